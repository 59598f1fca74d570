"""The page pool: which pages of an arena are free, held, or promised to a stream. Spec serving §2.

Holders of a page are counted, so that streams and kept prompts can share it. A claim promises a stream its pages before it
needs them: what was admitted never runs out. Keys and values take the lowest free page; a run of pages in a row, for a stream's
recurrent state, is taken from the top. So equal calls give equal pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np


class PoolFull(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""


class PoolBroken(Exception):
    """The pool's books do not agree with who holds its pages."""


class PagePool:
    """``count`` pages and a null page, ``count``, that nobody gets.

    order: the pages in the order in which they are handed out (a permutation; tests and ``compare`` shuffle with it). Default:
    lowest first. Raises ValueError when order is not a permutation of the pages.
    """

    def __init__(self, count: int, order: Sequence[int] | None = None):
        self.count = count
        self.order = np.arange(count) if order is None else np.array(order, np.int64)
        if sorted(self.order.tolist()) != list(range(count)):
            raise ValueError(f"page order: must name each of the {count} pages once")
        self.holders = np.zeros(count, np.int64)
        self.claims: list[Claim] = []

    @property
    def null_page(self) -> int:
        """The page that padded table entries name; nobody reads it."""
        return self.count

    @property
    def free(self) -> int:
        """Pages that nobody holds, promised ones among them."""
        return int(np.count_nonzero(self.holders == 0))

    @property
    def promised(self) -> int:
        """Free pages that claims have not taken yet."""
        return sum(claim.left for claim in self.claims)

    @property
    def available(self) -> int:
        """Pages that can be claimed or taken."""
        return self.free - self.promised

    # --- Taking -----------------------------------------------------------------------------------------------------------

    def claim(self, pages: int, run: int = 0) -> Claim:
        """Promise ``pages`` pages, and take a run of ``run`` pages at once. Raises PoolFull, changing nothing, without room."""
        self.check_room(pages + run)
        claim = Claim(self, pages, self.take_run(run))
        self.claims.append(claim)
        return claim

    def take(self, pages: int) -> list[int]:
        """Pages that nobody was promised, lowest first. Raises PoolFull, taking nothing, when there are fewer."""
        self.check_room(pages)
        return self.lowest(pages)

    def take_run(self, pages: int) -> list[int]:
        """The highest free pages in a row. Raises PoolFull, taking nothing, when there is no such row."""
        self.check_room(pages)
        taken_before = np.concatenate([[0], np.cumsum(self.holders != 0)])
        starts = np.flatnonzero(taken_before[pages:] == taken_before[: len(taken_before) - pages])
        if not len(starts):
            raise PoolFull(
                f"{counted(pages)} in a row wanted, {self.free} of {self.count} {are(self.free)} free, not in a row"
            )
        run = list(range(int(starts[-1]), int(starts[-1]) + pages))
        self.holders[run] = 1
        return run

    def lowest(self, pages: int) -> list[int]:
        """The first free pages in the pool's order, promised or not: ``claim`` and ``take`` have seen that there are enough."""
        found = self.order[np.flatnonzero(self.holders[self.order] == 0)[:pages]]
        self.holders[found] = 1
        return [int(page) for page in found]

    def check_room(self, pages: int) -> None:
        """Raise PoolFull when fewer pages are available."""
        if pages > self.available:
            reserved = f", {self.promised} of them promised" if self.promised else ""
            raise PoolFull(f"{counted(pages)} wanted, {self.free} of {self.count} {are(self.free)} free{reserved}")

    # --- Sharing and giving back ------------------------------------------------------------------------------------------

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each page. Raises ValueError, changing nothing, for a page that nobody holds."""
        self.check_held(pages)
        self.holders[list(pages)] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """One holder less for each page. Raises ValueError, changing nothing, when one is free already or none of the pool's."""
        self.check_held(pages)
        self.holders[list(pages)] -= 1

    def check_held(self, pages: Sequence[int]) -> None:
        """Raise ValueError for a page that has no holder, or stands twice."""
        for page, count in Counter(pages).items():
            if not 0 <= page < self.count or not self.holders[page] or count > 1:
                raise ValueError(f"page {page}: not a page that is taken")

    # --- Integrity --------------------------------------------------------------------------------------------------------

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Raise PoolBroken unless the pages' holders are just those of ``held``, a holder's pages each, and promises keep."""
        counts = Counter(page for pages in held for page in pages)
        if stray := [page for page in counts if not 0 <= page < self.count]:
            raise PoolBroken(f"page {stray[0]}: held, and none of the pool's {self.count} pages")
        for page, holders in enumerate(self.holders.tolist()):
            if holders != counts[page]:
                raise PoolBroken(f"page {page}: {holders} holders on the books, {counts[page]} in fact")
        if self.promised > self.free:
            raise PoolBroken(f"{self.promised} pages are promised, {self.free} are free")


class Claim:
    """Pages promised to one stream. left: those that it has not taken. run: the pages in a row that it holds from the start."""

    def __init__(self, pool: PagePool, left: int, run: list[int]):
        self.pool, self.left, self.run = pool, left, run

    def take(self, pages: int) -> list[int]:
        """Some of the promised pages, lowest first. Raises PoolFull, taking nothing, beyond what was promised."""
        if pages > self.left:
            raise PoolFull(f"{counted(pages)} wanted, {self.left} {are(self.left)} left of what was claimed")
        self.left -= pages
        return self.pool.lowest(pages)

    def release(self) -> None:
        """Break the promise off and give the run back. Raises ValueError the second time."""
        self.pool.claims.remove(self)
        self.pool.give_back(self.run)


def counted(pages: int) -> str:
    return f"{pages} page{'' if pages == 1 else 's'}"


def are(pages: int) -> str:
    return "is" if pages == 1 else "are"
