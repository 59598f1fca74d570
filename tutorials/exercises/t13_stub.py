"""Exercises of tutorial 13: Flash Next's sparse attention.

Replace each ``raise NotImplementedError`` by your answer.
"""

import numpy as np


def keys_read(position: int, budget: int) -> int:
    """How many keys a token reads.

    position: the token's, from 0. budget: how many blocks of four positions it may read, at least 1. It reads all
    keys up to its own while it has no more complete blocks than that; beyond, those of ``budget`` blocks and the
    tail behind the last complete block.
    """
    raise NotImplementedError


def cut(scores: np.ndarray, budget: int) -> float:
    """The score at which a list ends: the largest that at least ``budget`` blocks reach.

    scores: float32, of a token's complete blocks, at least ``budget`` of them. A block reaches a score if its own
    is that or larger. The result is one of the scores.
    """
    raise NotImplementedError


def taken(scores: np.ndarray, cut_at: float, budget: int) -> list[int]:
    """The blocks of a list, ascending: all above the cut, and of those at it the lowest.

    scores, budget: as above. cut_at: what ``cut`` gives. Exactly ``budget`` blocks are taken.
    """
    raise NotImplementedError
