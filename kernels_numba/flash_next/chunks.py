"""Sparse attention: a row's heads attend to the keys of its list, wherever they lie in the cache. Spec flash-next.

A list is cut by its entries: chunks of 512, tiles of 64, each tile folded onto the last, each chunk from nothing; then
fn_attn_merge folds the chunks. A tile's sums are those of decode_attention.py: a row has the bits that decode gives it with
its listed keys side by side.

All keys lie in the cache, those of the launch's rows too. Where one lies is found once a tile, by one thread, and kept in
shared memory for its copies of K and V.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.cache_rows import widen_piece
from kernels_numba.decode_attention import (
    CHUNK_TILES,
    THREADS,
    TILE,
    WEIGHT_WORDS,
    add_values,
    load_queries,
    pieces,
    row_step,
    score_keys,
    staged_words,
    start_chunk,
    store_partial,
    target_word,
    thread_rows,
    tile_words,
    weigh_tile,
    weights_at,
    wide_at,
)
from kernels_numba.decode_plan import CHUNK
from kernels_numba.flash_next.select import is_sparse, keys_before, list_length
from kernels_numba.fp8 import exponent_at, row_words
from kernels_numba.machine import (
    cp_async16,
    cp_commit,
    cp_wait,
    cuda,
    device,
    float32,
    int32,
    int64,
    kernel,
    uint32,
)
from kernels_numba.streams import (
    BASE,
    K_EXP_PLANE,
    K_PLANE,
    PAGE_WORDS,
    PTOK,
    TABLE,
    V_EXP_PLANE,
    V_PLANE,
)

# --- The launch -----------------------------------------------------------------------------------------------------
#
# Dynamic shared memory, in words: [K tile] [V tile] [P], of an fp8 cache [K codes] [V codes] [P] [widened tile], as
# decode_attention.py has it; then, ahead, [the next K tile, or its codes]; of an fp8 cache [exponents].


def next_keys_at(D: int, kv: str) -> int:
    """Word where the tiles of odd number have their keys, when they are brought ahead."""
    return weights_at(D, kv) + WEIGHT_WORDS + (tile_words(D) if kv == "fp8" else 0)


def exponents_at(D: int, ahead: bool) -> int:
    """Word where the exponents of an fp8 tile lie, [number % 2, K or V, 64], each + 128."""
    return next_keys_at(D, "fp8") + (staged_words(D, "fp8") if ahead else 0)


def shared_bytes(D: int, kv: str, ahead: bool) -> int:
    """Bytes of shared memory that a block of fn_attn_chunks asks for."""
    if kv == "fp8":
        return 4 * (exponents_at(D, ahead) + 4 * TILE)
    return 4 * (next_keys_at(D, kv) + (staged_words(D, kv) if ahead else 0))


def fn_attn_chunks(
    po: Any, pm: Any, pl: Any, q: Any, arena: Any, pages: Any, streams: Any, rows: Any, listed: Any, budget: int,
    scale: np.float32, kv_heads: int, layout: Any, kv: str = "bf16", ahead: bool = False, stream: Any = None,
) -> None:  # fmt: skip
    """The partials of every row of a launch. fn_attn_chunks_kernel documents the arrays.

    kv: "bf16" or "fp8", what the cache's rows are made of. ahead: whether keys are brought a tile ahead; the bits are the
    same. stream: of the GPU.
    """
    slots, count, heads, D = po.shape
    bound = fn_attn_chunks_kernel.at(D=D, G=heads // kv_heads, layout=layout, kv=kv, ahead=ahead)
    bound[(count, kv_heads, slots), THREADS, stream, shared_bytes(D, kv, ahead)](
        po, pm, pl, q, arena, pages, streams, rows, listed, budget, scale
    )


# --- Where keys lie ---------------------------------------------------------------------------------------------------


@device
def find_keys(
    key_at, memory, listed, row, first, keys, sparse, kv_head, tile, arena, base, table, ptok, pages, page_words,
    k_exp_plane, v_exp_plane, *, D, layout, kv, ahead
):  # fmt: skip
    """key_at of a tile, int64 [64]: the word of a row from the start of its plane. A thread a key looks up its page.

    first: the tile's first entry of the list; entries from ``keys`` on are none, and nothing of them is read. Of an fp8 cache
    the exponents come along; of no key they are 0.
    """
    thread = int64(cuda.threadIdx.x)
    entry = first + thread
    if thread < TILE:
        at, k_exponent, v_exponent = int64(0), int64(0), int64(0)
        if entry < keys:
            key = entry
            if sparse:
                key = int64(listed[row, entry])
            start, slot = layout.locate(key, base, table, ptok, pages, page_words)
            line = kv_head * ptok + slot
            at = start + line * row_words(D, kv)
            if kv == "fp8":
                k_exponent = exponent_at(arena, 4 * (start + k_exp_plane) + line)
                v_exponent = exponent_at(arena, 4 * (start + v_exp_plane) + line)
        key_at[thread] = at
        if kv == "fp8":
            exponents = exponents_at(D, ahead) + tile % 2 * (2 * TILE) + thread
            memory[exponents] = uint32(k_exponent + 128)
            memory[exponents + TILE] = uint32(v_exponent + 128)


@device
def stage_keys(memory, target, key_at, arena, plane, first, keys, *, D, kv):
    """Start the copies of a tile of K or V to word ``target``; entries that are no key become zeros."""
    thread = int64(cuda.threadIdx.x)
    piece = thread % pieces(D, kv)
    for i in range(thread_rows(D, kv)):
        place = thread // pieces(D, kv) + i * row_step(D, kv)
        word = target + staged_word(place, piece, D=D, kv=kv)
        nbytes = int32(16) if first + place < keys else int32(0)
        cp_async16(memory, word, arena, key_at[place] + plane + 4 * piece, nbytes)


@device
def staged_word(place, piece, *, D, kv):
    """Where a piece of a staged row goes: codes lie as they come."""
    if kv == "fp8":
        word = place * (D // 4) + 4 * piece
    else:
        word = target_word(place, piece, D=D)
    return word


# --- A tile that has landed -------------------------------------------------------------------------------------------


@device
def await_tile(memory, source, tile, *, D, kv, ahead, value):
    """For every thread of the block, until its copies have landed: those of K (value 0) or V (1).

    Copies of K, V and, ahead, the next K are waited for in the order in which they were started.
    """
    if ahead:
        await_ahead(value=value)
    else:
        await_both(value=value)
    cuda.syncthreads()
    if kv == "fp8":
        widen_tile(memory, source, exponents_at(D, ahead) + tile % 2 * (2 * TILE) + value * TILE, D=D)
        cuda.syncthreads()


@device
def await_both(*, value):
    """K, then V: V may be on its way when K is wanted."""
    if value == 0:
        cp_wait(1)
    else:
        cp_wait(0)


@device
def await_ahead(*, value):
    """K, V, the next K: both later ones may be on their way when K is wanted, one when V is."""
    if value == 0:
        cp_wait(2)
    else:
        cp_wait(1)


@device
def widen_tile(memory, source, exponents, *, D):
    """The codes from word ``source`` as the tile of bf16 that scores and values read."""
    thread = int64(cuda.threadIdx.x)
    piece = thread % (D // 16)
    for i in range(thread_rows(D, "fp8")):
        place = thread // (D // 16) + i * row_step(D, "fp8")
        e = int64(memory[exponents + place]) - 128
        low = wide_at(D) + target_word(place, 2 * piece, D=D)
        high = wide_at(D) + target_word(place, 2 * piece + 1, D=D)
        widen_piece(memory, low, high, source + place * (D // 4) + 4 * piece, e)


@device
def keys_tile_at(tile, *, D, kv, ahead):
    """Word where a tile's keys are staged."""
    word = int64(0)
    if ahead and tile % 2 == 1:
        word = int64(next_keys_at(D, kv))
    return word


