"""Where one stream's positions lie: page table, pages and staging items, asked of a backend's own address function."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from backends.base import Sizes
from backends.paged import PagedBackend
from kernels_numba.machine import cuda, int64, kernel
from kernels_numba.prompt_attention import ITEM
from refengine.model import cache_shape
from refengine.registry import load_model

THREADS = 32
SPARE_PAGES = 1
SHUFFLE = 6
"""Seed of the order in which the pool hands out its pages."""


@kernel
def locate_positions(out, pages, base, table, ptok, page_words, *, layout):
    """out[position] = layout.locate(position).

    out: int64 [positions, 2], (start, slot). pages: int32 [entries]. base, table, ptok, page_words: int64, as in the
    stream table. layout: a backends.layout.Layout. Launch: grid positions / 32, 32 threads.
    """
    position = int64(cuda.blockIdx.x) * THREADS + int64(cuda.threadIdx.x)
    if position < out.shape[0]:
        out[position, 0], out[position, 1] = layout.locate(position, base, table, ptok, pages, page_words)


@dataclass(frozen=True)
class Piece:
    """Positions first .. last of one item that lie in one page, from ``slot`` on; entry: of the page table."""

    item: int
    first: int
    last: int
    entry: int
    page: int
    slot: int

    @property
    def name(self) -> str:
        """``32–47``."""
        return f"{self.first}–{self.last}" if self.last > self.first else str(self.first)


class PageWalk:
    """A stream of ``positions`` positions in a shuffled pool of the tiny model's pages, its recurrent state left out.

    page_size: positions a page. positions: default, the whole pages that hold six items, two at least.
    Raises BackendError when page_size is less than 1.
    """

    def __init__(self, page_size: int, positions: int | None = None):
        self.page_size = page_size
        self.positions = positions or page_size * max(2, -(-6 * ITEM // max(1, page_size)))
        self.shape = replace(cache_shape(load_model("qwen3.5-tiny")), linear_layers=())
        sizes = Sizes(self.positions, page_size=page_size, spare_pages=SPARE_PAGES, shuffle=SHUFFLE)
        self.backend = PagedBackend(self.shape, sizes)
        self.stream = self.backend.open()
        self.stream.grow(self.positions)

    @property
    def table(self) -> list[int]:
        """The stream's page table: the page of each entry."""
        return [int(page) for page in self.backend.pages]

    @property
    def pool_pages(self) -> int:
        """Pages of the pool, without the null page, whose id it is."""
        return self.backend.null_page

    @cached_property
    def places(self) -> np.ndarray:
        """(page, slot) of each position: int64 [positions, 2]."""
        out = np.full((self.positions, 2), -1, np.int64)
        base, table = self.backend.address(self.stream)
        page_words = self.backend.page_words
        locate = locate_positions.at(layout=self.backend.layout)
        locate[-(-self.positions // THREADS), THREADS](out, self.backend.pages, base, table, self.page_size, page_words)
        out[:, 0] = (out[:, 0] - base) // page_words
        return out

    @cached_property
    def pieces(self) -> list[Piece]:
        """The items of 32 positions, cut where the page changes."""
        starts = [p for p in range(self.positions) if p % ITEM == 0 or self.places[p, 0] != self.places[p - 1, 0]]
        ends = [start - 1 for start in starts[1:]] + [self.positions - 1]
        return [self.piece(first, last) for first, last in zip(starts, ends)]

    def piece(self, first: int, last: int) -> Piece:
        page, slot = map(int, self.places[first])
        return Piece(first // ITEM, first, last, self.table.index(page), page, slot)

    def word(self, layer: int, plane: int, position: int, kv_head: int) -> int:
        """The arena's word where a row starts; plane: 0 for K, 1 for V. Spec attention §3."""
        page, slot = map(int, self.places[position])
        base, _ = self.backend.address(self.stream)
        start = base + page * self.backend.page_words
        return start + self.backend.planes(layer)[plane] + (kv_head * self.page_size + slot) * self.shape.head_dim // 2

    @property
    def straddling(self) -> list[int]:
        """Items that lie in more than one page."""
        items = [piece.item for piece in self.pieces]
        return sorted({item for item in items if items.count(item) > 1})
