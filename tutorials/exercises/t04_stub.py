"""Exercises of tutorial 04: why paged equals window. Replace each ``raise NotImplementedError`` by your answer."""

import numpy as np


def row_sum(p: np.ndarray) -> np.float32:
    """The sum of a tile's 64 weights in the order of the prompt kernel, each addition in float32.

    p: float32 [64], by column. The order: "The code" of the tutorial, ``quad_sum`` and ``row_sum``; you have all columns of the
    row here, where a thread has two of every 8.
    """
    raise NotImplementedError


def paged_sum(pages: np.ndarray, table: list[int], count: int) -> np.float32:
    """The sum of a stream's first ``count`` numbers, its bits the same for every page size.

    pages: float32 [page, slot]. table: the stream's page table. Tiles of 8 positions count from position 0. A tile's numbers are
    added from left to right, the tiles' sums are added in order; both start from zero, each addition is in float32.
    """
    raise NotImplementedError


def first_difference(a: np.ndarray, b: np.ndarray) -> tuple[int, int, int, str, str] | None:
    """The first place where two outputs differ in a bit, or None.

    a, b: bf16 [rows, heads, D] of one shape; ``a.view(np.uint16)`` has their bits. Returns (row, head, dim, bits of a,
    bits of b), the bits as four hex digits, such as "3F80". First: the lowest row, then head, then dim.
    """
    raise NotImplementedError
