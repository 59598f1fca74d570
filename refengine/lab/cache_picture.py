"""One stream's cache as a picture: its positions, its page table, and the pages where they lie, lit where a step touches them.

The places are asked of the laid-out cache (its stream table and page tables), so the picture shows what the kernel was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from kernels_numba import streams as columns
from kernels_numba.machine.trace import Spans
from kernels_numba.prompt_attention import ITEM
from refengine.contract.caches import BLOCK_POSITIONS, Cache
from refengine.lab.svg import WIDTH, Label, Rect, tidy

STRIP, PLANE_ROW, GAP = 16.0, 13.0, 12.0
"""Heights of a strip, of a plane's row in a page; between pages."""
LEAST_PAGE_WIDTH, SLOT_WIDTH = 34.0, 3.0
MOST_UNUSED = 24
"""Pages of no stream that are drawn."""
FIRST, LATER = "first", "second"
"""Looks of what the step's first lookup leads to, and of what later ones do."""


@dataclass(frozen=True)
class Plane:
    """Rows of a page. offset: word of the page. rows: a head has. words: a row has. positions: a row stands for."""

    name: str
    offset: int
    heads: int
    rows: int
    words: int
    positions: int = 1


@dataclass(frozen=True)
class Touched:
    """Rows first .. last of a head of a plane of a page."""

    page: int
    plane: int
    head: int
    first: int
    last: int


