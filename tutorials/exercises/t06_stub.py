"""Exercises of tutorial 06: decode: chunks, groups, merge. Replace each ``raise NotImplementedError`` by your answer."""

from collections.abc import Callable
from typing import Any

import numpy as np

Part = tuple[float, float, np.ndarray]
"""(m, l, o) of some keys: the largest score, the sum of exp(score - m), and of exp(score - m) · value, [D]."""


def slots(committed: int, rows: int) -> tuple[int, int]:
    """(groups that a block folds whole, partials of a row in all).

    committed: positions in the cache. rows: new rows, which are positions behind these; no rows: (0, 0). The rule:
    "The code" of the tutorial.
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
