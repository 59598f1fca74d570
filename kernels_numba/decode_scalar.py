"""Attention without tensor cores: one fma chain a score, weights in float32. Spec attention §2, "The scalar path".

The older way to decode, kept to be read and to be compared with: its sums have another order within a tile than those of
decode_attention.py, so its bits are others. A program takes a row, a KV head and a chunk of 512 keys; decode_merge folds the
chunks. Rows go in slices of as many as the scratch holds: scalar_plan.py.

A block has 16 lanes for each of at most 16 query heads. Lane j scores keys j, j + 16, j + 32, j + 48 of a tile, and sums the
output columns of words j, j + 16, ...
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.decode_attention import CHUNK_TILES, INFINITY, TILE, decode_merge
from kernels_numba.decode_plan import CHUNK, PAIRS
from kernels_numba.fp8 import exponent_at, row_words, widen_pair
from kernels_numba.machine import (
    bf16_high,
    bf16_low,
    count,
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
from kernels_numba.portable_math import exp_to_one
from kernels_numba.scalar_plan import ScalarPlan
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

LANES = 16
"""Lanes a head."""
HEADS = PAIRS
"""Query heads a block, at most."""
THREADS = LANES * HEADS


# --- The launch -----------------------------------------------------------------------------------------------------


def scalar_attention(
    out: Any, q: Any, arena: Any, pages: Any, streams: Any, rows: Any, paths: Any, depths: Any, k_record: Any,
    v_record: Any, scale: np.float32, scratch: Any, plan: ScalarPlan, layout: Any, kv: str, stream: Any = None,
) -> None:  # fmt: skip
    """Attention of every row of a launch: a pair of kernels, which document the arrays, for each slice of the plan.

    What has a row for each row of the launch starts at the slice's first row: out, q, rows, paths, depths. The stream
    table, whose FIRST counts rows of the launch, and the records stand as they are. paths, k_record, v_record: None where
    own is "cache". scratch: float32 [at least plan.scratch_size], holds nothing before or after. plan: of these streams,
    ``plan.to(xp)``. stream: of the GPU. Raises ValueError when the scratch is too small, out has another shape than the
    plan, or own is none.
    """
    if tuple(out.shape) != (plan.rows, plan.heads, plan.D):
        raise ValueError(f"out {tuple(out.shape)}: the plan is for {(plan.rows, plan.heads, plan.D)}")
    if plan.own == "cache":
        paths, k_record, v_record = depths, q, q  # stand-ins: a kernel takes arrays, and this one reads none of them
    po, pm, pl = plan.carve(scratch)
    place, record = (arena, pages, streams), (k_record, v_record)
    partial = decode_scalar.at(D=plan.D, G=plan.group, layout=layout, kv=kv, own=plan.own)
    merge = decode_merge.at(D=plan.D)
    for first, size in plan.slices():
        own_rows = slice(first, first + size)
        tables = rows[own_rows], paths[own_rows], depths[own_rows]
        partial[(size, plan.kv_heads, plan.slots), THREADS, stream](
            po, pm, pl, q[own_rows], *place, *tables, *record, plan.kv_heads, scale
        )
        merge[(size, plan.heads), plan.D // 2, stream](
            out[own_rows], po, pm, pl, streams, rows[own_rows], depths[own_rows], plan.groups
        )


# --- Staging --------------------------------------------------------------------------------------------------------
#
# A tile of keys or values lies in shared memory as bf16, whatever the cache: [64, D/2 + 1] words, the odd word so that 16
# lanes that read a word of 16 rows meet 16 banks. A thread copies word thread % (D/2) of rows thread // (D/2) + n ·
# row_step(D).


def tile_stride(D: int) -> int:
    """Words from row to row of a tile in shared memory."""
    return D // 2 + 1


def row_step(D: int) -> int:
    """Rows that the threads of a block copy at a time."""
    return THREADS // (D // 2)


def thread_words(D: int) -> int:
    """Words of a tile that one thread copies."""
    return TILE // row_step(D)


@device
def find_keys(
    starts, slots, paths, row, first, key0, cached, limit, base, table, ptok, pages, page_words, *, layout, own
):
    """Where the tile's keys lie: a thread a key looks up its page once, for K and for V.

    starts, slots: int64 [64] in shared memory: of keys below cached, as layout.locate gives them; slots of those below
    limit: the key's row of the window record.
    """
    thread = int64(cuda.threadIdx.x)
    key = key0 + thread
    if layout.straddles and thread == 0 and key0 < cached and key0 % ptok + min(TILE, cached - key0) > ptok:
        count("straddles")
    if thread < TILE and key < cached:
        start, slot = layout.locate(key, base, table, ptok, pages, page_words)
        starts[thread] = start
        slots[thread] = slot
    if own == "record" and thread < TILE and cached <= key < limit:
        slots[thread] = first + paths[row, key - cached]


@lanewise
def load_words(
    words, arena, record, starts, slots, thread, kv_head, ptok, plane, exp_plane, cached, seen, *, D, kv, own
):
    """The thread's words of a tile, two bf16 each. cached, seen: how many of its keys lie in the cache, and in all.

    Keys past the last are zeros and are not read.
    """
    word = thread % (D // 2)
    for n in range(thread_words(D)):
        key = thread // (D // 2) + n * row_step(D)
        words[n] = uint32(0)
        if key < cached:
            words[n] = cached_word(arena, starts[key], plane, exp_plane, kv_head * ptok + slots[key], word, D=D, kv=kv)
        if own == "record" and cached <= key < seen:
            words[n] = record[slots[key], kv_head, word]


@lanewise
def cached_word(arena, start, plane, exp_plane, line, word, *, D, kv):
    """A word of a row as bf16. line: hk · PTOK + slot."""
    if kv == "fp8":
        codes = int64(arena[start + plane + line * row_words(D, kv) + word // 2]) >> 16 * (word % 2)
        found = widen_pair(codes, exponent_at(arena, 4 * (start + exp_plane) + line))
    else:
        found = arena[start + plane + line * row_words(D, kv) + word]
    return found


@device
def stage(tile, words, *, D):
    """The thread's words into shared memory, in order for every thread of the block."""
    thread = int64(cuda.threadIdx.x)
    at = thread // (D // 2) * tile_stride(D) + thread % (D // 2)
    for n in range(thread_words(D)):
        tile[at + n * row_step(D) * tile_stride(D)] = words[n]
    cuda.syncthreads()


