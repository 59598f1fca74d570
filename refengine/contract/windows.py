"""Windows of rows that are not committed: who follows whom, and the record that holds their keys and values.

A kernel that looks past a row's path, or past the rows of the launch, meets a row of poison.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernels_numba.decode_plan import MOST_ROWS
from refengine.contract.workbench import Array, Poison

SPARE_ROWS = 2
"""Rows of poison in a record, after those of the launch."""


def path_of(row: int, tree: bool) -> list[int]:
    """Window rows from the root to a row: each follows the one before it, or, in a tree, row (row - 1) // 2."""
    path: list[int] = []
    while row >= 0:
        path.insert(0, row)
        row = (row - 1) // 2 if tree else row - 1
    return path


def path_table(paths: Sequence[Sequence[int]], firsts: Array) -> Array:
    """int32 [W, 128]: the paths of a launch's rows; entries past a path name a row of poison. firsts: int64 [W], of each row's
    window.
    """
    table = np.repeat((len(paths) - firsts).astype(np.int32)[:, None], MOST_ROWS, axis=1)
    for row, path in enumerate(paths):
        table[row, : len(path)] = path
    return table


def spared(record: Array, poison: Poison) -> Array:
    """A record with rows of poison after it."""
    room = np.empty((SPARE_ROWS, *record.shape[1:]), record.dtype)
    return np.concatenate([record, poison.filled(room.nbytes).view(record.dtype).reshape(room.shape)])
