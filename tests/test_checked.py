"""Checked mode finds what lock step hides: each fault planted in a small kernel is named with kernel, lines, thread and word."""

from __future__ import annotations

import inspect
import re
from contextlib import nullcontext

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
    device,
    float32,
    int32,
    int64,
    kernel,
    ldmatrix4,
    ldmatrix4_trans,
    mma,
    shfl,
    shfl_xor,
    uint8,
    uint16,
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


@kernel
def uneven(out, turns):
    """Block b has turns[b] barriers between writing and reading; out: float32 [blocks, 64], turns: int64 [blocks]."""
    shared = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    shared[t] = float32(t)
    for _turn in range(turns[cuda.blockIdx.x]):
        cuda.syncthreads()
    out[cuda.blockIdx.x, t] = shared[63 - t]


@device
def first_of(x, *, leave):
    """x of thread 0, through shared memory; leave: with a barrier for the next who writes."""
    cell = cuda.shared.array(1, float32)
    if cuda.threadIdx.x == 0:
        cell[0] = x
    cuda.syncthreads()
    found = cell[0]
    if leave:
        cuda.syncthreads()
    return found


@kernel
def called_in_a_loop(out, x, *, leave):
    """out: float32 [2, 64], x: float32 [64]."""
    for turn in range(2):
        out[turn, cuda.threadIdx.x] = first_of(x[cuda.threadIdx.x], leave=leave)


@kernel
def called_twice(out, x):
    """Each call has a cell of its own, so neither needs a barrier after it; out: float32 [64], x: float32 [2, 64]."""
    t = cuda.threadIdx.x
    out[t] = first_of(x[0, t], leave=False) + first_of(x[1, t], leave=False)


@kernel
def declared_in_a_loop(out, *, barrier):
    """Turn 0 writes what turn 1 reads; out: float32 [64]."""
    t = cuda.threadIdx.x
    for turn in range(2):
        shared = cuda.shared.array(64, float32)
        if turn == 0:
            shared[t] = float32(t)
        if barrier:
            cuda.syncthreads()
        out[t] = shared[63 - t]


@kernel
def on_a_flying_copy(out, x, *, wait, again, barrier):
    """The destination of a copy is written by its own thread, or with a barrier by the next; out: uint32 [64]."""
    shared = cuda.shared.array(0, uint32)
    t = cuda.threadIdx.x
    cp_async16(shared, 4 * t, x, 4 * t, int32(16))
    cp_commit()
    if wait:
        cp_wait(0)
    if barrier:
        cuda.syncthreads()
    if again:
        cp_async16(shared, 4 * t, x, 4 * t, int32(16))
        cp_commit()
    else:
        shared[4 * (t ^ 1) if barrier else 4 * t] = uint32(t)
    cp_wait(0)
    out[t] = shared[4 * (t ^ 1) if barrier else 4 * t]


@kernel
def warp_copies(out, x, *, warp_barrier, before, distance):
    """A thread reads what the lane at ``distance`` copied, a syncwarp after or before its wait; out: uint32 [64]."""
    shared = cuda.shared.array(0, uint32)
    t = cuda.threadIdx.x
    cp_async16(shared, 4 * t, x, 4 * t, int32(16))
    cp_commit()
    if before:
        cuda.syncwarp()
    cp_wait(0)
    if warp_barrier:
        cuda.syncwarp()
    out[t] = shared[4 * (t ^ distance)]


@kernel
def bytes_apart(out, *, distance):
    """Each thread writes a byte and reads one; out: int32 [64]."""
    shared = cuda.shared.array(64, uint8)
    t = cuda.threadIdx.x
    shared[t] = uint8(t)
    out[t] = int32(shared[t ^ distance])


@kernel
def only_even(out, *, odd):
    """Elements 2t are written, 2t + odd read; out: int32 [64]."""
    shared = cuda.shared.array(128, uint16)
    t = cuda.threadIdx.x
    shared[2 * t] = uint16(t)
    out[t] = int32(shared[2 * t + odd])


