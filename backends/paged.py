"""Pages of any size: a stream takes pages from a pool as it grows, and a page table says which. Spec serving §2, §4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from backends import layout
from backends.arena import Arena, CacheShape
from backends.base import Backend, BackendError, Beginning, NoRoom, Sizes, Stream
from backends.page_copies import copy_page
from backends.pool import PagePool, PoolBroken, PoolFull
from backends.prefix import Prefix


class PagedBackend(Backend):
    """Pages of ``page_size`` positions; entries of a page table beyond a stream's pages name the null page.

    A stream's run, its recurrent state, is pages in a row from the top of the same pool. A stream is promised all its pages
    when it is opened, and takes them as it grows.
    """

    name = "paged"
    layout = layout.paged
    paged = True

    def __init__(self, shape: CacheShape, sizes: Sizes, xp: Any = np, arena: type[Arena] = Arena):
        sizes.check(self.name)
        count, self.run_pages = self.pool_pages(shape, sizes), self.pages_a_run(shape, sizes)
        self.pool = PagePool(count, pool_order(count, self.low_pages(count, sizes), sizes.shuffle, sizes.reverse))
        self.prefixes: list[Prefix] = []
        super().__init__(shape, sizes, xp, arena)

    @classmethod
    def page_positions(cls, sizes: Sizes) -> int:
        return sizes.page_size

    @classmethod
    def pages_a_run(cls, shape: CacheShape, sizes: Sizes) -> int:
        """Pages in a row that hold a stream's recurrent state."""
        page_words = shape.page_words(cls.page_positions(sizes), sizes.kv)
        return -(-shape.run_words // page_words) if shape.run_words else 0

    @classmethod
    def pool_pages(cls, shape: CacheShape, sizes: Sizes) -> int:
        """Pages that there are: as many as asked for, or those that streams can need together, and the spare ones."""
        if sizes.pool is not None:
            return sizes.pool
        run_pages = sizes.streams * cls.pages_a_run(shape, sizes)
        return cls.streams_on_pages(sizes) * cls.pages_for(sizes.context, sizes) + run_pages + sizes.spare_pages

    def low_pages(self, count: int, sizes: Sizes) -> int:
        """Pages at the bottom that keys and values may take in any order; runs have the others, half of the pool at most."""
        rows = self.streams_on_pages(sizes) * self.pages_for(sizes.context, sizes) + sizes.spare_pages
        return min(rows, max(count - sizes.streams * self.run_pages, count // 2))

    @classmethod
    def streams_on_pages(cls, sizes: Sizes) -> int:
        """Streams whose keys and values lie in pages."""
        return sizes.streams

    @classmethod
    def pages_for(cls, positions: int, sizes: Sizes) -> int:
        """Pages that hold so many positions."""
        return -(-positions // cls.page_positions(sizes))

    @classmethod
    def cache_words(cls, shape: CacheShape, sizes: Sizes) -> int:
        """The pool's pages and the null page."""
        return (cls.pool_pages(shape, sizes) + 1) * shape.page_words(cls.page_positions(sizes), sizes.kv)

    @classmethod
    def arena_runs(cls, sizes: Sizes) -> int:
        """None: runs are pages."""
        return 0

    @property
    def null_page(self) -> int:
        return self.pool.null_page

    def address(self, stream: Stream) -> tuple[int, int]:
        return 0, stream.slot * self.columns

    def run_base(self, stream: Stream) -> int:
        run = claim_of(stream).run
        return run[0] * self.page_words if run else 0

    def has_window(self, stream: Stream) -> bool:
        """Whether the stream keeps a window, and takes no pages for keys and values."""
        return False

    # --- Room -------------------------------------------------------------------------------------------------------------

    def check_fits(self, capacity: int) -> None:
        super().check_fits(capacity)
        need, count = self.pages_for(capacity, self.sizes) + self.run_pages, self.pool.count
        if need > count and not self.fits_a_window:
            most = max(0, (count - self.run_pages) * self.positions)
            raise BackendError(
                f"{self.name}: {capacity} positions take {need} pages of {self.positions}, {self.run_pages} of them for the "
                f"recurrent state; the pool has {count}: ask for at most {most} positions, or make it larger"
            )

    @property
    def fits_a_window(self) -> bool:
        """Whether a stream may find a window here, which needs no pages for keys and values."""
        return False

    def seat(self, stream: Stream, begin: Beginning | None) -> None:
        """Promise the stream its pages, take its run, and share the full pages that it begins with."""
        window = self.has_window(stream)
        shared = begin.full_pages if isinstance(begin, Prefix) and not window else []
        quota = 0 if window else self.pages_for(stream.capacity, self.sizes) - len(shared)
        try:
            stream.claim = self.pool.claim(quota, self.run_pages)
        except PoolFull as full:
            raise NoRoom(f"{self.name}: {full}; release a stream") from full
        self.pool.share(shared)
        self.enter(stream, shared)

    def start(self, stream: Stream, begin: Beginning | None) -> None:
        if not isinstance(begin, Prefix) or self.has_window(stream):
            return super().start(stream, begin)
        self.arena.copy(begin.run_base, self.run_base(stream), self.shape.run_words)
        for page in begin.pages[len(begin.full_pages) :]:
            (own,) = claim_of(stream).take(1)
            if self.arena.words is not None:
                copy_page(self, page, own, begin.positions % self.positions)
            self.enter(stream, [own])
        stream.committed = stream.prompted = begin.positions

    def grow(self, ends: Sequence[tuple[Stream, int]]) -> None:
        """Take the pages that are missing from what the streams were promised, and enter them in their tables, in place."""
        for stream, end in ends:
            if not self.has_window(stream):
                missing = max(0, self.pages_for(end, self.sizes) - len(stream.pages))
                self.enter(stream, claim_of(stream).take(missing))

    def enter(self, stream: Stream, pages: list[int]) -> None:
        """The stream's next pages, in its row of the page table."""
        first = stream.slot * self.columns + len(stream.pages)
        self.pages[first : first + len(pages)] = self.xp.asarray(np.array(pages, np.int32))
        stream.pages += pages

    def freed(self, stream: Stream) -> None:
        """Give pages, promise and run back."""
        self.forget(stream)
        self.pool.give_back(stream.pages)
        claim_of(stream).release()
        stream.pages, stream.claim = [], None

    def forget(self, stream: Stream) -> None:
        """The whole row of the page table names the null page again."""
        first = stream.slot * self.columns
        self.pages[first : first + self.columns] = self.null_page

    def held_pages(self, stream: Stream) -> int:
        return len(stream.pages)

    # --- Prefixes ---------------------------------------------------------------------------------------------------------

    def snapshot(self, stream: Stream) -> Beginning:
        """As Backend.snapshot; pages are shared, the recurrent state is copied to a run of its own."""
        self.check_prompted(stream)
        if self.has_window(stream):
            return stream.save()
        try:
            run = self.pool.take_run(self.run_pages)
        except PoolFull as full:
            raise NoRoom(f"{self.name}: {full}; release a stream or a prefix") from full
        prefix = Prefix(self, stream.committed, stream.pages[: self.pages_for(stream.committed, self.sizes)], run)
        self.pool.share(prefix.pages)
        self.prefixes.append(prefix)
        try:
            self.arena.copy(self.run_base(stream), prefix.run_base, self.shape.run_words)
        except BaseException:
            prefix.release()
            raise
        return prefix

    def drop(self, prefix: Prefix) -> None:
        """A prefix's hold of its pages. Raises BackendError for one that is released or lies elsewhere."""
        prefix.check_held(self)
        self.pool.give_back(prefix.pages)
        self.pool.give_back(prefix.run)
        self.prefixes.remove(prefix)
        prefix.released = True

    # --- Integrity --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Also: holders are counted right, promises can be kept, and every table names its stream's pages, then the null page."""
        super().check()
        claims = [claim_of(stream) for stream in self.streams.values()]
        held = [stream.pages for stream in self.streams.values()] + [claim.run for claim in claims]
        self.pool.check([*held, *(p.pages for p in self.prefixes), *(p.run for p in self.prefixes)])
        if sorted(map(id, claims)) != sorted(map(id, self.pool.claims)):
            raise PoolBroken(f"{self.name}: {len(self.pool.claims)} claims, {len(claims)} of open streams")
        for stream, claim in zip(self.streams.values(), claims):
            self.check_stream(stream, claim.left)
        self.check_tables()

    def check_stream(self, stream: Stream, left: int) -> None:
        """Raise PoolBroken unless a stream has pages for what is committed, and with its promise for all of its capacity."""
        if self.has_window(stream):
            return
        most, least = self.pages_for(stream.capacity, self.sizes), self.pages_for(stream.committed, self.sizes)
        if len(stream.pages) + left != most or len(stream.pages) < least:
            raise PoolBroken(
                f"{self.name}: stream {stream.number} holds {len(stream.pages)} pages and was promised {left} more; its "
                f"capacity takes {most}, {least} are written"
            )

    def check_tables(self) -> None:
        """Raise PoolBroken unless each place's row of the page table names the pages of its stream, and no others."""
        wanted = np.full((self.sizes.streams, self.columns), self.null_page, np.int32)
        for slot, stream in self.streams.items():
            wanted[slot, : len(stream.pages)] = stream.pages
        found = np.asarray(self.pages.get() if hasattr(self.pages, "get") else self.pages).reshape(wanted.shape)
        if len(wrong := np.argwhere(found != wanted)):
            slot, entry = (int(n) for n in wrong[0])
            raise PoolBroken(
                f"{self.name}: place {slot}: entry {entry} of the page table names page {found[slot, entry]}, not "
                f"{wanted[slot, entry]}"
            )


def claim_of(stream: Stream) -> Any:
    """What an open stream was promised."""
    assert stream.claim is not None, "an open stream has a claim"
    return stream.claim


def pool_order(pages: int, shuffled: int, shuffle: int | None, reverse: bool = False) -> list[int]:
    """The order in which pages are handed out: the lowest ``shuffled`` as the seed says, the others behind them.

    reverse: those of the seed backwards.
    """
    order = page_order(shuffled, shuffle)
    return [*(order[::-1] if reverse else order), *range(shuffled, pages)]


def page_order(pages: int, shuffle: int | None) -> list[int]:
    """A permutation whose first two pages do not ascend, so that no table is in order; without a seed, lowest first."""
    if shuffle is None:
        return list(range(pages))
    order = [int(p) for p in np.random.default_rng(shuffle).permutation(pages)]
    if len(order) > 1 and order[0] < order[1]:
        order[0], order[1] = order[1], order[0]
    return order
