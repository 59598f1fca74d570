"""Solutions of tutorial 13: Flash Next's sparse attention."""

import numpy as np


def keys_read(position: int, budget: int) -> int:
    """How many keys a token reads."""
    end = position + 1
    return end if end // 4 <= budget else 4 * budget + end % 4


def cut(scores: np.ndarray, budget: int) -> float:
    """The score at which a list ends: the largest that at least ``budget`` blocks reach."""
    return float(max(score for score in scores if np.sum(scores >= score) >= budget))


def taken(scores: np.ndarray, cut_at: float, budget: int) -> list[int]:
    """The blocks of a list, ascending: all above the cut, and of those at it the lowest."""
    spare = budget - int(np.sum(scores > cut_at))
    found = []
    for block, score in enumerate(scores):
        at_it = score == cut_at and spare > 0
        spare -= at_it
        if score > cut_at or at_it:
            found.append(block)
    return found