@kernel
def two_types(out, *, wide, last):
    """A word through one view of the dynamic memory, its bytes through another; out: int64 [64]."""
    words_of = cuda.shared.array(0, uint32)
    t = cuda.threadIdx.x
    if wide:
        words_of[t] = uint32(t)
    bytes_of = cuda.shared.array(0, uint8)
    if not wide:
        for i in range(last):
            bytes_of[4 * t + i] = uint8(t)
    if wide:
        out[t] = int64(bytes_of[4 * (t ^ last) + 3])
    else:
        out[t] = int64(words_of[t])


@kernel
def pairs(out, *, last):
    """int64 through a view of dynamic memory that does not hold whole ones; out: int64 [64]."""
    shared = cuda.shared.array(0, int64)
    t = cuda.threadIdx.x
    if t < last:
        shared[t] = int64(t)
        out[t] = shared[t]


@kernel
def read_by_a_warp(out, *, barrier, writer):
    """Word 0 is read by warp 0 (``writer`` 0 or more: and written by that thread); out: uint32 [64]."""
    shared = cuda.shared.array(4, uint32)
    t = cuda.threadIdx.x
    if t == 0:
        shared[0] = uint32(1)
    cuda.syncthreads()
    if t < 32:
        out[t] = shared[0]
        if barrier:
            cuda.syncwarp()
    if t == writer:
        shared[0] = uint32(2)


@kernel
def read_again(out, *, reader):
    """Thread ``reader`` reads word 0 after its warp read it and met, then writes it; out: uint32 [64]."""
    shared = cuda.shared.array(4, uint32)
    t = cuda.threadIdx.x
    if t == 0:
        shared[0] = uint32(1)
    cuda.syncthreads()
    if t < 32:
        out[t] = shared[0]
        cuda.syncwarp()
        if t == 5 or t == reader:
            out[t] = shared[0]
        if t == 5:
            shared[0] = uint32(2)


@kernel
def returned(out, *, first):
    """Threads below ``first`` return before a barrier; out: uint32 [2, 64]."""
    t = cuda.threadIdx.x
    if cuda.blockIdx.x == 0 and t < first:
        return
    cuda.syncthreads()
    out[cuda.blockIdx.x, t] = uint32(t)


@kernel
def uneven_shuffle(out):
    """Lanes take different numbers of turns, each with a shuffle; out: int32 [64]."""
    x = int32(cuda.threadIdx.x)
    for _turn in range(cuda.threadIdx.x % 2 + 1):
        x = shfl(x, int32(0))
    out[cuda.threadIdx.x] = x


@kernel
def half_mma(out):
    """A product that half of a warp reaches; out: float32 [64]."""
    z, w = float32(0), uint32(0)
    if cuda.threadIdx.x % 32 < 16:
        z, _b, _c, _d = mma(w, w, w, w, w, w, z, z, z, z)
    out[cuda.threadIdx.x] = z


@kernel
def shuffled(out):
    """A shuffle orders no memory; out: uint32 [64]."""
    shared = cuda.shared.array(64, uint32)
    t = cuda.threadIdx.x
    shared[t] = uint32(t)
    seen = shfl_xor(uint32(t), 1)
    out[t] = shared[t ^ 1] + seen


@kernel
def transposed(out, *, barrier):
    """Words that ldmatrix4_trans reads are written again; out: uint32 [64]."""
    shared = cuda.shared.array(256, uint32)
    t = cuda.threadIdx.x
    for i in range(4):
        shared[4 * t + i] = uint32(t)
    cuda.syncthreads()
    a, b, c, d = ldmatrix4_trans(shared, 4 * (t % 32))
    if barrier:
        cuda.syncthreads()
    shared[t] = a + b + c + d
    out[t] = shared[t]


@kernel
def one_place(out, *, same):
    """All threads write element 0 of a global array; out: int32 [64]."""
    out[0] = int32(7) if same else int32(cuda.threadIdx.x)


