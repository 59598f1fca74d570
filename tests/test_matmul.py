"""An element of a product depends on its row of x and its row of the weight alone, and lies within the derived bound.

Any number of tokens gives a row the same bits; sums run over K in mma steps of 16, ascending.
"""

from __future__ import annotations

import inspect
from types import ModuleType

import numpy as np
import pytest
from buffers import BF16, Output, assert_same_bits, normal
from mutants import module_from

import kernels_numba.matmul
from kernels_numba.machine import KernelError
from kernels_numba.matmul import NARROW_TOKENS, matmul
from refengine.verify import oracles
from refengine.verify.bounds import worst_fraction

TOKENS = [1, 7, 8, 9, NARROW_TOKENS, NARROW_TOKENS + 1, 64, 257]
SHAPES = [(16, 16), (48, 6), (128, 320), (272, 66)]


def product(
    x: np.ndarray, weight: np.ndarray, dtype: type | np.dtype = BF16, module: ModuleType = kernels_numba.matmul
) -> np.ndarray:
    out = Output((len(x), len(weight)), dtype)
    module.matmul(out.array, x, weight)
    return out.checked()


def operands(tokens: int, k: int, features: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([k, features])
    return normal(rng, tokens, k), normal(rng, features, k, scale=k**-0.5)


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize("k, features", SHAPES)
def test_products_lie_within_the_bound(k: int, features: int, dtype: type) -> None:
    x, weight = operands(max(TOKENS), k, features)
    for tokens in (1, 9, max(TOKENS)):
        found = product(x[:tokens], weight, dtype)
        assert worst_fraction(found, *oracles.matmul(x[:tokens], weight, dtype == BF16)) <= 1


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(tokens: int) -> None:
    x, weight = operands(max(TOKENS), 128, 70)
    batch = product(x[:tokens], weight)
    for row in {0, tokens // 2, tokens - 1}:
        assert_same_bits(product(x[row : row + 1], weight), batch[row : row + 1])


def test_a_feature_has_the_same_bits_in_any_weight() -> None:
    x, weight = operands(9, 144, 70)
    assert_same_bits(product(x, weight[3:69]), product(x, weight)[:, 3:69])


def test_an_odd_feature_count_gives_float32() -> None:
    x, weight = operands(5, 32, 77)
    assert worst_fraction(product(x, weight, np.float32), *oracles.matmul(x, weight, False)) <= 1


def test_neighbours_that_are_nan_do_not_reach_a_row() -> None:
    x, weight = operands(9, 128, 70)
    clean = product(x, weight)
    x[4], weight[5] = np.nan, np.nan
    found = product(x, weight)
    assert np.isnan(found[4].astype(np.float32)).all() and np.isnan(found[:, 5].astype(np.float32)).all()
    kept = np.ix_(np.arange(9) != 4, np.arange(70) != 5)
    assert_same_bits(found[kept], clean[kept])


@pytest.mark.parametrize(
    "out, x, weight, message",
    [
        ((1, 8), (1, 24), (8, 24), "multiple of 16"),
        ((1, 8), (1, 16), (8, 32), "one K"),
        ((2, 8), (1, 16), (8, 16), "out has shape"),
        ((1, 7), (1, 16), (7, 16), "odd count needs a float32"),
    ],
)
def test_shapes_that_cannot_be_are_refused(out: tuple, x: tuple, weight: tuple, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        matmul(*(np.zeros(shape, BF16) for shape in (out, x, weight)))


def planted(old: str, new: str) -> ModuleType:
    """The module with one place changed."""
    source = inspect.getsource(kernels_numba.matmul)
    assert source.count(old) == 1
    return module_from(source.replace(old, new), "kernels_numba.matmul")


def test_red_when_k_descends() -> None:
    x, weight = operands(9, 128, 70)
    mutant = planted(
        "for s in range(SLAB):\n                c0", "for s in range(SLAB - 1, -1, -1):\n                c0"
    )
    assert (product(x, weight, np.float32, mutant) != product(x, weight, np.float32)).any()


def test_red_when_a_step_is_lost() -> None:
    x, weight = operands(9, 128, 70)
    mutant = planted("for s in range(SLAB):\n                c0", "for s in range(1, SLAB):\n                c0")
    assert worst_fraction(product(x, weight, BF16, mutant), *oracles.matmul(x, weight, True)) > 1
