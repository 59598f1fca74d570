"""Solutions of tutorial 07: slices and the 257-row fault."""

from collections.abc import Callable

import numpy as np


def slices_of(rows: int, most: int) -> list[tuple[int, int]]:
    """(first row, how many) of each slice, in order: each has ``most`` rows, the last one maybe fewer, none has no row."""
    return [(first, min(most, rows - first)) for first in range(0, rows, most)]


def lands(slot: int, row: int, slots: int, held: int) -> tuple[int, int] | None:
    """(slot, row) whose place the partial of a row takes, in scratch of ``slots`` times ``held`` rows, if nobody checks."""
    place = slot * held + row
    return divmod(place, held) if place < slots * held else None


def in_slices(
    kernel: Callable[..., np.ndarray],
    q: np.ndarray,
    owners: np.ndarray,
    depths: np.ndarray,
    streams: np.ndarray,
    most: int,
) -> np.ndarray:
    """The results of all rows, [W, D], from a kernel that takes ``most`` rows at a time."""
    out = np.empty_like(q)
    for first, count in slices_of(len(q), most):
        own = slice(first, first + count)
        out[own] = kernel(q[own], owners[own], depths[own], streams)
    return out
