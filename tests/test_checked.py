"""Checked mode finds what lock step hides: each fault planted in a small kernel is named with kernel, lines, thread and word."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from kernels_numba.machine import (
    KernelError,
    checked,
    count,
    cp_async16,
    cp_commit,
    cp_wait,
    cuda,
    float32,
    int32,
    kernel,
    ldmatrix4,
    mma,
    shfl_xor,
    uint32,
)

THREADS = 64


@kernel
def reverse(out, x, *, barrier):
    """Each thread reads what another wrote; out, x: float32 [64]."""
    shared = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    shared[t] = x[t]
    if barrier:
        cuda.syncthreads()
    out[t] = shared[63 - t]


@kernel
def reuse(out, x, *, barrier):
    """Shared memory is written again after others have read it; out: float32 [2, 64], x: float32 [64]."""
    shared = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    for turn in range(2):
        shared[t] = x[t] + float32(turn)
        cuda.syncthreads()
        out[turn, t] = shared[63 - t]
        if barrier:
            cuda.syncthreads()


@kernel
def copied(out, x, *, wait, barrier, neighbour):
    """cp.async, then a read by the copying thread or its neighbour; out: uint32 [64], x: uint32 [256]."""
    shared = cuda.shared.array(0, uint32)
    t = cuda.threadIdx.x
    cp_async16(shared, 4 * t, x, 4 * t, int32(16))
    cp_commit()
    cp_async16(shared, 256 + 4 * t, x, 4 * t, int32(16))
    cp_commit()
    if wait:
        cp_wait(1)
    if barrier:
        cuda.syncthreads()
    out[t] = shared[4 * (t ^ 1) if neighbour else 4 * t]


@kernel
def uninitialised(out):
    """Word 32 and on are never written; out: uint32 [64]."""
    shared = cuda.shared.array(64, uint32)
    t = cuda.threadIdx.x
    if t < 32:
        shared[t] = uint32(1)
    cuda.syncthreads()
    out[t] = shared[t]


@kernel
def half_barrier(out):
    """A barrier that half of the block reaches; out: float32 [64]."""
    if cuda.threadIdx.x < 32:
        cuda.syncthreads()
    out[cuda.threadIdx.x] = float32(0)


@kernel
def half_shuffle(out):
    """A shuffle that half of a warp reaches; out: float32 [64]."""
    x = float32(cuda.threadIdx.x)
    if cuda.threadIdx.x < 16:
        x = shfl_xor(x, 1)
    out[cuda.threadIdx.x] = x


@kernel
def same_word(out):
    """All threads write word 0; out: uint32 [64]."""
    shared = cuda.shared.array(4, uint32)
    shared[0] = uint32(cuda.threadIdx.x)
    cuda.syncthreads()
    out[cuda.threadIdx.x] = shared[0]


@kernel
def matrix(out, *, barrier):
    """ldmatrix of words that other lanes wrote; out: float32 [64]."""
    shared = cuda.shared.array(0, uint32)
    t = cuda.threadIdx.x
    for i in range(4):
        shared[4 * t + i] = uint32(t)
    if barrier:
        cuda.syncthreads()
    a0, a1, a2, a3 = ldmatrix4(shared, 4 * (t % 32))
    z = float32(0)
    d0, d1, d2, d3 = mma(a0, a1, a2, a3, a0, a1, z, z, z, z)
    out[t] = d0 + d1 + d2 + d3


@kernel
def column_too_many(out):
    """Column 8 of a row is column 0 of the next; out: uint32 [64, 8]."""
    t = cuda.threadIdx.x
    if t < 63:
        out[t, t % 9] = uint32(t)


@kernel
def counted(out, pages):
    """Counts by lane; out: int32 [64], pages: int32 [64]."""
    t = cuda.threadIdx.x
    if t % 2 == 0:
        count("even")
    out[t] = pages[t]


def floats(*shape):
    return np.zeros(shape, np.float32)


def words(n):
    return np.zeros(n, np.uint32)


COPY = {"wait": True, "barrier": True, "neighbour": True}
FAULTS = [
    ("read after write", reverse.at(barrier=False), (floats(64), floats(64)), r"reads word 63 written by thread 63"),
    ("write after read", reuse.at(barrier=False), (floats(2, 64), floats(64)), r"writes word 0 read by thread 63"),
    ("copy not waited for", copied.at(**COPY | {"wait": False}), (words(64), words(256)), "no cp_wait"),
    (
        "copy without barrier",
        copied.at(**COPY | {"barrier": False}),
        (words(64), words(256)),
        "no barrier after its cp_wait",
    ),
    ("uninitialised", uninitialised.at(), (words(64),), r"thread 32: reads word 32 .* nothing has written"),
    ("barrier in a branch", half_barrier.at(), (floats(64),), r"thread 32: barrier reached by a part"),
    ("shuffle in a branch", half_shuffle.at(), (floats(64),), r"thread 16: shfl_xor reached by a part"),
    ("one word, many writers", same_word.at(), (words(64),), "in the same statement"),
    (
        "column of the next row",
        column_too_many.at(),
        (words(512).reshape(64, 8),),
        r"thread 8: index 8 is outside axis 1",
    ),
    ("ldmatrix after write", matrix.at(barrier=False), (floats(64),), r"reads word \d+ written by thread"),
]


@pytest.mark.parametrize(("bound", "args", "message"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_fault_is_named(bound, args, message):
    with checked(), pytest.raises(KernelError, match=message) as found:
        bound[1, THREADS, None, 2048](*args)
    assert str(found.value).startswith(f"{bound.__name__}: ") and "test_checked.py:" in str(found.value)


@pytest.mark.parametrize(("bound", "args", "message"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_lock_step_alone_does_not_see_it(bound, args, message):
    bound[1, THREADS, None, 2048](*args)


SOUND = [
    (reverse.at(barrier=True), (floats(64), floats(64))),
    (reuse.at(barrier=True), (floats(2, 64), floats(64))),
    (copied.at(**COPY), (words(64), words(256))),
    (copied.at(wait=True, barrier=False, neighbour=False), (words(64), words(256))),
    (matrix.at(barrier=True), (floats(64),)),
]


@pytest.mark.parametrize(("bound", "args"), SOUND, ids=[b.__name__ for b, _ in SOUND])
def test_a_sound_kernel_passes(bound, args):
    with checked():
        bound[2, THREADS, None, 2048](*args)


def test_both_lines_are_named():
    source, first = inspect.getsourcelines(reverse.fn)
    wrote = first + next(i for i, line in enumerate(source) if "shared[t] = x[t]" in line)
    read = first + next(i for i, line in enumerate(source) if "shared[63 - t]" in line)
    with checked(), pytest.raises(KernelError, match=re.escape(f"test_checked.py:{read}: ")) as found:
        reverse.at(barrier=False)[1, THREADS](floats(64), floats(64))
    assert f"on line {wrote} " in str(found.value)


def test_counters_count_lanes_and_bytes():
    out, pages = np.zeros(64, np.int32), np.zeros(64, np.int32)
    with checked() as report:
        counted[1, THREADS](out, pages)
    assert report.counters == {"even": 32, "global_bytes": 64 * 4 * 2}


def test_a_sample_watches_one_block():
    out, pages = np.zeros(64, np.int32), np.zeros(64, np.int32)
    with checked(sample=lambda grid: (grid[0] - 1, 0, 0)) as report:
        counted[5, THREADS](out, pages)
    assert report.counters["even"] == 32


def test_checked_mode_gives_the_plain_bits():
    x = np.random.default_rng(3).standard_normal(64).astype(np.float32)
    plain, watched = floats(64), floats(64)
    reverse.at(barrier=True)[1, THREADS](plain, x)
    with checked():
        reverse.at(barrier=True)[1, THREADS](watched, x)
    assert plain.tobytes() == watched.tobytes()
