"""What a row of sparse attention reads, by a stable sort. Spec flash-next."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 4
"""Positions a block."""


def listed_keys(scores: NDArray[np.float32], end: int, budget: int) -> NDArray[np.int64]:
    """The positions of a row's keys in order. scores: of its complete blocks, and maybe more. end: its position + 1.

    All of them while there are at most ``budget`` complete blocks; else those of the best blocks, of equal scores the lower
    block, then the tail. NaN ranks as -inf.
    """
    complete = end // BLOCK
    if complete <= budget:
        return np.arange(end)
    own = np.where(np.isnan(scores[:complete]), -np.inf, scores[:complete])
    best = np.argsort(-own, kind="stable")[:budget]
    blocks = np.sort(best)[:, None] * BLOCK + np.arange(BLOCK)
    return np.concatenate([blocks.reshape(-1), np.arange(complete * BLOCK, end)])
