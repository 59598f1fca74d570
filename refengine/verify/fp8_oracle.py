"""fp8 rows by NumPy alone: ml_dtypes' conversion, clamped before it, and ldexp. Spec attention §4."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
LARGEST = 448.0
LEAST, MOST = -117, 119


def exponents(rows: np.ndarray) -> np.ndarray:
    """int8 [...]: of rows bf16 [..., D], the least e with max|x| · 2^-e <= 448; NaNs do not count."""
    with np.errstate(invalid="ignore"):
        largest = np.fmax.reduce(np.abs(rows.astype(np.float64)), axis=-1, initial=0.0)
    finite = np.minimum(largest, float(ml_dtypes.finfo(BF16).max))
    _, e = np.frexp(finite / LARGEST)  # finite / 448 = m · 2^e, 1/2 <= m < 1
    exact = np.ldexp(LARGEST, e - 1) == finite
    return np.where(finite == 0, 0, np.clip(e - exact, LEAST, MOST)).astype(np.int8)


def narrowed(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes uint8 [..., D], exponents int8 [...]) of rows bf16 [..., D]."""
    e = exponents(rows)
    scaled = np.ldexp(rows.astype(np.float64), -e[..., None].astype(np.int32))
    codes = np.clip(scaled, -LARGEST, LARGEST).astype(np.float32).astype(E4M3).view(np.uint8)
    return np.where(np.isnan(scaled), np.uint8(0x7F), codes), e


def widened(codes: np.ndarray, e: np.ndarray) -> np.ndarray:
    """bf16 [..., D]: code · 2^e."""
    with np.errstate(over="ignore"):  # poison for exponents
        values = np.ldexp(codes.view(E4M3).astype(np.float64), e[..., None].astype(np.int32)).astype(BF16)
    return np.where(codes & 0x7F == 0x7F, np.uint16(0x7FFF), values.view(np.uint16)).view(BF16)


def through_fp8(rows: np.ndarray) -> np.ndarray:
    """bf16 [..., D]: what an fp8 cache gives back of these rows."""
    return widened(*narrowed(rows))
