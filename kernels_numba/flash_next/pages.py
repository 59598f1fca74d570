"""Where a position and its block lie, for the kernels of the sparse indexer. Spec attention §3, flash-next.

A page holds whole blocks of four positions, so one lookup finds a block's four raw keys and its pooled one.
"""

from __future__ import annotations

from kernels_numba.machine import device, int64
from kernels_numba.streams import BASE, PAGE_WORDS, PTOK, TABLE

BLOCK = 4
"""Positions of a block."""


@device
def find(streams, stream, position, pages, *, layout):
    """(word of the arena at which the page of a position starts, its slot there, positions a page).

    streams: int64 [S, 13], of the layer. pages: int32 [entries].
    """
    ptok = streams[stream, PTOK] if layout.page is None else int64(layout.page)
    base, table, page_words = streams[stream, BASE], streams[stream, TABLE], streams[stream, PAGE_WORDS]
    start, slot = layout.locate(position, base, table, ptok, pages, page_words)
    return start, slot, ptok
