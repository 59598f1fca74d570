"""Exercises of tutorial 07: slices and the 257-row fault. Replace each ``raise NotImplementedError`` by your answer."""

from collections.abc import Callable

import numpy as np


def slices_of(rows: int, most: int) -> list[tuple[int, int]]:
    """(first row, how many) of each slice, in order: each has ``most`` rows, the last one maybe fewer, none has no row."""
    raise NotImplementedError


def lands(slot: int, row: int, slots: int, held: int) -> tuple[int, int] | None:
    """(slot, row) whose place the partial of a row takes, in scratch of ``slots`` times ``held`` rows, if nobody checks.

    Slots lie one behind the other. None: the place is behind the scratch.
    """
    raise NotImplementedError


def in_slices(
    kernel: Callable[..., np.ndarray],
    q: np.ndarray,
    owners: np.ndarray,
    depths: np.ndarray,
    streams: np.ndarray,
    most: int,
) -> np.ndarray:
    """The results of all rows, [W, D], from a kernel that takes ``most`` rows at a time.

    q: [W, D]. owners: [W], the stream of each row, a row of ``streams``. depths: [W]. streams: [S, 13]. kernel(q, owners, depths,
    streams) gives the results of the rows that it is given, as many as its q has. Its row i has entry i of owners and of depths.
    """
    raise NotImplementedError
