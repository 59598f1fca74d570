"""The lock-step CPU machine runs a kernel as a GPU would: per thread, with CUDA's types, any control flow, and clear refusals."""

from __future__ import annotations

import numpy as np
import pytest

from kernels_numba.machine import (
    KernelError,
    cuda,
    device,
    float32,
    fma,
    int32,
    int64,
    kernel,
    lanewise,
    mma,
    shfl_xor,
    uint32,
)
from kernels_numba.machine.modes import watched

BLOCKS, THREADS = 3, 64


@lanewise
def horner(x, coefficients, powers):
    """x · x · ... in a local array, two results, one branch."""
    for j in range(4):
        powers[j] = fma(x, powers[j], coefficients[j])
    if x > float32(0.5):
        return powers[3], x
    return powers[0] + powers[1], powers[2] / x


@device
def first_over(x, n):
    """A loop with every jump."""
    for i in range(n):
        if x < i:
            return i
        if i == 2:
            continue
        if i > 5:
            break
    return int64(-1)


@kernel
def everything(floats, ints, x, n, *, K, doubled):
    """All control flow of the dialect in one kernel; floats: [threads, 4], ints: [threads], x: [threads]."""
    thread = cuda.threadIdx.x
    i = cuda.blockIdx.x * cuda.blockDim.x + thread
    powers = cuda.local.array((2, K), float32)
    for r in range(2):
        for j in range(K):
            powers[r, j] = float32(j + r)
    shared = cuda.shared.array(0, float32)
    shared[thread] = x[i]
    cuda.syncthreads()
    if i >= n:
        return
    neighbour = shared[thread ^ 1]
    a, b = horner(neighbour, x, powers[1])
    ints[i] = first_over(thread, int32(thread // 4))
    total = float32(0)
    for j in range(thread, 64, 16):
        total += shared[j]
    steps = 0
    while steps < thread and steps < 7:
        steps += 2
        if steps == 4 and thread > 50:
            break
    floats[i, 0] = a
    floats[i, 1] = b * float32(2) if doubled else b
    floats[i, 2] = total
    floats[i, 3] = float32(steps) if thread % 2 == 0 else total


def one_thread(i: int, x: np.ndarray, doubled: bool) -> tuple[list, int]:
    """What thread i of ``everything`` computes, in plain Python."""
    block, t = divmod(i, THREADS)
    mine = x[block * THREADS : (block + 1) * THREADS]
    v = mine[t ^ 1]
    powers = [np.float32(np.float64(v) * (j + 1) + np.float64(x[j])) for j in range(4)]
    a, b = (powers[3], v) if v > 0.5 else (powers[0] + powers[1], powers[2] / v)
    found = -1
    for k in range(t // 4):
        if t < k:
            found = k
            break
        if k == 2:
            continue
        if k > 5:
            break
    total, steps = np.float32(0), 0
    for j in range(t, 64, 16):
        total += mine[j]
    while steps < t and steps < 7:
        steps += 2
        if steps == 4 and t > 50:
            break
    return [a, b * np.float32(2) if doubled else b, total, np.float32(steps) if t % 2 == 0 else total], found


@pytest.mark.parametrize("doubled", [False, True])
def test_control_flow_is_per_thread(doubled):
    x = np.random.default_rng(1).standard_normal(BLOCKS * THREADS).astype(np.float32)
    n = x.size - 10
    floats, ints = np.full((x.size, 4), np.nan, np.float32), np.full(x.size, -9)
    everything.at(K=4, doubled=doubled)[BLOCKS, THREADS, None, THREADS * 4](floats, ints, x, n)
    for i in range(n):
        wanted, found = one_thread(i, x, doubled)
        assert [f.tobytes() for f in floats[i]] == [np.float32(w).tobytes() for w in wanted]
        assert ints[i] == found
    assert np.isnan(floats[n:]).all() and (ints[n:] == -9).all()


def test_blocks_in_one_batch_equal_blocks_alone(monkeypatch):
    x = np.random.default_rng(2).standard_normal(BLOCKS * THREADS).astype(np.float32)
    outcomes = []
    for lanes in (THREADS, 16384):
        monkeypatch.setattr("kernels_numba.machine.cpu.batches.__defaults__", (lanes,))
        floats, ints = np.zeros((x.size, 4), np.float32), np.zeros(x.size, np.int64)
        everything.at(K=4, doubled=False)[BLOCKS, THREADS, None, THREADS * 4](floats, ints, x, x.size)
        outcomes.append(floats.tobytes() + ints.tobytes())
    assert outcomes[0] == outcomes[1]


@kernel
def exchange(out):
    """out: [32]"""
    lane = cuda.threadIdx.x
    out[lane] = shfl_xor(float32(lane), 8)


def test_shuffles_cross_lanes():
    out = np.zeros(32, np.float32)
    exchange[1, 32](out)
    assert (out == (np.arange(32) ^ 8)).all()


@kernel
def integer_types(out, small):
    """Each line's type is CUDA's: int32 + int32 is int64, uint32 arithmetic wraps only where converted."""
    out[0] = small[0] * small[1]
    out[1] = int64(uint32(small[2] - small[3]))
    out[2] = small[2] - small[3]
    out[3] = int64(uint32(7) // uint32(2)) + (small[4] >> 1)


def test_integers_widen_as_in_cuda():
    out, small = np.zeros(4, np.int64), np.array([131072, 16384, 3, 5, -3], np.int32)
    integer_types[1, 32](out, small)
    assert out.tolist() == [2**31, 2**32 - 2, -2, 3 - 2]


@kernel
def float_by_int(out):
    """The second factor makes it float64."""
    out[0] = out[1] * 2


@kernel
def bare_literal(out):
    """A bare float is float64."""
    out[0] = 0.5


@kernel
def past_the_end(out):
    """Thread 28 of block 0 is the first to go past 64 elements."""
    out[cuda.threadIdx.x + 36] = float32(1)


@kernel
def wrong_operand(out):
    """An mma of floats."""
    x = out[0]
    a, b, c, d = mma(x, x, x, x, x, x, x, x, x, x)
    out[0] = a + b + c + d


@kernel
def with_statement(out):
    """Not in the dialect."""
    with open("nothing"):
        out[0] = float32(1)


@kernel
def unknown_name(out):
    """Not defined anywhere."""
    out[0] = undefined_thing  # noqa: F821


@kernel
def from_the_end(out):
    out[-1] = float32(1.0)


@lanewise
def never_assigned(a):
    for i in range(1, 1):
        a[0] = float32(later)  # noqa: F821
        later = i  # noqa: F841
    return a[0]


@kernel
def unassigned_in_a_lane(out):
    a = cuda.local.array(1, float32)
    a[0] = float32(0.0)
    out[0] = never_assigned(a)


@kernel
def sliced(out):
    """Not in the dialect."""
    out[0] = out[1:2][0]


@kernel
def read_behind(out):
    """Lanes leave the loop at different turns, so its variable has no one value behind it."""
    for i in range(cuda.threadIdx.x):
        out[i] = float32(1)
    out[i] = float32(2)


@device
def first_of(row):
    return row[0]


@kernel
def row_by_thread(out):
    """A row that differs between threads."""
    rows = cuda.local.array((2, 3), float32)
    rows[0, 0] = float32(1)
    out[0] = first_of(rows[cuda.threadIdx.x % 2])


REFUSALS = [
    (row_by_thread, "a row of a local array is taken by an index that is the same for every thread"),
    (read_behind, "i is read behind its loop"),
    (float_by_int, "gives float64: convert"),
    (bare_literal, "write float32"),
    (past_the_end, "block (0, 0, 0), thread 28"),
    (wrong_operand, "mma: operand 0 is uint32, not float32"),
    (with_statement, "With is not in the kernel dialect"),
    (unknown_name, "name undefined_thing is not defined"),
    (sliced, "a slice is not in the kernel dialect"),
    (from_the_end, "index -1: arrays of the kernel dialect do not count from the end"),
]


@pytest.mark.parametrize(("broken", "message"), REFUSALS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_broken_kernel_is_refused_by_name_file_and_line(broken, message):
    with pytest.raises(KernelError) as refusal:
        broken[1, 32](np.zeros(64, np.float32))
    text = str(refusal.value)
    assert (
        message in text and text.startswith(f"{broken.__name__}: ") and "test_machine.py:" in text and "\n" not in text
    )


def test_a_compiled_function_names_a_variable_that_it_reads_too_early():
    with pytest.raises(KernelError, match="never_assigned: .*: Variable 'later' is read before it is assigned"):
        unassigned_in_a_lane[1, 32](np.zeros(64, np.float32))


LAUNCHES = [
    ((1, 1056), "1056 threads"),
    ((1, 48), "multiple of 32"),
    (((1, 65536), 32), "grid.y = 65536"),
    ((1, 32, None, 232452), "bytes of shared memory"),
]


@pytest.mark.parametrize(("launch", "message"), LAUNCHES, ids=[m for _, m in LAUNCHES])
def test_a_gpu_s_launch_limits_hold(launch, message):
    with pytest.raises(KernelError, match=message):
        exchange[launch]


def test_a_python_float_argument_is_refused():
    with pytest.raises(KernelError, match=r"np.float32"):
        exchange[1, 32](0.5)


def test_compile_time_arguments_are_named():
    with pytest.raises(KernelError, match="compile-time argument doubled is missing"):
        everything.at(K=4)
    with pytest.raises(KernelError, match="no compile-time argument D"):
        everything.at(K=4, doubled=True, D=1)


def test_what_watches_launches_sees_each_as_it_left_its_arrays():
    seen = []
    x, out = np.full(1, 3, np.int32), np.zeros(1, np.int32)
    with watched(lambda name, args: seen.append((name, {key: a.copy() for key, a in args.items()}))):
        thrice[1, 32, None](out, x)
    thrice[1, 32, None](out, x)
    assert seen == [("thrice", {"out": [9], "x": [3]})]


@kernel
def thrice(out, x):
    """Thread 0 alone."""
    if cuda.threadIdx.x == 0:
        out[0] = x[0] * 3


def test_an_empty_grid_launches_nothing():
    out = np.full(32, np.nan, np.float32)
    exchange[0, 32](out)
    assert np.isnan(out).all()


@lanewise
def trace_of(tile, i):
    """tile: float32 [4, 4] in shared memory."""
    return tile[i, i] + tile[i, 3 - i]


@kernel
def square_tile(out):
    """A two-dimensional shared array read by a compiled function; out: float32 [32]."""
    tile = cuda.shared.array((4, 4), float32)
    t = int64(cuda.threadIdx.x)
    if t < 16:
        tile[t // 4, t % 4] = float32(t)
    cuda.syncthreads()
    out[t] = trace_of(tile, t % 4)


def test_a_shared_array_keeps_its_shape_in_a_lanewise_function():
    out, square = np.zeros(32, np.float32), np.arange(16, dtype=np.float32).reshape(4, 4)
    square_tile[2, 32](out)
    assert out.tolist() == [square[i, i] + square[i, 3 - i] for i in range(4)] * 8


@kernel
def left_for_good(out):
    """What the condition reads is dead behind the loop, and other lanes write it; out: int64 [32]."""
    t = int64(cuda.threadIdx.x)
    limit = t % 5
    turns = 0
    while turns < limit:
        turns += 1
        limit = 7
    limit = 1
    out[t] = turns + limit


def test_a_lane_that_has_left_a_loop_does_not_come_back():
    out = np.zeros(32, np.int64)
    left_for_good[1, 32](out)
    assert out.tolist() == [1 + (7 if t % 5 else 0) for t in range(32)]
