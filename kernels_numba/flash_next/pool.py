"""Blocks that a pass completes: their four raw index keys pooled to one, normed and rotated. Spec flash-next, numerics §4.

A warp takes a block. An element of the mean is ((k0 + k1) + k2) + k3 in position order, float32, divided by 4, rounded to
bf16; then the norm, with the sums of rope_store, rounded to bf16; then the rotation by the block's first position, rounded to
bf16. A pooled key depends on its four raw ones alone, so pooling again gives the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.flash_next.pages import BLOCK, find
from kernels_numba.flash_next.turns import Media, check_index_rope, tables, turn_head
from kernels_numba.machine import bf16_high, bf16_low, cuda, float32, int64, kernel, lanewise, pack_bf16, uint32
from kernels_numba.norms import add_squares, inverse_rms, warp_sum
from kernels_numba.rope_store import norm
from kernels_numba.streams import COMMITTED, INDEX_PLANE, POOLED_PLANE, ROWS

THREADS = 128
WARPS = 4


def fn_qsa_pool(
    arena: Any, pages: Any, streams: Any, most: int, gain: Any, cos_sin: Any, eps: float, layout: Any,
    media: Media | None = None, stream: Any = None,
) -> None:  # fmt: skip
    """Pool every block that the pass's rows complete, once fn_attn_prep has stored them. fn_qsa_pool_kernel documents the
    arrays.

    most: the rows of the longest stream of the pass, or more. media: as fn_attn_prep took it. stream: of the GPU. Raises
    ValueError for dims or rotary dims that the kernel does not have.
    """
    (DI,), rope = gain.shape, 2 * cos_sin.shape[2]
    spans, axes, turns = tables(media, pages)
    bound = fn_qsa_pool_kernel.at(DI=DI, ROPE=rope, LANES=check_index_rope(DI, rope), layout=layout, turns=turns)
    blocks = (most + BLOCK - 1) // BLOCK
    bound[(streams.shape[0], max(1, -(-blocks // WARPS))), THREADS, stream](
        arena, pages, streams, spans, axes, gain, cos_sin, np.float32(eps)
    )


@kernel
def fn_qsa_pool_kernel(
    arena, pages, streams, spans, axes, gain, cos_sin, eps, *, DI, ROPE, LANES, layout, turns
):  # fmt: skip
    """Block b of a stream, positions 4b .. 4b + 3, is pooled where the pass's rows hold its last position. Launch: grid (S,
    ceil(most blocks of a stream / 4)), 128 threads.

    arena: uint32 [words], read and written. pages: int32 [entries]. streams: int64 [S, 13], of the layer. spans: int64 [S,
    3], axes: int32 [rows, 3], see Media; not read where turns has no media. gain: float32 [DI], the effective gain of the
    index keys' norm. cos_sin: float32 [positions, 2, ROPE/2]. eps: float32. LANES: lanes between the elements of a rotary
    pair.
    """
    words = cuda.local.array(DI // 64, uint32)  # [pairs of elements of this lane]
    stream, lane_word = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x) % 32 * (DI // 64)
    # From the block that the first row belongs to: it may have begun before the pass.
    committed = streams[stream, COMMITTED]
    block = committed // BLOCK + int64(cuda.blockIdx.y) * WARPS + int64(cuda.threadIdx.x) // 32
    if (block + 1) * BLOCK <= committed + streams[stream, ROWS]:
        # One lookup: a block's raw keys and its pooled one share a page.
        position = block * BLOCK
        start, slot, ptok = find(streams, stream, position, pages, layout=layout)
        # The mean of the four raw keys, bf16, and the sum of its squares.
        raw = start + streams[stream, INDEX_PLANE] + slot * (DI // 2) + lane_word
        squares = load_mean(words, arena, raw, DI=DI)
        # bf16((x · inv) · w).
        norm(words, gain, lane_word, inverse_rms(warp_sum(squares), DI, eps), D=DI)
        # The rotation of the block's first position.
        turn_head(words, cos_sin, spans, axes, stream, position, lane_word, D=DI, ROPE=ROPE, LANES=LANES, turns=turns)
        # Pooled row b, in the same page.
        target = start + streams[stream, POOLED_PLANE] + slot // BLOCK * (DI // 2) + lane_word
        for i in range(DI // 64):
            arena[target + i] = words[i]


@lanewise
def load_mean(words, arena, raw, *, DI):
    """This lane's part of a block's mean; the sum of its squares, in order. raw: its word of the block's first raw key."""
    squares = float32(0.0)
    for i in range(DI // 64):
        at = raw + i
        k0, k1, k2, k3 = arena[at], arena[at + DI // 2], arena[at + 2 * (DI // 2)], arena[at + 3 * (DI // 2)]
        low = ((bf16_low(k0) + bf16_low(k1)) + bf16_low(k2)) + bf16_low(k3)
        high = ((bf16_high(k0) + bf16_high(k1)) + bf16_high(k2)) + bf16_high(k3)
        words[i] = pack_bf16(low / float32(BLOCK), high / float32(BLOCK))
        squares = add_squares(squares, words[i])
    return squares
