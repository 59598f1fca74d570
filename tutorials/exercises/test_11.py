"""Tests of tutorial 11's exercises."""

import ml_dtypes
import numpy as np

from refengine.lab.exercises import expect
from refengine.verify import fp8_oracle

E4M3 = ml_dtypes.float8_e4m3fn


def test_exponent_by_hand(answers):
    """1. row_exponent: the tutorial's row"""
    expect("row_exponent([1000, -3, 27/64, 3/256])", answers.row_exponent(np.array([1000, -3, 27 / 64, 3 / 256])), 2)


def test_exponent_at_the_edge(answers):
    """1. row_exponent: just 448, and just above"""
    for largest, wanted in ((448.0, 0), (450.0, 1), (-896.0, 1), (224.0, -1)):
        expect(f"row_exponent([{largest}, 1])", answers.row_exponent(np.array([largest, 1.0])), wanted)


def test_exponents_of_odd_rows(answers):
    """1. row_exponent: zeros, NaN, infinities, tiny numbers"""
    nan, inf = float("nan"), float("inf")
    for row in ([0.0, -0.0], [nan, 3.0], [nan, nan], [inf, 1.0], [-inf], [2.0**-120, 0.0], [2.0**-133]):
        wanted = int(fp8_oracle.exponents(np.array(row).astype(ml_dtypes.bfloat16)))
        expect(f"row_exponent({row})", answers.row_exponent(np.array(row)), wanted)


def test_values(answers):
    """2. value_of: every code"""
    wanted = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float64)
    for code in range(256):
        found = answers.value_of(code)
        if np.isnan(wanted[code]):
            expect(f"value_of({code}) is a NaN", found != found, True)
        else:
            expect(f"value_of({code})", found, float(wanted[code]))


def test_nearest_by_hand(answers):
    """3. nearest_code: the tutorial's numbers"""
    for x, wanted in ((250.0, 0x78), (-0.75, 0xB4), (13.5 / 128, 0x1E), (1.5 / 512, 0x02)):
        expect(f"nearest_code({x})", answers.nearest_code(x), wanted)


def test_ties_to_even(answers):
    """3. nearest_code: in the middle of each two neighbours"""
    values = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float64)
    for code in range(126):
        middle = float((values[code] + values[code + 1]) / 2)
        expect(f"nearest_code({middle})", answers.nearest_code(middle), code + code % 2)


def test_beyond_the_largest(answers):
    """3. nearest_code: it saturates, and NaN stays NaN"""
    for x, wanted in ((1e9, 0x7E), (-449.0, 0xFE), (float("-inf"), 0xFE), (float("nan"), 0x7F)):
        expect(f"nearest_code({x})", answers.nearest_code(x), wanted)


def test_signs_of_zero(answers):
    """3. nearest_code: -0 and what rounds to it"""
    for x, wanted in ((0.0, 0x00), (-0.0, 0x80), (-1e-9, 0x80)):
        expect(f"nearest_code({x})", answers.nearest_code(x), wanted)
