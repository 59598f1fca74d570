"""Bank conflicts of shared memory: 32 banks, a word of 4 bytes wide, each of which serves one word a pass.

A warp's access of 4 bytes a lane is one request; of 8 bytes two, a half-warp each; of 16 bytes four, a quarter-warp each. A
request takes as many passes as the busiest bank has distinct words to serve; lanes that share a word share its pass.
"""

from __future__ import annotations

import numpy as np

BANKS = 32
BANK_BYTES = 4


def requests_and_passes(lanes: np.ndarray, byte: np.ndarray, width: int) -> tuple[int, int]:
    """(requests, passes) of one access. lanes: int [n], which lanes take part; byte: int64 [n], where each one's ``width``
    bytes start. Without conflicts the two are equal.
    """
    if not len(lanes):
        return 0, 0
    request = lanes // (32 * BANK_BYTES // max(BANK_BYTES, width))
    words = -(-width // BANK_BYTES)
    word = (byte // BANK_BYTES)[:, None] + np.arange(words)
    pairs = np.unique(np.stack([np.repeat(request, words), word.reshape(-1)], axis=1), axis=0)
    banks, counts = np.unique(pairs[:, 0] * BANKS + pairs[:, 1] % BANKS, return_counts=True)
    numbers = np.unique(pairs[:, 0])
    return len(numbers), sum(int(counts[banks // BANKS == n].max()) for n in numbers)
