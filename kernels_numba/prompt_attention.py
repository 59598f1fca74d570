"""Prompt attention: every row of a prompt pass attends to all keys up to its own position. Spec attention §1.

A block keeps 16 · 8/HPC query rows of HPC heads of one KV head and walks the keys in tiles of 64. A row's sums depend
on its own keys alone: not on the pass, its neighbours or the form of cache, which decides addresses and nothing else. An
fp8 cache's rows are widened to bf16 on their way and then summed as those of a bf16 cache. Spec attention §4.
"""

from __future__ import annotations

from kernels_numba.cache_rows import widen_piece
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

THREADS = 256
WARPS = 8
WARP_ROWS = 16
"""Query rows a warp."""
TILE = 64
"""Keys a fold."""
ITEM = 32
"""Keys a staging copy: a tile is four items, K lower half, K upper half, V lower half, V upper half."""
STAGING_BYTES = 96 * 1024
INFINITY = float("inf")


# --- The launch -----------------------------------------------------------------------------------------------------


def heads_per_block(group: int) -> int:
    """HPC: the largest of 8, 4, 2, 1 that divides the group of query heads that share a KV head."""
    return next(n for n in (8, 4, 2, 1) if group % n == 0)


def queries_staged(D: int) -> bool:
    """Whether a block's queries lie in shared memory (else in registers)."""
    return D > 128


def query_words(D: int) -> int:
    """Words of shared memory for the queries."""
    return WARPS * WARP_ROWS * D // 2 if queries_staged(D) else 0


def slot_words(D: int) -> int:
    """Words of shared memory an item takes as bf16."""
    return ITEM * D // 2


def staged_words(D: int, kv: str) -> int:
    """Words of an item as it comes from the cache."""
    return ITEM * row_words(D, kv)


