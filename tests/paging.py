"""Caches for tests: the same key and value rows as a window, as pages or as pages of 256, with poison everywhere else.

Every word of the arena that holds no row is NaN: unused slots, other planes, junk pages, the null page. Page ids are
shuffled and never ascend; entries of a table past its last page name the null page, the arena's last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from backends.layout import Layout, paged_p256, window

BF16 = np.dtype(ml_dtypes.bfloat16)
NAN_WORD = np.uint32(0x7FC1FFC3)
"""Two bf16 NaNs that no kernel writes."""
LEADING_WORDS = 36
"""Poison words before a plane, before the pool: an address without its plane or its base meets NaN."""
SPARE_PAGES = 3
PADDING = 4
"""Table entries after a stream's last page."""


@dataclass(frozen=True)
class StreamRows:
    """A stream to lay out. k, v: bf16 [N, HK, D], its positions 0 .. N - 1. first, rows, committed: as in the stream
    table.
    """

    k: NDArray
    v: NDArray
    first: int
    rows: int
    committed: int


@dataclass(frozen=True)
class Cache:
    """A laid out cache and what a kernel takes to address it."""

    layout: Layout
    arena: NDArray[np.uint32]
    pages: NDArray[np.int32]
    streams: NDArray[np.int64]
    page_words: int
    k_plane: int
    v_plane: int
    kv_heads: int
    row_words: int
    before: NDArray[np.uint32] = field(repr=False)

    def word(self, stream: int, plane: int, position: int, kv_head: int, word: int) -> int:
        """The arena word of a row's word; plane: k_plane or v_plane."""
        _, _, _, base, table, ptok = (int(n) for n in self.streams[stream])
        start, slot = base, position
        if table >= 0:
            start, slot = base + int(self.pages[table + position // ptok]) * self.page_words, position % ptok
        return start + plane + (kv_head * ptok + slot) * self.row_words + word

    def assert_untouched(self) -> None:
        """No kernel of these tests writes to the cache."""
        np.testing.assert_array_equal(self.arena, self.before)


def words_of(rows: NDArray) -> NDArray[np.uint32]:
    """bf16 [..., D] as uint32 [..., D / 2]."""
    assert rows.dtype == BF16
    return np.ascontiguousarray(rows).view(np.uint32)


def unordered(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids, reversed where chance left them ascending: a table in order would hide a missing lookup."""
    return ids[::-1] if len(ids) > 1 and (np.diff(ids) > 0).all() else ids


def poison(arena: NDArray[np.uint32], unused: NDArray[np.bool_]) -> None:
    """Fill the unused words with NaN, and make sure that the bytes did change."""
    before = arena.copy()
    arena[unused] = NAN_WORD
    assert (arena[unused] != before[unused]).all(), "the poison changed nothing"
    assert np.isnan(arena[unused].view(BF16).astype(np.float32)).all(), "the poison is not NaN"
    np.testing.assert_array_equal(arena[~unused], before[~unused])


def page_size(layout: Layout, ptok: int, longest: int) -> int:
    """Positions a page: the window's capacity leaves slots unused past its last row."""
    if layout is window:
        return longest + 37
    assert layout.page in (None, ptok), f"{layout.name} has pages of {layout.page}, not {ptok}"
    return ptok


def build_cache(
    layout: Layout, ptok: int, streams: list[StreamRows], seed: int = 0, padding: int | None = None
) -> Cache:
    """Lay the streams out. ptok: positions a page (a window ignores it). padding: table entries past the end (None:
    null page).
    """
    rng = np.random.default_rng(seed)
    _, kv_heads, dims = streams[0].k.shape
    ptok = page_size(layout, ptok, max(len(s.k) for s in streams))
    plane_words = kv_heads * ptok * dims // 2
    k_plane, v_plane = LEADING_WORDS, 2 * LEADING_WORDS + plane_words
    page_words = v_plane + plane_words + LEADING_WORDS
    needed = [max(1, -(-len(s.k) // ptok)) for s in streams]
    last = sum(needed) + SPARE_PAGES
    ids = rng.permutation(last)
    null = last if padding is None else padding
    arena = np.zeros(2 * LEADING_WORDS + (last + 1) * page_words, np.uint32)
    used = np.zeros(len(arena), np.bool_)
    tables: list[int] = [null] * PADDING
    table_rows = []
    for stream, count in zip(streams, needed, strict=True):
        own, ids = unordered(ids[:count]), ids[count:]
        base, table = LEADING_WORDS, len(tables)
        if layout is window:
            base, table = LEADING_WORDS + int(own[0]) * page_words, -1
        tables += [*map(int, own), *[null] * PADDING]
        table_rows.append((stream.first, stream.rows, stream.committed, base, table, ptok))
        for plane, rows in ((k_plane, stream.k), (v_plane, stream.v)):
            at = LEADING_WORDS + plane + row_starts(own, len(rows), ptok, page_words, kv_heads, dims // 2)
            place = at[..., None] + np.arange(dims // 2)
            assert not used[place].any(), "two rows in one place"
            arena[place], used[place] = words_of(rows), True
    poison(arena, ~used)
    pages = np.array(tables, np.int32)
    return Cache(
        layout,
        arena,
        pages,
        np.array(table_rows, np.int64),
        page_words,
        k_plane,
        v_plane,
        kv_heads,
        dims // 2,
        arena.copy(),
    )


def row_starts(
    own: NDArray[np.int64], count: int, ptok: int, page_words: int, kv_heads: int, row_words: int
) -> NDArray[np.int64]:
    """[count, kv_heads]: the word of each row's start, from page 0 of its plane."""
    position = np.arange(count)[:, None]
    in_page = (np.arange(kv_heads)[None, :] * ptok + position % ptok) * row_words
    return own[position // ptok] * page_words + in_page


class Guarded:
    """An output buffer of bf16 [*shape] pre-filled with a NaN that no kernel writes, between guard words."""

    GUARD = 64
    FILL = np.uint16(0xFFB5)

    def __init__(self, shape: tuple[int, ...]):
        size = int(np.prod(shape))
        self.buffer = np.full(size + 2 * self.GUARD, self.FILL, np.uint16)
        self.array = self.buffer[self.GUARD : self.GUARD + size].view(BF16).reshape(shape)

    def checked(self) -> NDArray:
        """The array, once the guards are whole and every element was written."""
        assert (self.buffer[: self.GUARD] == self.FILL).all() and (self.buffer[-self.GUARD :] == self.FILL).all(), (
            "guard"
        )
        unwritten = np.argwhere(self.array.view(np.uint16) == self.FILL)
        assert not len(unwritten), f"{len(unwritten)} elements not written, first {tuple(unwritten[0])}"
        return self.array


def p256_or(layout: Layout, ptok: int) -> int:
    """The page size a layout takes in a test that asks for ``ptok``."""
    return 256 if layout is paged_p256 else ptok
