"""Solutions of tutorial 05: what a page lookup costs."""

from collections.abc import Callable

ITEM = 32


def straddling(positions: int, page_size: int) -> list[int]:
    """The items of a text that lie in more than one page, in order."""
    ends = [min(first + ITEM, positions) - 1 for first in range(0, positions, ITEM)]
    return [item for item, end in enumerate(ends) if ITEM * item // page_size != end // page_size]


def block_lookups(positions: int, page_size: int) -> int:
    """Page lookups by the 256 threads of the block of the prompt kernel that sees a whole text; rows of 256 numbers."""
    items = 2 * (-(-positions // 64))
    return 2 * sum(_item_lookups(ITEM * item, positions, page_size) for item in range(items))


def _item_lookups(first: int, positions: int, page_size: int) -> int:
    """Of one item: every thread's own, and 32 threads' for each row behind the page."""
    page_end = (first // page_size + 1) * page_size
    behind = max(0, min(first + ITEM, positions) - page_end)
    return 256 + 32 * behind


def rows_of(positions: list[int], page_size: int, lookup: Callable[[int], int]) -> list[int]:
    """The row of the memory of each position: page · page_size + slot."""
    found, page_end, page_row = [], 0, 0
    for position in positions:
        entry, slot = divmod(position, page_size)
        if position >= page_end:
            page_end, page_row = (entry + 1) * page_size, lookup(entry) * page_size
        found.append(page_row + slot)
    return found
