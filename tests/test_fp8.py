"""An fp8 row: every code and every midpoint as ml_dtypes has them, saturation, NaN and zero rows. Spec numerics §1."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_numba import fp8
from kernels_numba.machine import cuda, int32, int64, kernel, uint32
from refengine.verify import fp8_oracle

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
THREADS = 128
CODES = np.arange(256, dtype=np.uint32)
VALUES = CODES.astype(np.uint8).view(E4M3).astype(np.float32)


@kernel
def narrow_all(out, x):
    """out: uint32 [N], x: float32 [N]. Launch: grid N / 128, 128 threads."""
    i = int64(cuda.blockIdx.x) * THREADS + int64(cuda.threadIdx.x)
    if i < x.shape[0]:
        out[i] = uint32(fp8.e4m3(x[i]))


@kernel
def widen_all(out, codes, e):
    """out: uint32 [N], codes: uint32 [N], e: int32 [N]. Launch: as narrow_all."""
    i = int64(cuda.blockIdx.x) * THREADS + int64(cuda.threadIdx.x)
    if i < out.shape[0]:
        out[i] = fp8.widen_pair(int64(codes[i]), int64(e[i]))


@kernel
def exponent_all(out, words):
    """out: int32 [N], words: uint32 [N]. Launch: as narrow_all."""
    i = int64(cuda.blockIdx.x) * THREADS + int64(cuda.threadIdx.x)
    if i < out.shape[0]:
        out[i] = int32(fp8.exponent_of(fp8.magnitude(words[i])))


def blocks(n: int) -> int:
    return -(-n // THREADS)


def narrowed(x: np.ndarray) -> np.ndarray:
    out = np.empty(len(x), np.uint32)
    narrow_all.at()[blocks(len(x)), THREADS](out, x)
    return out.astype(np.uint8)


def widened(codes: np.ndarray, e: np.ndarray) -> np.ndarray:
    """The bf16 bits of single codes."""
    out = np.empty(len(codes), np.uint32)
    widen_all.at()[blocks(len(codes)), THREADS](out, codes.astype(np.uint32), e.astype(np.int32))
    return (out & 0xFFFF).astype(np.uint16)


def test_every_code_at_every_exponent_widens_exactly():
    codes, e = (a.reshape(-1) for a in np.meshgrid(CODES, np.arange(fp8.LEAST, fp8.MOST + 1), indexing="ij"))
    wanted = fp8_oracle.widened(codes.astype(np.uint8)[:, None], e.astype(np.int8))[:, 0]
    np.testing.assert_array_equal(widened(codes, e), wanted.view(np.uint16))
    finite = np.isfinite(wanted.astype(np.float64))
    exact = np.ldexp(VALUES[codes].astype(np.float64), e)
    np.testing.assert_array_equal(wanted.astype(np.float64)[finite], exact[finite])
    assert ((finite) | (codes & 0x7F == 0x7F)).all()


def test_the_high_code_of_a_pair_widens_as_the_low_one():
    out = np.empty(256, np.uint32)
    widen_all.at()[2, THREADS](out, CODES << 8 | CODES, np.full(256, 3, np.int32))
    np.testing.assert_array_equal(out >> 16, out & 0xFFFF)


def test_every_code_narrows_to_itself_and_no_code_gives_another_sign_of_zero():
    number = CODES[~np.isnan(VALUES)]
    np.testing.assert_array_equal(narrowed(VALUES[number]), number)
    assert narrowed(np.array([np.nan, -np.nan], np.float32)).tolist() == [0x7F, 0x7F]


def test_midpoints_go_to_even_and_their_neighbours_to_the_nearest():
    positive = VALUES[:0x7F]
    middle = (positive[:-1] + positive[1:]) / np.float32(2)
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(500))
    x = np.concatenate([middle, below, above, -middle, -below, -above])
    np.testing.assert_array_equal(narrowed(x), x.astype(E4M3).view(np.uint8))


@pytest.mark.parametrize(
    "x, code",
    [
        (448.0, 0x7E), (464.0, 0x7E), (464.01, 0x7E), (465.0, 0x7E), (1000.0, 0x7E), (np.inf, 0x7E), (-np.inf, 0xFE),
        (1e-4, 0), (2.0**-10, 0), (np.nextafter(np.float32(2.0**-10), np.float32(1)), 1), (-0.0, 0x80), (1e-45, 0),
    ],
)  # fmt: skip
def test_saturation_and_small_numbers(x, code):
    assert narrowed(np.array([x], np.float32))[0] == code


@given(st.integers(0, 2**32 - 1))
def test_any_float_narrows_as_ml_dtypes_does_once_clamped(bits):
    x = np.array([bits], np.uint32).view(np.float32)
    wanted = np.clip(x, -448, 448).astype(E4M3).view(np.uint8) if not np.isnan(x[0]) else [0x7F]
    assert narrowed(x)[0] == wanted[0]


def test_the_exponent_of_every_magnitude():
    words = np.arange(0x8000, dtype=np.uint32)
    out = np.empty(len(words), np.int32)
    exponent_all.at()[blocks(len(words)), THREADS](out, words | words << 16)
    rows = words.astype(np.uint16).view(BF16)[:, None]
    np.testing.assert_array_equal(out, fp8_oracle.exponents(rows))
    with np.errstate(invalid="ignore"):
        largest = np.abs(rows[:, 0].astype(np.float64))
    inner = (out > fp8.LEAST) & (out < fp8.MOST) & (largest > 0) & np.isfinite(largest)
    assert (np.ldexp(largest[inner], -out[inner]) <= 448).all()
    assert (np.ldexp(largest[inner], 1 - out[inner]) > 448).all()


def test_a_row_gives_back_the_same_values_when_it_is_narrowed_again():
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((4096, 64)) * np.exp2(rng.integers(-120, 110, (4096, 1)))).astype(BF16)
    once = fp8_oracle.through_fp8(rows)
    assert fp8_oracle.through_fp8(once).tobytes() == once.tobytes()


def test_rows_of_zeros_nans_and_infinities():
    rows = np.zeros((4, 64), BF16)
    rows[1, 3], rows[2, 5], rows[2, 6], rows[3, :] = np.nan, np.inf, 2.0, np.nan
    codes, e = fp8_oracle.narrowed(rows)
    assert e.tolist() == [0, 0, fp8.MOST, 0]
    assert codes[1, 3] == 0x7F and codes[2, 5] == 0x7E and codes[2, 6] == 0
    assert np.isfinite(fp8_oracle.widened(codes, e)[2].astype(np.float32)).all()
