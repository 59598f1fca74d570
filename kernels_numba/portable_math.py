"""Exponentials and logarithms from fma, integers and bits alone, so that a CPU and a GPU give the same bits.

Every function takes and gives float32. Errors are relative, against the exact value of the function at the float32
argument, with u = 2^-24. Spec numerics §1 and §3.
"""

from __future__ import annotations

from .machine import bits_float, float32, float_bits, fma, int64, lanewise, sqrt, uint32

LOG2E = 1.4426950408889634
LN2_HIGH = 0.693359375
"""ln 2 to 9 bits after the leading one: its product with an exponent is exact."""
LN2_LOW = -2.12194440054690583e-4
ROUNDER = 12582912.0
"""1.5 · 2^23: adding it to |t| < 2^22 leaves the nearest integer, ties to even, in the low bits."""
SQRT_HALF_BITS = 0x3F3504F3
SUBNORMAL_SCALE = 8388608.0
"""2^23 lifts every subnormal into the normal range."""


@lanewise
def exp2_fraction(f):
    """2^f for f in [-1/2, 1/2], float32: 1 + f · q(f), exact at 0."""
    q = fma(float32(1.559467782e-4), f, float32(1.3406643411e-3))
    q = fma(q, f, float32(9.617692791e-3))
    q = fma(q, f, float32(5.5503103882e-2))
    q = fma(q, f, float32(2.4022652209e-1))
    q = fma(q, f, float32(6.9314724207e-1))
    return fma(q, f, float32(1.0))


@lanewise
def exp2_scaled(t):
    """2^t for -126 <= t < 128, float32; what it gives elsewhere is not meant to be used.

    t = n + f with n the nearest integer: 2^f in [0.70, 1.42] times 2^n is an addition to the exponent's bits.
    """
    rounded = t + float32(ROUNDER)
    fraction = exp2_fraction(t - (rounded - float32(ROUNDER)))
    return bits_float(uint32(float_bits(fraction) + (float_bits(rounded) << uint32(23))))


@lanewise
def exp2(t):
    """2^t, float32. Relative error at most 2^-22; exact at integers.

    t < -126, where the result would be subnormal, gives 0 (flushed), t >= 128 gives +inf, NaN stays NaN.
    """
    infinity = bits_float(uint32(0x7F800000))
    edge = float32(0.0) if t < float32(-126.0) else (infinity if t >= float32(128.0) else t)
    return exp2_scaled(t) if float32(-126.0) <= t < float32(128.0) else edge


@lanewise
def exp2_to_one(t):
    """exp2(t) for t that is at most 0 or NaN, the same bits: no overflow to look for."""
    return exp2_scaled(t) if t >= float32(-126.0) else (float32(0.0) if t < float32(-126.0) else t)


@lanewise
def exp(x):
    """e^x = exp2(fl(x · log2 e)), float32: E of spec numerics §3. exp(0) = 1.

    exp2 adds at most 2^-22; the rounded product adds at most |x| · 1.25 u. x below -87.33 gives 0, x above 88.72
    gives +inf, NaN stays NaN.
    """
    return exp2(x * float32(LOG2E))


@lanewise
def exp_to_one(x):
    """exp(x) for x that is at most 0 or NaN, the same bits: what a softmax needs."""
    return exp2_to_one(x * float32(LOG2E))


@lanewise
def log_significand(m):
    """log m for m in [sqrt 1/2, sqrt 2], float32: f - f²/2 + f³ · P(f) with f = m - 1."""
    f = m - float32(1.0)
    p = fma(float32(-0.07634498924), f, float32(0.1276157796))
    p = fma(p, f, float32(-0.1316018254))
    p = fma(p, f, float32(0.1420175731))
    p = fma(p, f, float32(-0.1662335694))
    p = fma(p, f, float32(0.2000122666))
    p = fma(p, f, float32(-0.2500081956))
    p = fma(p, f, float32(0.3333333135))
    return fma(f * f, fma(p, f, float32(-0.5)), f)


@lanewise
def log_finite(x):
    """log x for finite x > 0, float32: x = m · 2^e with m in [sqrt 1/2, sqrt 2)."""
    subnormal = x < float32(1.1754943508222875e-38)
    normal = x * float32(SUBNORMAL_SCALE) if subnormal else x
    bits = int64(float_bits(normal))
    exponent = (bits - SQRT_HALF_BITS) >> 23
    part = log_significand(bits_float(uint32(bits - (exponent << 23))))
    e = float32(exponent - 23 if subnormal else exponent)
    return fma(e, float32(LN2_HIGH), fma(e, float32(LN2_LOW), part))


@lanewise
def log(x):
    """Natural logarithm, float32. Relative error at most 2^-22; log(1) = 0.

    0 gives -inf, +inf stays, a negative argument or NaN gives NaN.
    """
    infinity = bits_float(uint32(0x7F800000))
    nan = bits_float(uint32(0x7FC00000))
    edge = -infinity if x == float32(0.0) else (x if x == infinity else nan)
    return log_finite(x) if float32(0.0) < x < infinity else edge


@lanewise
def softplus(x):
    """x if x > 20 else log(1 + exp(x)), float32, each operation rounded as written (absolute error at most 2^-22 ·
    max(1, |x|)).
    """
    return x if x > float32(20.0) else log(float32(1.0) + exp(x))


@lanewise
def sigmoid(x):
    """1 / (1 + exp(-x)), float32. Relative error at most 2^-22 + (|x| + 2) · 1.5 u; below -88.72 it is 0."""
    return float32(1.0) / (float32(1.0) + exp(-x))


@lanewise
def silu(x):
    """x · sigmoid(x), float32; the sigmoid's relative error and one rounding more. -inf gives NaN."""
    return x * sigmoid(x)


@lanewise
def rsqrt(x):
    """1 / sqrt(x), float32, both correctly rounded: relative error at most 1.5 u."""
    return float32(1.0) / sqrt(x)
