"""Pages of any size: a stream takes pages from a pool as it grows, and a page table says which."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from backends import layout
from backends.arena import CacheShape
from backends.base import Backend, BackendError, Sizes, Stream
from backends.pool import PagePool, PoolFull


class PagedBackend(Backend):
    """Pages of ``page_size`` positions; entries of a page table beyond a stream's pages name the null page."""

    name = "paged"
    layout = layout.paged
    paged = True

    def __init__(self, shape: CacheShape, sizes: Sizes, xp: Any = np):
        sizes.check(self.name)
        self.pool = PagePool(self.pool_pages(sizes), page_order(self.pool_pages(sizes), sizes.shuffle))
        super().__init__(shape, sizes, xp)

    @classmethod
    def page_positions(cls, sizes: Sizes) -> int:
        return sizes.page_size

    @classmethod
    def pool_pages(cls, sizes: Sizes) -> int:
        """Pages that streams can hold together, and the spare ones."""
        return sizes.streams * -(-sizes.context // cls.page_positions(sizes)) + sizes.spare_pages

    @classmethod
    def cache_words(cls, shape: CacheShape, sizes: Sizes) -> int:
        """The pool's pages and the null page."""
        return (cls.pool_pages(sizes) + 1) * shape.page_words(cls.page_positions(sizes), sizes.kv)

    @property
    def null_page(self) -> int:
        return self.pool.null_page

    def address(self, stream: Stream) -> tuple[int, int]:
        return 0, stream.slot * self.columns

    def grow(self, ends: Sequence[tuple[Stream, int]]) -> None:
        """Take the pages that are missing, all at once, and enter them in the streams' tables, in place."""
        missing = [max(0, -(-end // self.positions) - len(stream.pages)) for stream, end in ends]
        try:
            pages = iter(self.pool.take(sum(missing)))
        except PoolFull as full:
            raise BackendError(f"{self.name}: {full}; release a stream") from full
        for (stream, _), count in zip(ends, missing):
            self.enter(stream, list(islice(pages, count)))

    def enter(self, stream: Stream, pages: list[int]) -> None:
        """The stream's next pages, in its row of the page table."""
        first = stream.slot * self.columns + len(stream.pages)
        self.pages[first : first + len(pages)] = self.xp.asarray(np.array(pages, np.int32))
        stream.pages += pages

    def freed(self, stream: Stream) -> None:
        """Give the pages back; the whole row of the table names the null page again."""
        self.pool.give_back(stream.pages)
        stream.pages = []
        first = stream.slot * self.columns
        self.pages[first : first + self.columns] = self.null_page

    def held_pages(self, stream: Stream) -> int:
        return len(stream.pages)


def page_order(pages: int, shuffle: int | None) -> list[int] | None:
    """The order in which pages are handed out: a permutation whose first two do not ascend, so that no table is in order."""
    if shuffle is None:
        return None
    order = [int(p) for p in np.random.default_rng(shuffle).permutation(pages)]
    if len(order) > 1 and order[0] < order[1]:
        order[0], order[1] = order[1], order[0]
    return order
