"""Norms, gates and row copies: each row within its derived bound, with the same bits alone and in a batch."""

from __future__ import annotations

import numpy as np
import pytest
from buffers import BF16, Output, assert_same_bits, normal
from mutants import mutate

from kernels_numba import norms
from kernels_numba.activations import attention_gate, swiglu
from kernels_numba.embedding import embed
from kernels_numba.norms import add_rms_norm, rms_norm
from refengine.verify import oracles
from refengine.verify.bounds import worst_fraction

EPS = 1e-6
DIMS = [2, 128, 258, 2560]


def rows_and_gain(rows: int, dims: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([rows, dims])
    return normal(rng, rows, dims, scale=3.0), (1 + 0.3 * rng.standard_normal(dims)).astype(np.float32)


def normed(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    out = Output(x.shape)
    rms_norm(out.array, x, gain, EPS)
    return out.checked()


def add_normed(h: np.ndarray, r: np.ndarray, gain: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(h + r, its norm)."""
    out, h = Output(h.shape), h.copy()
    add_rms_norm(out.array, h, r, gain, EPS)
    return h, out.checked()


@pytest.mark.parametrize("dims", DIMS)
def test_norms_lie_within_the_bound(dims: int) -> None:
    x, gain = rows_and_gain(5, dims)
    assert worst_fraction(normed(x, gain), *oracles.rms_norm(x, gain, EPS)) <= 1


def test_a_row_of_zeros_stays_zero_and_a_tiny_one_is_held_by_eps() -> None:
    x, gain = rows_and_gain(3, 128)
    x[0], x[1] = 0, x[1] * BF16.type(1e-5)
    found = normed(x, gain)
    assert (found[0] == 0).all() and worst_fraction(found, *oracles.rms_norm(x, gain, EPS)) <= 1


@pytest.mark.parametrize("dims", DIMS)
def test_a_residual_is_added_rounded_and_kept_then_normed(dims: int) -> None:
    h, gain = rows_and_gain(5, dims)
    r, _ = rows_and_gain(5, dims)
    r = r[::-1].copy()
    kept, found = add_normed(h, r, gain)
    assert_same_bits(kept, (h.astype(np.float32) + r.astype(np.float32)).astype(BF16))
    assert_same_bits(found, normed(kept, gain))


def test_a_normed_row_does_not_depend_on_its_batch() -> None:
    x, gain = rows_and_gain(9, 384)
    batch = normed(x, gain)
    for row in (0, 4, 8):
        assert_same_bits(normed(x[row : row + 1], gain), batch[row : row + 1])


def test_a_norm_may_overwrite_its_input() -> None:
    x, gain = rows_and_gain(3, 384)
    wanted = normed(x, gain)
    rms_norm(x, x, gain, EPS)
    assert_same_bits(x, wanted)


def test_red_when_the_order_of_the_sum_changes() -> None:
    """Millions of elements: a last bit of the sum seldom shows in bf16."""
    x, gain = rows_and_gain(64, 32768)
    old, new = "(sums[0] + sums[1]) + (sums[2] + sums[3])", "((sums[0] + sums[1]) + sums[2]) + sums[3]"
    out = Output(x.shape)
    mutate(norms.rms_norm_kernel, old, new).at()[64, norms.THREADS](out.array, x, gain, np.float32(EPS))
    assert (out.checked() != normed(x, gain)).any()


def test_red_when_the_gain_is_forgotten() -> None:
    x, gain = rows_and_gain(3, 128)
    mutant, out = (
        mutate(norms.rms_norm_kernel, "(bf16_low(word) * inverse) * gain_low", "bf16_low(word) * inverse"),
        Output(x.shape),
    )
    mutant.at()[3, norms.THREADS](out.array, x, gain, np.float32(EPS))
    assert worst_fraction(out.checked(), *oracles.rms_norm(x, gain, EPS)) > 1


@pytest.mark.parametrize("rows, width", [(1, 2), (3, 256), (67, 258)])
def test_swiglu_lies_within_the_bound(rows: int, width: int) -> None:
    gate_up, out = normal(np.random.default_rng(rows), rows, 2 * width, scale=4.0), Output((rows, width))
    swiglu(out.array, gate_up)
    assert worst_fraction(out.checked(), *oracles.swiglu(gate_up)) <= 1


def test_swiglu_at_the_ends_of_its_gate() -> None:
    gate_up = np.array([[0.0, -0.0, 100.0, -100.0, 3e38, -3e38, 1, 1, 1, 1, 1, 1]], BF16)
    out = Output((1, 6))
    swiglu(out.array, gate_up)
    np.testing.assert_array_equal(
        out.checked().astype(np.float32), np.array([[0, 0, 100, 0, 3e38, 0]], BF16).astype(np.float32)
    )


@pytest.mark.parametrize("rows, heads, dims, more", [(1, 1, 64, 0), (5, 12, 256, 64), (65, 3, 64, 2)])
def test_the_attention_gate_takes_its_own_head(rows: int, heads: int, dims: int, more: int) -> None:
    rng = np.random.default_rng(rows)
    qkv, o = normal(rng, rows, heads * 2 * dims + more), normal(rng, rows, heads * dims)
    gate = qkv[:, : heads * 2 * dims].reshape(rows, heads, 2, dims)[:, :, 1].reshape(rows, -1)
    out = Output(o.shape)
    attention_gate(out.array, o, qkv, dims)
    assert worst_fraction(out.checked(), *oracles.attention_gate(o, gate)) <= 1


def test_embedding_copies_rows() -> None:
    table, ids = normal(np.random.default_rng(0), 11, 258), np.array([10, 0, 3, 3], np.int32)
    out = Output((4, 258))
    embed(out.array, table, ids)
    assert_same_bits(out.checked(), table[ids])
