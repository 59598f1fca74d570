"""Which keys a row of sparse attention reads: its best blocks of four positions, and the tail. Spec flash-next.

A row at position p has end = p + 1 keys before and with itself, end // 4 complete blocks. While they are no more than the
budget, the row is dense: its list is 0 .. p, and nothing is written. Beyond, its list is the positions of ``budget`` blocks, the
blocks ascending, then the 0 .. 3 positions after the last complete block. The row's own block is a block like any other.
"""

from __future__ import annotations

from typing import Any

from kernels_numba.flash_next.pages import BLOCK
from kernels_numba.machine import cuda, device, float32, int32, int64, kernel, lanewise, shfl, uint32
from kernels_numba.sampling import THREADS, block_sum, rank, with_bit
from kernels_numba.streams import COMMITTED, FIRST

ABOVE, TIED = 1, 1 << 16
"""What a block counts in a scan: its score is above the cut, or at it. A strip of 1024 blocks has room for both in 32 bits."""


def list_width(budget: int) -> int:
    """Columns of the table of lists: the longest list of a sparse row, and one to have a multiple of 4."""
    return BLOCK * (budget + 1)


def fn_qsa_select(listed: Any, scores: Any, streams: Any, rows: Any, budget: int, stream: Any = None) -> None:
    """The list of every sparse row of a launch. fn_qsa_select_kernel documents the arrays. stream: of the GPU.

    Raises ValueError when the budget is below 1 or ``listed`` does not hold a row's list.
    """
    if budget < 1:
        raise ValueError(f"budget {budget}: 1 or more blocks a row")
    if listed.shape[1] < list_width(budget):
        raise ValueError(f"listed has {listed.shape[1]} columns: {list_width(budget)} for a budget of {budget} blocks")
    fn_qsa_select_kernel.at()[len(rows), THREADS, stream](listed, scores, streams, rows, budget)


# --- A row's list -----------------------------------------------------------------------------------------------------


@lanewise
def keys_before(streams, rows, row):
    """end: how many keys are at or before a row's position, int64."""
    stream = int64(rows[row])
    return streams[stream, COMMITTED] + row - streams[stream, FIRST] + 1


@lanewise
def is_sparse(end, budget):
    """Whether a row reads chosen blocks alone."""
    return end // BLOCK > budget


@lanewise
def list_length(end, budget):
    """How many keys a row reads, int64."""
    return BLOCK * budget + end % BLOCK if end // BLOCK > budget else end


# --- The kernel -------------------------------------------------------------------------------------------------------


@kernel
def fn_qsa_select_kernel(listed, scores, streams, rows, budget):
    """Spec flash-next "fn_qsa_select": a block takes a row. Counts are whole numbers: no thread's speed shows in the list.

    Of equal scores the lower block is taken; zeros of both signs are equal. NaN and -inf rank below every other score and are
    equal: such a block is taken only where nothing else is left.

    listed: int32 [R, at least 4 · budget + 3], written: a sparse row's list, nothing of a dense row's and after a list's end.
    scores: float32 [R, blocks], of a row's complete blocks; the others are not read. streams: int64 [S, columns]. rows: int32
    [R], row -> stream. budget: int64, blocks that a sparse row reads.

    Launch: grid R, 1024 threads.
    """
    row, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
    end = keys_before(streams, rows, row)
    complete = end // BLOCK
    if is_sparse(end, budget):
        # The cut: the budget-th largest rank. Blocks above it are taken, of those at it the lowest until the list is full.
        cut = rank_at(scores, row, thread, complete, budget)
        above = block_sum(count_from(scores, row, thread, complete, uint32(cut + uint32(1))))
        list_blocks(listed, scores, row, thread, complete, cut, budget - int64(above))
        # The tail.
        if thread < end - BLOCK * complete:
            listed[row, BLOCK * budget + thread] = int32(BLOCK * complete + thread)


@device
def rank_at(scores, row, thread, complete, budget):
    """The budget-th largest rank of a row's complete blocks, at least ``budget``: uint32, in every thread.

    It is the largest rank that ``budget`` blocks reach: found bit by bit from the top.
    """
    cut = uint32(0)
    for bit in range(32):
        higher = with_bit(cut, bit)
        reached = block_sum(count_from(scores, row, thread, complete, higher))
        if reached >= float32(budget):
            cut = higher
    return cut


@lanewise
def count_from(scores, row, first, complete, least):
    """How many of every 1024th complete block of a row, from ``first``, have at least this rank: float32, exact."""
    count = float32(0.0)
    for block in range(first, complete, THREADS):
        count = count + (float32(1.0) if rank(scores[row, block]) >= least else float32(0.0))
    return count


@device
def list_blocks(listed, scores, row, thread, complete, cut, spare):
    """The positions of the taken blocks in order of the blocks. spare: how many of those at the cut are taken."""
    above, tied = int64(0), int64(0)  # blocks of the strips before
    for first in range(0, complete, THREADS):
        block = first + thread
        standing = standing_of(scores, row, block, complete, cut)
        before, all_of_them = scan_block(standing)
        higher, equal = above + before % TIED, tied + before // TIED
        if standing == ABOVE or (standing == TIED and equal < spare):
            at = BLOCK * (higher + min(equal, spare))
            for i in range(BLOCK):
                listed[row, at + i] = int32(BLOCK * block + i)
        above, tied = above + all_of_them % TIED, tied + all_of_them // TIED


@lanewise
def standing_of(scores, row, block, complete, cut):
    """ABOVE, TIED or 0 of a block, int32."""
    standing = int32(0)
    if block < complete:
        own = rank(scores[row, block])
        standing = int32(ABOVE) if own > cut else (int32(TIED) if own == cut else int32(0))
    return standing


# --- Sums over the threads before -------------------------------------------------------------------------------------


@device
def scan_block(x):
    """(sum of x over the threads before, sum over the block) of 1024 threads, int64; x: int32."""
    totals = cuda.shared.array(32, int32)  # [warp]
    lane, warp = int64(cuda.threadIdx.x) % 32, int64(cuda.threadIdx.x) // 32
    through = scan_warp(x, lane)
    if lane == 31:
        totals[warp] = through
    cuda.syncthreads()
    warps = scan_warp(totals[lane], lane)
    # The next turn of a loop writes what other warps may still read.
    cuda.syncthreads()
    below = shfl(warps, int32(max(warp - 1, 0)))
    return (int64(below) if warp > 0 else int64(0)) + through - x, int64(shfl(warps, int32(31)))


@device
def scan_warp(x, lane):
    """The sum of x over the lanes up to and with this one, int32."""
    x = add_from_below(x, lane, 1)
    x = add_from_below(x, lane, 2)
    x = add_from_below(x, lane, 4)
    x = add_from_below(x, lane, 8)
    return add_from_below(x, lane, 16)


@device
def add_from_below(x, lane, distance):
    """x and that of the lane ``distance`` below, where there is one."""
    other = shfl(x, int32(max(lane - distance, 0)))
    return int32(x + other) if lane >= distance else x
