"""Exercises of tutorial 06: decode: chunks, groups, merge. Replace each ``raise NotImplementedError`` by your answer."""

from collections.abc import Callable
from typing import Any

import numpy as np

Part = tuple[float, float, np.ndarray]
"""(m, l, o) of some keys: the largest score, the sum of exp(score - m), and of exp(score - m) · value, [D]."""


def slots(committed: int, rows: int) -> tuple[int, int]:
    """(groups that a block folds whole, partials of a row in all).

    A chunk has 512 keys, a group 2,048, both counted from position 0. Of ``committed`` keys the whole groups are folded in blocks
    where their number times ``rows`` is 64 or more, else none is. A folded group is one partial. So is each chunk behind them up
    to the last of committed + rows positions, even if it is not full. No rows: no partials.
    """
    raise NotImplementedError


def fold(part: Part, other: Part) -> Part:
    """Both parts as one.

    An empty part is (-inf, 0.0, zeros); either or both may be it. Joined to an empty one, a part is as it was. No NaN may come
    out: -inf - -inf is one.
    """
    raise NotImplementedError


def merge(chunks: list[Any], fold: Callable[[Any, Any], Any], empty: Any) -> Any:
    """The row of all chunks, in the order of the engine's tree.

    Chunks are folded in order into their group, which starts as ``empty``; a group has four chunks, the last one maybe fewer.
    Groups are folded in order into the row, which starts as ``empty``, too. fold(part, other) joins two parts, the one that
    was there first.
    """
    raise NotImplementedError