@kernel
def blocks_collide(out):
    """The blocks write the same elements, each its own number; out: int32 [64]."""
    out[cuda.threadIdx.x] = int32(cuda.blockIdx.x)


def floats(*shape):
    return np.zeros(shape, np.float32)


def words(*shape):
    return np.zeros(shape, np.uint32)


def ints(*shape):
    return np.zeros(shape, np.int32)


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
    (
        "a device function's array is the same in each turn",
        called_in_a_loop.at(leave=False),
        (floats(2, 64), floats(64)),
        r"writes word 0 read by several threads on line \d+ with no barrier",
    ),
    (
        "an array declared in a loop is the same in each turn",
        declared_in_a_loop.at(barrier=False),
        (floats(64),),
        r"reads word 63 written by thread 63",
    ),
    (
        "store on a copy of its own",
        on_a_flying_copy.at(wait=False, again=False, barrier=False),
        (words(64), words(256)),
        "thread 0: writes word 0 that the cp.async of thread 0 on line .* no cp_wait",
    ),
    (
        "copy on a copy of its own",
        on_a_flying_copy.at(wait=False, again=True, barrier=False),
        (words(64), words(256)),
        "thread 0: writes word 0 that the cp.async of thread 0 on line .* no cp_wait",
    ),
    (
        "store on another's copy, a barrier but no wait",
        on_a_flying_copy.at(wait=False, again=False, barrier=True),
        (words(64), words(256)),
        "thread 0: writes word 4 that the cp.async of thread 1 on line .* no cp_wait",
    ),
    (
        "own copy read before its wait",
        copied.at(wait=False, barrier=False, neighbour=False),
        (words(64), words(256)),
        "thread 0: reads word 0 that the cp.async of thread 0 .* no cp_wait",
    ),
    (
        "a lane's copy without syncwarp",
        warp_copies.at(warp_barrier=False, before=False, distance=1),
        (words(64), words(256)),
        "reads word 4 copied by thread 1 .* no barrier after its cp_wait",
    ),
    (
        "a lane's copy, syncwarp before the wait",
        warp_copies.at(warp_barrier=False, before=True, distance=1),
        (words(64), words(256)),
        "reads word 4 copied by thread 1 .* no barrier after its cp_wait",
    ),
    (
        "another warp's copy, syncwarp only",
        warp_copies.at(warp_barrier=True, before=False, distance=32),
        (words(64), words(256)),
        "reads word 128 copied by thread 32 .* no barrier after its cp_wait",
    ),
    ("another's byte", bytes_apart.at(distance=1), (ints(64),), "reads element 1 written by thread 1 on line"),
    ("half of a word written", only_even.at(odd=1), (ints(64),), "reads element 1 of shared .* nothing has written"),
    (
        "three bytes of a word written",
        two_types.at(wide=False, last=3),
        (np.zeros(64, np.int64),),
        "thread 0: reads word 0 of shared memory that nothing has written",
    ),
    (
        "a byte of another's word",
        two_types.at(wide=True, last=1),
        (np.zeros(64, np.int64),),
        "thread 0: reads element 7 written by thread 1 on line",
    ),
    (
        "read by a warp, written by a lane of it",
        read_by_a_warp.at(barrier=False, writer=1),
        (words(64),),
        "thread 1: writes word 0 read by several threads on line",
    ),
    (
        "read by a warp, written by another warp",
        read_by_a_warp.at(barrier=True, writer=40),
        (words(64),),
        "thread 40: writes word 0 read by several threads on line",
    ),
    ("read again by another lane", read_again.at(reader=9), (words(64),), "thread 5: writes word 0 read by several"),
    ("a return before a barrier", returned.at(first=1), (words(2, 64),), "thread 0: barrier reached by a part"),
    ("shuffles of uneven loops", uneven_shuffle.at(), (ints(64),), "thread 0: shfl reached by a part"),
    ("mma in a branch", half_mma.at(), (floats(64),), "thread 16: mma reached by a part"),
    ("a shuffle is no barrier", shuffled.at(), (words(64),), "thread 0: reads word 1 written by thread 1"),
    ("write after ldmatrix4_trans", transposed.at(barrier=False), (words(64),), r"writes word \d+ read by"),
    (
        "one element of global memory, many writers",
        one_place.at(same=False),
        (ints(64),),
        "element 0 of global array out, .* another value in the same statement",
    ),
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
    (called_in_a_loop.at(leave=True), (floats(2, 64), floats(64))),
    (called_twice.at(), (floats(64), floats(2, 64))),
    (declared_in_a_loop.at(barrier=True), (floats(64),)),
    (on_a_flying_copy.at(wait=True, again=False, barrier=False), (words(64), words(256))),
    (on_a_flying_copy.at(wait=True, again=True, barrier=False), (words(64), words(256))),
    (on_a_flying_copy.at(wait=True, again=False, barrier=True), (words(64), words(256))),
    (warp_copies.at(warp_barrier=True, before=False, distance=1), (words(64), words(256))),
    (bytes_apart.at(distance=0), (ints(64),)),
    (only_even.at(odd=0), (ints(64),)),
    (two_types.at(wide=False, last=4), (np.zeros(64, np.int64),)),
    (two_types.at(wide=True, last=0), (np.zeros(64, np.int64),)),
    (read_by_a_warp.at(barrier=True, writer=1), (words(64),)),
    (read_again.at(reader=5), (words(64),)),
    (returned.at(first=64), (words(2, 64),)),
    (transposed.at(barrier=True), (words(64),)),
    (one_place.at(same=True), (ints(64),)),
]


