"""Exercises of tutorial 02: pages and page tables. Replace each ``raise NotImplementedError`` by your answer."""

import numpy as np


def place(position: int, page_size: int, table: list[int]) -> tuple[int, int]:
    """(page, slot) of a position.

    table: the stream's page table; entry 0 names the page of positions 0 .. page_size - 1, entry 1 of the next, and so on.
    """
    raise NotImplementedError


def gather(pages: np.ndarray, table: list[int], positions: int) -> np.ndarray:
    """The rows of the stream's first positions, in order.

    pages: [page, slot, D], all pages of the pool. table: as for ``place``; it may have more entries than are needed, and what
    these name must not be read. Returns [positions, D].
    """
    raise NotImplementedError


def pages_of_item(item: int, page_size: int, table: list[int]) -> list[int]:
    """The pages that hold an item's positions, in order of position, each once.

    Item i has the 32 positions from 32 · i on. An item straddles if there is more than one page.
    """
    raise NotImplementedError
