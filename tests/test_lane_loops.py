"""A compiled lanewise function gives what its lock-step form gives, bit by bit, and refuses what lock step refuses."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from kernels_numba.machine import (
    KernelError,
    cpu,
    cuda,
    float32,
    int8,
    int32,
    int64,
    kernel,
    lane_loops,
    lanewise,
    round_int,
    uint8,
    uint16,
    uint32,
    uint64,
)
from kernels_numba.machine import fma as fused
from kernels_numba.machine.arrays import GlobalArray, LocalArray
from kernels_numba.machine.lanes import DivisionByZero, LaneTypeError

LANES = 64


def launch(lanes=LANES) -> cpu.Launch:
    return cpu.Launch(np.zeros((2, 3), int), lanes // 2, (2, 1, 1), 0)


def both(function, *args, mask=True, **bound):
    """What the compiled and the lock-step form return."""
    program = function.program(**bound)
    with np.errstate(all="ignore"):
        return [
            form(program)(launch(args[0].shape[-1]), mask, *map(own, args)) for form in (cpu.lane_loop, cpu.stepped)
        ]


def own(value):
    """A copy of an argument, so that no form sees another's stores."""
    return LocalArray(value.data.copy()) if isinstance(value, LocalArray) else value


def same(compiled, stepped):
    """Type and bits of a result; lock step may have one value for all lanes."""
    stepped = np.broadcast_to(np.asarray(stepped), compiled.shape)
    return compiled.dtype == stepped.dtype and compiled.tobytes() == np.ascontiguousarray(stepped).tobytes()


def local(*shape, dtype=np.float32):
    return LocalArray(np.zeros((*shape, LANES), dtype))


# --- Types of results ---------------------------------------------------------------------------------------------------


@lanewise
def clipped(x):
    if x < float32(0):
        return 0
    return x


@lanewise
def second_mixed(x):
    if x < float32(0):
        return x, float32(1)
    return x, 1


@lanewise
def mixed_variable(x):
    y = 0
    if x < float32(0):
        y = x
    return y


@lanewise
def widened(x, small):
    if x < float32(0):
        return small
    return int64(3000000000)


@lanewise
def doubled_by_int(x):
    return x * 2 if x < float32(-100) else x


@lanewise
def float_minimum(x):
    return min(x, x)


@lanewise
def fused_ints(x):
    return fused(x, x, 1)


@lanewise
def float_index(x, a):
    return a[x]


@lanewise
def one_index_of_two(x, a):
    return a[0]


@lanewise
def chosen(x):
    return x and x > float32(0)


@lanewise
def to_a_float(x):
    n = 0
    for i in range(x):
        n += i
    return n


@lanewise
def writes_global(x, a):
    a[0, 0] = x


POSITIVE = np.linspace(1, 2, LANES, dtype=np.float32)
MATRIX = np.zeros((2, 2), np.float32)
REFUSED = [
    (clipped, (), "return x", r"int64 and float32: convert"),
    (second_mixed, (), "return x, 1", r"int64: convert"),
    (mixed_variable, (), "y = x", r"one variable takes"),
    (doubled_by_int, (), "return x * 2", r"mul of float32 and int64 gives float64"),
    (float_minimum, (), "return min", r"min is for integers: use fmax"),
    (fused_ints, (), "return fused", r"fma: operand 2 is float32, not int64"),
    (float_index, (MATRIX[0],), "return a[x]", r"an index is an integer"),
    (one_index_of_two, (MATRIX,), "return a[0]", r"an array of 2 dimensions takes as many indices, not 1"),
    (chosen, (), "return x and", r"take booleans, not float32"),
    (to_a_float, (), "for i in range", r"range takes integers"),
    (writes_global, (MATRIX,), "a[0, 0] = x", r"writes its own local arrays alone"),
]