# --- The kernel -------------------------------------------------------------------------------------------------------


@kernel
def fn_attn_chunks_kernel(
    po, pm, pl, q, arena, pages, streams, rows, listed, budget, scale, *, D, G, layout, kv, ahead
):  # fmt: skip
    """Spec flash-next "fn_attn_chunks": a program takes a row, a KV head with its query heads, and 512 entries of the list.

    Up to 8 tiles of 64 entries, each spec attention §2's: folded in order, from m = -inf, l = 0, o = 0. Entry j of a dense
    row is position j. A program past the end of its row's list does nothing.

    po: float32 [slots, R, H, D], pm, pl: the same without D, written: chunk c of a row at slot c. q: bf16 [R, H, D]. arena:
    uint32 [words]. pages: int32 [entries]. streams: int64 [S, columns], of the layer. rows: int32 [R], row -> stream. listed:
    int32 [R, at least 4 · budget + 3] and budget: int64, see fn_qsa_select. scale: float32, factor of a score. D: head_dim,
    64, 128 or 256. G: query heads a KV head, at most 16. layout: backends.layout.Layout. kv: "bf16" or "fp8", the cache's
    rows. ahead: the next tile's keys are on their way while a tile is folded; the same bits.

    Launch: grid (R, HK, slots), 128 threads, ``shared_bytes(D, kv, ahead)``.
    """
    memory = cuda.shared.array(0, uint32)  # see above
    key_at = cuda.shared.array(TILE, int64)  # [64 keys]: word of the row from the start of its plane
    maxes = cuda.shared.array(64, float32)  # [4 warps, 16 heads]
    sums = cuda.shared.array(64, float32)  # [4 warps, 16 heads]
    queries = cuda.local.array((D // 16, 4), uint32)  # [steps of 16 dims, a0..a3]
    s = cuda.local.array(8, float32)  # [2 blocks of 8 keys, 4]: scores, then p
    o = cuda.local.array((D // 32, 4), float32)  # [blocks of 8 dims, 4]: heads g, g, g+8, g+8
    state = cuda.local.array(4, float32)  # [m of heads g, g+8, l of both]

    # The program's place: a row, a KV head, a chunk of the row's list.
    row, kv_head, chunk = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y), int64(cuda.blockIdx.z)
    end = keys_before(streams, rows, row)
    sparse, keys = is_sparse(end, budget), list_length(end, budget)
    tiles = min(max((keys - CHUNK * chunk + TILE - 1) // TILE, 0), CHUNK_TILES)
    stream = int64(rows[row])
    base, table = streams[stream, BASE], streams[stream, TABLE]
    ptok = streams[stream, PTOK] if layout.page is None else int64(layout.page)
    k_plane, v_plane, page_words = streams[stream, K_PLANE], streams[stream, V_PLANE], streams[stream, PAGE_WORDS]
    k_exp_plane, v_exp_plane = streams[stream, K_EXP_PLANE], streams[stream, V_EXP_PLANE]

    # The lane's place: heads g and g + 8 of the group.
    lane, warp = int64(cuda.threadIdx.x) % 32, int64(cuda.threadIdx.x) // 32
    low, high = lane // 4, lane // 4 + 8
    head_low, head_high = kv_head * G + low, kv_head * G + high
    load_queries(queries, q, row, head_low, low < G, row, head_high, high < G, lane % 4, D=D)

    # Prologue of ahead: the first tile's keys.
    first = CHUNK * chunk
    if ahead and tiles > 0:
        find_keys(
            key_at, memory, listed, row, first, keys, sparse, kv_head, int64(0), arena, base, table, ptok, pages,
            page_words, k_exp_plane, v_exp_plane, D=D, layout=layout, kv=kv, ahead=ahead,
        )  # fmt: skip
        cuda.syncthreads()
        stage_keys(memory, int64(0), key_at, arena, k_plane, first, keys, D=D, kv=kv)
        cp_commit()

    start_chunk(state, o, D=D)
    for tile in range(tiles):
        visible = keys - first - 8 * warp - 2 * (lane % 4)
        k_tile, v_tile = keys_tile_at(tile, D=D, kv=kv, ahead=ahead), int64(staged_words(D, kv))

        # Copies, a group each: K and V of the tile, or V of the tile and K of the next. The barrier after keys were found
        # also ends the use of the tile that a copy overwrites.
        if ahead:
            stage_keys(memory, v_tile, key_at, arena, v_plane, first, keys, D=D, kv=kv)
            cp_commit()
            cuda.syncthreads()
            if tile + 1 < tiles:
                find_keys(
                    key_at, memory, listed, row, first + TILE, keys, sparse, kv_head, tile + 1, arena, base, table, ptok,
                    pages, page_words, k_exp_plane, v_exp_plane, D=D, layout=layout, kv=kv, ahead=ahead,
                )  # fmt: skip
            cuda.syncthreads()
            if tile + 1 < tiles:
                next_tile = keys_tile_at(tile + 1, D=D, kv=kv, ahead=ahead)
                stage_keys(memory, next_tile, key_at, arena, k_plane, first + TILE, keys, D=D, kv=kv)
            cp_commit()
        else:
            find_keys(
                key_at, memory, listed, row, first, keys, sparse, kv_head, tile, arena, base, table, ptok, pages,
                page_words, k_exp_plane, v_exp_plane, D=D, layout=layout, kv=kv, ahead=ahead,
            )  # fmt: skip
            cuda.syncthreads()
            stage_keys(memory, k_tile, key_at, arena, k_plane, first, keys, D=D, kv=kv)
            cp_commit()
            stage_keys(memory, v_tile, key_at, arena, v_plane, first, keys, D=D, kv=kv)
            cp_commit()

        # Scores.
        await_tile(memory, k_tile, tile, D=D, kv=kv, ahead=ahead, value=0)
        scored = int64(wide_at(D)) if kv == "fp8" else k_tile
        score_keys(s, maxes, memory, scored, queries, warp, lane, visible, scale, D=D)
        cuda.syncthreads()

        # Fold: s becomes p.
        alpha_low, alpha_high = weigh_tile(s, state, maxes, sums, memory, warp, lane, visible, D=D, kv=kv)

        # l, o and the values.
        await_tile(memory, v_tile, tile, D=D, kv=kv, ahead=ahead, value=1)
        add_values(o, state, sums, memory, warp, lane, alpha_low, alpha_high, D=D, kv=kv)
        if ahead:
            cuda.syncthreads()
        first = first + TILE

    # End.
    if tiles > 0 and low < G:
        store_partial(po, pm, pl, o, state, chunk, row, head_low, warp, lane, D=D, part=0)
    if tiles > 0 and high < G:
        store_partial(po, pm, pl, o, state, chunk, row, head_high, warp, lane, D=D, part=1)
