"""Noise that a key alone decides: Philox4x32-10, and Gumbel noise by seed, position and token. Spec numerics §6.

Philox is the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011), with their constants: ten rounds that mix a counter of four words with a key of two. It has no state, so noise
knows nothing of batches, rows or the order of draws.
"""

from __future__ import annotations

from .machine import float32, lanewise, uint32, uint64
from .portable_math import log

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
"""What a round adds to the key: the fractions of the golden ratio and of sqrt 3."""
ROUNDS = 10
STEP = 2.0**-24
"""Uniform numbers are its odd multiples."""


@lanewise
def philox(c0, c1, c2, c3, k0, k1):
    """Four random words of the counter (c0, c1, c2, c3) under the key (k0, k1); all uint32."""
    for _ in range(ROUNDS):
        first, second = uint64(c0) * uint64(MULTIPLIER_0), uint64(c2) * uint64(MULTIPLIER_1)
        c0, c2 = uint32(high_word(second) ^ c1 ^ k0), uint32(high_word(first) ^ c3 ^ k1)
        c1, c3 = uint32(second), uint32(first)
        k0, k1 = uint32(k0 + uint32(WEYL_0)), uint32(k1 + uint32(WEYL_1))
    return c0, c1, c2, c3


@lanewise
def high_word(wide):
    """The upper half of a uint64, uint32."""
    return uint32(wide >> uint64(32))


@lanewise
def uniform(word):
    """(2 · (word // 512) + 1) · 2^-24, float32: 2^23 numbers evenly in (0, 1), each exact."""
    return float32(uint32(uint32(word >> uint32(8)) | uint32(1))) * float32(STEP)


@lanewise
def gumbel(seed, position, token):
    """-log(-log u), float32, from -2.82 to 16.64. seed: uint64; position: int64, not negative; token: int32.

    u is ``uniform`` of Philox's first word. Counter: (token, position's low word, its high word, 0); key: (the seed's low
    word, its high word). Absolute error at most 2^-22 · (1 + |g|): each log is off by at most 2^-22 of itself, and what
    the inner one is off, relative to itself, the outer one adds.
    """
    at = uint64(position)
    word, _, _, _ = philox(uint32(token), uint32(at), high_word(at), uint32(0), uint32(seed), high_word(seed))
    return -log(-log(uniform(word)))