def slots(D: int) -> int:
    """NS: items of shared memory that are on their way or in use at a time."""
    return min(8, (STAGING_BYTES // 4 - query_words(D)) // slot_words(D))


def wide_at(D: int) -> int:
    """Word of shared memory where an fp8 item lies widened, after the slots it came through."""
    return query_words(D) + slots(D) * staged_words(D, "fp8")


def exponents_at(D: int) -> int:
    """Word of shared memory where the exponents of the slots' rows begin, [NS, 32], each + 128."""
    return wide_at(D) + slot_words(D)


def shared_bytes(D: int, kv: str = "bf16") -> int:
    """Bytes of shared memory a block: [queries][NS slots]; fp8: [queries][NS slots][widened item][exponents]."""
    if kv == "fp8":
        return 4 * (exponents_at(D) + slots(D) * ITEM)
    return 4 * (query_words(D) + slots(D) * slot_words(D))


def launch_shape(rows: int, heads: int, kv_heads: int, D: int, kv: str = "bf16") -> tuple[tuple[int, int], int, int]:
    """(grid, threads a block, bytes of shared memory) for ``rows`` rows of one stream; no rows: an empty grid.

    Raises ValueError when kv_heads does not divide heads, or D is none of 64, 128, 256.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads {heads}: must be a multiple of kv_heads {kv_heads}")
    if D not in (64, 128, 256):
        raise ValueError(f"head_dim {D}: prompt_attention has 64, 128 and 256")
    group = heads // kv_heads
    per_block = heads_per_block(group)
    block_at = WARP_ROWS * WARPS // per_block
    return (-(-rows // block_at), kv_heads * (group // per_block)), THREADS, shared_bytes(D, kv)


# --- Staging --------------------------------------------------------------------------------------------------------


@device
def stage_queries(memory, q, first, row0, rows, heads, head0, *, D, HPC):
    """Start the copies of a block's queries: staged row 16w + r is row r of warp w; rows past the stream are zeros."""
    thread = int64(cuda.threadIdx.x)
    piece = thread % (D // 8)
    for i in range(WARPS * WARP_ROWS * (D // 8) // THREADS):
        staged = thread // (D // 8) + i * (THREADS // (D // 8))
        row = row0 + WARP_ROWS * (staged // WARP_ROWS // HPC) + staged % WARP_ROWS
        head = head0 + staged // WARP_ROWS % HPC
        source = ((first + row) * heads + head) * (D // 2) + 4 * piece
        target = staged * (D // 2) + 4 * (piece ^ (staged & 7))
        cp_async16(memory, target, q, source, int32(16) if row < rows else int32(0))


@device
def stage_item(
    memory, item, arena, pages, base, table, ptok, page_words, k_at, v_at, k_exp_at, v_exp_at, keys,
    *, D, layout, kv
):  # fmt: skip
    """Start the copies of one item of 32 keys: 16-byte piece c of row r goes to piece c XOR (r & 7), a piece of codes to c.

    k_at, v_at: word offset in a page of the KV head's first K and V row; k_exp_at, v_exp_at: byte offset of their
    exponents. One page lookup an item; a row past the page's edge, which only a straddling layout has, is looked up for
    itself. Keys at or past ``keys`` are zeros, not read.
    """
    thread = int64(cuda.threadIdx.x)
    piece = thread % (row_words(D, kv) // 4)
    row0 = thread // (row_words(D, kv) // 4)
    part = item % 4
    key0 = item // 4 * TILE + part % 2 * ITEM
    offset = (k_at if part < 2 else v_at) + 4 * piece
    start, slot = layout.locate(min(key0, keys - 1), base, table, ptok, pages, page_words)
    source = start + offset + (slot + row0) * row_words(D, kv)
    swizzled = piece if kv == "fp8" else piece ^ (row0 & 7)
    target = query_words(D) + item % slots(D) * staged_words(D, kv) + row0 * row_words(D, kv) + 4 * swizzled
    if layout.straddles and thread == 0 and slot + min(ITEM, keys - key0) > ptok:
        count("straddles")
    for i in range(item_steps(D, kv)):
        row = row0 + i * step_rows(D, kv)
        word = source + i * step_rows(D, kv) * row_words(D, kv)
        if layout.straddles and slot + row >= ptok and key0 + row < keys:
            other, other_slot = layout.locate(key0 + row, base, table, ptok, pages, page_words)
            word = other + offset + other_slot * row_words(D, kv)
        present = key0 + row < keys
        if step_rows(D, kv) <= ITEM or row < ITEM:
            cp_async16(memory, target + i * THREADS * 4, arena, word, int32(16) if present else int32(0))
    if kv == "fp8" and thread < ITEM:
        exponents_of_page = k_exp_at if part < 2 else v_exp_at
        byte = 4 * start + exponents_of_page + slot + thread
        if layout.straddles and slot + thread >= ptok and key0 + thread < keys:
            other, other_slot = layout.locate(key0 + thread, base, table, ptok, pages, page_words)
            byte = 4 * other + exponents_of_page + other_slot
        e = int64(0)
        if key0 + thread < keys:
            e = exponent_at(arena, byte)
        memory[exponents_at(D) + item % slots(D) * ITEM + thread] = uint32(e + 128)


def step_rows(D: int, kv: str) -> int:
    """Rows that the threads of a block copy a piece of at a time."""
    return THREADS // (row_words(D, kv) // 4)


def item_steps(D: int, kv: str) -> int:
    """Times that the threads of a block copy until an item is through."""
    return max(1, ITEM // step_rows(D, kv))


@device
def next_item(
    memory, item, items, arena, pages, base, table, ptok, page_words, k_at, v_at, k_exp_at, v_exp_at, keys,
    *, D, layout, kv
):  # fmt: skip
    """After an item's last use: its slot takes the item NS ahead. Always one copy group."""
    cuda.syncthreads()
    ahead = item + slots(D)
    if ahead < items:
        stage_item(
            memory, ahead, arena, pages, base, table, ptok, page_words, k_at, v_at, k_exp_at, v_exp_at, keys,
            D=D, layout=layout, kv=kv,
        )  # fmt: skip
    cp_commit()


@device
def await_item(memory, item, *, D, kv):
    """Until the oldest item on its way has landed, for every thread of the block; codes are widened then."""
    cp_wait(slots(D) - 1)
    cuda.syncthreads()
    if kv == "fp8":
        widen_item(memory, item, D=D)
        cuda.syncthreads()


@device
def item_at(item, *, D, kv):
    """Word of shared memory where an item lies as bf16."""
    return int64(wide_at(D)) if kv == "fp8" else query_words(D) + item % slots(D) * slot_words(D)


@device
def widen_item(memory, item, *, D):
    """code · 2^e as bf16, a piece of 16 codes a thread at a time: two pieces of the row, c XOR (r & 7) as bf16 items lie."""
    thread = int64(cuda.threadIdx.x)
    piece = thread % (D // 16)
    raw = query_words(D) + item % slots(D) * staged_words(D, "fp8")
    for i in range(item_steps(D, "fp8")):
        row = thread // (D // 16) + i * step_rows(D, "fp8")
        if step_rows(D, "fp8") <= ITEM or row < ITEM:
            e = int64(memory[exponents_at(D) + item % slots(D) * ITEM + row]) - 128
            low = wide_at(D) + row * (D // 2) + 4 * (2 * piece ^ (row & 7))
            high = wide_at(D) + row * (D // 2) + 4 * (2 * piece + 1 ^ (row & 7))
            widen_piece(memory, low, high, raw + row * (D // 4) + 4 * piece, e)


# --- Scores ---------------------------------------------------------------------------------------------------------


@device
def load_queries(queries, q, first, row, rows, head, quad, *, D):
    """A warp's queries as A operands in registers, a step of 16 dims a row; rows past the stream's are zeros."""
    for step in range(D // 16):
        for half in range(2):
            word = 8 * step + 4 * half + quad
            queries[step, 2 * half] = q[first + row, head, word] if row < rows else uint32(0)
            queries[step, 2 * half + 1] = q[first + row + 8, head, word] if row + 8 < rows else uint32(0)


@device
def score_item(s, memory, queries, item, warp, lane, *, D, half, kv):
    """Two rows of s, from 2 · half: Q · K^T over an item of 32 keys.

    One chain a score, from zero, dims ascending in steps of 16.
    """
    swizzle = lane & 7
    side = lane // 8 % 2
    far = lane // 16
    q_row = (warp * WARP_ROWS + side * 8 + swizzle) * (D // 2)
    k_row = item_at(item, D=D, kv=kv) + (far * 8 + swizzle) * (D // 2)
    for pair in range(2 * half, 2 * half + 2):
        for i in range(8):
            s[pair, i] = float32(0.0)
    for step in range(D // 16):
        if queries_staged(D):
            a0, a1, a2, a3 = ldmatrix4(memory, q_row + 4 * ((2 * step + far) ^ swizzle))
        else:
            a0, a1, a2, a3 = queries[step, 0], queries[step, 1], queries[step, 2], queries[step, 3]
        k_word = k_row + 4 * ((2 * step + side) ^ swizzle)
        for n in range(2 * half, 2 * half + 2):
            # 16 keys, two blocks of 8, each with the low and the high 8 of the step's dims.
            b0, b1, b2, b3 = ldmatrix4(memory, k_word + (n - 2 * half) * (8 * D))
            s[n, 0], s[n, 1], s[n, 2], s[n, 3] = mma(a0, a1, a2, a3, b0, b1, s[n, 0], s[n, 1], s[n, 2], s[n, 3])
            s[n, 4], s[n, 5], s[n, 6], s[n, 7] = mma(a0, a1, a2, a3, b2, b3, s[n, 4], s[n, 5], s[n, 6], s[n, 7])


# --- The fold -------------------------------------------------------------------------------------------------------


@lanewise
def scale_and_mask(s, key, position, scale, *, part):
    """s = score · scale where the key is visible, else -inf; the largest of the lane's 16.

    key: of the lane's first column. part: 0 for row g, 1 for row g + 8.
    """
    largest = -float32(INFINITY)
    for n in range(4):
        for block in range(2):
            for c in range(2):
                at = 4 * block + 2 * part + c
                s[n, at] = s[n, at] * scale if key + 16 * n + 8 * block + c <= position else -float32(INFINITY)
                largest = fmax(largest, s[n, at])
    return largest


@lanewise
def rescale(m, tile_max):
    """(n, alpha) of the fold, n = top: the new running maximum, the factor of what was summed under the old one."""
    active = tile_max != -float32(INFINITY)
    top = fmax(m, tile_max) if active else m
    decayed = float32(0.0) if m == -float32(INFINITY) else exp_to_one(m - top)
    return top, decayed if active else float32(1.0)


@lanewise
def weigh(s, sums, top, tile_max, key, position, *, part):
    """s = p = E(s - top) where the key is visible, else 0; sums[block] = the lane's two columns of the block added."""
    active = tile_max != -float32(INFINITY)
    for n in range(4):
        for block in range(2):
            at = 4 * block + 2 * part
            column = key + 16 * n + 8 * block
            p0 = exp_to_one(s[n, at] - top)
            p1 = exp_to_one(s[n, at + 1] - top)
            s[n, at] = p0 if active and column <= position else float32(0.0)
            s[n, at + 1] = p1 if active and column + 1 <= position else float32(0.0)
            sums[2 * n + block] = s[n, at] + s[n, at + 1]


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
def row_sum(sums):
    """rowsum of spec attention §1: each 8-key block over the quad, then the blocks as a tree."""
    w04 = quad_sum(sums[0]) + quad_sum(sums[4])
    w26 = quad_sum(sums[2]) + quad_sum(sums[6])
    w15 = quad_sum(sums[1]) + quad_sum(sums[5])
    w37 = quad_sum(sums[3]) + quad_sum(sums[7])
    return (w04 + w26) + (w15 + w37)


@device
def fold_row(s, sums, m, total, key, position, scale, *, part):
    """(m, l, alpha) after a tile's scores; s becomes p. part 0: row g, 1: row g + 8."""
    tile_max = quad_max(scale_and_mask(s, key, position, scale, part=part))
    top, alpha = rescale(m, tile_max)
    weigh(s, sums, top, tile_max, key, position, part=part)
    return top, fma(total, alpha, row_sum(sums)), alpha


@device
def scale_output(o, alpha_low, alpha_high, *, D):
    """o = o · alpha, row g by alpha_low, row g + 8 by alpha_high."""
    for n in range(D // 16):
        for block in range(2):
            o[n, 4 * block] = o[n, 4 * block] * alpha_low
            o[n, 4 * block + 1] = o[n, 4 * block + 1] * alpha_low
            o[n, 4 * block + 2] = o[n, 4 * block + 2] * alpha_high
            o[n, 4 * block + 3] = o[n, 4 * block + 3] * alpha_high


@lanewise
def pack_weights(s, p):
    """p = bf16(s) as A operands, a step of 16 keys a row."""
    for step in range(4):
        for i in range(4):
            p[step, i] = pack_bf16(s[step, 2 * i], s[step, 2 * i + 1])


@device
def add_values(o, memory, p, item, lane, *, D, half, kv):
    """o += P · V over one item of 32 keys: one chain an output, keys ascending in steps of 16."""
    swizzle = lane & 7
    side = lane // 8 % 2
    far = lane // 16
    v_row = item_at(item, D=D, kv=kv) + (side * 8 + swizzle) * (D // 2)
    for n in range(D // 16):
        v_word = v_row + 4 * ((2 * n + far) ^ swizzle)
        for step in range(2 * half, 2 * half + 2):
            # 16 dims, two blocks of 8, each with the low and the high 8 of the step's keys.
            b0, b1, b2, b3 = ldmatrix4_trans(memory, v_word + (step - 2 * half) * (8 * D))
            o[n, 0], o[n, 1], o[n, 2], o[n, 3] = mma(
                p[step, 0], p[step, 1], p[step, 2], p[step, 3], b0, b1, o[n, 0], o[n, 1], o[n, 2], o[n, 3]
            )
            o[n, 4], o[n, 5], o[n, 6], o[n, 7] = mma(
                p[step, 0], p[step, 1], p[step, 2], p[step, 3], b2, b3, o[n, 4], o[n, 5], o[n, 6], o[n, 7]
            )


@device
def store_row(out, o, total, row, head, quad, *, D, part):
    """out[row, head] = bf16(o / l), l = total: the lane's two columns of each block of 8 dims are one word."""
    for n in range(D // 16):
        out[row, head, 8 * n + quad] = pack_bf16(o[n, 2 * part] / total, o[n, 2 * part + 1] / total)
        out[row, head, 8 * n + 4 + quad] = pack_bf16(o[n, 2 * part + 4] / total, o[n, 2 * part + 5] / total)


# --- The kernel -----------------------------------------------------------------------------------------------------


@kernel
def prompt_attention(out, q, arena, pages, streams, stream, heads, kv_heads, scale, *, D, HPC, layout, kv):
    """Attention of one stream's prompt rows to its cache, which already holds the rows' own keys and values.

    Launch: grid, threads and shared memory from ``launch_shape``; HPC = ``heads_per_block(heads // kv_heads)``.

    out, q: bf16 [R, H, D], the rows of all streams of the pass; FIRST .. FIRST + ROWS - 1 are written and read.
    arena: uint32 [words], the cache. pages: int32 [entries], the page tables. streams: int64 [S, 13], of the layer, see
    streams.py. stream: this launch's row of ``streams``.
    heads, kv_heads: H and HK. scale: float32, the factor of a score.
    D: head_dim, 64, 128 or 256. HPC: 1, 2, 4 or 8. layout: a backends.layout.Layout. kv: "bf16" or "fp8".
    """
    memory = cuda.shared.array(0, uint32)  # [query_words(D)] queries, then [slots(D), slot_words(D)] items
    o = cuda.local.array((D // 16, 8), float32)  # 16 dims a row: row g q0 q1, row g+8 q0 q1 of the low 8; of the high 8
    s = cuda.local.array((4, 8), float32)  # 16 keys a row, as o: scores, then p
    sums = cuda.local.array(8, float32)  # [8 blocks of 8 keys]
    p = cuda.local.array((4, 4), uint32)  # [16 keys, a0 .. a3]: p as bf16
    queries = cuda.local.array((1 if queries_staged(D) else D // 16, 4), uint32)  # [16 dims, a0 .. a3]

    # The block's place: rows row0 .. of the stream, HPC heads from head0, all of one KV head.
    first, rows, committed = streams[stream, FIRST], streams[stream, ROWS], streams[stream, COMMITTED]
    base, table = streams[stream, BASE], streams[stream, TABLE]
    ptok = streams[stream, PTOK] if layout.page is None else int64(layout.page)
    page_words = streams[stream, PAGE_WORDS]
    group = heads // kv_heads
    kv_head = int64(cuda.blockIdx.y) // (group // HPC)
    head0 = kv_head * group + int64(cuda.blockIdx.y) % (group // HPC) * HPC
    row0 = int64(cuda.blockIdx.x) * (WARP_ROWS * WARPS // HPC)
    k_at = streams[stream, K_PLANE] + kv_head * ptok * row_words(D, kv)
    v_at = streams[stream, V_PLANE] + kv_head * ptok * row_words(D, kv)
    k_exp_at = 4 * streams[stream, K_EXP_PLANE] + kv_head * ptok
    v_exp_at = 4 * streams[stream, V_EXP_PLANE] + kv_head * ptok
    keys = committed + rows
    tiles = (committed + min(row0 + WARP_ROWS * WARPS // HPC, rows) - 1) // TILE + 1
    items = 4 * tiles

    # The warp's and the lane's place: rows g and g + 8 of the warp's 16, columns 2q and 2q + 1 of each block of 8.
    lane = int64(cuda.threadIdx.x) % 32
    warp = int64(cuda.threadIdx.x) // 32
    head = head0 + warp % HPC
    warp_row = row0 + WARP_ROWS * (warp // HPC)
    row = warp_row + lane // 4
    quad = lane % 4
    last_seen = committed + min(warp_row + WARP_ROWS, rows) - 1

    # Prologue: NS items on their way, a copy group each, the queries with the first.
    if queries_staged(D):
        stage_queries(memory, q, first, row0, rows, heads, head0, D=D, HPC=HPC)
    else:
        load_queries(queries, q, first, row, rows, head, quad, D=D)
    for item in range(slots(D)):
        if item < items:
            stage_item(
                memory, item, arena, pages, base, table, ptok, page_words, k_at, v_at, k_exp_at, v_exp_at, keys,
                D=D, layout=layout, kv=kv,
            )  # fmt: skip
        cp_commit()

    # Start: m = -inf, l = 0, o = 0.
    m_low, m_high = -float32(INFINITY), -float32(INFINITY)
    l_low, l_high = float32(0.0), float32(0.0)
    for n in range(D // 16):
        for i in range(8):
            o[n, i] = float32(0.0)

    for tile in range(tiles):
        # A warp none of whose rows exists or sees the tile keeps the block's barriers and copies, no more.
        busy = warp_row < rows and tile * TILE <= last_seen
        item = 4 * tile
        key = tile * TILE + 2 * quad

        # Scores, 32 keys an item.
        await_item(memory, item, D=D, kv=kv)
        if busy:
            score_item(s, memory, queries, item, warp, lane, D=D, half=0, kv=kv)
        next_item(
            memory, item, items, arena, pages, base, table, ptok, page_words, k_at, v_at, k_exp_at, v_exp_at, keys,
            D=D, layout=layout, kv=kv,
        )  # fmt: skip
        await_item(memory, item + 1, D=D, kv=kv)
        if busy:
            score_item(s, memory, queries, item + 1, warp, lane, D=D, half=1, kv=kv)
        next_item(
            memory, item + 1, items, arena, pages, base, table, ptok, page_words, k_at, v_at, k_exp_at, v_exp_at, keys,
            D=D, layout=layout, kv=kv,
        )  # fmt: skip

        # Fold: s becomes p, l takes the unrounded p, o is scaled, P = bf16(p).
        if busy:
            m_low, l_low, alpha_low = fold_row(s, sums, m_low, l_low, key, committed + row, scale, part=0)
            m_high, l_high, alpha_high = fold_row(s, sums, m_high, l_high, key, committed + row + 8, scale, part=1)
            scale_output(o, alpha_low, alpha_high, D=D)
            pack_weights(s, p)

        # Values, accumulated onto the scaled o.
        await_item(memory, item + 2, D=D, kv=kv)
        if busy:
            add_values(o, memory, p, item + 2, lane, D=D, half=0, kv=kv)
        next_item(
            memory, item + 2, items, arena, pages, base, table, ptok, page_words, k_at, v_at, k_exp_at, v_exp_at, keys,
            D=D, layout=layout, kv=kv,
        )  # fmt: skip
        await_item(memory, item + 3, D=D, kv=kv)
        if busy:
            add_values(o, memory, p, item + 3, lane, D=D, half=1, kv=kv)
        next_item(
            memory, item + 3, items, arena, pages, base, table, ptok, page_words, k_at, v_at, k_exp_at, v_exp_at, keys,
            D=D, layout=layout, kv=kv,
        )  # fmt: skip

    # End: bf16(o / l), rows of the stream only.
    if row < rows:
        store_row(out, o, l_low, first + row, head, quad, D=D, part=0)
    if row + 8 < rows:
        store_row(out, o, l_high, first + row + 8, head, quad, D=D, part=1)
