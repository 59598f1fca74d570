"""From the input projection to attention: q and k normed by head and rotated, keys and values stored. Spec numerics §4.

A warp takes one head of one row. A lane owns D/32 neighbouring elements and adds their squares in order, starting
from zero; the 32 sums are added by exchanges at distance 16, 8, 4, 2, 1. Rotary pairs are (j, j + ROPE/2), ROPE the
rotary dims, always the first of a head; the other dims stay as normed. Values pass through unchanged.

A row of the projection ``qkv`` is [H × [D query | D gate] | HK × D key | HK × D value]; gates are left alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels_numba.cache_rows import store_cached, through_fp8
from kernels_numba.fp8 import as_bytes
from kernels_numba.machine import (
    bf16_high,
    bf16_low,
    cuda,
    device,
    float32,
    int64,
    kernel,
    lanewise,
    pack_bf16,
    shfl_xor,
    uint32,
)
from kernels_numba.norms import add_squares, inverse_rms, scaled, warp_sum
from kernels_numba.streams import (
    BASE,
    COMMITTED,
    FIRST,
    K_EXP_PLANE,
    K_PLANE,
    PAGE_WORDS,
    PTOK,
    TABLE,
    V_EXP_PLANE,
    V_PLANE,
)

THREADS = 128
WARPS = 4


def rope_table(positions: int, rope: int, theta: float) -> NDArray[np.float32]:
    """float32 [positions, 2, rope/2]: cos and sin of position · theta^(-j / (rope/2)), rounded once, from float64."""
    angles = np.arange(positions)[:, None] * theta ** (-np.arange(rope // 2) / (rope // 2))
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def check_rope(D: int, rope: int) -> int:
    """The lanes between the two elements of a rotary pair. Raises ValueError when the kernel has no such rotation."""
    if D not in (64, 128, 256):
        raise ValueError(f"head_dim {D}: rope_store has 64, 128 and 256")
    lanes, rest = divmod(rope // 2, D // 32)
    if rope % 2 or rest or lanes not in (1, 2, 4, 8, 16):
        raise ValueError(f"rotary dims {rope} of head_dim {D}: must be head_dim / 16 times 1, 2, 4, 8 or 16")
    return lanes


def grid(rows: int, heads: int, kv_heads: int) -> tuple[int, int]:
    """A block takes four heads of a row: queries, then keys, each with its value."""
    return rows, -(-(heads + kv_heads) // WARPS)


def rope_store(
    q: Any, qkv: Any, arena: Any, pages: Any, streams: Any, rows: Any, q_gain: Any, k_gain: Any, cos_sin: Any,
    eps: float, kv_heads: int, layout: Any, kv: str = "bf16", stream: Any = None,
) -> None:  # fmt: skip
    """A prompt pass: q out, keys and values into the cache at the rows' positions. rope_store_kernel documents the
    arrays.

    kv: "bf16" or "fp8", what the cache's rows are made of. stream: of the GPU. Raises ValueError for a head_dim or rotary
    dims that the kernel does not have.
    """
    (count, heads, D), rope = q.shape, 2 * cos_sin.shape[2]
    bound = rope_store_kernel.at(D=D, H=heads, HK=kv_heads, ROPE=rope, LANES=check_rope(D, rope), layout=layout, kv=kv)
    bound[grid(count, heads, kv_heads), THREADS, stream](
        q, qkv, arena, as_bytes(arena), pages, streams, rows, q_gain, k_gain, cos_sin, np.float32(eps)
    )


def rope_record(
    q: Any, qkv: Any, k_record: Any, v_record: Any, streams: Any, rows: Any, depths: Any, q_gain: Any, k_gain: Any,
    cos_sin: Any, eps: float, kv: str = "bf16", stream: Any = None,
) -> None:  # fmt: skip
    """A decode launch: q out, keys and values into the window record. rope_record_kernel documents the arrays.

    kv: of the cache that the rows may be kept in. stream: of the GPU. Raises ValueError for a head_dim or rotary dims that
    the kernel does not have.
    """
    (count, heads, D), kv_heads, rope = q.shape, k_record.shape[1], 2 * cos_sin.shape[2]
    bound = rope_record_kernel.at(D=D, H=heads, HK=kv_heads, ROPE=rope, LANES=check_rope(D, rope), kv=kv)
    bound[grid(count, heads, kv_heads), THREADS, stream](
        q, qkv, k_record, v_record, streams, rows, depths, q_gain, k_gain, cos_sin, np.float32(eps)
    )


@kernel
def rope_store_kernel(
    q, qkv, arena, exponents, pages, streams, rows, q_gain, k_gain, cos_sin, eps,
    *, D, H, HK, ROPE, LANES, layout, kv
):  # fmt: skip
    """Row r of a stream stands at position COMMITTED + r - FIRST; its key and value go there. Launch: ``grid``, 128
    threads.

    q: bf16 [W, H, D], written. qkv: bf16 [W, (2·H + 2·HK)·D]. arena: uint32 [words], written; exponents: the same memory
    as uint8. pages: int32 [entries]. streams: int64 [S, 13], of the layer. rows: int32 [W], row -> stream. q_gain,
    k_gain: float32 [D], effective gains. cos_sin: float32 [positions, 2, ROPE/2], see rope_table. eps: float32. LANES:
    lanes between the elements of a rotary pair.
    """
    words = cuda.local.array(D // 64, uint32)  # [pairs of elements of this lane]
    row, head = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y) * WARPS + int64(cuda.threadIdx.x) // 32
    lane_word = int64(cuda.threadIdx.x) % 32 * (D // 64)
    stream = int64(rows[row])
    position = streams[stream, COMMITTED] + row - streams[stream, FIRST]
    if head < H:
        query_word = head * D + lane_word
        normed_head(words, qkv, q_gain, row, query_word, lane_word, eps, D=D)
        rotate_head(words, cos_sin, position, lane_word, D=D, ROPE=ROPE, LANES=LANES)
        store_row(q, words, row, head, lane_word, D=D)
    elif head < H + HK:
        kv_head = head - H
        ptok = streams[stream, PTOK] if layout.page is None else int64(layout.page)
        page_words = streams[stream, PAGE_WORDS]
        start, slot = layout.locate(position, streams[stream, BASE], streams[stream, TABLE], ptok, pages, page_words)
        plane_row = kv_head * ptok + slot
        key_word = H * D + kv_head * (D // 2) + lane_word
        normed_head(words, qkv, k_gain, row, key_word, lane_word, eps, D=D)
        rotate_head(words, cos_sin, position, lane_word, D=D, ROPE=ROPE, LANES=LANES)
        k_plane, k_exp_plane = streams[stream, K_PLANE], streams[stream, K_EXP_PLANE]
        store_cached(arena, exponents, words, start, k_plane, k_exp_plane, plane_row, D=D, kv=kv)
        load_row(words, qkv, row, key_word + HK * (D // 2), D=D)
        v_plane, v_exp_plane = streams[stream, V_PLANE], streams[stream, V_EXP_PLANE]
        store_cached(arena, exponents, words, start, v_plane, v_exp_plane, plane_row, D=D, kv=kv)


@kernel
def rope_record_kernel(
    q, qkv, k_record, v_record, streams, rows, depths, q_gain, k_gain, cos_sin, eps, *, D, H, HK, ROPE, LANES, kv
):
    """A row stands at position COMMITTED + depth - 1; its key and value go to its row of the record. Launch:
    ``grid``, 128 threads.

    k_record, v_record: bf16 [W, HK, D], written; with kv "fp8" as an fp8 cache will give them back, so that a drafted row
    sees what it will see once they are kept. depths: int32 [W], rows of the row's path, itself included. The
    others as rope_store_kernel.
    """
    words = cuda.local.array(D // 64, uint32)  # [pairs of elements of this lane]
    row, head = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y) * WARPS + int64(cuda.threadIdx.x) // 32
    lane_word = int64(cuda.threadIdx.x) % 32 * (D // 64)
    position = streams[int64(rows[row]), COMMITTED] + depths[row] - 1
    if head < H:
        query_word = head * D + lane_word
        normed_head(words, qkv, q_gain, row, query_word, lane_word, eps, D=D)
        rotate_head(words, cos_sin, position, lane_word, D=D, ROPE=ROPE, LANES=LANES)
        store_row(q, words, row, head, lane_word, D=D)
    elif head < H + HK:
        kv_head = head - H
        key_word = H * D + kv_head * (D // 2) + lane_word
        normed_head(words, qkv, k_gain, row, key_word, lane_word, eps, D=D)
        rotate_head(words, cos_sin, position, lane_word, D=D, ROPE=ROPE, LANES=LANES)
        if kv == "fp8":
            through_fp8(words, D=D)
        store_row(k_record, words, row, kv_head, lane_word, D=D)
        load_row(words, qkv, row, key_word + HK * (D // 2), D=D)
        if kv == "fp8":
            through_fp8(words, D=D)
        store_row(v_record, words, row, kv_head, lane_word, D=D)


@device
def normed_head(words, qkv, gain, row, word, lane_word, eps, *, D):
    """words = this lane's part of a head, normed. word: where it starts in the row of qkv; lane_word: in the head."""
    squares = load_squares(words, qkv, row, word, D=D)
    norm(words, gain, lane_word, inverse_rms(warp_sum(squares), D, eps), D=D)


