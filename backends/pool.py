"""The page pool: which pages of an arena are free. Lowest free first, so equal calls give equal pages."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class PoolFull(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""


class PagePool:
    """``count`` pages that streams take and give back, and a null page, ``count``, that nobody gets.

    order: which physical page the n-th is (a permutation; tests and ``compare`` shuffle with it). Default: page n.
    Raises ValueError when order is not a permutation of the pages.
    """

    def __init__(self, count: int, order: Sequence[int] | None = None):
        self.count = count
        self.order = list(range(count)) if order is None else [int(n) for n in order]
        if sorted(self.order) != list(range(count)):
            raise ValueError(f"page order: must name each of the {count} pages once")
        self.number = {page: n for n, page in enumerate(self.order)}
        self.free = list(range(count))

    @property
    def null_page(self) -> int:
        """The page that padded table entries name; nobody reads it."""
        return self.count

    def take(self, pages: int) -> list[int]:
        """The lowest free pages, in order. Raises PoolFull, taking nothing, when there are fewer."""
        if pages > len(self.free):
            raise PoolFull(f"{pages} pages wanted, {len(self.free)} of {self.count} are free")
        return [self.order[heapq.heappop(self.free)] for _ in range(pages)]

    def give_back(self, pages: Sequence[int]) -> None:
        """Free pages again. Raises ValueError when one is free already or none of the pool's."""
        numbers = [self.number.get(page) for page in pages]
        for page, number in zip(pages, numbers):
            if number is None or number in self.free or numbers.count(number) > 1:
                raise ValueError(f"page {page}: not a page that is taken")
        for number in numbers:
            assert number is not None
            heapq.heappush(self.free, number)
