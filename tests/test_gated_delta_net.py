"""Gated DeltaNet: each part within its derived bound; a row's bits depend on its stream's own past alone.

Chunked equals one pass, row by row equals a window, together equals alone; runs of nobody are neither read nor
written.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from buffers import BF16, Output, assert_same_bits, normal
from delta_data import HK, HV, C, Layer, Rows, Weights, delta_rows, layer, mixed_rows, table, weights
from mutants import mutate

from kernels_numba import gated_delta_net as gdn
from kernels_numba.machine import KernelError
from refengine.verify import oracles
from refengine.verify.bounds import worst_fraction

CHUNKS = [1, 31, 32, 33, 63, 64, 65, 95]


# --- Convolution -----------------------------------------------------------------------------------------------------


def convolved(mixed: np.ndarray, at: Layer, *rows: int, kernel=gdn.conv_kernel) -> np.ndarray:
    streams, row_stream = table(*rows)
    out = Output((len(mixed), C))
    bound = kernel.at(HK=HK, HV=HV)
    bound[(len(mixed), 2), gdn.THREADS](
        out.array, mixed, at.history_words, weights().taps, row_stream, streams, at.runs
    )
    return out.checked()


def conv_fraction(found: np.ndarray, mixed: np.ndarray, at: Layer, *rows: int) -> float:
    edges = np.cumsum((0, *rows))
    parts = zip(at.slots, edges, edges[1:], strict=False)
    oracle = [oracles.conv_qkv(at.histories[s], mixed[a:b, :C], weights().taps, HK) for s, a, b in parts]
    return worst_fraction(found, *(np.concatenate(part) for part in zip(*oracle, strict=True)))


def test_the_convolution_lies_within_the_bound() -> None:
    mixed, at = mixed_rows(16), layer(4)
    found = convolved(mixed, at, 1, 0, 11, 4)
    assert conv_fraction(found, mixed, at, 1, 0, 11, 4) <= 1


def test_the_host_function_gives_the_kernel_its_heads() -> None:
    mixed, at, out = mixed_rows(5), layer(1), Output((5, C))
    streams, row_stream = table(5)
    gdn.conv(out.array, mixed, at.history_words, weights().taps, row_stream, streams, at.runs, HK)
    assert_same_bits(out.checked(), convolved(mixed, at, 5))


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5])
def test_a_convolution_in_chunks_equals_one_pass(chunk: int) -> None:
    mixed, before = mixed_rows(10), layer(1)
    at, parts = before.copy(), []
    for first in range(0, 10, chunk):
        part = mixed[first : first + chunk]
        parts.append(convolved(part, at, len(part)))
        gdn.commit_conv(at.history_words, part, table(len(part))[0], at.runs, C)
    assert_same_bits(np.concatenate(parts), convolved(mixed, before, 10))
    at.checked(before)


def test_a_commit_keeps_the_last_three_rows() -> None:
    rows = (0, 1, 2, 3, 5)
    mixed, before = mixed_rows(11), layer(5)
    at = before.copy()
    gdn.commit_conv(at.history_words, mixed, table(*rows)[0], at.runs, C)
    edges = np.cumsum((0, *rows))
    for slot, first, stop in zip(at.slots, edges, edges[1:], strict=False):
        assert_same_bits(at.histories[slot], np.concatenate([before.histories[slot], mixed[first:stop, :C]])[-3:])
    at.checked(before)


def test_red_when_the_history_is_one_row_stale() -> None:
    mixed, at = mixed_rows(5), layer(1)
    mutant = mutate(
        gdn.conv_kernel,
        "histories[run + (source + (TAPS - 1)) * (C // 2) + word]",
        "histories[run + max(source + (TAPS - 2), 0) * (C // 2) + word]",
    )
    assert conv_fraction(convolved(mixed, at, 5, kernel=mutant), mixed, at, 5) > 1


# --- Gates -----------------------------------------------------------------------------------------------------------


def gated(mixed: np.ndarray, w: Weights) -> tuple[np.ndarray, np.ndarray]:
    decay, beta = Output((len(mixed), HV), np.float32), Output((len(mixed), HV), np.float32)
    gdn.gates(decay.array, beta.array, mixed, w.a_log, w.dt_bias, HK)
    return decay.checked(), beta.checked()


def test_gates_lie_within_the_bound() -> None:
    mixed, w = mixed_rows(67), weights()
    mixed[:9, C + HV * 128 :] = np.array([-200, -88, -20, -1, 0, 1, 20.5, 88, 200], BF16)[:, None]
    b, a = np.split(mixed[:, C + HV * 128 :], 2, axis=1)
    decay, beta = gated(mixed, w)
    assert worst_fraction(decay, *oracles.decay(a, w.a_log, w.dt_bias)) <= 1
    assert worst_fraction(beta, *oracles.beta(b)) <= 1
    assert (decay <= 1).all() and (beta <= 1).all()


# --- The delta rule --------------------------------------------------------------------------------------------------


def chained(rows: Rows, at: Layer, *counts: int, kernel=gdn.chain_kernel) -> np.ndarray:
    """y: bf16 [W, HV·128]; the states change in place."""
    y, streams = Output((len(rows.qkv), HV * 128)), table(*counts)[0]
    bound = kernel.at(HK=HK, HV=HV)
    args = (rows.qkv, rows.decay, rows.beta, streams, at.runs)
    bound[(len(counts), HV), 256](y.array, at.state_words, *args)
    return y.checked()


def stepped(rows: Rows, at: Layer, *counts: int, commit: bool = True, kernel=gdn.step_kernel) -> np.ndarray:
    y, streams = Output((len(rows.qkv), HV * 128)), table(*counts)[0]
    bound = kernel.at(HK=HK, HV=HV, COMMIT=commit)
    args = (rows.qkv, rows.decay, rows.beta, streams, at.runs)
    bound[(len(counts), HV, 16), gdn.THREADS](y.array, at.state_words, *args)
    return y.checked()


def delta_fraction(y: np.ndarray, after: Layer, rows: Rows, before: Layer, depth: int) -> float:
    """The worst of y and state, one stream."""
    slot = int(before.slots[0])
    exact_y, exact_state = oracles.delta_rule(before.states[slot], *rows.heads(), rows.decay, rows.beta, depth)
    return max(worst_fraction(y.reshape(-1, HV, 128), *exact_y), worst_fraction(after.states[slot], *exact_state))


@pytest.mark.parametrize("run, depth", [(chained, oracles.CHAIN_DEPTH), (stepped, oracles.STEP_DEPTH)])
@pytest.mark.parametrize("count", [1, 16])
def test_the_delta_rule_lies_within_the_bound(run, depth: int, count: int) -> None:
    rows, before = delta_rows(count), layer(1)
    at = before.copy()
    assert delta_fraction(run(rows, at, count), at, rows, before, depth) <= 1


@pytest.mark.parametrize("cut", CHUNKS)
def test_a_chain_in_chunks_equals_one_pass(cut: int) -> None:
    rows, whole = delta_rows(96), layer(1)
    at = whole.copy()
    y = np.concatenate([chained(rows.cut(0, cut), at, cut), chained(rows.cut(cut, 96), at, 96 - cut)])
    assert_same_bits(y, chained(rows, whole, 96))
    assert_same_bits(at.states, whole.states)


@pytest.mark.parametrize("length", CHUNKS)
def test_a_chain_of_any_length_equals_its_rows_one_by_one(length: int) -> None:
    rows, whole = delta_rows(96), layer(1)
    at = whole.copy()
    one_by_one = [chained(rows.cut(i, i + 1), at, 1) for i in range(length)]
    assert_same_bits(np.concatenate(one_by_one), chained(rows.cut(0, length), whole, length))
    assert_same_bits(at.states, whole.states)


def test_steps_row_by_row_equal_a_window() -> None:
    rows, window = delta_rows(16), layer(1)
    at = window.copy()
    y = np.concatenate([stepped(rows.cut(i, i + 1), at, 1) for i in range(16)])
    assert_same_bits(y, stepped(rows, window, 16))
    assert_same_bits(at.states, window.states)


def test_a_window_commits_nothing_until_its_accepted_rows_are_run_again() -> None:
    rows, before = delta_rows(9), layer(1)
    at, accepted = before.copy(), before.copy()
    drafted = stepped(rows, at, 9, commit=False)
    assert_same_bits(at.memory, before.memory)
    assert_same_bits(stepped(rows.cut(0, 4), at, 4), drafted[:4])
    stepped(rows.cut(0, 4), accepted, 4)
    assert_same_bits(at.states, accepted.states)


@pytest.mark.parametrize("run", [chained, stepped])
def test_streams_together_equal_each_alone(run) -> None:
    counts = (7, 0, 9, 1)
    rows, before = delta_rows(sum(counts)), layer(len(counts))
    at, edges = before.copy(), np.cumsum((0, *counts))
    y = run(rows, at, *counts)
    at.checked(before)
    for s, (first, stop) in enumerate(pairwise(edges)):
        alone, slot = before.stream(s), int(before.slots[s])
        if counts[s]:
            assert_same_bits(run(rows.cut(first, stop), alone, counts[s]), y[first:stop])
        assert_same_bits(at.states[slot], alone.states[slot])


def test_the_host_functions_launch_the_kernels() -> None:
    rows, before = delta_rows(3), layer(1)
    streams = table(3)[0]
    for run, launch in ((chained, gdn.chain), (stepped, lambda *args: gdn.step(*args, commit=True))):
        at, again, y = before.copy(), before.copy(), Output((3, HV * 128))
        launch(y.array, at.state_words, rows.qkv, rows.decay, rows.beta, streams, at.runs)
        assert_same_bits(y.checked(), run(rows, again, 3))
        assert_same_bits(at.states, again.states)


@pytest.mark.parametrize(
    "old, new",
    [
        ("s[r, i] = s[r, i] * g", "s[r, i] = s[r, i]"),
        ("(bf16_low(v) - mem0) * b", "bf16_low(v) - mem0"),
        ("(bf16_high(v) - mem1) * b", "bf16_high(v) * b"),
        ("mem0, mem1, b)\n    out0", "mem1, mem0, b)\n    out0"),
    ],
    ids=["decay dropped", "gate dropped", "memory not read", "value rows swapped"],
)
def test_red_when_a_step_is_wrong(old: str, new: str) -> None:
    rows, before = delta_rows(2), layer(1)
    at = before.copy()
    y = stepped(rows, at, 2, kernel=mutate(gdn.step_kernel, old, new))
    assert delta_fraction(y, at, rows, before, oracles.STEP_DEPTH) > 1


def test_red_when_a_value_head_reads_the_wrong_key_head() -> None:
    rows, before = delta_rows(2), layer(1)
    at = before.copy()
    old = "query_word = head // (HV // HK) * WORDS + half * 2"
    y = chained(rows, at, 2, kernel=mutate(gdn.chain_kernel, old, "query_word = head % HK * WORDS + half * 2"))
    assert delta_fraction(y, at, rows, before, oracles.CHAIN_DEPTH) > 1


def test_red_when_the_order_of_the_chains_sum_changes() -> None:
    rows, at, again = delta_rows(8), layer(1), layer(1)
    chained(rows, at, 8)
    mutant = mutate(gdn.chain_kernel, "return (m0 + m1) + (m2 + m3)", "return ((m0 + m1) + m2) + m3")
    chained(rows, again, 8, kernel=mutant)
    assert (at.states[at.slots] != again.states[at.slots]).any()


# --- Gated output norm -----------------------------------------------------------------------------------------------


def normed(y: np.ndarray, mixed: np.ndarray, gate: str, kernel=gdn.gated_norm_kernel) -> np.ndarray:
    out = Output(y.shape)
    bound = kernel.at(HK=HK, HV=HV, GATE=gate)
    bound[(len(y), 1), gdn.THREADS](out.array, y, mixed, weights().gain, np.float32(1e-6))
    return out.checked()


@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_the_gated_norm_lies_within_the_bound(gate: str) -> None:
    mixed, y = mixed_rows(17), normal(np.random.default_rng(3), 17, HV * 128)
    y[3], y[4] = 0, y[4] * BF16.type(1e-4)
    found, z = normed(y, mixed, gate), mixed[:, C : C + HV * 128].reshape(17, HV, 128)
    oracle = oracles.gated_norm(y.reshape(17, HV, 128), z, weights().gain, 1e-6, gate == "silu")
    assert worst_fraction(found.reshape(17, HV, 128), *oracle) <= 1
    assert_same_bits(normed(y[5:6], mixed[5:6], gate), found[5:6])


def test_the_gated_norm_may_overwrite_its_input() -> None:
    mixed, y = mixed_rows(3), normal(np.random.default_rng(3), 3, HV * 128)
    wanted = normed(y, mixed, "silu")
    gdn.gated_norm(y, y, mixed, weights().gain, 1e-6, HK)
    assert_same_bits(y, wanted)


def test_red_when_the_gate_is_dropped() -> None:
    mixed, y = mixed_rows(3), normal(np.random.default_rng(3), 3, HV * 128)
    mutant = mutate(gdn.gated_norm_kernel, "low = gate_of(bf16_low(z), GATE=GATE) * (", "low = (")
    assert (normed(y, mixed, "silu", mutant) != normed(y, mixed, "silu")).any()


def test_states_and_gates_that_cannot_be_are_refused() -> None:
    rows, at = delta_rows(1), layer(2)
    y, streams = np.empty((1, HV * 128), BF16), table(1)[0]
    with pytest.raises(KernelError, match="C-contiguous"):
        gdn.chain(y, at.state_words[::2], rows.qkv, rows.decay, rows.beta, streams, at.runs[:1])
    with pytest.raises(KernelError, match="silu or sigmoid"):
        gdn.gated_norm(y, y, mixed_rows(1), weights().gain, 1e-6, HK, gate="relu")
