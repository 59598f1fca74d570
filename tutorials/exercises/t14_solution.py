"""Solutions of tutorial 14: tensor cores, to the bit."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np


def kept(x: Fraction) -> Fraction:
    """24 bits of a number, from its first one on; the rest is cut off toward zero."""
    if x == 0:
        return x
    unit = Fraction(2) ** (_exponent(x) - 23)
    return int(x / unit) * unit


def mma(a: Sequence[float], b: Sequence[float], c: float) -> np.float32:
    """One output of the tensor core: c + the sum of a · b, as a float32."""
    factors = [(Fraction(float(x)), Fraction(float(y))) for x, y in zip(a, b)] + [(Fraction(float(c)), Fraction(1))]
    there = [(x, y) for x, y in factors if x * y]
    if not there:
        return np.float32(0)
    largest = max(_exponent(x) + _exponent(y) for x, y in there)
    unit = Fraction(2) ** (largest - 25)
    return np.float32(float(kept(sum(int(x * y / unit) for x, y in there) * unit)))


def dot(x: Sequence[float], w: Sequence[float]) -> np.float32:
    """The sum of x · w as the matmul kernel makes it, as a float32."""
    total = np.float32(0)
    for first in range(0, len(x), 16):
        total = mma(x[first : first + 16], w[first : first + 16], total)
    return total


def _exponent(x: Fraction) -> int:
    """e of |x| = 2^e · 1.xyz."""
    e = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return e if abs(x) >= Fraction(2) ** e else e - 1