@pytest.mark.parametrize(("bound", "args"), SOUND, ids=[f"{b.__name__}-{i}" for i, (b, _) in enumerate(SOUND)])
def test_a_sound_kernel_passes(bound, args):
    with checked():
        bound[2, THREADS, None, 2048](*args)


@pytest.mark.parametrize(("turns", "block"), [((0, 1, 1), 0), ((3, 1, 0), 2)])
def test_a_barrier_is_its_own_blocks(turns, block):
    """Blocks with different trip counts run side by side: a barrier of one says nothing about the others."""
    with checked():
        uneven[3, THREADS](floats(3, 64), np.array([3, 1, 2]))
    with checked(), pytest.raises(KernelError, match=rf"block \({block}, 0, 0\), thread 0: reads word 63 written by"):
        uneven[3, THREADS](floats(3, 64), np.array(turns))


def test_blocks_that_write_one_element_differently_are_found():
    with (
        checked(),
        pytest.raises(KernelError, match=r"block \(0, 0, 0\), thread 0: writes element 0 of global array out"),
    ):
        blocks_collide[2, THREADS](ints(64))


@pytest.mark.parametrize("block", [0, 1])
def test_a_sampled_block_is_watched_by_itself(block):
    """Of two blocks only one has its barrier; the sample sees the block it names and no other."""
    turns = np.array([1, 1])
    turns[1 - block] = 0
    with checked(sample=lambda grid: (block, 0, 0)):
        uneven[2, THREADS](floats(2, 64), turns)
    with (
        checked(sample=lambda grid: (1 - block, 0, 0)),
        pytest.raises(KernelError, match=rf"block \({1 - block}, 0, 0\)"),
    ):
        uneven[2, THREADS](floats(2, 64), turns)


def test_dynamic_memory_is_as_many_whole_elements_as_fit():
    out = np.full(64, -1, np.int64)
    with checked():
        pairs.at(last=5)[1, THREADS, None, 44](out)
    assert out[:6].tolist() == [0, 1, 2, 3, 4, -1]
    for mode in (checked(), nullcontext()):
        with mode, pytest.raises(KernelError, match="thread 5: index 5 .* 5"):
            pairs.at(last=6)[1, THREADS, None, 44](out)


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