@device
def rotate_head(words, cos_sin, position, lane_word, *, D, ROPE, LANES):
    """Rotate this lane's part of a head; the other elements of its pairs lie LANES lanes away."""
    partners = cuda.local.array(D // 64, uint32)  # [as words]
    for i in range(D // 64):
        partners[i] = shfl_xor(words[i], LANES)
    rotate(words, partners, cos_sin, position, lane_word, D=D, ROPE=ROPE)


@lanewise
def load_row(words, qkv, row, word, *, D):
    """This lane's part of a head."""
    for i in range(D // 64):
        words[i] = qkv[row, word + i]


@lanewise
def load_squares(words, qkv, row, word, *, D):
    """This lane's part of a head; the sum of its squares, in order."""
    squares = float32(0.0)
    for i in range(D // 64):
        words[i] = qkv[row, word + i]
        squares = add_squares(squares, words[i])
    return squares


@lanewise
def norm(words, gain, lane_word, inverse, *, D):
    """bf16((x · inv) · w)."""
    for i in range(D // 64):
        at = 2 * (lane_word + i)
        words[i] = scaled(words[i], inverse, gain[at], gain[at + 1])


@lanewise
def rotate(words, partners, cos_sin, position, lane_word, *, D, ROPE):
    """First half of the rotary dims: bf16(x · cos - partner · sin), second half: bf16(x · cos + partner · sin)."""
    for i in range(D // 64):
        at = 2 * (lane_word + i)
        if at < ROPE:
            second = at >= ROPE // 2
            j = at - ROPE // 2 if second else at
            cos, sin = cos_sin[position, 0, j], cos_sin[position, 1, j]
            low = turned(bf16_low(words[i]), bf16_low(partners[i]), cos, sin, second)
            cos, sin = cos_sin[position, 0, j + 1], cos_sin[position, 1, j + 1]
            words[i] = pack_bf16(low, turned(bf16_high(words[i]), bf16_high(partners[i]), cos, sin, second))


@lanewise
def turned(x, partner, cos, sin, second):
    """One element of a rotary pair; each operation rounded."""
    return x * cos + partner * sin if second else x * cos - partner * sin


@device
def store_row(out, words, row, head, lane_word, *, D):
    """This lane's part of a head. out: bf16 [rows, heads, D]."""
    for i in range(D // 64):
        out[row, head, lane_word + i] = words[i]
