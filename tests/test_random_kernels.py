"""A kernel's results do not depend on how the CPU machine runs it: random programs give, in plain mode, block by block and
in checked mode, the bits that each thread computes alone."""

from __future__ import annotations

import inspect
import operator
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from functools import cache
from typing import Any

import numba
import numpy as np
import pytest
from mutants import module_from
from random_kernels import (
    BOUND,
    OUTPUTS,
    Invalid,
    Number,
    Program,
    Stmt,
    absolute,
    arguments,
    random_program,
    reference,
    shrunk,
    smallest_or_largest,
)

from kernels_numba.machine import KernelError, arrays, checked, choices, cuda, int64, kernel, lanes
from kernels_numba.machine.cpu import Launch
from kernels_numba.machine.lockstep import Translator

PROGRAMS = range(30)
COMPILED = range(1000, 1010)
"""Seeds; those of programs with compiled functions apart, for they take numba's time."""

WAYS = ("plain", "block by block", "checked")
OTHER_BITS = "other bits than the reference"


def launched(run: Callable, args: dict[str, Any], way: str, threads: int) -> dict[str, np.ndarray]:
    """The outputs of one way to run."""
    copies = {n: a.copy() if isinstance(a, np.ndarray) else a for n, a in args.items()}
    with pytest.MonkeyPatch.context() as patch, checked() if way == "checked" else nullcontext():
        if way == "block by block":
            patch.setattr("kernels_numba.machine.cpu.batches.__defaults__", (threads,))
        run(*copies.values())
    return {n: copies[n] for n in OUTPUTS}


