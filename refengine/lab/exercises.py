"""Run the tests of a tutorial's exercises against somebody's answers, and say in plain words what is wrong.

A file of tests has functions ``test_...(answers)``, which take the module of answers; the first line of a docstring is the
test's title. Tests use ``expect``, ``expect_close`` and ``expect_bits``, whose failures read as sentences.
"""

from __future__ import annotations

import itertools
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from refengine.errors import UserError

OK, TO_DO, WRONG = "ok", "to do", "wrong"
LONGEST = 240
"""Characters of a message."""
SIDE = 60
"""Characters of a value in it."""
CALL = re.compile(r"\w+\(.*\)")
"""What a place in square brackets can follow."""
Check = Callable[[ModuleType], None]
"""A test: takes the module of answers."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Outcome:
    """What became of a test. name: of its function. state: OK, TO_DO or WRONG. why: one line, empty where all is well."""

    name: str
    title: str
    state: str
    why: str = ""


def check_answers(answers: Path, tests: Path) -> list[Outcome]:
    """Every test of a file against the answers of another, in order, here and without a limit (check_apart has one).

    Raises UserError where a file cannot be imported.
    """
    module = load(answers)
    return [outcome(check, module, answers) for check in checks_of(tests)]


def checks_of(tests: Path) -> list[Check]:
    """The tests of a file, in order. Raises UserError where it cannot be imported."""
    return [check for name, check in vars(load(tests)).items() if name.startswith("test_") and callable(check)]


def load(path: Path) -> ModuleType:
    """A Python file as a module of its own, read anew each time. Raises UserError naming file and line."""
    name = f"refengine_exercise_{next(_numbers)}"
    try:
        module = sys.modules[name] = ModuleType(name)
        module.__file__ = str(path)
        code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
        exec(code, module.__dict__)
        return module
    except OSError as problem:
        raise UserError(f"{path}: cannot be read: {problem.strerror}") from problem
    except SyntaxError as problem:
        raise UserError(f"{path}: line {problem.lineno}: {problem.msg}") from problem
    except Exception as problem:
        raise UserError(f"{path}: {where(problem, path)}{type(problem).__name__}: {problem}") from problem


def named(check: Check) -> tuple[str, str]:
    """(name, title) of a test."""
    return check.__name__, (check.__doc__ or check.__name__).strip().splitlines()[0].rstrip(".")


def outcome(check: Check, answers: ModuleType, path: Path) -> Outcome:
    """Run one test."""
    name, title = named(check)
    try:
        with np.errstate(all="ignore"):
            check(answers)
        return Outcome(name, title, OK)
    except NotImplementedError:
        return Outcome(name, title, TO_DO)
    except AssertionError as problem:
        return Outcome(name, title, WRONG, one_line(str(problem)))
    except Exception as problem:
        if isinstance(problem, AttributeError) and problem.obj is answers:
            return Outcome(name, title, WRONG, f"{path} has no function {problem.name}")
        return Outcome(name, title, WRONG, one_line(f"{where(problem, path)}{type(problem).__name__}: {problem}"))


def where(problem: Exception, path: Path) -> str:
    """``line N: ``, the last line of a file that a failure went through; nothing where it is another's."""
    lines = [frame.lineno for frame in traceback.extract_tb(problem.__traceback__) if frame.filename == str(path)]
    return f"line {lines[-1]}: " if lines else ""


def one_line(text: str, longest: int = LONGEST) -> str:
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


# --- What tests say -----------------------------------------------------------------------------------------------------


def expect(what: str, found: Any, wanted: Any) -> None:
    """The very value. what: the call, as one would type it."""
    if isinstance(wanted, np.ndarray):
        return expect_array(what, found, wanted, np.equal)
    same = type_name(found) == type_name(wanted) and found == wanted
    assert same, f"{what} gives {short(found)}, not {short(wanted)}{parting(found, wanted)}"


def expect_close(what: str, found: Any, wanted: np.ndarray, within: float) -> None:
    """An array of numbers, each within a distance."""
    expect_array(what, found, wanted, lambda a, b: np.abs(a - b) <= within)


def expect_bits(what: str, found: Any, wanted: np.ndarray) -> None:
    """An array of float32, bit for bit: the sum must be made in the order that was asked for."""
    wanted = np.asarray(wanted, np.float32)
    assert getattr(found, "dtype", None) == np.float32, f"{what} gives {type_name(found)}, not float32"
    expect_array(what, found, wanted, lambda a, b: a.view(np.uint32) == b.view(np.uint32), bits=True)


def expect_array(
    what: str, found: Any, wanted: np.ndarray, same: Callable[[Any, Any], Any], bits: bool = False
) -> None:
    """An array of a shape, each element the same in some sense."""
    assert isinstance(found, (np.ndarray, np.generic)), f"{what} gives {type_name(found)}, not an array"
    found = np.asarray(found)
    assert found.shape == wanted.shape, f"{what} has shape {found.shape}, not {wanted.shape}"
    if len(wrong := np.argwhere(~np.asarray(same(found, wanted)))):
        at = tuple(int(i) for i in wrong[0])
        place = f"[{', '.join(map(str, at))}]" if at else ""
        between = ": " if place and not CALL.fullmatch(what) else ""
        raise AssertionError(f"{what}{between}{place} is {shown(found[at], bits)}, not {shown(wanted[at], bits)}")


def short(value: Any, longest: int = SIDE) -> str:
    return one_line(shown(value), longest)


def parting(found: Any, wanted: Any) -> str:
    """Where two sequences part, if one is too long to be shown whole."""
    if type(found) is not type(wanted) or not isinstance(found, (list, tuple, str)):
        return ""
    if max(len(shown(found)), len(shown(wanted))) <= SIDE:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(found, wanted)) if a != b), min(len(found), len(wanted)))
    if isinstance(found, str):
        return (
            f": after {at} characters {short(found[at:], 30) or 'the end'}, not {short(wanted[at:], 30) or 'the end'}"
        )
    here, there = (short(side[at], 30) if at < len(side) else "the end" for side in (found, wanted))
    return f": the first that differs is [{at}], {here}, not {there}"


def type_name(value: Any) -> str:
    """Python's name of a type; NumPy's whole numbers count as ints, its other real numbers as floats."""
    if isinstance(value, (np.integer, np.floating)):
        return "int" if isinstance(value, np.integer) else "float"
    return type(value).__name__


def shown(value: Any, bits: bool = False) -> str:
    """A value as a learner would write it; bits: with the 32 bits of a float32."""
    text = f"{value:,}" if isinstance(value, (int, np.integer)) and not isinstance(value, bool) else str(value)
    return f"{text} (0x{int(np.float32(value).view(np.uint32)):08X})" if bits else text
