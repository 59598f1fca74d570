"""The engine agrees with the public transformers implementations of all families on small random models.

Each layer, given the oracle's own input, lies within the bound that its rounding points give, and a layer with any
part wrong does not. The whole model is off by no more than twice what the public bf16 run is off. Against results
recorded by benchmarks/record_oracle.py; where torch is installed, also against the public code itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from held_cases import BY_NAME, held
from mutants import mutate

from backends import attention
from kernels_numba import gated_delta_net, prompt_attention
from kernels_numba.rope_store import rope_table
from kernels_numba.sampling import argmax
from refengine.checkpoint import LayerWeights
from refengine.model import blocks
from refengine.registry import load_model
from refengine.verify import layer_bounds, oracles
from refengine.verify.against_oracle import Found, Held, errors, margins
from refengine.verify.bounds import SECOND_ORDER
from refengine.verify.chains.delta_net import delta_rule
from refengine.verify.forced import forced_logits
from refengine.verify.oracle_cases import CASES, FLASH_NEXT, PROMPT_PASSES, Case, Oracle

D256, D128, D64, *_ = BY_NAME
SMALL = SECOND_ORDER - 1
"""The part of a bound that is kept for the float32 errors of the oracle."""
every_case = pytest.mark.parametrize("name", BY_NAME)


@cache
def found(name: str) -> Found:
    """What the engine makes of each layer's input, and of the head's."""
    one = held(name)
    return one.found(one.model())


@cache
def engine_logits(name: str) -> np.ndarray:
    return held(name).logits()


def at_most(limit: float, values: list[float]) -> bool:
    """Whether no value is above the limit, or a NaN; the values are shown when a test fails."""
    print(*values)
    return all(value <= limit for value in values)


# --- Layer by layer -------------------------------------------------------------------------------------------------


@every_case
def test_every_layer_lies_within_its_bound(name: str) -> None:
    assert at_most(1, held(name).fractions(found(name)))


@every_case
def test_errors_are_no_larger_than_roundings_make_them(name: str) -> None:
    """Their mean square: far below the bound, which is for the worst of all outputs."""
    assert at_most(1, held(name).mean_squares(found(name)))


@every_case
def test_the_chain_that_bounds_are_made_of_is_the_oracles(name: str) -> None:
    assert at_most(SMALL, held(name).oracle_fractions(held(name).oracle))


@pytest.mark.parametrize("name", [case.name for case in CASES if case.chooses])
def test_nine_of_ten_rows_choose_as_the_public_code_does(name: str) -> None:
    """The others choose between scores that are closer than their roundings, or the same."""
    assert at_most(0.1, [rows / len(BY_NAME[name].ids) for rows in held(name).rows_of_other_choices(found(name))])


@pytest.mark.parametrize("case", FLASH_NEXT, ids=lambda case: case.name)
def test_most_rows_are_sparse(case: Case) -> None:
    """Rows of both prompt passes and of decode, and of every length modulo a block's."""
    (keys,) = [chosen["keys"] for chosen in found(case.name).choices if "keys" in chosen]
    sparse = keys.sum(axis=1) < np.arange(len(keys)) + 1
    assert sparse.mean() > 0.6 and sparse[PROMPT_PASSES[0] - 1 :].all()


def test_the_closed_form_of_the_delta_rule_is_the_rule() -> None:
    rng = np.random.default_rng(5)
    q, k, v = rng.standard_normal((3, 40, 1, 128)) / np.sqrt(128)
    g, beta = rng.uniform(0.1, 1, (40, 1)), rng.uniform(0, 1, (40, 1))
    value, r = delta_rule(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0])
    zero = np.zeros((1, 128, 128))
    rule, tight = oracles.delta_rule(zero, q, k, v, g, beta, oracles.CHAIN_DEPTH)[0]
    assert np.abs(value - rule[:, 0]).max() < 1e-12
    assert (r >= tight[:, 0]).all() and (r <= 1.1 * tight[:, 0] + 1e-5).all()


def test_a_bound_needs_no_luck() -> None:
    """The bound of a sum of n roundings, whose spread is known: close to it, and above its largest draws."""
    chain = lambda take: take((np.zeros((500, 400)), np.ones((500, 400)))).sum(axis=1)  # noqa: E731
    bounded = layer_bounds.bounded(chain)
    assert (bounded.value == 0).all() and 0.95 < np.mean(bounded.spread) / 20 < 1.05
    fresh = [np.abs(chain(layer_bounds.moved(seed))) for seed in range(1000, 1100)]
    assert (fresh <= bounded.bound).all() and np.max(fresh) > 0.3 * bounded.bound.max()


# --- Controls: a layer with a part wrong leaves its bound -------------------------------------------------------------

Change = Callable[[LayerWeights], LayerWeights]


def mixer(w: LayerWeights, **arrays: np.ndarray) -> LayerWeights:
    """The layer with other weights in its attention or Gated DeltaNet."""
    return replace(w, mixer=replace(w.mixer, **arrays))


def heads(array: np.ndarray, order: list[int], axis: int = 0) -> np.ndarray:
    """The array with its heads, equal parts along an axis, in another order."""
    return np.concatenate([np.split(array, len(order), axis)[h] for h in order], axis)


