"""Where a running kernel stands: its own lines from the kernel inward, and the turns of the loops around them.

The lock-step functions on Python's stack are the kernel and the device functions that it is in. A turn is the value of a
loop's variable, or of a name that follows from one: ``item = 4 * tile``, and ``item`` in the device function it is passed to.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

from .frontend import Program

Turns = tuple[tuple[str, str], ...]
"""(name, value) of the variables that say which turn it is, outer loops first."""
Names = tuple[str, ...]


@dataclass(frozen=True)
class Spot:
    """A statement of a kernel or device function. line: of the file, where the statement starts."""

    program: Program
    line: int


def program_of(frame: FrameType) -> Program | None:
    """The kernel or device function that a frame runs in lock step."""
    return frame.f_globals.get("__lockstep__")


def kernel_frames(frame: FrameType | None = None) -> list[FrameType]:
    """The lock-step frames from ``frame`` (default: here) outward, the kernel's first."""
    found, at = [], frame or sys._getframe(1)
    while at is not None:
        if program_of(at) is not None:
            found.append(at)
        at = at.f_back  # type: ignore[assignment]
    return found[::-1]


def spot_of(frame: FrameType) -> Spot:
    program = frame.f_globals["__lockstep__"]
    return Spot(program, statement_line(program, frame.f_lineno))


# --- Statements and loops of a source ---------------------------------------------------------------------------------


@cache
def statement_line(program: Program, line: int) -> int:
    """The line where the innermost statement that covers a line starts."""
    covering = [s for s in statements(program) if s.lineno <= line <= (s.end_lineno or s.lineno)]
    return max((s.lineno for s in covering), default=line)


@cache
def statements(program: Program) -> tuple[ast.stmt, ...]:
    return tuple(n for n in ast.walk(program.counted) if isinstance(n, ast.stmt) and n is not program.counted)


@cache
def loops_around(program: Program, line: int) -> tuple[ast.For | ast.While, ...]:
    """The loops whose body holds a line, outermost first."""
    loops = [n for n in statements(program) if isinstance(n, (ast.For, ast.While))]
    inside = [n for n in loops if n.body[0].lineno <= line <= (n.end_lineno or n.lineno)]
    return tuple(sorted(inside, key=lambda n: n.lineno))


@cache
def turning(program: Program, line: int, passed: Names) -> Names:
    """The names that say at a line which turn it is: loop variables, parameters in ``passed``, and what follows from both."""
    loops = loops_around(program, line)
    found = [*passed, *(n.target.id for n in loops if isinstance(n, ast.For) and isinstance(n.target, ast.Name))]
    first = program.counted.lineno if passed else loops[0].lineno if loops else line
    assigned = [s for s in statements(program) if isinstance(s, ast.Assign) and first <= s.lineno < line]
    for statement in sorted(assigned, key=lambda s: s.lineno):
        target = statement.targets[0]
        if isinstance(target, ast.Name) and target.id not in found and reads(statement.value, found):
            found.append(target.id)
    return tuple(dict.fromkeys(found))


@cache
def passed_on(caller: Spot, callee: Program, turns: Names) -> Names:
    """The callee's parameters whose arguments at the caller's line follow from the caller's turns."""
    nodes = [n for s in statements(caller.program) if s.lineno == caller.line for n in ast.walk(s)]
    calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    arguments = next((n.args for n in calls if caller.program.env.get(ast.unparse(n.func)) is callee), [])
    return tuple(p for p, a in zip(callee.params, arguments) if reads(a, turns))


def reads(node: ast.expr, names: Any) -> bool:
    return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(node))


# --- The turns of running frames --------------------------------------------------------------------------------------


def turns_of(frames: list[FrameType]) -> list[Turns]:
    """Each frame's turns: the names of ``turning`` that now hold one whole number for all lanes."""
    found: list[Turns] = []
    passed: Names = ()
    for frame, inner in zip(frames, [*frames[1:], None]):
        spot = spot_of(frame)
        names = turning(spot.program, spot.line, passed)
        held = frame.f_locals
        found.append(tuple((n, str(int(held[n]))) for n in names if is_whole(held.get(n))))
        if inner is not None:
            passed = passed_on(spot, inner.f_globals["__lockstep__"], names)
    return found


def is_whole(value: Any) -> bool:
    """Whether a variable holds one integer, the same for every lane."""
    return getattr(value, "ndim", 1) == 0 and value.dtype.kind in "iu"
