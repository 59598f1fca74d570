"""Tests of tutorial 12's exercises."""

import ml_dtypes
import numpy as np

from kernels_numba import gated_delta_net
from kernels_numba.streams import COLUMNS, ROWS
from refengine.lab.exercises import expect, expect_bits, expect_close
from refengine.verify import oracles

BF16 = ml_dtypes.bfloat16


def test_delta_step_by_hand(answers):
    """1. delta_step: the tutorial's fourth token"""
    state = np.array([[0.0, 2.0], [4.0, 6.0]])
    k, v = np.array([0.6, 0.8]), np.array([5.0, 10.0])
    after, y = answers.delta_step(state, np.array([1.0, 0.0]), k, v, 0.5, 0.5)
    expect_close("the state of delta_step", after, np.array([[1.26, 2.68], [3.92, 5.56]]), 1e-12)
    expect_close("y of delta_step", y, np.array([1.26, 3.92]), 1e-12)


def test_delta_step_leaves_its_argument(answers):
    """1. delta_step: the state that it is given stays as it is"""
    state = np.ones((2, 2))
    answers.delta_step(state, np.ones(2), np.ones(2), np.ones(2), 0.5, 1.0)
    expect("the state given to delta_step, afterwards,", state, np.ones((2, 2)))


def test_delta_step_is_the_oracles(answers):
    """1. delta_step: 20 tokens against the engine's float64 oracle"""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 20, 1, 128)) / 12
    decay, beta = rng.uniform(0.5, 1, (2, 20, 1))
    zero = np.zeros((1, 128, 128))
    state, wanted = zero[0], oracles.delta_rule(zero, q, k, v, decay, beta, oracles.STEP_DEPTH)
    for t in range(20):
        state, y = answers.delta_step(state, q[t, 0], k[t, 0], v[t, 0], decay[t, 0], beta[t, 0])
        expect_close(f"y of token {t}", y, wanted[0][0][t, 0], 1e-9)
    expect_close("the state after 20 tokens", state, wanted[1][0][0], 1e-9)


def test_decode_sum_is_the_kernels(answers):
    """2. decode_sum: the bits of the step kernel"""
    rng = np.random.default_rng(1)
    k = rng.standard_normal(128).astype(BF16)
    k[0] = 1
    state = rng.standard_normal((128, 128), np.float32)
    state[:, 0] = 0
    wanted = kernel_sums(state, k)
    for row in range(128):
        expect_bits(f"decode_sum(row {row}, k)", answers.decode_sum(state[row], k.astype(np.float32)), wanted[row])


def kernel_sums(state: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The sums state · k of the real kernel: with v = 0 and beta = k[0] = 1 the first column becomes their negatives."""
    rows = np.concatenate([np.zeros(128, BF16), k, np.zeros(128, BF16)])[None]
    streams, ones, y = np.zeros((1, COLUMNS), np.int64), np.ones((1, 1), np.float32), np.zeros((1, 128), BF16)
    streams[0, ROWS] = 1
    after = state.copy()
    gated_delta_net.step(y, after.reshape(-1), rows, ones, ones, streams, np.zeros(1, np.int64), commit=True)
    return -after[:, 0]


def test_begin_at_a_kept_state(answers):
    """3. begin_at: the last state within what both share"""
    older = [7, 7, 5, 1, 2, 9, 4]
    prompt = [7, 7, 5, 1, 2, 3, 3, 3]
    expect(f"begin_at({prompt}, {older}, [4, 2, 6])", answers.begin_at(prompt, older, [4, 2, 6]), 4)
    expect(f"begin_at({prompt}, {older}, [5])", answers.begin_at(prompt, older, [5]), 5)


def test_begin_at_needs_a_state(answers):
    """3. begin_at: shared rows without a state are of no use"""
    older = [7, 7, 5, 1, 2, 9, 4]
    expect("begin_at([7, 7, 5, 0], older, [6, 7])", answers.begin_at([7, 7, 5, 0], older, [6, 7]), 0)
    expect("begin_at([7, 7, 5, 0], older, [])", answers.begin_at([7, 7, 5, 0], older, []), 0)


def test_begin_at_leaves_a_token(answers):
    """3. begin_at: one token is left to read"""
    expect("begin_at([1, 2, 3], [1, 2, 3], [3, 1])", answers.begin_at([1, 2, 3], [1, 2, 3], [3, 1]), 1)