# --- A tile: scores, fold, values -----------------------------------------------------------------------------------


@lanewise
def score_keys(s, q, tile, row, head, lane, *, D):
    """s[n] = q · k of key lane + 16n: one fma chain over d ascending, from zero."""
    s0, s1, s2, s3 = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
    for word in range(D // 2):
        pair = q[row, head, word]
        low, high = bf16_low(pair), bf16_high(pair)
        at = lane * tile_stride(D) + word
        k0, k1 = tile[at], tile[at + LANES * tile_stride(D)]
        k2, k3 = tile[at + 2 * LANES * tile_stride(D)], tile[at + 3 * LANES * tile_stride(D)]
        s0 = fma(high, bf16_high(k0), fma(low, bf16_low(k0), s0))
        s1 = fma(high, bf16_high(k1), fma(low, bf16_low(k1), s1))
        s2 = fma(high, bf16_high(k2), fma(low, bf16_low(k2), s2))
        s3 = fma(high, bf16_high(k3), fma(low, bf16_low(k3), s3))
    s[0], s[1], s[2], s[3] = s0, s1, s2, s3


@lanewise
def scale_and_mask(s, visible, scale):
    """s = score · scale where the key is visible, else -inf; the largest of the lane's four."""
    for n in range(TILE // LANES):
        s[n] = s[n] * scale if LANES * n < visible else -float32(INFINITY)
    return fmax(fmax(s[0], s[1]), fmax(s[2], s[3]))


@lanewise
def weigh(s, state, tile_max, visible):
    """(alpha, t): m = n, s = p = E(s - n), t = ((p_0 + p_1) + p_2) + p_3 of the lane's keys in sequence."""
    active = tile_max != -float32(INFINITY)
    m = state[0]
    n = fmax(m, tile_max) if active else m
    decayed = float32(0.0) if m == -float32(INFINITY) else exp_to_one(m - n)
    for i in range(TILE // LANES):
        p = exp_to_one(s[i] - n)
        s[i] = p if active and LANES * i < visible else float32(0.0)
    state[0] = n
    return decayed if active else float32(1.0), ((s[0] + s[1]) + s[2]) + s[3]


@device
def head_max(x):
    """The largest over the 16 lanes of a head."""
    x = fmax(x, shfl_xor(x, 8))
    x = fmax(x, shfl_xor(x, 4))
    x = fmax(x, shfl_xor(x, 2))
    return fmax(x, shfl_xor(x, 1))


@device
def head_sum(x):
    """The sum over the 16 lanes of a head by exchanges at distance 8, 4, 2, 1: in every lane, the same bits."""
    x = x + shfl_xor(x, 8)
    x = x + shfl_xor(x, 4)
    x = x + shfl_xor(x, 2)
    return x + shfl_xor(x, 1)


@device
def fold_scores(weights, state, s, q, tile, row, head, place, lane, visible, scale, *, D):
    """Fold a tile's keys: m and l of the head, its weights p into shared memory at ``place``. Gives alpha."""
    score_keys(s, q, tile, row, head, lane, D=D)
    tile_max = head_max(scale_and_mask(s, visible, scale))
    alpha, part = weigh(s, state, tile_max, visible)
    state[1] = fma(state[1], alpha, head_sum(part))
    for n in range(TILE // LANES):
        weights[place, lane + LANES * n] = s[n]
    return alpha


@lanewise
def add_values(o, weights, tile, place, lane, alpha, *, D):
    """o = o · alpha + P · V: a column's own fma chain over the 64 keys from zero, then one fma onto o."""
    for n in range(D // (2 * LANES)):
        low, high = float32(0.0), float32(0.0)
        for key in range(TILE):
            pair = tile[key * tile_stride(D) + lane + LANES * n]
            p = weights[place, key]
            low = fma(p, bf16_low(pair), low)
            high = fma(p, bf16_high(pair), high)
        o[2 * n] = fma(o[2 * n], alpha, low)
        o[2 * n + 1] = fma(o[2 * n + 1], alpha, high)


@lanewise
def start_chunk(state, o, *, D):
    """Start: m = -inf, l = 0, o = 0."""
    state[0], state[1] = -float32(INFINITY), float32(0.0)
    for n in range(D // LANES):
        o[n] = float32(0.0)


@device
def store_partial(po, pm, pl, o, state, chunk, row, head, lane, *, D):
    """A head's partial: the lane's columns of o, and m and l once."""
    for n in range(D // (2 * LANES)):
        po[chunk, row, head, 2 * (lane + LANES * n)] = o[2 * n]
        po[chunk, row, head, 2 * (lane + LANES * n) + 1] = o[2 * n + 1]
    if lane == 0:
        pm[chunk, row, head] = state[0]
        pl[chunk, row, head] = state[1]


# --- The kernel -----------------------------------------------------------------------------------------------------


@kernel
def decode_scalar(
    po, pm, pl, q, arena, pages, streams, rows, paths, depths, k_record, v_record, kv_heads, scale,
    *, D, G, layout, kv, own
):  # fmt: skip
    """One chunk of a row's keys for the heads of one KV head: 8 tiles of 64 keys, each folded onto the last.

    Launch: grid (rows of the slice, HK, slots), 256 threads. A program whose chunk the stream's window does not reach does
    nothing; one whose chunk the row does not reach stores it empty: m = -inf, l = 0, o = 0.

    po: float32 [slots, rows of a slice, H, D], pm, pl: the same without D, written: chunk c of a row at slot c. q: bf16 [R,
    H, D], of the slice and maybe more, as rows, paths and depths. arena: uint32 [words]. pages: int32 [entries]. streams:
    int64 [S, 13], of the layer. rows: int32 [R], row -> stream. depths: int32 [R]: the row sees keys below p + depth.
    kv_heads: HK. scale: float32, factor of a score. D: head_dim, 64, 128 or 256. G: query heads a KV head, at most 16.
    layout: backends.layout.Layout. kv: "bf16" or "fp8", the cache's rows.

    own: "record": keys from p on come from the window record, k_record, v_record: bf16 [W, HK, D], of the whole launch; the
    key at p + i is window row paths[row, i], paths: int32 [R, 128], not read past the row's depth. "cache": all keys lie in
    the cache; paths and the records are not read.
    """
    tile = cuda.shared.array(TILE * tile_stride(D), uint32)  # [64, D/2 + 1]: keys, then values
    weights = cuda.shared.array((HEADS, TILE), float32)  # [16 heads, 64 keys]: p
    starts = cuda.shared.array(TILE, int64)  # [64 keys]: word of the page
    slots = cuda.shared.array(TILE, int64)  # [64 keys]: slot in the page, or row of the record
    words = cuda.local.array(thread_words(D), uint32)  # [words of a tile that this thread copies]
    s = cuda.local.array(TILE // LANES, float32)  # [keys of the lane]: scores, then p
    o = cuda.local.array(D // LANES, float32)  # [columns of the lane, two a word]
    state = cuda.local.array(2, float32)  # [m, l] of the head

    # The program's place: a row, a KV head, a chunk; the row sees keys below limit, those below cached in the cache.
    row, kv_head, chunk = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y), int64(cuda.blockIdx.z)
    stream = int64(rows[row])
    first, window, committed = streams[stream, FIRST], streams[stream, ROWS], streams[stream, COMMITTED]
    base, table = streams[stream, BASE], streams[stream, TABLE]
    ptok = streams[stream, PTOK] if layout.page is None else int64(layout.page)
    page_words = streams[stream, PAGE_WORDS]
    k_plane, k_exp_plane = streams[stream, K_PLANE], streams[stream, K_EXP_PLANE]
    v_plane, v_exp_plane = streams[stream, V_PLANE], streams[stream, V_EXP_PLANE]
    limit = committed + depths[row]
    cached = committed if own == "record" else limit
    tiles = min(max((limit - CHUNK * chunk + TILE - 1) // TILE, 0), CHUNK_TILES)

    # The lane's place: a head of the group. Lanes past the group repeat its last head and store nothing; a warp of such
    # lanes alone copies only.
    thread = int64(cuda.threadIdx.x)
    lane, place = thread % LANES, thread // LANES
    head = kv_head * G + min(place, int64(G - 1))
    busy = 2 * (thread // 32) < G

    alpha = float32(1.0)
    start_chunk(state, o, D=D)
    for n in range(tiles):
        # Where the keys lie. The barrier also ends the use of the V tile before.
        key0 = CHUNK * chunk + TILE * n
        find_keys(
            starts, slots, paths, row, first, key0, cached, limit, base, table, ptok, pages, page_words,
            layout=layout, own=own,
        )  # fmt: skip
        cuda.syncthreads()

        # Scores and fold: p into shared memory.
        load_words(
            words, arena, k_record, starts, slots, thread, kv_head, ptok, k_plane, k_exp_plane, cached - key0,
            limit - key0, D=D, kv=kv, own=own,
        )  # fmt: skip
        stage(tile, words, D=D)
        if busy:
            visible = limit - key0 - lane
            alpha = fold_scores(weights, state, s, q, tile, row, head, place, lane, visible, scale, D=D)
        cuda.syncthreads()

        # Values.
        load_words(
            words, arena, v_record, starts, slots, thread, kv_head, ptok, v_plane, v_exp_plane, cached - key0,
            limit - key0, D=D, kv=kv, own=own,
        )  # fmt: skip
        stage(tile, words, D=D)
        if busy:
            add_values(o, weights, tile, place, lane, alpha, D=D)

    # End: the stream's chunks that its window reaches.
    if CHUNK * chunk < committed + window and place < G:
        store_partial(po, pm, pl, o, state, chunk, row, head, lane, D=D)
