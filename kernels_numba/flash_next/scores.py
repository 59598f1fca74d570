"""Scores of a row's complete blocks: how well their pooled keys suit its index queries. Spec flash-next.

A score is (max(q_0 · P, 0) + ... + max(q_IH-1 · P, 0)) / sqrt(DI), heads added in order from zero; all of it float32, never
rounded to bf16, divided, not multiplied by a reciprocal: the rounding of the division decides ties. A dot product has DI/8
lanes; lane l owns dims 8l .. 8l + 7: the first product, then one fma a dim, in order. The lanes' sums are added by exchanges
at distance DI/16, ..., 2, 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.flash_next.pages import BLOCK, find
from kernels_numba.flash_next.turns import check_index_dim
from kernels_numba.machine import (
    bf16_high,
    bf16_low,
    cuda,
    device,
    float32,
    fma,
    fmax,
    int64,
    kernel,
    lanewise,
    shfl_xor,
    uint32,
)
from kernels_numba.streams import COMMITTED, FIRST, POOLED_PLANE

THREADS = 128
TILE = 64
"""Blocks of a program."""
PIECE = 4
"""Words of a lane's eight dims."""


def fn_qsa_scores(
    scores: Any, index_q: Any, arena: Any, pages: Any, streams: Any, rows: Any, layout: Any, stream: Any = None
) -> None:
    """scores[row, b] of every block b that is complete at the row, (position + 1) // 4 of them; others are left as they are.
    fn_qsa_scores_kernel documents the arrays.

    stream: of the GPU. Raises ValueError for dims of index heads that the kernel does not have.
    """
    (count, blocks), (_, index_heads, DI) = scores.shape, index_q.shape
    check_index_dim(DI)
    if blocks:
        bound = fn_qsa_scores_kernel.at(IH=index_heads, DI=DI, layout=layout)
        bound[(count, -(-blocks // TILE)), THREADS, stream](
            scores, index_q, arena, pages, streams, rows, np.sqrt(np.float32(DI))
        )


@kernel
def fn_qsa_scores_kernel(scores, index_q, arena, pages, streams, rows, root, *, IH, DI, layout):
    """A program scores 64 blocks for one row. Launch: grid (W, ceil(blocks / 64)), 128 threads.

    scores: float32 [W, blocks], written for complete blocks. index_q: bf16 [W, IH, DI], normed and rotated. arena: uint32
    [words]; pages: int32 [entries]; streams: int64 [S, 13], of the layer. rows: int32 [W], row -> stream. root: float32,
    sqrt(DI).
    """
    keys_at = cuda.shared.array(TILE, int64)  # [block of the tile], the word at which its pooled key starts
    query = cuda.local.array((IH, PIECE), uint32)  # [index head, pair of dims of this lane]
    key = cuda.local.array(PIECE, uint32)  # [pair of dims of this lane]
    row, first, thread = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y) * TILE, int64(cuda.threadIdx.x)
    stream = int64(rows[row])
    # A row sees the blocks whose last position is not behind its own.
    position = streams[stream, COMMITTED] + row - streams[stream, FIRST]
    complete = (position + 1) // BLOCK
    if first < complete:
        # One lookup a block, by one thread.
        if thread < TILE and first + thread < complete:
            start, slot, ptok = find(streams, stream, (first + thread) * BLOCK, pages, layout=layout)
            keys_at[thread] = start + streams[stream, POOLED_PLANE] + slot // BLOCK * (DI // 2)
        cuda.syncthreads()
        # DI/8 lanes take a block; a lane's dims of every head's query.
        lane, group = thread % (DI // 8), thread // (DI // 8)
        for h in range(IH):
            for i in range(PIECE):
                query[h, i] = index_q[row, h, lane * PIECE + i]
        for slot0 in range(0, TILE, THREADS // (DI // 8)):
            # The lane's dims of the block's pooled key; zeros for a block that the row does not see.
            number = slot0 + group
            seen = first + number < complete
            for i in range(PIECE):
                key[i] = uint32(0)
            if seen:
                for i in range(PIECE):
                    key[i] = arena[keys_at[number] + lane * PIECE + i]
            # Heads in order, each cut off at zero.
            total = float32(0.0)
            for h in range(IH):
                total = total + fmax(lane_sum(dot_piece(key, query, h), DI=DI), float32(0.0))
            if seen and lane == 0:
                scores[row, first + number] = total / root


@lanewise
def dot_piece(key, query, h):
    """A lane's eight dims of a dot product: key · query[h], a product, then seven fma."""
    total = bf16_low(key[0]) * bf16_low(query[h, 0])
    total = fma(bf16_high(key[0]), bf16_high(query[h, 0]), total)
    for i in range(1, PIECE):
        total = fma(bf16_low(key[i]), bf16_low(query[h, i]), total)
        total = fma(bf16_high(key[i]), bf16_high(query[h, i]), total)
    return total


@device
def lane_sum(part, *, DI):
    """The sum over the DI/8 lanes of a block: in each of them, the same bits."""
    total = part
    if DI == 128:
        total = total + shfl_xor(total, 8)
    total = total + shfl_xor(total, 4)
    total = total + shfl_xor(total, 2)
    return total + shfl_xor(total, 1)
