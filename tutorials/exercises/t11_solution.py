"""Solutions of tutorial 11: fp8."""

import numpy as np


def row_exponent(row: np.ndarray) -> int:
    """e of a row: the least with max|x| · 2^-e <= 448."""
    largest = max((abs(x) for x in row.tolist() if x == x), default=0.0)
    if largest == 0:
        return 0
    e = -117
    while e < 119 and largest * 2.0**-e > 448:
        e += 1
    return e


def value_of(code: int) -> float:
    """What an e4m3 code stands for."""
    sign, exponent, part = (-1) ** (code >> 7), code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * part / 8 * 2.0**-6
    return sign * (1 + part / 8) * 2.0 ** (exponent - 7)


def nearest_code(x: float) -> int:
    """The code of a number: the nearest, of two equally near the even one; beyond ±448 that of ±448; of a NaN 0x7F."""
    if x != x:
        return 0x7F
    sign = 0x80 if np.signbit(x) else 0
    size = min(abs(x), 448.0)
    return sign | min(range(0x7F), key=lambda code: (abs(value_of(code) - size), code % 2))
