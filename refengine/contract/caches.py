"""Caches laid out by hand: the same key and value rows as a window, as pages or as pages of 256, with poison everywhere else.

Every word of the arena that holds no row is poison: unused slots, other planes, junk pages, the null page. Page ids are
shuffled and never ascend; entries of a table past its last page name no page.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backends.layout import Layout
from kernels_numba import streams as columns
from refengine.contract.workbench import BF16, NAN, Poison

LEADING_WORDS = 36
"""Poison words before a plane, before the pool: an address without its plane or its base meets poison."""
SPARE_PAGES = 3
PADDING = 4
"""Table entries after a stream's last page."""
NO_PAGE = 10**6
"""What they hold: a page that no arena has."""
SLACK = 37
"""Positions of a window past its stream's last."""


@dataclass(frozen=True)
class StreamRows:
    """A stream to lay out. k, v: bf16 [N, HK, D], its positions 0 .. N - 1. first, rows, committed: as in the stream table."""

    k: NDArray
    v: NDArray
    first: int
    rows: int
    committed: int


@dataclass(frozen=True)
class Cache:
    """A laid out cache and what a kernel takes to address it. held: bool [words], the words that hold rows."""

    layout: Layout
    arena: NDArray[np.uint32]
    pages: NDArray[np.int32]
    streams: NDArray[np.int64]
    page_words: int
    k_plane: int
    v_plane: int
    kv_heads: int
    row_words: int
    held: NDArray[np.bool_]

    def word(self, stream: int, plane: int, position: int, kv_head: int, word: int) -> int:
        """The arena word of a row's word; plane: k_plane or v_plane."""
        base, table, ptok = (int(n) for n in self.streams[stream, [columns.BASE, columns.TABLE, columns.PTOK]])
        start, slot = base, position
        if table >= 0:
            start, slot = base + int(self.pages[table + position // ptok]) * self.page_words, position % ptok
        return start + plane + (kv_head * ptok + slot) * self.row_words + word

    def rows(self, stream: int, plane: int, first: int, last: int) -> NDArray[np.int64]:
        """[last - first, kv_heads, row_words]: the arena words of positions first .. last - 1."""
        starts = [[self.word(stream, plane, p, h, 0) for h in range(self.kv_heads)] for p in range(first, last)]
        at = np.array(starts, np.int64).reshape(last - first, self.kv_heads)
        return at[..., None] + np.arange(self.row_words)

    def swap_first_pages(self) -> None:
        """A page table whose first entry names a later page."""
        first = int(self.streams[0, columns.TABLE])
        self.pages[[first, first + 1]] = self.pages[[first + 1, first]]


def words_of(rows: NDArray) -> NDArray[np.uint32]:
    """bf16 [..., D] as uint32 [..., D / 2]."""
    assert rows.dtype == BF16
    return np.ascontiguousarray(rows).view(np.uint32)


def unordered(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids, reversed where chance left them ascending: a table in order would hide a missing lookup."""
    return ids[::-1] if len(ids) > 1 and (np.diff(ids) > 0).all() else ids


def poison_unheld(arena: NDArray[np.uint32], held: NDArray[np.bool_], poison: Poison) -> None:
    """Fill the words that hold no row. Raises AssertionError when the bytes did not change."""
    before = arena.copy()
    arena[~held] = poison.word
    assert (arena[~held] != before[~held]).all(), "the poison changed nothing"


def build_cache(
    layout: Layout,
    ptok: int,
    streams: list[StreamRows],
    poison: Poison = NAN,
    padding: int | None = NO_PAGE,
    first_page: int = 0,
) -> Cache:
    """Lay the streams out.

    ptok: positions a page (a window ignores it). padding: table entries past the end (None: the null page). first_page: the
    lowest page id, below which no page is used.
    """
    rng = np.random.default_rng(0)
    _, kv_heads, dims = streams[0].k.shape
    windows = layout.name == "window"
    ptok = max(len(s.k) for s in streams) + SLACK if windows else layout.page or ptok
    plane_words = kv_heads * ptok * dims // 2
    k_plane, v_plane = LEADING_WORDS, 2 * LEADING_WORDS + plane_words
    page_words = v_plane + plane_words + LEADING_WORDS
    needed = [max(1, -(-len(s.k) // ptok)) for s in streams]
    last = first_page + sum(needed) + SPARE_PAGES
    ids = first_page + rng.permutation(last - first_page)
    arena = np.zeros(2 * LEADING_WORDS + (last + 1) * page_words, np.uint32)
    held = np.zeros(len(arena), np.bool_)
    null = last if padding is None else padding
    tables, rows = [null] * PADDING, []
    for stream, count in zip(streams, needed, strict=True):
        own, ids = unordered(ids[:count]), ids[count:]
        base, table = (LEADING_WORDS + int(own[0]) * page_words, -1) if windows else (LEADING_WORDS, len(tables))
        tables += [*map(int, own), *[null] * PADDING]
        place = (base, table, ptok, page_words, k_plane, v_plane, 0, 0)
        rows.append((stream.first, stream.rows, stream.committed, *place))
        for plane, data in ((k_plane, stream.k), (v_plane, stream.v)):
            starts = row_starts(own, len(data), ptok, page_words, kv_heads, dims // 2)
            words = LEADING_WORDS + plane + starts[..., None] + np.arange(dims // 2)
            arena[words], held[words] = words_of(data), True
    poison_unheld(arena, held, poison)
    table_of_streams = np.array(rows, np.int64)
    return Cache(
        layout,
        arena,
        np.array(tables, np.int32),
        table_of_streams,
        page_words,
        k_plane,
        v_plane,
        kv_heads,
        dims // 2,
        held,
    )


def row_starts(
    own: NDArray[np.int64], count: int, ptok: int, page_words: int, kv_heads: int, row_words: int
) -> NDArray[np.int64]:
    """[count, kv_heads]: the word of each row's start, from page 0 of its plane."""
    position = np.arange(count)[:, None]
    in_page = (np.arange(kv_heads)[None, :] * ptok + position % ptok) * row_words
    return own[position // ptok] * page_words + in_page
