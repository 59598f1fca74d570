"""A backend of one's own: a page table of two levels, as operating systems have it.

A one-level table reserves an entry for every page that a stream may ever need. Here a stream owns a small *directory*; an entry
of it names a *leaf*, a run of LEAF page ids, that is taken only when the stream grows into it. One lookup becomes two.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backends.arena import CacheShape
from backends.base import Sizes, Stream
from backends.layout import Layout
from backends.paged import PagedBackend
from backends.pool import PoolBroken
from kernels_numba.machine import count, device, int64, uint32

LEAF = 4
"""Pages that a leaf names."""


@device
def locate_two_level(pos, base, table, ptok, pages, page_words):
    """(word where the page starts, slot in it) of a position; directory entry, then leaf entry."""
    count("lookups")
    entry = int64(uint32(pos) // uint32(ptok))
    leaf = int64(pages[table + entry // LEAF])
    return base + int64(pages[leaf + entry % LEAF]) * page_words, pos - entry * ptok


class TwoLevelBackend(PagedBackend):
    """As PagedBackend, which takes and gives back the pages; ``pages`` holds the streams' directories, then all leaves."""

    name = "two-level"
    layout = Layout("two_level", straddles=True, page=None, locate=locate_two_level)

    def __init__(self, shape: CacheShape, sizes: Sizes, xp: Any = np):
        super().__init__(shape, sizes, xp)
        self.entries = -(-self.columns // LEAF)
        self.leaves = sizes.streams * self.entries
        self.free_leaves = list(range(self.leaves))
        self.taken: dict[int, list[int]] = {}
        self.pages = xp.full(self.leaves + self.leaves * LEAF, self.null_page, dtype=np.int32)

    def address(self, stream: Stream) -> tuple[int, int]:
        return 0, stream.slot * self.entries

    def enter(self, stream: Stream, pages: list[int]) -> None:
        """Name the stream's next pages in its leaves; a leaf that is begun is entered in the directory."""
        leaves = self.taken.setdefault(stream.slot, [])
        for page in pages:
            number = len(stream.pages)
            if number % LEAF == 0:
                leaves.append(self.free_leaves.pop())
                self.pages[stream.slot * self.entries + number // LEAF] = self.leaf_start(leaves[-1])
            self.pages[self.leaf_start(leaves[-1]) + number % LEAF] = page
            stream.pages.append(page)

    def forget(self, stream: Stream) -> None:
        """Give the leaves back; their entries name the null page again."""
        for number, leaf in enumerate(self.taken.pop(stream.slot, [])):
            self.pages[self.leaf_start(leaf) : self.leaf_start(leaf) + LEAF] = self.null_page
            self.pages[stream.slot * self.entries + number] = self.null_page
            self.free_leaves.append(leaf)

    def check_tables(self) -> None:
        """Raise PoolBroken unless directories and leaves lead to their streams' pages and nothing else, and no leaf is lost."""
        held = [leaf for leaves in self.taken.values() for leaf in leaves]
        if sorted([*self.free_leaves, *held]) != list(range(self.leaves)):
            raise PoolBroken(f"{self.name}: leaves free {self.free_leaves}, taken {self.taken}")
        wanted = np.full(self.pages.shape, self.null_page, np.int32)
        for slot, leaves in self.taken.items():
            for number, leaf in enumerate(leaves):
                named = self.streams[slot].pages[number * LEAF : (number + 1) * LEAF]
                wanted[slot * self.entries + number] = self.leaf_start(leaf)
                wanted[self.leaf_start(leaf) : self.leaf_start(leaf) + len(named)] = named
        found = np.asarray(self.pages.get() if hasattr(self.pages, "get") else self.pages)
        if len(wrong := np.flatnonzero(found != wanted)):
            entry = int(wrong[0])
            raise PoolBroken(f"{self.name}: entry {entry} of the table is {found[entry]}, not {wanted[entry]}")

    def leaf_start(self, leaf: int) -> int:
        """The first entry of a leaf."""
        return self.leaves + leaf * LEAF


@device
def locate_past_the_leaf(pos, base, table, ptok, pages, page_words):
    """As locate_two_level, but the first leaf is taken to go on for ever."""
    entry = int64(uint32(pos) // uint32(ptok))
    return base + int64(pages[int64(pages[table]) + entry]) * page_words, pos - entry * ptok


class BrokenTwoLevelBackend(TwoLevelBackend):
    """Right for LEAF pages, then wrong: short tests pass, the contract does not."""

    name = "two-level-broken"
    layout = Layout("two_level_broken", straddles=True, page=None, locate=locate_past_the_leaf)