class CachePicture:
    """A stream of a cache, drawn from ``top`` down; ``bottom`` is where it ends."""

    def __init__(self, cache: Cache, stream: int, top: float):
        self.cache, self.row, self.top = cache, cache.streams[stream], top
        self.base, self.first_entry, self.ptok, self.page_words = (
            int(self.row[n]) for n in (columns.BASE, columns.TABLE, columns.PTOK, columns.PAGE_WORDS)
        )
        self.paged = self.first_entry >= 0
        self.planes = planes_of(cache, self.row)
        wanted = max(1, int(self.row[columns.COMMITTED] + self.row[columns.ROWS]))
        self.table = self.held_pages(-(-wanted // self.ptok)) if self.paged else [0]
        self.positions = min(wanted, len(self.table) * self.ptok)
        self.pages = sorted({*self.table, *self.unused()})
        self.scale = WIDTH / (len(self.table) * self.ptok if self.paged else self.positions)
        self.slot = min(max(SLOT_WIDTH, LEAST_PAGE_WIDTH / self.ptok), WIDTH / self.ptok)
        self.places = dict(zip(self.pages, self.page_places()))
        page_rows = len({y for _, y in self.places.values()})
        self.bottom = self.pool_top + page_rows * (self.page_height + 20.0) + 4.0

    # --- Where things stand -------------------------------------------------------------------------------------------

    def held_pages(self, entries: int) -> list[int]:
        """The pages of the first entries, up to one that names none."""
        listed = [int(page) for page in self.cache.pages[self.first_entry :][:entries]]
        return list(takewhile(lambda page: self.base + (page + 1) * self.page_words <= len(self.cache.arena), listed))

    def unused(self) -> list[int]:
        """Pages of the pool that are not this stream's, where they are few."""
        if not self.paged:
            return []
        count = (len(self.cache.arena) - self.base) // self.page_words
        return list(range(count)) if count - len(self.table) <= MOST_UNUSED else []

    @property
    def table_top(self) -> float:
        return self.top + 58.0

    @property
    def pool_top(self) -> float:
        return self.table_top + (62.0 if self.paged else 0.0)

    @property
    def page_height(self) -> float:
        return PLANE_ROW * sum(plane.heads for plane in self.planes)

    def page_places(self) -> Iterator[tuple[float, float]]:
        """Left upper corners of the pages, side by side as far as there is room."""
        width = self.ptok * self.slot
        a_row = max(1, int((WIDTH + GAP) // (width + GAP)))
        for number in range(len(self.pages)):
            line, column = divmod(number, a_row)
            yield tidy(column * (width + GAP)), self.pool_top + line * (self.page_height + 20.0)

    def plane_top(self, plane: int, head: int) -> float:
        """Of a head's row, below a page's upper edge."""
        return PLANE_ROW * (sum(p.heads for p in self.planes[:plane]) + head)

    # --- The picture at rest ------------------------------------------------------------------------------------------

    def drawn(self) -> Iterator[Rect | Label]:
        yield from self.drawn_positions()
        if self.paged:
            yield from self.drawn_table()
        yield from self.drawn_pages()

    def drawn_positions(self) -> Iterator[Rect | Label]:
        """The positions in items of 32; one that lies in several pages looks it."""
        text = f"positions 0 to {self.positions - 1}, {ITEM} a box"
        yield Label(0, self.top - 6, text + ("; orange: in more than one page" if self.paged else ""), "title")
        for item in range(-(-self.positions // ITEM)):
            first, last = item * ITEM, min((item + 1) * ITEM, self.positions) - 1
            straddles = self.paged and first // self.ptok != last // self.ptok
            look = "item straddle" if straddles else f"item item{item % 2}"
            yield Rect(tidy(first * self.scale), self.top, tidy((last + 1 - first) * self.scale), STRIP, look,
                       f"keys {first} to {last}{': in more than one page' if straddles else ''}")  # fmt: skip
            if ITEM * self.scale > 22:
                yield Label(
                    tidy((first + last + 1) / 2 * self.scale), self.top + STRIP + 12, str(first), "label middle"
                )

    def drawn_table(self) -> Iterator[Rect | Label]:
        """The page of each entry, below the positions that it is for."""
        yield Label(0, self.table_top - 6, f"page table: entry = position // {self.ptok}, its page inside", "title")
        width = self.ptok * self.scale
        for entry, page in enumerate(self.table):
            x = entry * width
            yield Rect(tidy(x), self.table_top, tidy(width), STRIP, "entry", f"entry {entry}: page {page}")
            if width > 18:
                yield Label(tidy(x + width / 2), self.table_top + 12, str(page), "label middle")

    def drawn_pages(self) -> Iterator[Rect | Label]:
        names = " above ".join(plane.name for plane in self.planes)
        what = f"pages of {self.ptok} positions, in memory order" if self.paged else "the window"
        yield Label(0, self.pool_top - 20, f"{what}; in each, rows of {names}, slot by slot", "title")
        for page, (x, y) in self.places.items():
            entry = self.table.index(page) if page in self.table else None
            yield Label(x, y - 4, (f"page {page}" if self.ptok * self.slot > 50 else str(page)) if self.paged else "")
            look = "page" if entry is not None else "page unused"
            for number, plane in enumerate(self.planes):
                for head in range(plane.heads):
                    width = tidy(plane.rows * plane.positions * self.slot)
                    title = f"{'page ' + str(page) if self.paged else 'window'}, {plane.name} of KV head {head}"
                    owner = "of no entry of this stream" if entry is None else f"entry {entry}" if self.paged else ""
                    yield Rect(
                        x, y + self.plane_top(number, head), width, PLANE_ROW - 1, look, f"{title} {owner}".strip()
                    )

    # --- What a step lights -------------------------------------------------------------------------------------------

    def touched(self, spans: Spans) -> Iterator[Touched]:
        """The rows that arena words belong to."""
        for start, stop in spans:
            for page in self.pages if self.paged else [0]:
                origin = self.base + page * self.page_words
                for number, plane in enumerate(self.planes):
                    rows = plane.heads * plane.rows
                    first = max(0, (start - origin - plane.offset) // plane.words)
                    last = min(rows, -(-(stop - origin - plane.offset) // plane.words)) - 1
                    for head in range(first // plane.rows, last // plane.rows + 1) if last >= first else ():
                        low, high = max(first, head * plane.rows), min(last, (head + 1) * plane.rows - 1)
                        yield Touched(page, number, head, low - head * plane.rows, high - head * plane.rows)

    def lit_rows(self, spans: Spans, entries: Sequence[int], look: str) -> Iterator[Rect]:
        """The rows in their pages and among the positions. entries: looked up, in order. look: "read", "write" or "used"."""
        later = {self.table[e] for e in entries[1:] if e < len(self.table)} if self.paged else set()
        for one in self.touched(spans):
            plane, (x, y) = self.planes[one.plane], self.places[one.page]
            order = LATER if one.page in later else FIRST
            unit = plane.positions * self.slot
            width = tidy((one.last + 1 - one.first) * unit)
            left, upper = tidy(x + one.first * unit), y + self.plane_top(one.plane, one.head)
            yield Rect(left, upper, width, PLANE_ROW - 1, f"{look} {order}")
            if one.page in self.table:
                position = self.table.index(one.page) * self.ptok + one.first * plane.positions
                span = tidy((one.last + 1 - one.first) * plane.positions * self.scale)
                yield Rect(tidy(position * self.scale), self.top - 2, span, STRIP + 4, f"{look} {order}")

    def entries(self, spans: Spans) -> list[int]:
        """The entries of this stream's table that elements of ``pages`` are."""
        found = [n - self.first_entry for start, stop in spans for n in range(start, stop)]
        return [n for n in found if self.paged and 0 <= n < len(self.table)]

    def lit_entries(self, entries: Sequence[int]) -> Iterator[Rect]:
        """The entries that were looked up, and their pages' outlines."""
        width = self.ptok * self.scale
        for order, entry in enumerate(entries):
            look = FIRST if order == 0 else LATER
            yield Rect(tidy(entry * width), self.table_top - 2, tidy(width), STRIP + 4, f"lookup {look}")
            x, y = self.places[self.table[entry]]
            yield Rect(x - 2, y - 2, tidy(self.ptok * self.slot + 4), self.page_height + 3, f"frame {look}")


def planes_of(cache: Cache, row: np.ndarray) -> list[Plane]:
    """The planes of a page that hold rows."""
    ptok = int(row[columns.PTOK])
    found = [Plane(name, int(row[column]), cache.kv_heads, ptok, cache.row_words)
             for name, column in (("K", columns.K_PLANE), ("V", columns.V_PLANE))]  # fmt: skip
    if cache.index_dims:
        words = cache.index_dims // 2
        found.append(Plane("index keys", int(row[columns.INDEX_PLANE]), 1, ptok, words))
        found.append(
            Plane("pooled keys", int(row[columns.POOLED_PLANE]), 1, ptok // BLOCK_POSITIONS, words, BLOCK_POSITIONS)
        )
    return found


def busiest_stream(cache: Cache, spans: Spans) -> int:
    """The stream in whose rows most of these arena words lie."""
    pictures = [CachePicture(cache, n, 0.0) for n in range(len(cache.streams))]
    return int(np.argmax([sum(t.page in one.table for t in one.touched(spans)) for one in pictures]))
