"""Which tokens a draw may give, in float64: the noise from the same integers, and a margin for what float32 rounds.

To first order, with U = 2^-24 and z = (logit - best) / temperature, a kernel's score z + g is off by at most
2^-22 · (1 + |g|) for the noise (kernels_numba/philox.py), 2 U · |z| for the two roundings of z and U · |z + g| for the
sum. The drawn token's score in the kernel is the largest; so in float64 it is at most the two tokens' margins below any
other. Where that leaves several tokens, any of them may be drawn; but of tokens with the same logit and the same noise
the kernel takes the lowest, whatever it rounds.

Top-k compares logits and is exact. Top-p compares sums of weights: a weight is off by 2^-22 and 3.25 U · |z| of itself
(z, the product with log2 e, exp2), below 2^-126 by all of it, and a sum of weights by U of itself an addition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bounds import EXP2, EXP_DEPTH, SECOND_ORDER, U

Array = NDArray[Any]
THREADS = 1024
TREE = 10
"""Additions that join the sums of 1024 threads, one after the other."""
LOG = 2.0**-22
"""Relative error of log (kernels_numba/portable_math.py)."""
SMALLEST_NORMAL = 2.0**-126
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)


def philox(counter: Array, key: Array) -> Array:
    """Philox4x32-10: four words for each counter. counter: uint32 [..., 4]; key: uint32 [2]."""
    words, (k0, k1) = [counter[..., i] for i in range(4)], key.astype(np.uint32)
    for _ in range(10):
        (high0, low0), (high1, low1) = product(words[0], MULTIPLIERS[0]), product(words[2], MULTIPLIERS[1])
        words = [high1 ^ words[1] ^ k0, low1, high0 ^ words[3] ^ k1, low0]
        k0, k1 = np.add([k0, k1], WEYL, dtype=np.uint32)
    return np.stack(words, axis=-1)


def product(a: Array, b: np.uint64) -> tuple[Array, Array]:
    """The high and low words of a · b."""
    wide = a.astype(np.uint64) * b
    return (wide >> np.uint64(32)).astype(np.uint32), wide.astype(np.uint32)


def noise_numbers(seed: int, position: int, vocabulary: int) -> Array:
    """The odd n of the uniform number n · 2^-24 of every token: int64 [vocabulary]."""
    counter = np.zeros((vocabulary, 4), np.uint32)
    counter[:, 0], counter[:, 1:3] = np.arange(vocabulary), halves(position)
    return philox(counter, halves(seed))[:, 0].astype(np.int64) // 512 * 2 + 1


def halves(wide: int) -> Array:
    """The low and the high word."""
    return np.array([wide & 0xFFFFFFFF, wide >> 32], np.uint32)


@np.errstate(invalid="ignore", over="ignore")
def candidates(logits: Array, seed: int, position: int, temperature: float, top_k: int, top_p: float) -> Array:
    """The tokens that a kernel may draw, ascending; [-1] where there is none. logits: float32 [vocabulary]."""
    logits, temperature, top_p = logits.astype(np.float64), float(temperature), float(top_p)
    if not temperature > 0:
        return greedy(logits)
    allowed = kept_by_top_k(logits, logits > -np.inf, top_k)
    if not allowed.any():
        return np.array([-1])
    best = logits[allowed].max()
    z = np.where(logits == best, 0.0, (logits - best) / temperature)
    must, may = kept_by_top_p(logits, z, allowed, top_p)
    numbers = noise_numbers(seed, position, len(logits))
    noise = -np.log(-np.log(numbers * U))
    score, margin = z + noise, SECOND_ORDER * margins(z, noise)
    found = np.flatnonzero(may & (score + margin >= (score - margin)[must].max()))
    _, lowest = np.unique(np.stack([logits[found], numbers[found]]), axis=1, return_index=True)
    return found[np.sort(lowest)]


def greedy(logits: Array) -> Array:
    """The lowest of the largest; -1 where all are NaN."""
    equal = np.flatnonzero(logits == np.where(np.isnan(logits), -np.inf, logits).max())
    return equal[:1] if len(equal) else np.array([-1])


def margins(z: Array, noise: Array) -> Array:
    """How far a score may be off."""
    return LOG * (1 + np.abs(noise)) + 2 * U * np.abs(z) + U * np.abs(z + noise)


def kept_by_top_k(logits: Array, allowed: Array, k: int) -> Array:
    """Of the allowed, the k largest and what equals the k-th. bool [vocabulary]."""
    values = np.sort(logits[allowed])
    return allowed & (logits >= values[-k]) if 0 < k < len(values) else allowed


def kept_by_top_p(logits: Array, z: Array, allowed: Array, p: float) -> tuple[Array, Array]:
    """(what top-p surely keeps, what it may keep), bool [vocabulary]: the fewest of the largest that weigh p of all."""
    if p >= 1:
        return allowed, allowed
    negated, group = np.unique(-logits[allowed], return_inverse=True)
    weight = np.exp(z[allowed])
    depth = np.abs(np.where(weight > 0, z[allowed], 0.0))
    lost = weight * (EXP2 + (EXP_DEPTH + U) * depth) + np.minimum(weight, SMALLEST_NORMAL)
    reached, own = (np.cumsum(np.bincount(group, w, len(negated))) for w in (weight, lost))
    off = SECOND_ORDER * (own + (-(-len(logits) // THREADS) + TREE) * U * reached)
    wanted, around = p * reached[-1], p * off[-1] + SECOND_ORDER * U * p * reached[-1]
    possibly, surely = reached + off >= wanted - around, reached - off >= wanted + around
    # The sum of all is the one that p is taken of: it reaches, whatever was rounded.
    surely[-1] = True
    least, most = (allowed & (-logits <= negated[reach.argmax()]) for reach in (possibly, surely))
    return least, most
