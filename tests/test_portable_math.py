"""exp, log and their kin stay within the errors that their docstrings state, over their whole range, and mind the
edges.
"""

from __future__ import annotations

import numpy as np
import pytest

from kernels_numba import portable_math
from kernels_numba.machine import Device, cuda, int64, kernel
from kernels_numba.machine.modes import checked

THREADS = 256
U = 2.0**-24
INF, NAN = np.inf, np.nan
SMALLEST_NORMAL, SUBNORMAL = np.float32(2.0**-126), np.float32(1e-40)


@kernel
def apply(out, x, *, function):
    """out[i] = function(x[i]), float32 [n]."""
    i = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    if i < x.shape[0]:
        out[i] = function(x[i])


def of(function: Device, x: np.ndarray) -> np.ndarray:
    out = np.full_like(x, -123.0)
    apply.at(function=function)[-(-len(x) // THREADS), THREADS](out, x)
    return out


def floats(first: float, last: float, step: int) -> np.ndarray:
    """Every ``step``-th float32 from first to last, which have one sign, the larger magnitude last."""
    lo, hi = (int(np.float32(v).view(np.uint32)) for v in (first, last))
    return np.arange(lo, hi + 1, step, dtype=np.int64).astype(np.uint32).view(np.float32)


def relative_error(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    assert np.isfinite(found).all()
    return np.abs(found.astype(np.float64) - exact) / np.abs(exact)


def softplus_exactly(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, x)


# --- Errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [
        floats(-0.5, -1.0, 1),
        floats(-1e-30, -126.0, 1009),
        floats(1e-30, 127.99, 1009),
        np.linspace(-126, 127.99, 400_001).astype(np.float32),
    ],
    ids=["one binade whole", "negative", "positive", "even"],
)
def test_exp2(x):
    assert relative_error(of(portable_math.exp2, x), np.exp2(x.astype(np.float64))).max() <= 2.0**-22


@pytest.mark.slow
@pytest.mark.parametrize("exponent", range(-24, 7))
def test_exp2_every_float(exponent):
    x = floats(-(2.0**exponent), -min(2.0 ** (exponent + 1), 126.0), 1)
    assert relative_error(of(portable_math.exp2, x), np.exp2(x.astype(np.float64))).max() <= 2.0**-22


@pytest.mark.parametrize("x", [floats(-1e-30, -87.0, 1009), floats(1e-30, 88.0, 1009)], ids=["negative", "positive"])
def test_exp(x):
    exact = np.exp(x.astype(np.float64))
    assert (relative_error(of(portable_math.exp, x), exact) <= 2.0**-22 + np.abs(x) * 1.25 * U).all()


@pytest.mark.parametrize("x", [floats(0.7, 1.42, 17), floats(1e-45, 3e38, 4999)], ids=["around one", "all"])
def test_log(x):
    exact = np.log(x.astype(np.float64))
    x, exact = x[exact != 0], exact[exact != 0]
    assert relative_error(of(portable_math.log, x), exact).max() <= 2.0**-22


def test_softplus():
    x = np.linspace(-100, 100, 200_001).astype(np.float32)
    error = np.abs(of(portable_math.softplus, x) - softplus_exactly(x.astype(np.float64)))
    assert (error <= 2.0**-22 * np.maximum(1.0, np.abs(x))).all()


def test_sigmoid_and_silu():
    x = np.linspace(-87, 100, 200_001).astype(np.float32)
    x = x[x != 0]
    exact = 1.0 / (1.0 + np.exp(-x.astype(np.float64)))
    bound = 2.0**-22 + (np.abs(x) + 2) * 1.5 * U
    assert (relative_error(of(portable_math.sigmoid, x), exact) <= bound).all()
    assert (relative_error(of(portable_math.silu, x), x * exact) <= bound + U).all()


def test_rsqrt():
    x = floats(1e-37, 1e38, 4999)
    assert relative_error(of(portable_math.rsqrt, x), x.astype(np.float64) ** -0.5).max() <= 1.51 * U


# --- Edges ----------------------------------------------------------------------------------------------------------

EDGES = [
    ("exp", 0.0, 1.0), ("exp", -0.0, 1.0), ("exp", -INF, 0.0), ("exp", -87.5, 0.0), ("exp", -1e30, 0.0),
    ("exp", 89.0, INF), ("exp", INF, INF), ("exp", NAN, NAN), ("exp", SUBNORMAL, 1.0),
    ("exp2", -126.0, SMALLEST_NORMAL), ("exp2", -126.00001, 0.0), ("exp2", 127.0, 2.0**127), ("exp2", 128.0, INF),
    ("exp2", NAN, NAN),
    ("log", 1.0, 0.0), ("log", 0.0, -INF), ("log", -0.0, -INF), ("log", -1.0, NAN), ("log", INF, INF),
    ("log", NAN, NAN),
    ("softplus", 20.5, 20.5), ("softplus", -INF, 0.0), ("softplus", INF, INF), ("softplus", NAN, NAN),
    ("sigmoid", 0.0, 0.5), ("sigmoid", -INF, 0.0), ("sigmoid", INF, 1.0), ("sigmoid", -100.0, 0.0),
    ("sigmoid", NAN, NAN),
    ("silu", 0.0, 0.0), ("silu", INF, INF), ("silu", NAN, NAN), ("rsqrt", 4.0, 0.5), ("rsqrt", 0.0, INF),
]  # fmt: skip


@pytest.mark.parametrize("name, x, expected", EDGES)
def test_edge(name, x, expected):
    found = of(getattr(portable_math, name), np.array([x], np.float32))
    np.testing.assert_array_equal(found, np.array([expected], np.float32))


@pytest.mark.parametrize("whole, part", [("exp", "exp_to_one"), ("exp2", "exp2_to_one")])
def test_the_shorter_forms_have_the_same_bits_up_to_zero(whole, part):
    x = np.concatenate([floats(-0.0, -200.0, 9973), np.array([-INF, NAN, 0.0], np.float32)])
    found, expected = (of(getattr(portable_math, n), x).view(np.uint32) for n in (part, whole))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["exp", "log", "softplus", "silu", "rsqrt"])
def test_compiled_and_step_by_step_give_the_same_bits(name):
    function, x = getattr(portable_math, name), np.linspace(-140, 140, 1000).astype(np.float32)
    plain = of(function, x)
    with checked():
        np.testing.assert_array_equal(of(function, x), plain)
