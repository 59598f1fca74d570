"""Exercises of tutorial 05: what a page lookup costs. Replace each ``raise NotImplementedError`` by your answer."""

from collections.abc import Callable

ITEM = 32


def straddling(positions: int, page_size: int) -> list[int]:
    """The items of a text that lie in more than one page, in order.

    Item i is positions 32 · i .. 32 · i + 31, as far as the text goes: positions past its end do not count. Only items
    that have a position are meant.
    """
    raise NotImplementedError


def block_lookups(positions: int, page_size: int) -> int:
    """Page lookups by the 256 threads of the block of the prompt kernel that sees a whole text; rows of 256 numbers.

    positions: of the text, at least 1; it need not fill an item, nor a tile. The block fetches whole tiles all the same. What
    each thread looks up for an item: "The code" of the tutorial, ``stage_item``. Mind its ``keys``.
    """
    raise NotImplementedError


def rows_of(positions: list[int], page_size: int, lookup: Callable[[int], int]) -> list[int]:
    """The row of the memory of each position: page · page_size + slot.

    positions: ascending. lookup(entry): the page of an entry of the page table. Ask for each entry that is needed once, and
    for no other.
    """
    raise NotImplementedError
