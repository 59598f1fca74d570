"""Solutions of tutorial 06: decode: chunks, groups, merge."""

from collections.abc import Callable
from typing import Any

import numpy as np

Part = tuple[float, float, np.ndarray]
"""(m, l, o) of some keys: the largest score, the sum of exp(score - m), and of exp(score - m) · value, [D]."""


def slots(committed: int, rows: int) -> tuple[int, int]:
    """(groups that a block folds whole, partials of a row in all)."""
    if rows == 0:
        return 0, 0
    groups = committed // 2048
    if groups * rows < 64:
        groups = 0
    chunks = -(-(committed + rows) // 512)
    return groups, groups + chunks - 4 * groups


def fold(part: Part, other: Part) -> Part:
    """Both parts as one."""
    if other[1] == 0:
        return part
    if part[1] == 0:
        return other
    m = max(part[0], other[0])
    a, b = np.exp(part[0] - m), np.exp(other[0] - m)
    return m, part[1] * a + other[1] * b, part[2] * a + other[2] * b


def merge(chunks: list[Any], fold: Callable[[Any, Any], Any], empty: Any) -> Any:
    """The row of all chunks, in the order of the engine's tree."""
    row = empty
    for first in range(0, len(chunks), 4):
        group = empty
        for chunk in chunks[first : first + 4]:
            group = fold(group, chunk)
        row = fold(row, group)
    return row