@pytest.mark.parametrize(("function", "arrays", "line", "message"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_types_that_lock_step_refuses_are_refused_whatever_the_data(function, arrays, line, message):
    arrays = [GlobalArray("a", a) for a in arrays]
    with pytest.raises(KernelError, match=message) as refusal:
        cpu.lane_loop(function.program())(launch(), True, POSITIVE, *arrays)
    text = str(refusal.value)
    assert text.startswith(f"{function.__name__}: {__file__}:") and "\n" not in text and f"[{line}" in text


@pytest.mark.parametrize("x", [POSITIVE, -POSITIVE, POSITIVE - np.float32(1.5)], ids=["one side", "other", "both"])
def test_integers_of_two_widths_widen_whatever_lanes_come_first(x):
    small = np.arange(LANES, dtype=np.int32)
    program = widened.program()
    compiled = lane_loops.LaneLoop(program)(launch(), True, x, small)
    assert compiled.dtype == np.int64
    assert compiled.tolist() == [n if v < 0 else 3000000000 for n, v in zip(small.tolist(), x)]


@lanewise
def pair_of(x):
    return x, int32(round_int(x))


@lanewise
def passed_on(x):
    return pair_of(x)


def test_lanes_that_are_not_active_are_zero():
    active = np.arange(LANES) % 3 == 0
    first, second = cpu.lane_loop(passed_on.program())(launch(), active, POSITIVE)
    assert first.dtype == np.float32 and second.dtype == np.int32
    assert (first == np.where(active, POSITIVE, 0)).all() and (second == np.where(active, np.rint(POSITIVE), 0)).all()


# --- Bounds -------------------------------------------------------------------------------------------------------------


@lanewise
def fetched(a, i):
    return a[i]


@lanewise
def fetched_from_two(a, i, j):
    return a[i, j]


@lanewise
def put_in(a, i):
    a[i] = float32(1)


@lanewise
def caller_of(a, i):
    return fetched(a, i) + float32(1)


FIRST_FIVE = np.where(np.arange(LANES) == 37, 5, 0)
LAST = {"int64": FIRST_FIVE, "negative": -FIRST_FIVE, "uint64": (-FIRST_FIVE).astype(np.uint64)}
ARRAYS = {"global": lambda: GlobalArray("a", np.zeros(5, np.float32)), "local": lambda: local(5)}


@pytest.mark.parametrize("index", LAST.values(), ids=LAST)
@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
@pytest.mark.parametrize("function", [fetched, caller_of], ids=["in itself", "in a callee"])
def test_an_index_outside_is_refused_in_every_call(function, array, index):
    loop = lane_loops.LaneLoop(function.program())
    loop(launch(), True, array(), np.zeros_like(index))
    with pytest.raises(Exception, match=r"outside axis 0 of a \(fetched, .*test_lane_loops.py:\d+\) of 5") as failure:
        loop(launch(), True, array(), index)
    assert failure.value.lane == 37 and failure.value.index == int(index.astype(np.int64)[37])


@pytest.mark.parametrize(("i", "j", "axis"), [(0, 3, 1), (2, 0, 0), (1, -1, 1), (-1, 2, 0)])
def test_each_axis_is_checked(i, j, axis):
    loop = lane_loops.LaneLoop(fetched_from_two.program())
    for array in (GlobalArray("a", np.zeros((2, 3), np.float32)), local(2, 3)):
        with pytest.raises(Exception, match=rf"outside axis {axis} of a \(fetched_from_two"):
            loop(launch(), True, array, np.full(LANES, i), np.full(LANES, j))


def test_a_store_outside_writes_nothing_there():
    memory = np.zeros((7, LANES), np.float32)
    with pytest.raises(Exception, match="index 5 is outside axis 0 of a"):
        lane_loops.LaneLoop(put_in.program())(launch(), True, LocalArray(memory[:5]), FIRST_FIVE)
    assert not memory[5:].any()


@kernel
def past_shared(out):
    """Thread 17 reads past the array; out: float32 [32]."""
    words = cuda.shared.array(16, float32)
    t = int64(cuda.threadIdx.x)
    words[t % 16] = float32(0)
    cuda.syncthreads()
    out[t] = fetched(words, 16 if t == 17 and cuda.blockIdx.x == 1 else t % 16)


def test_a_kernel_s_error_names_block_thread_and_both_lines():
    with pytest.raises(
        KernelError, match=r"past_shared: .*: block \(1, 0, 0\), thread 17: index 16 .*fetched, .*of 16"
    ):
        past_shared[2, 32](np.zeros(32, np.float32))


# --- Integers -----------------------------------------------------------------------------------------------------------

TYPES = (int8, uint8, uint16, int32, uint32, int64, uint64)
EDGES = (0, 1, 2, 3, 5, 7, 8, 31, 32, 33, 63, 64, 65, 100, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)
EDGES += (2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 2, 2**64 - 3, 2**64 - 63, 2**64 - 64, 2**64 - 2**31)
PAIRS = [(t, t) for t in TYPES] + [(int8, uint8), (uint16, int32), (uint32, int64), (int32, uint32), (uint32, uint64)]


@lanewise
def operated(a, b):
    """The operators of two integers that are defined for all."""
    return (
        a + b, a - b, a * b, a & b, a | b, a ^ b, a == b, a != b, a < b, a <= b, a > b, a >= b,
        min(a, b), max(a, b),
    )  # fmt: skip


@lanewise
def shifted(a, b):
    left, right = a << b, a >> b
    again = a << 0
    again <<= b
    return left, right, again


@lanewise
def of_one(a):
    return -a, ~a, +a, not a, abs(a)


@lanewise
def divided(a, b):
    quotient, rest = a, a
    quotient //= b
    rest %= b
    return a // b, a % b, quotient, rest


def edges(dtype) -> np.ndarray:
    return np.array(EDGES, np.uint64).astype(dtype)


def assert_equal(function, *args):
    """The compiled form's results are those of lock step, in type and bits."""
    compiled, stepped = both(function, *args)
    for number, (got, wanted) in enumerate(zip(compiled, stepped, strict=True)):
        differ = np.flatnonzero(np.broadcast_to(wanted, got.shape) != got)[:3]
        seen = [
            (*(a[n] for a in args if isinstance(a, np.ndarray)), "stepped", wanted[n], "compiled", got[n])
            for n in differ
        ]
        assert same(got, wanted), f"result {number}: {wanted.dtype} {got.dtype} {seen}"


@pytest.mark.parametrize("function", [operated, shifted, divided])
@pytest.mark.parametrize("kinds", PAIRS, ids=str)
def test_operators_on_two_integers_are_those_of_lock_step(function, kinds):
    a, b = (edges(str(kind)) for kind in kinds)
    b = b[b != 0] if function is divided else b
    assert_equal(function, np.repeat(a, len(b)), np.tile(b, len(a)))


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_operators_on_one_integer_are_those_of_lock_step(kind):
    assert_equal(of_one, edges(str(kind)))


def test_a_negated_unsigned_wraps_in_its_own_type_before_it_widens():
    for result in both(of_one, np.array([1, 2], np.uint32)):
        assert result[0].dtype == np.uint64 and result[0].tolist() == [2**32 - 1, 2**32 - 2]


def test_the_quotient_that_int64_does_not_hold_is_zero():
    for form in both(divided, np.array([-(2**63)] * 2), np.array([-1, 1])):
        assert form[0].tolist() == [0, -(2**63)] and form[1].tolist() == [0, 0]


@pytest.mark.parametrize("function", [divided])
@pytest.mark.parametrize("kind", ["int32", "uint64", "int64"])
def test_a_division_by_zero_names_lane_and_line(function, kind):
    divisors = np.where(np.arange(LANES) == 37, 0, 1).astype(kind)
    loop = cpu.lane_loop(function.program())
    loop(launch(), np.arange(LANES) != 37, divisors, divisors)
    with pytest.raises(DivisionByZero, match=r"division or modulo by zero \(divided, .*lane_loops.py:\d+\)") as stopped:
        loop(launch(), True, divisors, divisors)
    assert stopped.value.lane == 37


@lanewise
def float_division(a, b):
    return a // b, a % b, a / b


def test_floats_divide_as_in_lock_step():
    values = np.array([0.0, -0.0, 1.5, -2.5, 7.0, np.inf, -np.inf, np.nan, 1e-40, 3e38], np.float32)
    assert_equal(float_division, np.repeat(values, 10), np.tile(values, 10))


# --- Conversions --------------------------------------------------------------------------------------------------------


@lanewise
def converted(x, u16, i32, u64):
    """To every integer type of 16 bits or more, by name and by a store."""
    u16[0], i32[0] = x, x
    u64[0] = x
    return (
        uint16(x), int32(x), uint32(x), int64(x), uint64(x), round_int(float32(x)), u16[0], i32[0], u64[0],
    )  # fmt: skip


@lanewise
def two(x):
    return x, x + x


@lanewise
def stored_every_way(x, i32, u64, f32):
    """Each form of assignment to elements of arrays of other types."""
    i32[0], u64[0] = two(x)
    i32[1] = u64[1] = f32[0] = x
    i32[2], u64[2], f32[1] = x, x, x
    i32[0] += u64[1] > u64[0]
    i32[1] <<= i32[2]
    f32[2] = f32[0]
    f32[2] -= f32[1] + f32[0]
    return i32[0], i32[1], i32[2], u64[0], u64[1], u64[2], f32[0], f32[1], f32[2]


@pytest.mark.parametrize("kind", ["int32", "int64", "uint32", "float32"])
def test_an_element_takes_what_it_is_given_in_every_form_of_assignment(kind):
    arrays = [LocalArray(np.zeros((3, 8), t)) for t in ("int32", "uint64", "float32")]
    assert_equal(stored_every_way, np.array([0, 1, 5, 7, 2**20, 2**30, 2**31 - 1, 3], kind), *arrays)


@lanewise
def to_a_byte(x):
    return uint8(x)


@lanewise
def stored_as_a_byte(x, bytes_):
    bytes_[0] = x


HALVES = [0.0, 0.5, 0.75, 1.0, 1.5, 2.5, 126.5, 127.0, 128.0, 129.0, 255.0, 256.0, 257.0, 32767.0, 32768.0, 65535.0]
POWERS = [65536.0, 2.0**31, 2.0**32, 2.0**63, 2.0**64, 1e30, np.inf, np.nan, 1e-40]
NEAR = [float(np.nextafter(np.float32(p), np.float32(q))) for p in POWERS[1:5] for q in (0, np.inf)]
FLOATS = [sign * x for x in (*HALVES, *POWERS, *NEAR) for sign in (1, -1)]


def as_ptx(x: float, bits: int, signed: bool) -> int:
    """cvt.rzi of the PTX manual on Python's numbers."""
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    if x != x:
        word = 2**63 if bits == 64 else 0
    else:
        word = (high if x > 0 else low) if np.isinf(x) else min(max(int(x), low), high)
    word &= 2**bits - 1
    return word - 2**bits if signed and word >= 2 ** (bits - 1) else word


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_floats_become_integers_as_ptx_says(kind):
    x = np.array(FLOATS, kind)
    stored = [LocalArray(np.zeros((1, x.size), t)) for t in ("uint16", "int32", "uint64")]
    wanted = [[as_ptx(float(v), t.bitwidth, t.signed) for v in x] for t in TYPES[2:]]
    with np.errstate(all="ignore"):
        wanted.append([as_ptx(float(np.rint(np.float32(v))), 32, True) for v in x])
    wanted += [wanted[0], wanted[1], wanted[4]]
    for form in both(converted, x, *stored):
        assert [f.tolist() for f in form] == wanted


@pytest.mark.parametrize("function", [to_a_byte, stored_as_a_byte])
def test_a_float_becomes_no_byte_for_a_gpu_has_no_such_conversion(function):
    program = function.program()
    for form in (cpu.lane_loop, cpu.stepped):
        arrays = [LocalArray(np.zeros((1, LANES), np.uint8))] * (len(program.params) - 1)
        with pytest.raises((KernelError, LaneTypeError), match=r"uint8 of float32 .*: write uint8\(int32\(x\)\)"):
            form(program)(launch(), True, POSITIVE, *arrays)


@kernel
def literals(out):
    """Conversions of constants; out: int64 [4]."""
    out[0] = int32(3000000000.0)
    out[1] = int64(uint16(-1.0))
    out[2] = int64(uint16(70000.0))
    out[3] = int64(uint32(-7))


def test_constants_become_integers_as_ptx_says():
    out = np.zeros(4, np.int64)
    literals[1, 32](out)
    assert out.tolist() == [2**31 - 1, 0, 2**16 - 1, 2**32 - 7]


# --- Names and files ----------------------------------------------------------------------------------------------------


@lanewise
def loop(t, found, active, threads, out0, a0):
    """Everything has the name of something in the module around it."""
    fault, within, np, njit, zero_of = t + 1, found + 2, active + 3, threads + 4, out0 + 5
    lshift = fused(a0, a0, a0)
    int32 = fault + within + np + njit + zero_of
    OPTIONS = int64(round_int(lshift))
    return int32 + OPTIONS, fmin(lshift, a0)


@lanewise
def fmin(x, y):
    """A device function with the name of an instruction."""
    return x - y


def test_names_of_the_generated_module_are_free():
    n, x = np.arange(LANES), np.full(LANES, 2, np.float32)
    first, second = cpu.lane_loop(loop.program())(launch(), True, n, n, n, n, n, x)
    assert first.tolist() == (5 * n + 15 + 6).tolist() and set(second) == {4}


@pytest.mark.parametrize("harm", [lambda text: text[: len(text) // 2], lambda text: "", lambda text: text + "x"])
def test_a_damaged_module_is_rewritten(harm, monkeypatch, tmp_path):
    monkeypatch.setenv("REFENGINE_CACHE", str(tmp_path))
    program = pair_of.program()

    def run() -> np.ndarray:
        for name in [n for n in sys.modules if n.startswith("_lanes_pair_of")]:
            monkeypatch.delitem(sys.modules, name)
        lane_loops.scalar_module.cache_clear()
        return lane_loops.LaneLoop(program)(launch(), True, POSITIVE)[1]

    wanted = run()
    modules = list((tmp_path / "lanes").glob("*.py"))
    whole = {path: path.read_text() for path in modules}
    for path in modules:
        path.write_text(harm(whole[path]))
    assert (run() == wanted).all() and len(modules) == 2
    assert {path: path.read_text() for path in modules} == whole
