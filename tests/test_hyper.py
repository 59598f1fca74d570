"""Hyper-connections: a block's readout and write-back are what float64 makes of them, and a row's bits are its own."""

from __future__ import annotations

import numpy as np
import pytest
from buffers import Output, assert_same_bits, normal

from kernels_numba.flash_next import hyper
from kernels_numba.machine import KernelError
from kernels_numba.matmul import matmul
from refengine.contract.registry import product_kernels

S, D, RANK, EPS = 4, 320, 32, 1e-6
RNG = np.random.default_rng(2)
GAIN = (1 + 0.3 * RNG.standard_normal(S * D)).astype(np.float32)
DOWN, UP = normal(RNG, RANK + S, S * D, scale=0.05), normal(RNG, S * D, RANK, scale=0.5)
ROWS = 33


def readout(h: np.ndarray, last: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
    """(x, inject) by kernels; last: of the mixer after the last layer, which has no inject."""
    rows, columns = len(h), RANK if last else RANK + S
    normed, low, act, up, x = (Output((rows, n)) for n in (S * D, columns, RANK, S * D, D))
    inject = None if last else Output((rows, S))
    hyper.norm_streams(normed.array, h, GAIN, S, EPS)
    matmul(low.array, normed.checked(), DOWN[:columns])
    hyper.readout_gates(act.array, None if inject is None else inject.array, low.checked(), S)
    matmul(up.array, act.checked(), UP)
    hyper.mix_streams(x.array, up.checked(), normed.array)
    return x.checked(), None if inject is None else inject.checked()


def readout_in_float64(h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    split = h.astype(np.float64).reshape(len(h), S, D)
    normed = (split / np.sqrt((split**2).mean(-1, keepdims=True) + EPS)).reshape(len(h), -1) * GAIN
    low = normed @ DOWN.astype(np.float64).T / S
    act, inject = low[:, :RANK] / (1 + np.exp(-low[:, :RANK])), 2 / (1 + np.exp(-low[:, RANK:]))
    gate = 1 / (1 + np.exp(-act @ UP.astype(np.float64).T))
    return (gate * normed).reshape(len(h), S, D).mean(axis=1), inject


def streams() -> np.ndarray:
    """A row's streams as a block sees them: no two alike."""
    return normal(np.random.default_rng(3), ROWS, S * D, scale=2.0)


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.linalg.norm(found.astype(np.float64) - wanted) <= 2.0**-7 * np.linalg.norm(wanted))


@pytest.mark.parametrize("last", [False, True])
def test_a_readout_is_what_float64_makes_of_it(last: bool) -> None:
    (x, inject), (wanted, wanted_inject) = readout(streams(), last), readout_in_float64(streams())
    assert close(x, wanted)
    assert inject is None if last else close(inject, wanted_inject)


def test_a_row_is_spread_then_written_back_by_each_streams_own_weight() -> None:
    x, branch = normal(RNG, ROWS, D), normal(RNG, ROWS, D)
    h = Output((ROWS, S * D))
    hyper.spread_streams(h.array, x)
    assert_same_bits(h.checked(), np.tile(x, S))
    inject = np.tile(np.array([0, 0.5, 1, 2], x.dtype), (ROWS, 1))
    hyper.write_back(h.array, branch, inject)
    split, x, branch = (a.astype(np.float64) for a in (h.checked().reshape(ROWS, S, D), x, branch))
    assert (split[:, 0] == x).all()
    for s, weight in enumerate((0, 0.5, 1, 2)):
        assert close(split[:, s], x + weight * branch)


def test_a_row_has_the_same_bits_alone() -> None:
    whole, inject = readout(streams())
    alone, own_inject = readout(streams()[7:8])
    assert_same_bits(alone[0], whole[7])
    assert_same_bits(own_inject[0], inject[7])


def test_kernels_of_a_package_inside_count_for_the_contract() -> None:
    assert product_kernels()["write_back_kernel"] == "kernels_numba.flash_next.hyper"


BAD = [
    (lambda a: hyper.spread_streams(a(2, 10), a(2, 4)), "spread_streams: streams (2, 10), a row (2, 4)"),
    (lambda a: hyper.write_back(a(2, 9), a(2, 3), a(2, 3)), "write_back: streams (2, 9), a row (2, 3)"),
    (lambda a: hyper.norm_streams(a(2, 8), a(2, 8), a(4), 4, EPS), "norm_streams: out (2, 8), h (2, 8), gain (4,)"),
    (lambda a: hyper.readout_gates(a(2, 8), a(2, 4), a(2, 8), 4), "readout_gates: low (2, 8): wants [2, 12]"),
    (lambda a: hyper.readout_gates(a(2, 8), None, a(2, 12), 4), "readout_gates: low (2, 12): wants [2, 8]"),
]


@pytest.mark.parametrize("call, says", BAD)
def test_shapes_that_do_not_fit_are_named(call, says: str) -> None:
    with pytest.raises(KernelError) as raised:
        call(lambda *shape: normal(RNG, *shape))
    assert str(raised.value).startswith(says) and "\n" not in str(raised.value)
