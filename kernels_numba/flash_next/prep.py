"""From the input projection to the cache: queries, keys and index queries normed by head and rotated, keys, values and raw
index keys stored. Spec flash-next, numerics §4.

A row of the projection is [H × (D query | D gate) | HK × D key | HK × D value | IH × DI index query | DI index key]. A warp
takes one head of one row, with the sums of rope_store. Values and the raw index key pass through unchanged: its norm and its
rotation are those of its block, once that is pooled.

Decode windows are stored like prompt rows, each row at its own position behind the committed ones, before any row attends:
a row sees what its length says, so a window's rows see their own path and no more. Windows are chains for that reason.
There is no record and nothing to keep: rows that are rejected lie past the committed length, where nobody reads them, and the
next pass writes over them; its first block is pooled anew.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.cache_rows import store_cached
from kernels_numba.flash_next.pages import find
from kernels_numba.flash_next.turns import Media, check_index_rope, tables, turn_head
from kernels_numba.fp8 import as_bytes
from kernels_numba.machine import cuda, int64, kernel, uint32
from kernels_numba.rope_store import check_rope, load_row, normed_head, store_row
from kernels_numba.streams import (
    COMMITTED,
    FIRST,
    INDEX_PLANE,
    K_EXP_PLANE,
    K_PLANE,
    V_EXP_PLANE,
    V_PLANE,
)

THREADS = 128
WARPS = 4


def fn_attn_prep(
    q: Any, index_q: Any, projection: Any, arena: Any, pages: Any, streams: Any, rows: Any, q_gain: Any, k_gain: Any,
    index_gain: Any, cos_sin: Any, eps: float, kv_heads: int, layout: Any, kv: str = "bf16", media: Media | None = None,
    stream: Any = None,
) -> None:  # fmt: skip
    """A pass's rows: q and index_q out, keys, values and raw index keys into the cache. fn_attn_prep_kernel documents the
    arrays.

    kv: "bf16" or "fp8", what keys and values of the cache are made of. media: the positions by which rows turn, where some
    stream has media. stream: of the GPU. Raises ValueError for dims or rotary dims that the kernel does not have.
    """
    (count, heads, D), (_, index_heads, DI), rope = q.shape, index_q.shape, 2 * cos_sin.shape[2]
    spans, axes, turns = tables(media, pages)
    bound = fn_attn_prep_kernel.at(
        D=D, H=heads, HK=kv_heads, DI=DI, IH=index_heads, ROPE=rope, LANES=check_rope(D, rope),
        INDEX_LANES=check_index_rope(DI, rope), layout=layout, kv=kv, turns=turns,
    )  # fmt: skip
    bound[(count, -(-(heads + kv_heads + index_heads + 1) // WARPS)), THREADS, stream](
        q, index_q, projection, arena, as_bytes(arena), pages, streams, rows, spans, axes, q_gain, k_gain, index_gain, cos_sin,
        np.float32(eps),
    )  # fmt: skip


@kernel
def fn_attn_prep_kernel(
    q, index_q, projection, arena, exponents, pages, streams, rows, spans, axes, q_gain, k_gain, index_gain, cos_sin, eps,
    *, D, H, HK, DI, IH, ROPE, LANES, INDEX_LANES, layout, kv, turns
):  # fmt: skip
    """Row r of a stream stands at position COMMITTED + r - FIRST; what is stored goes there. Launch: grid (W, ceil((H + HK +
    IH + 1) / 4)), 128 threads.

    q: bf16 [W, H, D], index_q: bf16 [W, IH, DI], written. projection: bf16 [W, (2·H + 2·HK)·D + (IH + 1)·DI]. arena: uint32
    [words], written; exponents: the same memory as uint8. pages: int32 [entries]. streams: int64 [S, 13], of the layer. rows:
    int32 [W], row -> stream. spans: int64 [S, 3], axes: int32 [rows, 3], see Media; not read where turns has no media. q_gain,
    k_gain: float32 [D], index_gain: float32 [DI], effective gains. cos_sin: float32 [positions, 2, ROPE/2]. eps: float32.
    LANES, INDEX_LANES: lanes between the elements of a rotary pair of a head, of an index head.
    """
    words = cuda.local.array(D // 64, uint32)  # [pairs of elements of this lane]
    index_words = cuda.local.array(DI // 64, uint32)  # [pairs of elements of this lane]
    # The warp's row and head: queries, then keys with their values, then index queries, then the index key.
    row, head = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y) * WARPS + int64(cuda.threadIdx.x) // 32
    lane = int64(cuda.threadIdx.x) % 32
    lane_word, lane_index_word = lane * (D // 64), lane * (DI // 64)
    stream = int64(rows[row])
    position = streams[stream, COMMITTED] + row - streams[stream, FIRST]
    if head < H:
        # A query, beside its gate: normed, rotated.
        query_word = head * D + lane_word
        normed_head(words, projection, q_gain, row, query_word, lane_word, eps, D=D)
        turn_head(words, cos_sin, spans, axes, stream, position, lane_word, D=D, ROPE=ROPE, LANES=LANES, turns=turns)
        store_row(q, words, row, head, lane_word, D=D)
    elif head < H + HK:
        # A key: normed, rotated, stored in the head's rows of the page.
        kv_head = head - H
        start, slot, ptok = find(streams, stream, position, pages, layout=layout)
        plane_row = kv_head * ptok + slot
        key_word = H * D + kv_head * (D // 2) + lane_word
        normed_head(words, projection, k_gain, row, key_word, lane_word, eps, D=D)
        turn_head(words, cos_sin, spans, axes, stream, position, lane_word, D=D, ROPE=ROPE, LANES=LANES, turns=turns)
        k_plane, k_exp_plane = streams[stream, K_PLANE], streams[stream, K_EXP_PLANE]
        store_cached(arena, exponents, words, start, k_plane, k_exp_plane, plane_row, D=D, kv=kv)
        # Its value: stored as projected.
        load_row(words, projection, row, key_word + HK * (D // 2), D=D)
        v_plane, v_exp_plane = streams[stream, V_PLANE], streams[stream, V_EXP_PLANE]
        store_cached(arena, exponents, words, start, v_plane, v_exp_plane, plane_row, D=D, kv=kv)
    elif head < H + HK + IH:
        # An index query: normed, rotated in the same dims.
        index_head = head - (H + HK)
        index_word = (H + HK) * D + index_head * (DI // 2) + lane_index_word
        normed_head(index_words, projection, index_gain, row, index_word, lane_index_word, eps, D=DI)
        turn_head(
            index_words, cos_sin, spans, axes, stream, position, lane_index_word,
            D=DI, ROPE=ROPE, LANES=INDEX_LANES, turns=turns,
        )  # fmt: skip
        store_row(index_q, index_words, row, index_head, lane_index_word, D=DI)
    elif head < H + HK + IH + 1:
        # The raw index key: stored as projected, bf16 whatever the cache's keys are.
        start, slot, ptok = find(streams, stream, position, pages, layout=layout)
        load_row(index_words, projection, row, (H + HK) * D + IH * (DI // 2) + lane_index_word, D=DI)
        target = start + streams[stream, INDEX_PLANE] + slot * (DI // 2) + lane_index_word
        for i in range(DI // 64):
            arena[target + i] = index_words[i]
