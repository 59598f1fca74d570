"""Exercises of tutorial 01: what a KV cache is. Replace each ``raise NotImplementedError`` by your answer."""

import numpy as np


def cache_bytes(layers: int, kv_heads: int, head_dim: int, positions: int, number_bytes: int = 2) -> int:
    """Bytes of a KV cache.

    layers: attention layers. Each keeps, for every position and KV head, a key and a value of ``head_dim`` numbers of
    ``number_bytes`` bytes.
    """
    raise NotImplementedError


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention of one query.

    q: [D]; k, v: [n, D], n at least 1. A score is q · k / sqrt(D). Returns [D]: the values, weighted by the softmax of the
    scores. Scores may be in the thousands, where exp overflows: subtract the largest from all of them first.
    """
    raise NotImplementedError


def step(cache: list[tuple[np.ndarray, np.ndarray]], q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One new token through the cache: it is stored, then its query looks at all that is stored, itself too.

    cache: (key, value) of each token so far; the new token's are appended. q, k, v: [D], the new token's. Returns its attention
    output: [D].
    """
    raise NotImplementedError
