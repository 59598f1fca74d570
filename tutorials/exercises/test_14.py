"""Tests of tutorial 14's exercises."""

from fractions import Fraction

import ml_dtypes
import numpy as np

from kernels_numba.matmul import matmul
from refengine.lab.exercises import expect, expect_bits
from refengine.lab.sources import ROOT

BF16 = ml_dtypes.bfloat16
FOUR, EIGHT = [1.0, *[2.0**-25] * 4, *[0.0] * 11], [1.0, *[2.0**-26] * 8, *[0.0] * 7]
ONES = [1.0] * 16


def test_kept_cuts_toward_zero(answers):
    """1. kept: a third, and minus a third"""
    third = Fraction(11_184_810, 2**25)
    expect("kept(Fraction(1, 3))", answers.kept(Fraction(1, 3)), third)
    expect("kept(Fraction(-1, 3))", answers.kept(Fraction(-1, 3)), -third)


def test_kept_keeps_24_bits(answers):
    """1. kept: whole numbers around 2^24"""
    for x, wanted in ((0, 0), (1, 1), (2**24 - 1, 2**24 - 1), (2**24 + 1, 2**24), (2**25 + 7, 2**25 + 4)):
        expect(f"kept(Fraction({x}))", answers.kept(Fraction(x)), Fraction(wanted))


def test_mma_by_hand(answers):
    """2. mma: the tutorial's examples"""
    expect_bits("mma(1 and 4 of 2^-25, ones, 0)", answers.mma(FOUR, ONES, 0.0), np.float32(1 + 2.0**-23))
    expect_bits("mma(1 and 8 of 2^-26, ones, 0)", answers.mma(EIGHT, ONES, 0.0), np.float32(1))
    minus = [-1.0, *[0.0] * 15]
    expect_bits("mma([-1, 0, ...], ones, 2^-25)", answers.mma(minus, ONES, 2.0**-25), np.float32(-1 + 2.0**-24))


def test_mma_of_zeros(answers):
    """2. mma: zeros take no part"""
    zeros = [0.0] * 16
    expect_bits("mma(zeros, ones, 0)", answers.mma(zeros, ONES, 0.0), np.float32(0))
    expect_bits("mma(zeros, ones, 2^-60)", answers.mma(zeros, ONES, 2.0**-60), np.float32(2.0**-60))
    expect_bits("mma([2^-60, 0, ...], ones, 0)", answers.mma([2.0**-60, *zeros[1:]], ONES, 0.0), np.float32(2.0**-60))


def test_mma_has_the_exponent_of_the_factors(answers):
    """2. mma: 1.5 · 1.5 counts as 2^0"""
    a, b = [1.5, *[2.0**-25] * 8, *[0.0] * 7], [1.5, *[1.0] * 15]
    expect_bits("mma(1.5 · 1.5 and 8 of 2^-25)", answers.mma(a, b, 0.0), np.float32(2.25 + 2.0**-22))


def test_mma_is_the_h200s(answers):
    """2. mma: outputs of an H200"""
    with np.load(ROOT / "tests/data/mma_m16n8k16_bf16_h200.npz") as file:
        a, b, c, o = (file[name] for name in "abco")
    for warp in range(200, 800, 6):
        lanes = np.arange(4)  # of row 0 and column 0
        row, column = (np.concatenate([x[warp, lanes, i] for i in half]) for x, half in ((a, (0, 2)), (b, (0, 1))))
        x, y = (np.ascontiguousarray(words).view(BF16).astype(np.float32) for words in (row, column))
        expect_bits(f"mma of warp {warp}, row 0, column 0", answers.mma(x, y, c[warp, 0, 0]), o[warp, 0, 0])


def test_dot_is_the_kernels(answers):
    """3. dot: the bits of the matmul kernel"""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((1, 320)).astype(BF16), rng.standard_normal((24, 320)).astype(BF16)
    wanted = np.zeros((1, 24), np.float32)
    matmul(wanted, x, w)
    for feature in range(24):
        expect_bits(f"dot(x, w[{feature}])", answers.dot(x[0], w[feature]), wanted[0, feature])
