"""What the n-gram branch's hash is made of: odd multipliers, a prime number of rows for each head, and where its rows start.

A checkpoint stores the same numbers; they follow from the model's sizes and a seed. Spec flash-next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import isqrt

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
"""What splitmix64 adds: 2^64 divided by the golden ratio."""
SEED_STRIDE = 10007
"""How far apart the seeds of two layers' hashes are."""


@dataclass(frozen=True)
class NgramHash:
    """Row of head h of an n-gram: offsets[h] + XOR of token · multiplier over its n tokens, newest first, modulo sizes[h].

    Heads come n by n: first those of pairs, then those of triples, and so on. rows: of the whole table, padded.
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: int


@cache
def ngram_hash(vocabulary: int, size: int, heads: int, base: int, divisor: int, seed: int, index: int = 0) -> NgramHash:
    """The hash of the ``index``-th n-gram layer of a model.

    size: the longest n-gram's tokens, at least 2; heads: for each length from 2 on; base: no head has fewer rows; divisor: of
    the table's rows. A product of a token and a multiplier stays below 2^63.
    """
    count = (size - 1) * heads
    sizes = primes_from(base, (index + 1) * count)[index * count :]
    offsets = tuple(sum(sizes[:h]) for h in range(count))
    rows = -(-sum(sizes) // divisor) * divisor
    return NgramHash(multipliers(vocabulary, size, seed + SEED_STRIDE * index), sizes, offsets, rows)


def multipliers(vocabulary: int, size: int, seed: int) -> tuple[int, ...]:
    """Odd numbers, one a token of an n-gram, each at most (2^63 - 1) / vocabulary."""
    half = max(1, (2**63 - 1) // vocabulary // 2)
    return tuple(2 * (splitmix64((seed + GOLDEN * (i + 1)) & MASK) % half) + 1 for i in range(size))


def splitmix64(value: int) -> int:
    """A step of the generator splitmix64: 64 bits to 64 bits."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def primes_from(start: int, count: int) -> tuple[int, ...]:
    """The first ``count`` primes that are at least ``start``."""
    found: list[int] = []
    number = max(start, 2)
    while len(found) < count:
        if all(number % d for d in range(2, isqrt(number) + 1)):
            found.append(number)
        number += 1
    return tuple(found)
