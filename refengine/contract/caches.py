"""Caches laid out by hand: the same key and value rows as a window, as pages or as pages of 256, with poison everywhere else.

Every byte of the arena that holds no row is poison: unused slots, other planes, junk pages, the null page. Page ids are
shuffled and never ascend; entries of a table past its last page name no page.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backends.layout import Layout
from kernels_numba import streams as columns
from kernels_numba.fp8 import row_words
from refengine.contract.workbench import BF16, NAN, Poison
from refengine.verify import fp8_oracle

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
    """A stream to lay out. k, v: bf16 [N, HK, D], its positions 0 .. N - 1. first, rows, committed: as in the stream table.
    index: bf16 [N, DI], raw keys of a sparse indexer, and pooled: bf16 [whole blocks, DI], where the cache has one.
    """

    k: NDArray
    v: NDArray
    first: int
    rows: int
    committed: int
    index: NDArray | None = None
    pooled: NDArray | None = None


PLANES = {"k": columns.K_PLANE, "v": columns.V_PLANE}
"""Columns of the stream table by the plane's name."""
EXPONENTS = {"k": columns.K_EXP_PLANE, "v": columns.V_EXP_PLANE}
INDEXER = {"index": columns.INDEX_PLANE, "pooled": columns.POOLED_PLANE}
BLOCK_POSITIONS = 4
"""Positions whose raw index keys are pooled to one."""