def gates_after_queries(w: LayerWeights) -> LayerWeights:
    """The rows [H × (query | gate)] read as [H × query | H × gate]."""
    rows = w.mixer.q_proj.reshape(2, 6, 256, -1)
    return mixer(w, q_proj=rows.swapaxes(0, 1).reshape(w.mixer.q_proj.shape))


def rotary_pairs_interleaved(w: LayerWeights) -> LayerWeights:
    """Rotary pairs (2j, 2j + 1) in place of (j, j + 32): the same order for queries and keys leaves scores alone."""
    order = np.concatenate([np.arange(0, 64, 2), np.arange(1, 64, 2), np.arange(64, 256)])
    q = w.mixer.q_proj.reshape(6, 2, 256, -1).copy()
    q[:, 0] = q[:, 0, order]
    arrays = {"q_proj": q.reshape(w.mixer.q_proj.shape), "k_proj": w.mixer.k_proj[order]}
    return mixer(w, **arrays, q_norm=w.mixer.q_norm[order], k_norm=w.mixer.k_norm[order])


def kv_head_by_remainder(w: LayerWeights) -> LayerWeights:
    """Query head h reads KV head h % HK, not h // (H / HK)."""
    order = [0, 2, 1, 3]
    return mixer(w, q_proj=heads(w.mixer.q_proj, order), o_proj=heads(w.mixer.o_proj, order, axis=1))


def key_head_by_remainder(w: LayerWeights) -> LayerWeights:
    """Value head h reads key head h % K, not h // (V / K)."""
    order, m = [0, 2, 1, 3], w.mixer
    by_head = {
        key: heads(getattr(m, key), order) for key in ("in_proj_z", "in_proj_a", "in_proj_b", "a_log", "dt_bias")
    }
    channels = {key: heads(getattr(m, key), [0, 1, 2, 3, *(4 + h for h in order)]) for key in ("in_proj_qkv", "conv")}
    return mixer(w, **by_head, **channels, out_proj=heads(m.out_proj, order, axis=1))


