"""An fp8 cache row: e4m3 codes and one power of two. Spec attention §4, numerics §1.

value = code · 2^e, exact in bf16. A row's exponent e is the least for which its largest magnitude, times 2^-e, is at most
448, kept in LEAST .. MOST, where every value but zero is a normal bf16 number; a row of zeros has e = 0. NaNs do not count,
infinities count as the largest magnitude there is. Codes saturate at ±448 and stay NaN: 0x7F.

In a page, a plane of codes is [HK, PTOK, D] bytes and a plane of exponents int8 [HK, PTOK]. Integers and exact products
alone: no architecture's conversion instruction is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.machine import bf16_high, bf16_low, bits_float, float32, float_bits, int64, lanewise, uint32

KV_TYPES = ("bf16", "fp8")
"""Compile-time argument ``kv`` of the kernels that read or write caches."""
LEAST, MOST = -117, 119
"""Exponents."""
NAN_CODE = 0x7F
LARGEST_CODE = 0x7E
"""448."""
NORMAL_BITS = 0x3C800000
"""2^-6 as float32: from here on a code has an exponent of its own."""
SUBNORMAL_ROUNDER = 16384.0
"""2^14: adding it to |x| < 2^-6 leaves the nearest multiple of 2^-9, ties to even, in the low bits."""
SUBNORMAL_ROUNDER_BITS = 0x46800000


def row_words(D: int, kv: str) -> int:
    """Words of a row of a plane of keys or values."""
    return D // 4 if kv == "fp8" else D // 2


def as_bytes(arena: Any) -> Any:
    """The arena's memory as uint8, for stores of one exponent."""
    return arena.view(np.uint8)


# --- Narrow -----------------------------------------------------------------------------------------------------------


@lanewise
def magnitude(word):
    """The larger magnitude of two bf16, its 15 bits as int64; a NaN counts as zero."""
    low, high = int64(word) & 0x7FFF, int64(word) >> 16 & 0x7FFF
    return max(low if low <= 0x7F80 else int64(0), high if high <= 0x7F80 else int64(0))


@lanewise
def exponent_of(largest):
    """e of a row, int64. largest: the 15 bits of its largest magnitude, as ``magnitude`` gives them."""
    e = (largest >> 7) - 135 + (int64(1) if largest & 0x7F > 0x60 else int64(0))
    return min(max(e, int64(LEAST)), int64(MOST)) if largest != 0 else int64(0)


@lanewise
def power(e):
    """2^e, float32; e: int64 in -126 .. 127."""
    return bits_float(uint32((e + 127) << 23))


@lanewise
def e4m3(x):
    """The code of a float32, int64: nearest, ties to even; saturates at ±448; a NaN is 0x7F."""
    bits = int64(float_bits(x))
    positive = bits & 0x7FFFFFFF
    normal = (positive + 0x7FFFF + (positive >> 20 & 1) >> 20) - (120 << 3)
    small = int64(float_bits(bits_float(uint32(positive)) + float32(SUBNORMAL_ROUNDER))) - SUBNORMAL_ROUNDER_BITS
    code = min(normal, int64(LARGEST_CODE)) if positive >= NORMAL_BITS else small
    return int64(NAN_CODE) if positive > 0x7F800000 else code | (bits >> 24 & 0x80)


@lanewise
def narrow_pair(word, scale):
    """The codes of two bf16, in the low 16 bits of an int64. scale: 2^-e."""
    return e4m3(bf16_low(word) * scale) | e4m3(bf16_high(word) * scale) << 8


# --- Widen ------------------------------------------------------------------------------------------------------------


@lanewise
def widen(code, e):
    """code · 2^e as the 16 bits of a bf16, int64; a NaN is 0x7FFF. code: int64, its low byte counts; e: int64."""
    field = code >> 3 & 15
    significand = (code & 7) + (int64(8) if field > 0 else int64(0))
    value = float32(significand) * power(max(field, int64(1)) - 10 + e)
    bits = int64(float_bits(value)) >> 16 | (code & 0x80) << 8
    return int64(0x7FFF) if code & 0x7F == NAN_CODE else bits


@lanewise
def widen_pair(codes, e):
    """Two bf16 in one word, of the codes in the low 16 bits of an int64."""
    return uint32(widen(codes, e) | widen(codes >> 8, e) << 16)


@lanewise
def exponent_at(arena, at):
    """The exponent at byte ``at`` of the arena, int64."""
    byte = int64(arena[at >> 2]) >> 8 * (at & 3) & 0xFF
    return byte - 256 if byte > 127 else byte