@dataclass(frozen=True)
class Cache:
    """A laid out cache and what a kernel takes to address it. index_dims: of a sparse indexer's keys, or 0. held: bool
    [4 · words], the bytes that hold rows.
    """

    layout: Layout
    kv: str
    arena: NDArray[np.uint32]
    pages: NDArray[np.int32]
    streams: NDArray[np.int64]
    kv_heads: int
    dims: int
    index_dims: int
    held: NDArray[np.bool_]

    @property
    def row_words(self) -> int:
        """Words of a row."""
        return row_words(self.dims, self.kv)

    def rows(self, stream: int, plane: str, first: int, last: int) -> NDArray[np.int64]:
        """[last - first, kv_heads, row_words]: arena words of the rows of positions first .. last - 1; plane: "k" or "v"."""
        starts, in_page = self.places(stream, first, last)
        at = starts + int(self.streams[stream, PLANES[plane]]) + in_page * self.row_words
        return at[..., None] + np.arange(self.row_words)

    def exponents(self, stream: int, plane: str, first: int, last: int) -> NDArray[np.int64]:
        """[last - first, kv_heads]: arena bytes of the exponents of positions first .. last - 1."""
        starts, in_page = self.places(stream, first, last)
        return 4 * (starts + int(self.streams[stream, EXPONENTS[plane]])) + in_page

    def places(self, stream: int, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """([n, 1] word of the page's start, [n, kv_heads] row in a plane) of positions first .. last - 1."""
        row, position = self.streams[stream], np.arange(first, last)[:, None]
        base, table, ptok = (int(row[n]) for n in (columns.BASE, columns.TABLE, columns.PTOK))
        starts = np.full(position.shape, base, np.int64)
        if table >= 0:
            starts += self.pages[table + position // ptok].astype(np.int64) * int(row[columns.PAGE_WORDS])
        return starts, np.arange(self.kv_heads)[None, :] * ptok + position % ptok

    def indexer_rows(self, stream: int, plane: str, first: int, last: int) -> NDArray[np.int64]:
        """[last - first, 1, index_dims / 2]: arena words of rows first .. last - 1; plane: "index", by position, or "pooled", by
        block.
        """
        row, a_row, number = self.streams[stream], BLOCK_POSITIONS if plane == "pooled" else 1, np.arange(first, last)
        starts, _ = self.places(stream, first * a_row, last * a_row)
        slot = number % (int(row[columns.PTOK]) // a_row) if row[columns.TABLE] >= 0 else number
        at = starts[::a_row, 0] + int(row[INDEXER[plane]]) + slot * (self.index_dims // 2)
        return at[:, None, None] + np.arange(self.index_dims // 2)

    def word(self, stream: int, plane: str, position: int, kv_head: int, word: int) -> int:
        """The arena word of a row's word."""
        return int(self.rows(stream, plane, position, position + 1)[0, kv_head, word])

    def swap_first_pages(self) -> None:
        """A page table whose first entry names a later page: of the first stream that has one."""
        first = int(next((t for t in self.streams[:, columns.TABLE] if t >= 0), 0))
        self.pages[[first, first + 1]] = self.pages[[first + 1, first]]


def words_of(rows: NDArray) -> NDArray[np.uint32]:
    """bf16 [..., D] as uint32 [..., D / 2]."""
    assert rows.dtype == BF16
    return np.ascontiguousarray(rows).view(np.uint32)


def unordered(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids, reversed where chance left them ascending: a table in order would hide a missing lookup."""
    return ids[::-1] if len(ids) > 1 and (np.diff(ids) > 0).all() else ids


def poison_unheld(arena: NDArray[np.uint32], held: NDArray[np.bool_], poison: Poison) -> None:
    """Fill the bytes that hold no row. Raises AssertionError when they did not change."""
    memory = arena.view(np.uint8)
    filling = poison.filled(memory.nbytes)
    assert (held | (memory != filling)).all(), "the poison changed nothing"
    np.copyto(memory, filling, where=~held)


@dataclass(frozen=True)
class Form:
    """A page (or window) of ``ptok`` positions of one layer: word offsets of its planes, and its words, with poison between."""

    ptok: int
    planes: tuple[int, ...]
    words: int


def form_of(ptok: int, kv_heads: int, dims: int, kv: str, index_dims: int = 0) -> Form:
    """A page that starts, ends and changes planes with poison."""
    rows = kv_heads * ptok
    sizes = [rows * row_words(dims, kv)] * 2 + [-(-rows // 16) * 4 if kv == "fp8" else 0] * 2
    sizes += [count * index_dims // 2 for count in (ptok, ptok // BLOCK_POSITIONS)]
    planes, at = [], LEADING_WORDS
    for size in sizes:
        planes.append(at if size else 0)
        at += size + LEADING_WORDS if size else 0
    return Form(ptok, tuple(planes), -(-at // 4) * 4)


def build_cache(
    layout: Layout,
    ptok: int,
    streams: list[StreamRows],
    poison: Poison = NAN,
    padding: int | None = NO_PAGE,
    first_page: int = 0,
    kv: str = "bf16",
) -> Cache:
    """Lay the streams out.

    ptok: positions a page (a window ignores it). padding: table entries past the end (None: the null page). first_page: the
    lowest page id, below which no page is used. kv: "bf16", or "fp8", which holds what it gives of the rows. Layout
    ``mixed``: the first stream and every second one after it have windows.
    """
    rng = np.random.default_rng(0)
    _, kv_heads, dims = streams[0].k.shape
    index_dims = 0 if streams[0].index is None else streams[0].index.shape[-1]
    capacity = max(len(s.k) for s in streams) + SLACK
    windows = [layout.name == "window" or (layout.name == "mixed" and has_window(n)) for n in range(len(streams))]
    page, window = (form_of(n, kv_heads, dims, kv, index_dims) for n in (layout.page or ptok or 1, capacity))
    needed = [0 if own else max(1, -(-len(s.k) // page.ptok)) for s, own in zip(streams, windows, strict=True)]
    last = first_page + sum(needed) + SPARE_PAGES
    ids = first_page + rng.permutation(last - first_page)
    pool = 0 if all(windows) else (last + 1) * page.words
    arena = np.zeros(2 * LEADING_WORDS + pool + sum(windows) * window.words, np.uint32)
    null = last if padding is None else padding
    tables, rows, free = [null] * PADDING, [], LEADING_WORDS + pool
    for stream, count, own in zip(streams, needed, windows, strict=True):
        mine, ids = unordered(ids[:count]), ids[count:]
        form, base, table = (window, free, -1) if own else (page, LEADING_WORDS, len(tables))
        free += window.words if own else 0
        tables += [*map(int, mine), *[null] * PADDING]
        place = (base, table, form.ptok, form.words, *form.planes)
        rows.append((stream.first, stream.rows, stream.committed, *place))
    held = np.zeros(4 * len(arena), np.bool_)
    table_and_rows = np.array(tables, np.int32), np.array(rows, np.int64)
    laid = Cache(layout, kv, arena, *table_and_rows, kv_heads, dims, index_dims, held)
    for number, stream in enumerate(streams):
        fill(laid, number, stream)
    poison_unheld(arena, held, poison)
    return laid


def has_window(stream: int) -> bool:
    """Whether a stream of layout ``mixed`` has a window."""
    return stream % 2 == 0


def fill(laid: Cache, number: int, stream: StreamRows) -> None:
    """Put a stream's rows where they belong."""
    memory, held_words = laid.arena.view(np.uint8), laid.held.reshape(-1, 4)
    for plane, data in (("k", stream.k), ("v", stream.v)):
        words = laid.rows(number, plane, 0, len(data))
        held_words[words] = True
        if laid.kv == "bf16":
            laid.arena[words] = words_of(data)
        else:
            codes, exponents = fp8_oracle.narrowed(data)
            laid.arena[words] = np.ascontiguousarray(codes).view(np.uint32)
            at = laid.exponents(number, plane, 0, len(data))
            memory[at], laid.held[at] = exponents.view(np.uint8), True
    for plane, keys in (("index", stream.index), ("pooled", stream.pooled)):
        if keys is not None:
            words = laid.indexer_rows(number, plane, 0, len(keys))
            laid.arena[words], held_words[words] = words_of(keys)[:, None], True