def on_the_machine(
    program: Program, args: dict[str, Any], ways: Iterable[str]
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Each way to run and its outputs."""
    kernel = module_from(str(program), f"random program {program.seed}").program
    run = kernel.at(**BOUND)[program.blocks, program.threads]
    for way in ways:
        yield way, launched(run, args, way, program.threads)


@cache
def valid_program(seed: int, lanewise: bool) -> tuple[Program, dict[str, Any], dict[str, np.ndarray]] | None:
    """A seed's program, its arguments and its outputs; None where it is not valid."""
    program = random_program(seed, lanewise)
    args = arguments(program)
    with suppress(Invalid):
        return program, args, reference(program, args)
    return None


def fault(program: Program, args: dict[str, Any], wanted: dict[str, np.ndarray], ways: Iterable[str] = WAYS) -> str:
    """What is wrong, or nothing: an error's message without its place, or the way whose bits differ."""
    try:
        for way, found in on_the_machine(program, args, ways):
            if any(found[n].tobytes() != wanted[n].tobytes() for n in OUTPUTS):
                return f"{way}: {OTHER_BITS}"
    except Exception as error:
        return f"{type(error).__name__}: {re.sub(r'^.*?: .*?:[0-9]+: |[0-9]+', '', str(error))[:60]}"
    return ""


def wrong(seeds: Iterable[int], lanewise: bool = False, ways: Iterable[str] = WAYS) -> Iterator[tuple[Program, str]]:
    """The programs with a fault, and it; seeds whose program is not valid are passed over."""
    for made in filter(None, (valid_program(seed, lanewise) for seed in seeds)):
        found = fault(*made, ways)
        if found:
            yield made[0], found


def failure(program: Program, first: str) -> str:
    """The smallest program found with the same fault, as source to paste."""

    def fails(smaller: Program) -> bool:
        args = arguments(smaller)
        try:
            return fault(smaller, args, reference(smaller, args)) == first
        except Invalid:
            return False

    return f"seed {program.seed}: {first}\n\n{shrunk(program, fails)}"


def no_fault(seeds: Iterable[int], lanewise: bool = False) -> None:
    for program, found in wrong(seeds, lanewise):
        pytest.fail(failure(program, found))


@pytest.mark.parametrize("first", PROGRAMS[::10])
def test_all_ways_to_run_give_each_thread_its_bits(first):
    no_fault(range(first, first + 10))


def test_compiled_functions_give_each_thread_its_bits():
    no_fault(COMPILED, lanewise=True)


@pytest.mark.slow
def test_many_more_programs():
    no_fault(range(10_000, 12_000))
    no_fault(range(20_000, 20_200), lanewise=True)


def test_most_programs_are_valid():
    """Else the seeds above say little."""
    valid = [seed for seed in PROGRAMS if valid_program(seed, False)]
    assert len(valid) >= 0.8 * len(PROGRAMS)


# --- An index outside a local array is refused ------------------------------------------------------------------------------

OUTSIDE = ["4", "n", "K + 1", "t % 5", "-1", "K - 4", "t % 4 - 1", "n - 6", "m"]
ACCESSES = ["x = a[{}]", "x = a[{}] + 1", "a[{}] = x", "a[{}] += x", "x = inner(a, {})"]
INNER = """

@lanewise
def inner(row, at):
    return row[at]


@kernel
"""


def with_index(access: str, index: str) -> str:
    """A kernel with this access to a local array of four elements."""
    body = ["t = cuda.threadIdx.x", "x = 1", "a = cuda.local.array(4, int64)", "for j in range(4):", "    a[j] = j"]
    body += [access.format(index), "out_i[t, 0] = x"]
    program = Program(0, 1, 32, body=[Stmt([line]) for line in body])
    return str(program).replace("@kernel", INNER.strip(), 1) if "inner" in access else str(program)


@pytest.mark.parametrize("index", OUTSIDE)
@pytest.mark.parametrize("access", ACCESSES)
@pytest.mark.parametrize("way", ["plain", "checked"])
def test_an_index_outside_a_local_array_is_refused(way, access, index):
    source = with_index(access, index)
    with pytest.raises(KernelError):
        run = module_from(source, "an index outside").program.at(**BOUND)[1, 32]
        launched(run, arguments(Program(0, 1, 32)), way, 32)


# --- Faults planted in the machine come out red -----------------------------------------------------------------------------

PLANTED = [
    (choices.merge, "picked(mask, *alike(new, old))", "new"),
    (lanes.split, "np.logical_not(condition)", "np.logical_not(np.logical_not(condition))"),
    (Translator.turn, "isinstance(node, ast.For) and gone", "False"),
    (Translator.turn, "head if jumps_back(node) else NONE", "NONE"),
    (Translator.do_Continue, 'call("union", load_name(skipped), load_name(scope.mask))', "load_name(skipped)"),
    (Translator.do_Return, 'call("union", load_name("__gone"), load_name(scope.mask))', 'load_name("__gone")'),
    (Translator.do_If, "scope.inside(yes, other)", "scope.inside(yes, NONE)"),
    (Translator.do_While, "assign(inside, load_name(scope.mask))", 'assign(inside, load_name("__m"))'),
    (Translator.value_Compare, "left = load_name(kept)", "pass"),
    (arrays.put, 'np.copyto(row, value, where=mask, casting="unsafe")', "row[:] = value"),
    (Launch.steps, "else gt", "else (lambda a, b: a >= b)"),
]


def plant(monkeypatch: pytest.MonkeyPatch, function: Any, old: str, new: str) -> None:
    """Change one place of a function, for all who hold it."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1
    made: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source.replace(old, new), function.__globals__, made)
    monkeypatch.setattr(function, "__code__", made[function.__name__].__code__)


@pytest.mark.parametrize(("function", "old", "new"), PLANTED, ids=[f"{f.__name__}: {new}" for f, _, new in PLANTED])
def test_a_planted_fault_is_found(function, old, new, monkeypatch):
    plant(monkeypatch, function, old, new)
    assert any(OTHER_BITS in found for _, found in wrong(PROGRAMS, ways=["plain"]))


def test_a_failing_program_shrinks_to_what_a_person_can_read(monkeypatch):
    plant(monkeypatch, *PLANTED[0])
    source = failure(*min(wrong(PROGRAMS[:12], ways=["plain"]), key=lambda found: len(str(found[0]))))
    assert "@kernel" in source and len(source.splitlines()) < 30


# --- The reference itself ---------------------------------------------------------------------------------------------------

OPERATORS = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.and_, operator.or_, operator.xor,
             operator.lshift, operator.rshift, operator.lt, operator.eq]  # fmt: skip
PAIRS = [("int32", "int32"), ("int32", "int64"), ("int64", "uint32"), ("uint32", "int32"), ("uint32", "uint32"),
         ("uint64", "uint32"), ("int64", "int64")]  # fmt: skip


def every_operation(a, b):
    return (a + b, a - b, a * b, a // b, a % b, a & b, a | b, a ^ b, a << (b & 31), a >> (b & 31), a < b, a == b,
            -a, ~a, abs(a), min(a, b), max(a, b))  # fmt: skip


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=map("-".join, PAIRS))
def test_the_reference_s_types_and_values_are_numba_s(first, second):
    compiled = numba.njit((getattr(numba, first), getattr(numba, second)))(every_operation)
    kinds = [str(t) for t in compiled.nopython_signatures[0].return_type]
    lowest, highest = np.iinfo(first).min, np.iinfo(first).max
    for a, b in [(lowest, 3), (lowest, 1), (highest, 5), (highest, np.iinfo(second).max), (7, 2), (12, 31)]:
        x, y = Number(first, int(a)), Number(second, int(b))
        little = Number(second, b & 31)
        found = [op(x, little if "shift" in op.__name__ else y) for op in OPERATORS]
        found += [-x, ~x, absolute(x), smallest_or_largest(min)(x, y), smallest_or_largest(max)(x, y)]
        wanted = compiled(np.dtype(first).type(a), np.dtype(second).type(b))
        for kind, mine, theirs in zip(kinds, found, wanted, strict=True):
            assert repr(mine) == (str(theirs) if kind == "bool" else f"{kind}({int(theirs)})")


# --- One program by hand ----------------------------------------------------------------------------------------------------


@kernel
def collatz(out):
    """How many steps take i + 1 to 1; out: int64 [lanes]."""
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    value = int64(i + 1)
    steps = int64(0)
    while value != 1:
        if value % 2 == 0:
            value //= 2
        else:
            value = 3 * value + 1
        steps += 1
    out[i] = steps


def steps_to_one(value: int) -> int:
    return 0 if value == 1 else 1 + steps_to_one(3 * value + 1 if value % 2 else value // 2)


@pytest.mark.parametrize("mode", [nullcontext, checked], ids=["plain", "checked"])
def test_collatz(mode):
    out = np.zeros(3 * 64, np.int64)
    with mode():
        collatz[3, 64](out)
    assert out.tolist() == [steps_to_one(i + 1) for i in range(out.size)]
