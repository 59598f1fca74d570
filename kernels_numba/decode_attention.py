"""Decode attention: the rows of several streams' windows attend to the committed keys and to their own path. Spec
attention §2.

The sums are a tree: tiles of 64 keys, chunks of 512, groups of four chunks, the row. Three kernels climb it:
``decode_rows`` the whole chunks of committed keys, ``decode_partial`` the last, partial chunk and the window's own
keys, ``decode_merge`` the rest. The first two compute a tile by the same device functions, so a key's part in a sum
does not show whether it was committed.

A window row's number counts from 0 in its stream's window; its row in the launch is FIRST + number. decode_plan.py
decides how a launch is cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.cache_rows import widen_piece
from kernels_numba.decode_plan import CHUNK, GROUP_CHUNKS, PAIRS, DecodePlan
from kernels_numba.fp8 import exponent_at, row_words
from kernels_numba.machine import (
    count,
    cp_async16,
    cp_commit,
    cp_wait,
    cuda,
    device,
    float32,
    fma,
    fmax,
    int32,
    int64,
    kernel,
    lanewise,
    ldmatrix4,
    ldmatrix4_trans,
    mma,
    pack_bf16,
    shfl_xor,
    uint32,
)
from kernels_numba.portable_math import exp_to_one
from kernels_numba.streams import (
    BASE,
    COMMITTED,
    FIRST,
    K_EXP_PLANE,
    K_PLANE,
    PAGE_WORDS,
    PTOK,
    ROWS,
    TABLE,
    V_EXP_PLANE,
    V_PLANE,
)

THREADS = 128
TILE = 64
"""Keys a fold."""
CHUNK_TILES = CHUNK // TILE
WEIGHT_WORDS = PAIRS * TILE // 2
"""Words of shared memory for P."""
INFINITY = float("inf")


# --- The launch -----------------------------------------------------------------------------------------------------


def shared_bytes(D: int, kv: str = "bf16") -> int:
    """Bytes of shared memory a block of decode_rows and decode_partial: [K tile][V tile][P]; fp8: [K codes][V codes][P]
    [widened tile][exponents of K and of V]."""
    if kv == "fp8":
        return 4 * (exponents_at(D) + 2 * TILE)
    return 4 * (2 * tile_words(D) + WEIGHT_WORDS)


def tile_words(D: int) -> int:
    """Words of a K or V tile as bf16."""
    return TILE * D // 2


def staged_words(D: int, kv: str) -> int:
    """Words of a K or V tile as it comes from the cache."""
    return TILE * row_words(D, kv)


def weights_at(D: int, kv: str) -> int:
    """Word of shared memory where P begins."""
    return 2 * staged_words(D, kv)


def wide_at(D: int) -> int:
    """Word of shared memory where an fp8 tile lies widened, K or V."""
    return weights_at(D, "fp8") + WEIGHT_WORDS


def exponents_at(D: int) -> int:
    """Word of shared memory where the exponents of the staged rows begin, [K or V, 64], each + 128."""
    return wide_at(D) + tile_words(D)


def decode_attention(
    out: Any, q: Any, arena: Any, pages: Any, streams: Any, rows: Any, paths: Any, depths: Any, k_record: Any,
    v_record: Any, scale: np.float32, scratch: Any, plan: DecodePlan, layout: Any, kv: str = "bf16",
    stream: Any = None,
) -> None:  # fmt: skip
    """Attention of every row of a decode launch: the three kernels, which document the arrays.

    scratch: float32 [at least plan.scratch_size], holds nothing before or after. plan: of these streams,
    ``plan.to(xp)``. kv: "bf16" or "fp8", what the cache's rows are made of. stream: of the GPU. Raises ValueError when
    the scratch is too small or out has another shape than the plan.
    """
    if tuple(out.shape) != (plan.rows, plan.heads, plan.D):
        raise ValueError(f"out {tuple(out.shape)}: the plan is for {(plan.rows, plan.heads, plan.D)}")
    po, pm, pl = plan.carve(scratch)
    place = (arena, pages, streams)
    bind = {"D": plan.D, "G": plan.group, "layout": layout, "kv": kv}
    shared = shared_bytes(plan.D, kv)
    decode_rows.at(**bind)[plan.rows_grid, THREADS, stream, shared](
        po, pm, pl, q, *place, plan.items, plan.groups, plan.kv_heads, scale
    )
    decode_partial.at(**bind)[plan.partial_grid, THREADS, stream, shared](
        po, pm, pl, q, *place, rows, paths, depths, plan.groups, k_record, v_record, plan.kv_heads, scale
    )
    decode_merge.at(D=plan.D)[plan.merge_grid, plan.D // 2, stream](out, po, pm, pl, streams, rows, depths, plan.groups)


# --- Staging --------------------------------------------------------------------------------------------------------
#
# A thread copies piece (16 bytes) thread % pieces of rows thread // pieces + i · row_step, i < thread_rows, of a tile: a
# row has D/8 pieces of bf16, or D/16 of codes. words[i] is where such a row's piece starts, from the start of the plane or
# record: found once, used for K and for V. bytes[i] is where its exponent lies, from the start of the plane of exponents.


def pieces(D: int, kv: str) -> int:
    """16-byte pieces of a row of the cache."""
    return row_words(D, kv) // 4


def row_step(D: int, kv: str) -> int:
    """Rows that the threads of a block copy at a time."""
    return THREADS // pieces(D, kv)


def thread_rows(D: int, kv: str) -> int:
    """Rows of a tile that one thread copies a piece of."""
    return TILE // row_step(D, kv)


@device
def find_rows(
    words, bytes, page_end, origin, exponent_origin, key0, committed, kv_head, base, table, ptok, pages, page_words,
    *, D, layout, kv
):  # fmt: skip
    """words and bytes of a tile's committed keys; (page_end, origin, exponent_origin) after it: the thread's last page ends
    before position page_end, its position k starts at word origin + k · row words, its exponent is byte exponent_origin + k.

    A page is looked up when a row is not in the thread's last page: where layouts do not straddle, at most once a tile.
    """
    thread = int64(cuda.threadIdx.x)
    key = key0 + thread // pieces(D, kv)
    if layout.straddles and thread == 0 and key0 < committed and key0 % ptok + min(TILE, committed - key0) > ptok:
        count("straddles")
    for i in range(thread_rows(D, kv)):
        if (layout.straddles or i == 0) and key >= page_end and key < committed:
            start, slot = layout.locate(key, base, table, ptok, pages, page_words)
            page_end = key - slot + ptok
            origin = start + (kv_head * ptok - (key - slot)) * row_words(D, kv) + 4 * (thread % pieces(D, kv))
            exponent_origin = 4 * start + kv_head * ptok - (key - slot)
        words[i] = origin + key * row_words(D, kv)
        if kv == "fp8":
            bytes[i] = exponent_origin + key
        key = key + row_step(D, kv)
    return page_end, origin, exponent_origin


@device
def find_path_rows(words, paths, row, first, committed, limit, key0, kv_head, kv_heads, *, D, kv):
    """words of a tile's keys in the window record: the key at position committed + i is window row paths[row, i].

    Of an fp8 cache only committed keys are staged.
    """
    thread = int64(cuda.threadIdx.x)
    key = key0 + thread // (D // 8)
    if kv == "bf16":
        for i in range(thread_rows(D, kv)):
            if committed <= key < limit:
                window_row = first + paths[row, key - committed]
                words[i] = (window_row * kv_heads + kv_head) * (D // 2) + 4 * (thread % (D // 8))
            key = key + row_step(D, kv)


@device
def stage_tile(memory, words, bytes, arena, plane, exponent_plane, key0, committed, *, D, kv, value):
    """Start the copies of a tile of committed keys: K (value 0) or V (1)."""
    if kv == "fp8":
        stage_codes(memory, words, bytes, arena, plane, exponent_plane, key0, committed, D=D, value=value)
    else:
        stage_rows(memory, int64(value * tile_words(D)), words, arena, plane, D=D)


@device
def stage_path_tile(
    memory, words, bytes, arena, plane, exponent_plane, record, key0, committed, limit, *, D, kv, value
):  # fmt: skip
    """Start the copies of a tile that may reach into the window record; of an fp8 cache, of its committed keys."""
    if kv == "fp8":
        stage_codes(memory, words, bytes, arena, plane, exponent_plane, key0, committed, D=D, value=value)
    else:
        target = int64(value * tile_words(D))
        stage_path_rows(memory, target, words, arena, plane, record, key0, committed, limit, D=D)


@device
def target_word(row, piece, *, D):
    """Where piece c of row r of a tile of bf16 goes: 16-byte piece c XOR (r & 7) of the row."""
    return row * (D // 2) + 4 * (piece ^ (row & 7))


@device
def stage_rows(memory, target, words, arena, plane, *, D):
    """Start the copies of a tile of committed keys. target: word of shared memory where the tile starts."""
    thread = int64(cuda.threadIdx.x)
    row, piece = thread // (D // 8), thread % (D // 8)
    even = target + target_word(row, piece, D=D)
    odd = target + target_word(row + row_step(D, "bf16"), piece, D=D)
    for i in range(0, thread_rows(D, "bf16"), 2):
        ahead = i * row_step(D, "bf16") * (D // 2)
        cp_async16(memory, even + ahead, arena, words[i] + plane, int32(16))
        cp_async16(memory, odd + ahead, arena, words[i + 1] + plane, int32(16))


@device
def stage_path_rows(memory, target, words, arena, plane, record, key0, committed, limit, *, D):
    """Start the copies of a tile whose keys are committed, in the window record, or past the row's last: zeros."""
    thread = int64(cuda.threadIdx.x)
    row, piece = thread // (D // 8), thread % (D // 8)
    even = target + target_word(row, piece, D=D)
    odd = target + target_word(row + row_step(D, "bf16"), piece, D=D)
    for i in range(0, thread_rows(D, "bf16"), 2):
        ahead = i * row_step(D, "bf16")
        key = key0 + row + ahead
        stage_path_row(memory, even + ahead * (D // 2), words[i], arena, plane, record, key, committed, limit)
        key = key + row_step(D, "bf16")
        stage_path_row(memory, odd + ahead * (D // 2), words[i + 1], arena, plane, record, key, committed, limit)


@device
def stage_path_row(memory, staged, word, arena, plane, record, key, committed, limit):
    """Start the copy of one piece of such a tile."""
    if key < committed:
        cp_async16(memory, staged, arena, word + plane, int32(16))
    else:
        cp_async16(memory, staged, record, word, int32(16) if key < limit else int32(0))


@device
def stage_codes(memory, words, bytes, arena, plane, exponent_plane, key0, committed, *, D, value):
    """Start the copies of the committed keys of an fp8 tile, K (value 0) or V (1), and fetch their exponents."""
    thread = int64(cuda.threadIdx.x)
    row, piece = thread // (D // 16), thread % (D // 16)
    target = value * staged_words(D, "fp8") + row * (D // 4) + 4 * piece
    for i in range(thread_rows(D, "fp8")):
        ahead = i * row_step(D, "fp8")
        if key0 + row + ahead < committed:
            cp_async16(memory, target + ahead * (D // 4), arena, words[i] + plane, int32(16))
            if piece == 0:
                e = exponent_at(arena, bytes[i] + 4 * exponent_plane)
                memory[exponents_at(D) + value * TILE + row + ahead] = uint32(e + 128)


# --- A tile that has landed --------------------------------------------------------------------------------------------


@device
def await_copies():
    """Until the older of the two tiles on their way has landed, for every thread of the block."""
    cp_wait(1)
    cuda.syncthreads()


@device
def await_tile(memory, key0, committed, *, D, kv, value):
    """Until the tile of committed keys is there to be read: K (value 0) or V (1)."""
    await_copies()
    if kv == "fp8":
        widen_tile(memory, key0, committed, D=D, value=value)
        cuda.syncthreads()


@device
def await_path_tile(memory, record, paths, row, first, kv_head, key0, committed, limit, *, D, kv, value):
    """As await_tile; an fp8 tile takes its keys from ``committed`` on from the window record."""
    await_copies()
    if kv == "fp8":
        widen_tile(memory, key0, committed, D=D, value=value)
        take_path_rows(memory, record, paths, row, first, kv_head, key0, committed, limit, D=D)
        cuda.syncthreads()


@device
def widen_tile(memory, key0, committed, *, D, value):
    """Committed keys of the staged codes, K (value 0) or V (1), as the tile of bf16 that scores and values read."""
    thread = int64(cuda.threadIdx.x)
    piece = thread % (D // 16)
    for i in range(thread_rows(D, "fp8")):
        row = thread // (D // 16) + i * row_step(D, "fp8")
        if key0 + row < committed:
            e = int64(memory[exponents_at(D) + value * TILE + row]) - 128
            source = value * staged_words(D, "fp8") + row * (D // 4) + 4 * piece
            low = wide_at(D) + target_word(row, 2 * piece, D=D)
            high = wide_at(D) + target_word(row, 2 * piece + 1, D=D)
            widen_piece(memory, low, high, source, e)


@device
def take_path_rows(memory, record, paths, row, first, kv_head, key0, committed, limit, *, D):
    """Keys from ``committed`` on from the window record into the widened tile; those from ``limit`` on are zeros.

    record: bf16 [W, HK, D], its rows as an fp8 cache gives them back.
    """
    thread = int64(cuda.threadIdx.x)
    piece = thread % (D // 8)
    for i in range(thread_rows(D, "bf16")):
        tile_row = thread // (D // 8) + i * row_step(D, "bf16")
        key = key0 + tile_row
        at = key - committed
        if at >= 0:
            target = wide_at(D) + target_word(tile_row, piece, D=D)
            for n in range(4):
                word = uint32(0)
                if key < limit:
                    word = record[first + paths[row, at], kv_head, 4 * piece + n]
                memory[target + n] = word


# --- A tile: scores, fold, values. Both kernels use these and nothing else ------------------------------------------
#
# Pair rows g = lane / 4 and g + 8 belong to a lane, q = lane % 4. Warp w scores columns 8w + 2q, + 1, 32 + 8w + 2q, +
# 1 of a tile and sums output columns w·D/4 .. + D/4 - 1. state holds m of rows g, g + 8, then l of both.


@lanewise
def load_queries(queries, q, row_low, head_low, low, row_high, head_high, high, quad, *, D):
    """The queries as A operands: queries[step, i] is a_i of 16 dims; pairs that do not exist (low, high) are zeros."""
    for step in range(D // 16):
        for half in range(2):
            word = 8 * step + 4 * half + quad
            queries[step, 2 * half] = q[row_low, head_low, word] if low else uint32(0)
            queries[step, 2 * half + 1] = q[row_high, head_high, word] if high else uint32(0)


@lanewise
def start_chunk(state, o, *, D):
    """Start: m = -inf, l = 0, o = 0."""
    state[0], state[1] = -float32(INFINITY), -float32(INFINITY)
    state[2], state[3] = float32(0.0), float32(0.0)
    for n in range(D // 32):
        for i in range(4):
            o[n, i] = float32(0.0)


@device
def score_tile(s, maxes, memory, queries, warp, lane, visible, scale, *, D, kv):
    """score_keys of the staged K tile, in its only place."""
    k_tile = int64(wide_at(D) if kv == "fp8" else 0)
    score_keys(s, maxes, memory, k_tile, queries, warp, lane, visible, scale, D=D)


@device
def score_keys(s, maxes, memory, k_tile, queries, warp, lane, visible, scale, *, D):
    """s = scaled, masked scores of the tile of keys at word k_tile; maxes[16 · warp + row] = each row's largest in this
    warp's columns.

    One chain a score, dims ascending in steps of 16, from zero. s[4b + c]: columns 32b + 8w + 2q + c of row g for c <
    2, c - 2 of row g + 8 else. visible: how many keys from the lane's first column on are visible.
    """
    swizzle = lane & 7
    k_row = k_tile + (8 * warp + 32 * (lane // 16) + swizzle) * (D // 2)
    k_piece = 4 * (lane // 8 % 2 ^ swizzle)
    for i in range(8):
        s[i] = float32(0.0)
    for step in range(D // 16):
        a0, a1, a2, a3 = queries[step, 0], queries[step, 1], queries[step, 2], queries[step, 3]
        b0, b1, b2, b3 = ldmatrix4(memory, k_row + (k_piece ^ 8 * step))
        s[0], s[1], s[2], s[3] = mma(a0, a1, a2, a3, b0, b1, s[0], s[1], s[2], s[3])
        s[4], s[5], s[6], s[7] = mma(a0, a1, a2, a3, b2, b3, s[4], s[5], s[6], s[7])
    largest_low, largest_high = scale_and_mask(s, visible, scale)
    largest_low, largest_high = quad_max(largest_low), quad_max(largest_high)
    if lane % 4 == 0:
        maxes[16 * warp + lane // 4] = largest_low
        maxes[16 * warp + lane // 4 + 8] = largest_high


@lanewise
def scale_and_mask(s, visible, scale):
    """s = score · scale where the key is visible, else -inf; the largest of the lane's four, for both rows."""
    for i in range(8):
        s[i] = s[i] * scale if 32 * (i // 4) + i % 2 < visible else -float32(INFINITY)
    return fmax(fmax(s[0], s[1]), fmax(s[4], s[5])), fmax(fmax(s[2], s[3]), fmax(s[6], s[7]))


@device
def weigh_tile(s, state, maxes, sums, memory, warp, lane, visible, *, D, kv):
    """s = p, m = n; sums[16 · warp + row] = W_w of rowsum, P = bf16(p) in shared memory. Gives alpha of both rows."""
    row = lane // 4
    quad = lane % 4
    alpha_low, sum_low = weigh_row(s, state, maxes, row, visible, part=0)
    alpha_high, sum_high = weigh_row(s, state, maxes, row + 8, visible, part=1)
    sum_low, sum_high = quad_sum(sum_low), quad_sum(sum_high)
    if quad == 0:
        sums[16 * warp + row] = sum_low
        sums[16 * warp + row + 8] = sum_high
    near = weights_at(D, kv) + row * (TILE // 2) + quad + 4 * (warp ^ row)
    far = weights_at(D, kv) + row * (TILE // 2) + quad + 4 * ((4 + warp) ^ row)
    memory[near] = pack_bf16(s[0], s[1])
    memory[far] = pack_bf16(s[4], s[5])
    memory[near + 8 * (TILE // 2)] = pack_bf16(s[2], s[3])
    memory[far + 8 * (TILE // 2)] = pack_bf16(s[6], s[7])
    return alpha_low, alpha_high


@lanewise
def weigh_row(s, state, maxes, row, visible, *, part):
    """(alpha, t) of a row, part 0: g, 1: g + 8. m = n, s = p = E(s - n), t = ((p_a + p_b) + p_c) + p_d of the lane."""
    tile_max = fmax(fmax(maxes[row], maxes[16 + row]), fmax(maxes[32 + row], maxes[48 + row]))
    active = tile_max != -float32(INFINITY)
    m = state[part]
    n = fmax(m, tile_max) if active else m
    decayed = float32(0.0) if m == -float32(INFINITY) else exp_to_one(m - n)
    for i in range(4):
        at = 4 * (i // 2) + 2 * part + i % 2
        p = exp_to_one(s[at] - n)
        s[at] = p if active and 32 * (i // 2) + i % 2 < visible else float32(0.0)
    state[part] = n
    t = ((s[2 * part] + s[2 * part + 1]) + s[4 + 2 * part]) + s[4 + 2 * part + 1]
    return decayed if active else float32(1.0), t


@device
def quad_max(x):
    """The largest over the four lanes that share a row."""
    x = fmax(x, shfl_xor(x, 2))
    return fmax(x, shfl_xor(x, 1))


@device
def quad_sum(x):
    """(x_0 + x_2) + (x_1 + x_3) over the four lanes that share a row."""
    x = x + shfl_xor(x, 2)
    return x + shfl_xor(x, 1)


@device
def add_values(o, state, sums, memory, warp, lane, alpha_low, alpha_high, *, D, kv):
    """l = l · alpha + rowsum(p); o = o · alpha, then o += P · V of the staged V tile: one chain, 16 keys a step."""
    swizzle = lane & 7
    row = lane // 8 % 2 * 8 + swizzle
    far = lane // 16 ^ swizzle
    p_row = weights_at(D, kv) + row * (TILE // 2)
    v_row = (wide_at(D) if kv == "fp8" else tile_words(D)) + row * (D // 2)
    v_piece = 4 * (warp * (D // 32) ^ far)
    add_sums(o, state, sums, lane // 4, alpha_low, alpha_high, D=D)
    for step in range(TILE // 16):
        a0, a1, a2, a3 = ldmatrix4(memory, p_row + (4 * far ^ 8 * step))
        v_step = v_row + step * 16 * (D // 2)
        for pair in range(D // 64):
            # Dims 16 pair .. + 15 of the warp's: two blocks of 8, each with the low and the high 8 of the step's 16
            # keys.
            b0, b1, b2, b3 = ldmatrix4_trans(memory, v_step + (v_piece ^ 8 * pair))
            n = 2 * pair
            o[n, 0], o[n, 1], o[n, 2], o[n, 3] = mma(a0, a1, a2, a3, b0, b1, o[n, 0], o[n, 1], o[n, 2], o[n, 3])
            o[n + 1, 0], o[n + 1, 1], o[n + 1, 2], o[n + 1, 3] = mma(
                a0, a1, a2, a3, b2, b3, o[n + 1, 0], o[n + 1, 1], o[n + 1, 2], o[n + 1, 3]
            )


@lanewise
def add_sums(o, state, sums, row, alpha_low, alpha_high, *, D):
    """l = fma(l, alpha, (W_0 + W_2) + (W_1 + W_3)); o = o · alpha."""
    sum_low = (sums[row] + sums[32 + row]) + (sums[16 + row] + sums[48 + row])
    sum_high = (sums[row + 8] + sums[40 + row]) + (sums[24 + row] + sums[56 + row])
    state[2] = fma(state[2], alpha_low, sum_low)
    state[3] = fma(state[3], alpha_high, sum_high)
    for n in range(D // 32):
        o[n, 0] = o[n, 0] * alpha_low
        o[n, 1] = o[n, 1] * alpha_low
        o[n, 2] = o[n, 2] * alpha_high
        o[n, 3] = o[n, 3] * alpha_high


# --- FOLD -----------------------------------------------------------------------------------------------------------


@lanewise
def fold_sums(m, total, cm, cl):
    """FOLD of spec attention §2 without o: (n, l, a, b); total is l. Only an empty part has cl = 0; a NaN is none."""
    active = cl != float32(0.0)
    n = fmax(m, cm) if active else m
    decayed = float32(0.0) if m == -float32(INFINITY) else exp_to_one(m - n)
    a = decayed if active else float32(1.0)
    b = exp_to_one(cm - n) if active else float32(0.0)
    return n, fma(total, a, cl * b), a, b


@lanewise
def fold_chunk(group_state, group_o, state, o, *, D):
    """FOLD a chunk into its group: both rows of the lane."""
    m_low, l_low, a_low, b_low = fold_sums(group_state[0], group_state[2], state[0], state[2])
    m_high, l_high, a_high, b_high = fold_sums(group_state[1], group_state[3], state[1], state[3])
    group_state[0], group_state[1], group_state[2], group_state[3] = m_low, m_high, l_low, l_high
    for n in range(D // 32):
        group_o[n, 0] = fma(group_o[n, 0], a_low, o[n, 0] * b_low)
        group_o[n, 1] = fma(group_o[n, 1], a_low, o[n, 1] * b_low)
        group_o[n, 2] = fma(group_o[n, 2], a_high, o[n, 2] * b_high)
        group_o[n, 3] = fma(group_o[n, 3], a_high, o[n, 3] * b_high)


@lanewise
def fold_pair(state, cm, cl, first, second):
    """FOLD a partial's (m, l, two columns of o) into state = [m, l, o, o]."""
    n, total, a, b = fold_sums(state[0], state[1], cm, cl)
    state[0], state[1] = n, total
    state[2] = fma(state[2], a, first * b)
    state[3] = fma(state[3], a, second * b)


@lanewise
def fold_partial(state, po, pm, pl, slot, row, head, column):
    """fold_pair of a slot of a row, its columns ``column`` and the next."""
    cm, cl = pm[slot, row, head], pl[slot, row, head]
    fold_pair(state, cm, cl, po[slot, row, head, column], po[slot, row, head, column + 1])


@device
def store_partial(po, pm, pl, o, state, slot, row, head, warp, lane, *, D, part):
    """A row's partial: the lane's columns of o, and m and l once. part 0: row g, 1: row g + 8."""
    column = warp * (D // 4) + 2 * (lane % 4)
    for n in range(D // 32):
        po[slot, row, head, column + 8 * n] = o[n, 2 * part]
        po[slot, row, head, column + 8 * n + 1] = o[n, 2 * part + 1]
    if warp == 0 and lane % 4 == 0:
        pm[slot, row, head] = state[part]
        pl[slot, row, head] = state[2 + part]


# --- The kernels ----------------------------------------------------------------------------------------------------


@kernel
def decode_rows(po, pm, pl, q, arena, pages, streams, items, groups, kv_heads, scale, *, D, G, layout, kv):
    """Whole chunks of committed keys: one program 16 (row, head) pairs of a stream and one KV head, over one chunk or
    one group.

    Launch: grid items · HK, the KV head fastest, 128 threads, ``shared_bytes(D)``.

    po: float32 [slots, W, H, D], pm, pl: float32 [slots, W, H], written: a stream's groups from slot 0, then its
    chunks. q: bf16 [W, H, D]. arena: uint32 [words]. pages: int32 [entries]. streams: int64 [S, 13], of the layer.
    items: int32 [n, 3] and groups: int32 [S], see DecodePlan. kv_heads: HK. scale: float32, factor of a score. D:
    head_dim, 64, 128 or 256. G: query heads a KV head. layout: backends.layout.Layout. kv:
    "bf16" or "fp8".
    """
    memory = cuda.shared.array(0, uint32)  # [K tile: 64, D/2] [V tile: 64, D/2] [P: 16, 32]; fp8: see shared_bytes
    maxes = cuda.shared.array(64, float32)  # [4 warps, 16 pairs]
    sums = cuda.shared.array(64, float32)  # [4 warps, 16 pairs]
    queries = cuda.local.array((D // 16, 4), uint32)  # [steps of 16 dims, a0..a3]
    words = cuda.local.array(thread_rows(D, kv), int64)  # [rows of a tile that this thread copies]
    bytes = cuda.local.array(thread_rows(D, kv), int64)  # as words: where exponents lie
    s = cuda.local.array(8, float32)  # [2 blocks of 8 keys, 4]: scores, then p
    o = cuda.local.array((D // 32, 4), float32)  # [blocks of 8 dims, 4]: rows g, g, g+8, g+8
    state = cuda.local.array(4, float32)  # [m of rows g, g+8, l of both]
    group_o = cuda.local.array((D // 32, 4), float32)  # as o
    group_state = cuda.local.array(4, float32)  # as state

    # The program's place: a stream, 16 pairs, a KV head, chunks chunk0 .. chunk0 + chunks - 1.
    item, kv_head = int64(cuda.blockIdx.x) // kv_heads, int64(cuda.blockIdx.x) % kv_heads
    stream, pair0, code = int64(items[item, 0]), int64(items[item, 1]), int64(items[item, 2])
    first, rows, committed = streams[stream, FIRST], streams[stream, ROWS], streams[stream, COMMITTED]
    base, table = streams[stream, BASE], streams[stream, TABLE]
    ptok = streams[stream, PTOK] if layout.page is None else int64(layout.page)
    k_plane, v_plane, page_words = streams[stream, K_PLANE], streams[stream, V_PLANE], streams[stream, PAGE_WORDS]
    k_exp_plane, v_exp_plane = streams[stream, K_EXP_PLANE], streams[stream, V_EXP_PLANE]
    folded = int64(groups[stream])
    chunk0 = GROUP_CHUNKS * code if code >= 0 else GROUP_CHUNKS * folded - 1 - code
    tiles = GROUP_CHUNKS * CHUNK_TILES if code >= 0 else CHUNK_TILES
    slot = code if code >= 0 else folded - 1 - code

    # The lane's place: pairs low and high; pair i is row i // G, head i % G of the group.
    lane = int64(cuda.threadIdx.x) % 32
    warp = int64(cuda.threadIdx.x) // 32
    low, high = pair0 + lane // 4, pair0 + lane // 4 + 8
    row_low, head_low = first + low // G, kv_head * G + low % G
    row_high, head_high = first + high // G, kv_head * G + high % G
    load_queries(queries, q, row_low, head_low, low < rows * G, row_high, head_high, high < rows * G, lane % 4, D=D)

    # Prologue: the first K tile and the first V tile, a copy group each.
    key0 = CHUNK * chunk0
    page_end, origin, exponent_origin = find_rows(
        words, bytes, int64(0), int64(0), int64(0), key0, committed, kv_head, base, table, ptok, pages, page_words,
        D=D, layout=layout, kv=kv,
    )  # fmt: skip
    stage_tile(memory, words, bytes, arena, k_plane, k_exp_plane, key0, committed, D=D, kv=kv, value=0)
    cp_commit()
    stage_tile(memory, words, bytes, arena, v_plane, v_exp_plane, key0, committed, D=D, kv=kv, value=1)
    cp_commit()

    start_chunk(group_state, group_o, D=D)
    for tile in range(tiles):
        if tile % CHUNK_TILES == 0:
            start_chunk(state, o, D=D)
        visible = int64(TILE) - 8 * warp - 2 * (lane % 4)
        here = key0
        key0 = key0 + TILE

        # Scores; the K tile gives way to the next.
        await_tile(memory, here, committed, D=D, kv=kv, value=0)
        score_tile(s, maxes, memory, queries, warp, lane, visible, scale, D=D, kv=kv)
        cuda.syncthreads()
        if tile + 1 < tiles:
            page_end, origin, exponent_origin = find_rows(
                words, bytes, page_end, origin, exponent_origin, key0, committed, kv_head, base, table, ptok, pages,
                page_words, D=D, layout=layout, kv=kv,
            )  # fmt: skip
            stage_tile(memory, words, bytes, arena, k_plane, k_exp_plane, key0, committed, D=D, kv=kv, value=0)
        cp_commit()

        # Fold: s becomes p.
        alpha_low, alpha_high = weigh_tile(s, state, maxes, sums, memory, warp, lane, visible, D=D, kv=kv)

        # l, o and the values; the V tile gives way to the next.
        await_tile(memory, here, committed, D=D, kv=kv, value=1)
        add_values(o, state, sums, memory, warp, lane, alpha_low, alpha_high, D=D, kv=kv)
        cuda.syncthreads()
        if tile + 1 < tiles:
            stage_tile(memory, words, bytes, arena, v_plane, v_exp_plane, key0, committed, D=D, kv=kv, value=1)
        cp_commit()

        if tile % CHUNK_TILES == CHUNK_TILES - 1:
            fold_chunk(group_state, group_o, state, o, D=D)

    # End: a chunk folded into an empty group is the chunk itself.
    if low < rows * G:
        store_partial(po, pm, pl, group_o, group_state, slot, row_low, head_low, warp, lane, D=D, part=0)
    if high < rows * G:
        store_partial(po, pm, pl, group_o, group_state, slot, row_high, head_high, warp, lane, D=D, part=1)


@kernel
def decode_partial(
    po, pm, pl, q, arena, pages, streams, rows, paths, depths, groups, k_record, v_record, kv_heads, scale,
    *, D, G, layout, kv
):  # fmt: skip
    """The last, partial chunk of committed keys and the row's own path: one program a row, a KV head and z in 0, 1.

    Program z takes chunk p // 512 + z, if the window reaches it, and stops after the tile of the row's last key; a
    chunk that the row's path does not reach is stored empty: m = -inf, l = 0, o = 0. Launch: grid (W, HK, 2), 128
    threads, ``shared_bytes(D)``.

    rows: int32 [W], row -> stream. paths: int32 [W, 128]: the key at position p + i is window row paths[row, i];
    entries past the row's depth are not read. depths: int32 [W], entries of the path (0: the row sees committed keys
    only). k_record, v_record: bf16 [W, HK, D], keys (normed, rotated) and values of the launch's rows. The others as
    decode_rows.
    """
    memory = cuda.shared.array(0, uint32)  # [K tile: 64, D/2] [V tile: 64, D/2] [P: 16, 32]; fp8: see shared_bytes
    maxes = cuda.shared.array(64, float32)  # [4 warps, 16 heads]
    sums = cuda.shared.array(64, float32)  # [4 warps, 16 heads]
    queries = cuda.local.array((D // 16, 4), uint32)  # [steps of 16 dims, a0..a3]
    words = cuda.local.array(thread_rows(D, kv), int64)  # [rows of a tile that this thread copies]
    bytes = cuda.local.array(thread_rows(D, kv), int64)  # as words: where exponents lie
    s = cuda.local.array(8, float32)  # [2 blocks of 8 keys, 4]: scores, then p
    o = cuda.local.array((D // 32, 4), float32)  # [blocks of 8 dims, 4]: heads g, g, g+8, g+8
    state = cuda.local.array(4, float32)  # [m of heads g, g+8, l of both]

    # The program's place: a row, a KV head, a chunk; the row sees keys below limit.
    row, kv_head = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
    stream = int64(rows[row])
    first, window, committed = streams[stream, FIRST], streams[stream, ROWS], streams[stream, COMMITTED]
    base, table = streams[stream, BASE], streams[stream, TABLE]
    ptok = streams[stream, PTOK] if layout.page is None else int64(layout.page)
    k_plane, v_plane, page_words = streams[stream, K_PLANE], streams[stream, V_PLANE], streams[stream, PAGE_WORDS]
    k_exp_plane, v_exp_plane = streams[stream, K_EXP_PLANE], streams[stream, V_EXP_PLANE]
    chunk = committed // CHUNK + cuda.blockIdx.z
    limit = committed + depths[row]
    tiles = min(max((limit - CHUNK * chunk + TILE - 1) // TILE, 0), CHUNK_TILES)

    # The lane's place: heads g and g + 8 of the group.
    lane = int64(cuda.threadIdx.x) % 32
    warp = int64(cuda.threadIdx.x) // 32
    low, high = lane // 4, lane // 4 + 8
    head_low, head_high = kv_head * G + low, kv_head * G + high
    load_queries(queries, q, row, head_low, low < G, row, head_high, high < G, lane % 4, D=D)

    # Prologue: the first K tile and the first V tile, a copy group each.
    key0 = CHUNK * chunk
    page_end, origin, exponent_origin = int64(0), int64(0), int64(0)
    for i in range(thread_rows(D, kv)):
        words[i] = int64(0)
    if tiles > 0:
        page_end, origin, exponent_origin = find_rows(
            words, bytes, page_end, origin, exponent_origin, key0, committed, kv_head, base, table, ptok, pages,
            page_words, D=D, layout=layout, kv=kv,
        )  # fmt: skip
        find_path_rows(words, paths, row, first, committed, limit, key0, kv_head, kv_heads, D=D, kv=kv)
        stage_path_tile(
            memory, words, bytes, arena, k_plane, k_exp_plane, k_record, key0, committed, limit, D=D, kv=kv, value=0
        )
    cp_commit()
    if tiles > 0:
        stage_path_tile(
            memory, words, bytes, arena, v_plane, v_exp_plane, v_record, key0, committed, limit, D=D, kv=kv, value=1
        )
    cp_commit()

    start_chunk(state, o, D=D)
    for tile in range(tiles):
        visible = limit - key0 - 8 * warp - 2 * (lane % 4)
        here = key0
        key0 = key0 + TILE

        # Scores; the K tile gives way to the next.
        await_path_tile(memory, k_record, paths, row, first, kv_head, here, committed, limit, D=D, kv=kv, value=0)
        score_tile(s, maxes, memory, queries, warp, lane, visible, scale, D=D, kv=kv)
        cuda.syncthreads()
        if tile + 1 < tiles:
            page_end, origin, exponent_origin = find_rows(
                words, bytes, page_end, origin, exponent_origin, key0, committed, kv_head, base, table, ptok, pages,
                page_words, D=D, layout=layout, kv=kv,
            )  # fmt: skip
            find_path_rows(words, paths, row, first, committed, limit, key0, kv_head, kv_heads, D=D, kv=kv)
            stage_path_tile(
                memory, words, bytes, arena, k_plane, k_exp_plane, k_record, key0, committed, limit, D=D, kv=kv, value=0
            )
        cp_commit()

        # Fold: s becomes p.
        alpha_low, alpha_high = weigh_tile(s, state, maxes, sums, memory, warp, lane, visible, D=D, kv=kv)

        # l, o and the values; the V tile gives way to the next.
        await_path_tile(memory, v_record, paths, row, first, kv_head, here, committed, limit, D=D, kv=kv, value=1)
        add_values(o, state, sums, memory, warp, lane, alpha_low, alpha_high, D=D, kv=kv)
        cuda.syncthreads()
        if tile + 1 < tiles:
            stage_path_tile(
                memory, words, bytes, arena, v_plane, v_exp_plane, v_record, key0, committed, limit, D=D, kv=kv, value=1
            )
        cp_commit()

    # End: the stream's chunks that its window reaches.
    slot = groups[stream] + chunk - GROUP_CHUNKS * groups[stream]
    if CHUNK * chunk < committed + window:
        if low < G:
            store_partial(po, pm, pl, o, state, slot, row, head_low, warp, lane, D=D, part=0)
        if high < G:
            store_partial(po, pm, pl, o, state, slot, row, head_high, warp, lane, D=D, part=1)


@kernel
def decode_merge(out, po, pm, pl, streams, rows, depths, groups, *, D):
    """Partials into rows, in order: chunks into groups of four, groups into the row; out = bf16(o / l).

    A row that sees no key (p + depth = 0) gives 0. Launch: grid (W, H), D/2 threads, two columns each.

    out: bf16 [W, H, D], written. po: float32 [slots, W, H, D], pm, pl: float32 [slots, W, H]. streams: int64 [S, 13].
    rows: int32 [W], row -> stream. depths: int32 [W]. groups: int32 [S], how many of a stream's slots are whole
    groups.
    """
    state = cuda.local.array(4, float32)  # [m, l, two columns of o]: the row
    group = cuda.local.array(4, float32)  # as state: a group of chunks
    row, head = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
    column = 2 * int64(cuda.threadIdx.x)
    stream = int64(rows[row])
    committed, window = streams[stream, COMMITTED], streams[stream, ROWS]
    folded = int64(groups[stream])
    chunks = (committed + window + CHUNK - 1) // CHUNK - GROUP_CHUNKS * folded
    empty(state)
    for slot in range(folded):
        fold_partial(state, po, pm, pl, slot, row, head, column)
    empty(group)
    for chunk in range(chunks):
        slot = folded + chunk
        fold_partial(group, po, pm, pl, slot, row, head, column)
        if chunk % GROUP_CHUNKS == GROUP_CHUNKS - 1 or chunk == chunks - 1:
            fold_pair(state, group[0], group[1], group[2], group[3])
            empty(group)
    low, high = state[2] / state[1], state[3] / state[1]
    if committed + depths[row] == 0:
        low, high = float32(0.0), float32(0.0)
    out[row, head, int64(cuda.threadIdx.x)] = pack_bf16(low, high)


@lanewise
def empty(state):
    """m = -inf, l = 0, o = 0."""
    state[0] = -float32(INFINITY)
    for i in range(1, 4):
        state[i] = float32(0.0)