WRONG_WEIGHTS: dict[str, tuple[str, int, Change]] = {
    "input gain without its 1": (D256, 0, lambda w: replace(w, input_norm=w.input_norm - 1)),
    "second gain without its 1": (D256, 1, lambda w: replace(w, post_norm=w.post_norm - 1)),
    "query gain without its 1": (D256, 1, lambda w: mixer(w, q_norm=w.mixer.q_norm - 1)),
    "key gain without its 1": (D256, 1, lambda w: mixer(w, k_norm=w.mixer.k_norm - 1)),
    "gates after queries": (D256, 1, gates_after_queries),
    "rotary pairs interleaved": (D256, 1, rotary_pairs_interleaved),
    "KV head by remainder": (D128, 1, kv_head_by_remainder),
    "keys and values swapped": (D64, 2, lambda w: mixer(w, k_proj=w.mixer.v_proj, v_proj=w.mixer.k_proj)),
    "key head by remainder": (D128, 0, key_head_by_remainder),
    "output gain with a 1": (D256, 2, lambda w: mixer(w, norm=w.mixer.norm + 1)),
    "a and b swapped": (D256, 2, lambda w: mixer(w, in_proj_a=w.mixer.in_proj_b, in_proj_b=w.mixer.in_proj_a)),
    "taps newest first": (D64, 1, lambda w: mixer(w, conv=w.mixer.conv[:, ::-1].copy())),
    "no decay": (D64, 1, lambda w: mixer(w, a_log=np.full_like(w.mixer.a_log, -80))),
    "no dt bias": (D64, 1, lambda w: mixer(w, dt_bias=np.zeros_like(w.mixer.dt_bias))),
    "gate and up swapped": (
        D64, 0, lambda w: replace(w, mlp=replace(w.mlp, gate_proj=w.mlp.up_proj, up_proj=w.mlp.gate_proj)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_WEIGHTS)
def test_red_when_weights_are_misread(wrong: str) -> None:
    name, number, change = WRONG_WEIGHTS[wrong]
    assert held(name).layer_fraction(held(name).changed(number, change), number) > 1


def test_red_when_the_final_gain_lacks_its_1() -> None:
    one = held(D256)
    assert one.layer_fraction(one.model(replace(one.weights, final_norm=one.weights.final_norm - 1)), -1) > 1


@pytest.mark.parametrize("dims, theta", [(32, 1e7), (64, 1e6)], ids=["half the rotary dims", "another theta"])
def test_red_when_the_rotation_is_another(dims: int, theta: float) -> None:
    one = held(D256)
    model = one.model()
    model.rope = rope_table(len(model.rope), dims, theta)
    assert one.layer_fraction(model, 1) > 1


def ungated(out: np.ndarray, o: np.ndarray, qkv: np.ndarray, head_dim: int) -> None:
    np.copyto(out, o)


def chain_from_zero(y, states, qkv, decay, beta, streams, runs, chain=gated_delta_net.chain) -> None:
    for run in runs:
        states[run : run + decay.shape[1] * gated_delta_net.HEAD**2] = 0
    chain(y, states, qkv, decay, beta, streams, runs)


WRONG_STEPS = {
    "output gate dropped": (1, blocks, "attention_gate", lambda: ungated),
    "a key too far": (
        1, attention, "prompt_attention",
        lambda: mutate(
            prompt_attention.prompt_attention, "committed + row, scale, part=0", "committed + row + 1, scale, part=0"
        ),
    ),
    "keys and queries normed by mean": (
        0, gated_delta_net, "conv_kernel",
        lambda: mutate(gated_delta_net.conv_kernel, "squares + float32(NORM_EPS)", "squares / float32(HEAD) + float32(NORM_EPS)"),
    ),
    "queries not divided": (
        0, gated_delta_net, "conv_kernel",
        lambda: mutate(gated_delta_net.conv_kernel, "sqrt(float32(HEAD)) if head < HK", "float32(1.0) if head < HK"),
    ),
    "state dropped between passes": (0, gated_delta_net, "chain", lambda: chain_from_zero),
    "history dropped between passes": (0, gated_delta_net, "commit_conv", lambda: lambda *args: None),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_STEPS)
def test_red_when_a_step_is_wrong(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number, module, attribute, replacement = WRONG_STEPS[wrong]
    monkeypatch.setattr(module, attribute, replacement())
    assert held(D256).layer_fraction(held(D256).model(), number) > 1


# --- The whole model ------------------------------------------------------------------------------------------------


@every_case
def test_the_model_is_at_most_twice_as_far_off_as_public_bf16(name: str) -> None:
    """At every position: prompt rows of the first and of a later pass, and decode rows. Where rows choose, at nine of ten:
    another of two nearly equal experts takes a row far away.
    """
    off = errors(engine_logits(name), held(name).oracle)
    assert off.middle_ratio <= 1.2
    if BY_NAME[name].chooses:
        assert np.quantile(off.row_ratios, 0.9) <= 2
    else:
        assert off.ratio <= 2 and (off.row_ratios <= 2).all()


@pytest.mark.parametrize(
    "name, yardstick, share",
    [*((name, "ours", 0.7) for name in BY_NAME), *((case.name, "bf16", 0.5) for case in CASES if not case.chooses)],
)
def test_a_clear_choice_is_the_oracles(name: str, yardstick: str, share: float) -> None:
    """The greedy token is the same where the margin exceeds twice the largest error, which most positions have to.

    With our error at the position, that leaves only argmax to be wrong. That of the public bf16 run, its largest at any
    position, knows nothing of ours; where rows choose, that is another expert's, and says nothing.
    """
    logits, oracle = engine_logits(name), held(name).oracle
    off = errors(logits, oracle)
    largest = np.abs(off.ours).max(axis=1) if yardstick == "ours" else np.abs(off.bf16).max()
    clear = margins(oracle.logits) > 2 * largest
    chosen = np.empty(len(logits), np.int32)
    argmax(chosen, logits)
    assert (chosen == oracle.logits.argmax(axis=1))[clear].all()
    assert clear.mean() > share and clear[sum(PROMPT_PASSES) :].any()


@every_case
def test_red_when_a_layer_is_skipped(name: str) -> None:
    """Control: a model without its last layer is further off than bf16 explains."""
    one = held(name)
    model = one.model()
    model.layers.pop()
    assert errors(forced_logits(model, one.backend(), one.case.ids, PROMPT_PASSES), one.oracle).ratio > 2


# --- The public code itself -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=BY_NAME)
def live(request, tmp_path_factory) -> tuple[Held, Oracle]:
    """A case, and the public implementation run now, on the recorded inputs of each layer."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from refengine.verify.transformers_oracle import run_oracle

    one = held(request.param)
    folder = one.case.checkpoint(tmp_path_factory.mktemp("oracle"))
    return one, run_oracle(folder, one.case.ids, one.inputs)


def test_live_the_recording_is_what_the_public_code_gives(live: tuple[Held, Oracle]) -> None:
    one, oracle = live
    assert at_most(SMALL, one.fractions(Found(oracle.parts, [oracle.choices(n) for n in range(len(oracle.parts))])))
    assert errors(oracle.logits, one.oracle).ratio <= SMALL


def test_live_the_engine_agrees_with_the_public_code(live: tuple[Held, Oracle]) -> None:
    one, oracle = live
    assert at_most(1, one.fractions(found(one.case.name), oracle))
    assert errors(engine_logits(one.case.name), oracle).ratio <= 2


def test_live_the_hash_of_n_grams_is_made_of_the_public_code_s_numbers() -> None:
    """Of the real layout: a checkpoint brings its own, and must have these."""
    pytest.importorskip("torch")
    public = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    spec = load_model("qwen3.8-flash-next")
    own, n = spec.ngram_hash, spec.ngrams
    assert public._build_layer_multipliers(spec.vocabulary, n.size, 0, n.seed).tolist() == list(own.multipliers)
    assert [public._find_nth_prime_after(n.base - 1, h + 1) for h in range(n.all_heads)] == list(own.sizes)
