"""Exercises of tutorial 14: tensor cores, to the bit. Replace each ``raise NotImplementedError`` by your answer."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np


def kept(x: Fraction) -> Fraction:
    """24 bits of a number, from its first one on; the rest is cut off toward zero.

    Fractions are exact. kept(Fraction(1, 3)) is 11184810 / 2^25: 11184810 has 24 bits. kept(-x) is -kept(x); 0 stays 0.
    """
    raise NotImplementedError


def mma(a: Sequence[float], b: Sequence[float], c: float) -> np.float32:
    """One output of the tensor core: c + the sum of a · b, as a float32.

    a, b: 16 bf16 numbers each; c: a float32. The exponent of x is the e of |x| = 2^e · 1.xyz; that of a product is
    the sum of its factors'. Each of the 17 terms is cut toward zero to a multiple of 2^(largest exponent - 25),
    zeros taking no part; they are added exactly; 24 bits of the sum are kept. No result is subnormal or infinite.
    If all terms are zero, it is 0.
    """
    raise NotImplementedError


def dot(x: Sequence[float], w: Sequence[float]) -> np.float32:
    """The sum of x · w as the matmul kernel makes it, as a float32.

    x, w: K bf16 numbers each, K a multiple of 16. One ``mma`` for each 16, in order; the first begins with 0.
    """
    raise NotImplementedError
