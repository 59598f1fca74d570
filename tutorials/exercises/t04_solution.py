"""Solutions of tutorial 04: why paged equals window."""

import numpy as np


def row_sum(p: np.ndarray) -> np.float32:
    """The sum of a tile's 64 weights in the order of the prompt kernel, each addition in float32."""
    c = p.reshape(8, 4, 2)[:, :, 0] + p.reshape(8, 4, 2)[:, :, 1]
    w = (c[:, 0] + c[:, 2]) + (c[:, 1] + c[:, 3])
    return ((w[0] + w[4]) + (w[2] + w[6])) + ((w[1] + w[5]) + (w[3] + w[7]))


def paged_sum(pages: np.ndarray, table: list[int], count: int) -> np.float32:
    """The sum of a stream's first ``count`` numbers, its bits the same for every page size."""
    page_size = pages.shape[1]
    total = np.float32(0)
    for first in range(0, count, 8):
        tile = np.float32(0)
        for position in range(first, min(first + 8, count)):
            tile = tile + pages[table[position // page_size], position % page_size]
        total = total + tile
    return total


def first_difference(a: np.ndarray, b: np.ndarray) -> tuple[int, int, int, str, str] | None:
    """The first place where two outputs differ in a bit, or None."""
    a_bits, b_bits = a.view(np.uint16), b.view(np.uint16)
    places = np.argwhere(a_bits != b_bits)
    if len(places) == 0:
        return None
    row, head, dim = (int(n) for n in places[0])
    return row, head, dim, f"{a_bits[row, head, dim]:04X}", f"{b_bits[row, head, dim]:04X}"
