"""Keep: rows of a decode pass move from the window record into the cache, to the first positions after the committed
ones.

The window record holds the keys and values of the pass's own rows, whatever the cache: contiguous or pages, bf16 or fp8. A
bf16 cache takes a row as it stands, 16 bytes a thread; an fp8 cache narrows it, a warp a row, which loses nothing: the record
holds rows as an fp8 cache gives them back. So a kept row is what the other rows of the pass have seen. Spec attention §2, §4.
"""

from __future__ import annotations

from typing import Any

from kernels_numba.cache_rows import store_cached
from kernels_numba.fp8 import as_bytes
from kernels_numba.machine import cuda, device, int64, kernel, uint32
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


def keep(
    arena: Any, pages: Any, streams: Any, paths: Any, last: Any, kept: Any, k_record: Any, v_record: Any, most: int,
    layout: Any, kv: str = "bf16", stream: Any = None,
) -> None:  # fmt: skip
    """Keep ``kept`` rows of each stream's pass in one layer's cache. keep_kernel documents the arrays; COMMITTED is the
    caller's to raise.

    most: the largest of ``kept`` or more. kv: "bf16" or "fp8", what the cache's rows are made of. stream: of the GPU.
    """
    bound = keep_kernel.at(HK=k_record.shape[1], D=k_record.shape[2], layout=layout, kv=kv)
    bound[(streams.shape[0], most), THREADS, stream](
        arena, as_bytes(arena), pages, streams, paths, last, kept, k_record, v_record
    )


@kernel
def keep_kernel(arena, exponents, pages, streams, paths, last, kept, k_record, v_record, *, HK, D, layout, kv):
    """A block stores the row that takes position COMMITTED + i: the stream's row paths[last, i] of the pass, i < kept.

    arena: uint32 [words], written; exponents: the same memory as uint8. pages: int32 [entries]. streams: int64 [S, 13],
    of the layer. paths: int32 [W, 128]. last: int32 [S], the row of the launch whose path is kept. kept: int32 [S], rows
    of the path, from its root; 0: nothing. k_record, v_record: bf16 [W, HK, D], the window record. Launch: grid (S, most
    kept), 128 threads.
    """
    stream, i = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
    if i < kept[stream]:
        row = streams[stream, FIRST] + paths[last[stream], i]
        ptok = streams[stream, PTOK] if layout.page is None else int64(layout.page)
        k_plane, v_plane = streams[stream, K_PLANE], streams[stream, V_PLANE]
        start, slot = layout.locate(
            streams[stream, COMMITTED] + i, streams[stream, BASE], streams[stream, TABLE], ptok, pages,
            streams[stream, PAGE_WORDS],
        )  # fmt: skip
        if kv == "fp8":
            k_exp_plane, v_exp_plane = streams[stream, K_EXP_PLANE], streams[stream, V_EXP_PLANE]
            narrow(arena, exponents, start, k_plane, k_exp_plane, k_record, row, slot, ptok, HK=HK, D=D)
            narrow(arena, exponents, start, v_plane, v_exp_plane, v_record, row, slot, ptok, HK=HK, D=D)
        else:
            copy(arena, start, k_plane, v_plane, k_record, v_record, row, slot, ptok, HK=HK, D=D)


@device
def copy(arena, start, k_plane, v_plane, k_record, v_record, row, slot, ptok, *, HK, D):
    """A row's keys and values of every KV head, piece by piece."""
    for piece0 in range(0, HK * D // 8, THREADS):
        piece = piece0 + int64(cuda.threadIdx.x)
        if piece < HK * D // 8:
            kv_head, word = piece // (D // 8), piece % (D // 8) * 4
            target = start + (kv_head * ptok + slot) * (D // 2) + word
            for n in range(4):
                arena[target + k_plane + n] = k_record[row, kv_head, word + n]
                arena[target + v_plane + n] = v_record[row, kv_head, word + n]


@device
def narrow(arena, exponents, start, plane, exponent_plane, record, row, slot, ptok, *, HK, D):
    """A row's keys (or values) of every KV head, a warp a head."""
    words = cuda.local.array(D // 64, uint32)  # [pairs of elements of this lane]
    lane_word = int64(cuda.threadIdx.x) % 32 * (D // 64)
    for head0 in range(0, HK, WARPS):
        kv_head = head0 + int64(cuda.threadIdx.x) // 32
        if kv_head < HK:
            for n in range(D // 64):
                words[n] = record[row, kv_head, lane_word + n]
            store_cached(arena, exponents, words, start, plane, exponent_plane, kv_head * ptok + slot, D=D, kv="fp8")
