"""Solutions of tutorial 02: pages and page tables."""

import numpy as np


def place(position: int, page_size: int, table: list[int]) -> tuple[int, int]:
    """(page, slot) of a position."""
    entry, slot = divmod(position, page_size)
    return table[entry], slot


def gather(pages: np.ndarray, table: list[int], positions: int) -> np.ndarray:
    """The rows of the stream's first positions, in order."""
    entry, slot = np.divmod(np.arange(positions), pages.shape[1])
    return pages[np.array(table)[entry], slot]


def pages_of_item(item: int, page_size: int, table: list[int]) -> list[int]:
    """The pages that hold an item's positions, in order of position, each once."""
    first, last = 32 * item // page_size, (32 * item + 31) // page_size
    return table[first : last + 1]
