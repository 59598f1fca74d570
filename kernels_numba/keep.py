"""Keep: rows of a decode pass move from the window record into the cache, to the first positions after the committed
ones.

The window record holds the keys and values of the pass's own rows, whatever the cache: contiguous or pages. A row is
copied as it stands, 16 bytes a thread, so a kept row's bits are what the other rows of the pass have seen. Spec
attention §2.
"""

from __future__ import annotations

from typing import Any

from kernels_numba.machine import cuda, int64, kernel
from kernels_numba.streams import BASE, COMMITTED, FIRST, K_PLANE, PAGE_WORDS, PTOK, TABLE, V_PLANE

THREADS = 128


def keep(
    arena: Any, pages: Any, streams: Any, paths: Any, last: Any, kept: Any, k_record: Any, v_record: Any, most: int,
    layout: Any, stream: Any = None,
) -> None:  # fmt: skip
    """Keep ``kept`` rows of each stream's pass in one layer's cache. keep_kernel documents the arrays; COMMITTED is the
    caller's to raise.

    most: the largest of ``kept`` or more. stream: of the GPU.
    """
    bound = keep_kernel.at(HK=k_record.shape[1], D=k_record.shape[2], layout=layout)
    bound[(streams.shape[0], most), THREADS, stream](arena, pages, streams, paths, last, kept, k_record, v_record)


@kernel
def keep_kernel(arena, pages, streams, paths, last, kept, k_record, v_record, *, HK, D, layout):
    """A block copies the row that takes position COMMITTED + i: the stream's row paths[last, i] of the pass, i < kept.

    arena: uint32 [words], written. pages: int32 [entries]. streams: int64 [S, 11], of the layer. paths: int32 [W, 128].
    last: int32 [S], the row of the launch whose path is kept. kept: int32 [S], rows of the path, from its root; 0:
    nothing. k_record, v_record: bf16 [W, HK, D], the window record. Launch: grid (S, most kept), 128 threads.
    """
    stream, i = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
    if i < kept[stream]:
        row = streams[stream, FIRST] + paths[last[stream], i]
        ptok = streams[stream, PTOK] if layout.page is None else int64(layout.page)
        k_plane, v_plane, page_words = streams[stream, K_PLANE], streams[stream, V_PLANE], streams[stream, PAGE_WORDS]
        start, slot = layout.locate(
            streams[stream, COMMITTED] + i, streams[stream, BASE], streams[stream, TABLE], ptok, pages, page_words
        )
        for piece0 in range(0, HK * D // 8, THREADS):
            piece = piece0 + int64(cuda.threadIdx.x)
            if piece < HK * D // 8:
                kv_head, word = piece // (D // 8), piece % (D // 8) * 4
                target = start + (kv_head * ptok + slot) * (D // 2) + word
                for n in range(4):
                    arena[target + k_plane + n] = k_record[row, kv_head, word + n]
                    arena[target + v_plane + n] = v_record[row, kv_head, word + n]
