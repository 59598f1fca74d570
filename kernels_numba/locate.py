"""Where positions lie, asked of a layout's address function on the machine that has the page table. Spec attention §3."""

from __future__ import annotations

from typing import Any

from kernels_numba.machine import cuda, int64, kernel

THREADS = 32


def locate(
    out: Any, positions: Any, pages: Any, base: int, table: int, ptok: int, page_words: int, layout: Any,
    stream: Any = None,
) -> None:  # fmt: skip
    """out[i] = (start, slot) of positions[i]: the word of its page (or window) and its slot there.

    locate_kernel documents the arrays. base, table, ptok, page_words: of the stream table. stream: of the GPU.
    """
    if len(positions):
        bound = locate_kernel.at(layout=layout)
        bound[-(-len(positions) // THREADS), THREADS, stream](out, positions, pages, base, table, ptok, page_words)


@kernel
def locate_kernel(out, positions, pages, base, table, ptok, page_words, *, layout):
    """A thread takes a position. out: int64 [N, 2], written; positions: int64 [N]; pages: int32 [entries]; base, table, ptok,
    page_words: int64.

    Launch: grid ceil(N / 32), 32 threads.
    """
    i = int64(cuda.blockIdx.x) * THREADS + int64(cuda.threadIdx.x)
    if i < positions.shape[0]:
        start, slot = layout.locate(positions[i], base, table, ptok, pages, page_words)
        out[i, 0] = start
        out[i, 1] = slot
