"""Attention in float64 on plain NumPy arrays: what the prompt and decode kernels compute, before any rounding.

Beside each output stand the sums that bounds.py needs. Inputs are taken as they are stored (bf16 values are exact in
float64).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Attended:
    """An exact attention result, with w a key's weight, s its scaled score, m the largest s of the row.

    out: [W, H, D]. reach: Σ w·|v|. scores: Σ w·a·|v| + |out|·Σ w·a with a = scale·Σ|q·k|, how a relative error of the
    products of a score shows in the output. depth: Σ w·(m - s)·|v| + |out|·Σ w·(m - s), the same for an error that
    grows with m - s. keys: the most keys that a row sees.
    """

    out: Float64
    reach: Float64
    scores: Float64
    depth: Float64
    keys: int


def attend(q: NDArray, k: NDArray, v: NDArray, visible: NDArray[np.bool_], scale: float) -> Attended:
    """Softmax attention. q: [W, H, D], k, v: [N, HK, D], visible: bool [W, N], each row sees a key at least.

    Raises ValueError when a row sees no key or the heads do not divide.
    """
    q, k, v = (np.asarray(a).astype(np.float64) for a in (q, k, v))
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads: must be a multiple of {k.shape[1]} KV heads")
    if not visible.any(axis=1).all():
        raise ValueError(f"row {int(np.argmin(visible.any(axis=1)))} sees no key")
    heads = [_one_head(q[:, h], k[:, g], v[:, g], visible, scale) for h, g in _head_pairs(q.shape[1], k.shape[1])]
    out, reach, scores, depth = (np.stack(part, axis=1) for part in zip(*heads, strict=True))
    return Attended(out, reach, scores, depth, int(visible.sum(axis=1).max()))


def _head_pairs(heads: int, kv_heads: int) -> list[tuple[int, int]]:
    """(query head, its KV head)."""
    return [(h, h // (heads // kv_heads)) for h in range(heads)]


def _one_head(
    q: Float64, k: Float64, v: Float64, visible: NDArray[np.bool_], scale: float
) -> tuple[Float64, Float64, Float64, Float64]:
    """(out, reach, scores, depth) of one head: q [W, D], k, v [N, D] -> [W, D] each."""
    s = np.where(visible, q @ k.T * scale, -np.inf)
    below = s.max(axis=1, keepdims=True) - s
    w = np.exp(-below)
    w /= w.sum(axis=1, keepdims=True)
    out, size = w @ v, np.abs(v)
    products = w * (np.abs(q) @ np.abs(k).T * abs(scale))
    depths = w * np.where(visible, below, 0.0)
    return out, w @ size, _weighted(products, size, out), _weighted(depths, size, out)


def _weighted(errors: Float64, size: Float64, out: Float64) -> Float64:
    """What relative errors of the weights do to a quotient: numerator, and denominator times the result."""
    return errors @ size + np.abs(out) * errors.sum(axis=1, keepdims=True)


def prompt_attention(q: NDArray, k: NDArray, v: NDArray, committed: int, scale: float) -> Attended:
    """Row r of q [W, H, D] sees keys 0 .. committed + r of k, v [N, HK, D]."""
    last = committed + np.arange(len(q))
    return attend(q, k, v, np.arange(len(k)) <= last[:, None], scale)


def decode_attention(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    record_k: NDArray,
    record_v: NDArray,
    paths: NDArray,
    depths: NDArray,
    scale: float,
) -> Attended:
    """Rows of one stream's window: q [w, H, D] see all committed keys k, v [p, HK, D], then their own path.

    record_k, record_v: [w, HK, D], the window's own rows; path entry i < depths[r] of row r is window row paths[r, i].
    """
    committed, rows = len(k), len(q)
    seen = np.zeros((rows, committed + rows), np.bool_)
    seen[:, :committed] = True
    for row in range(rows):
        seen[row, committed + paths[row, : depths[row]].astype(np.int64)] = True
    return attend(q, np.concatenate([k, record_k]), np.concatenate([v, record_v]), seen, scale)
