"""A layer of experts or of Flash Next with any part wrong leaves its bound, or makes choices that no rounding explains.

Also: ties go to the lower block, which the public implementation leaves open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from held_cases import held
from mutants import mutate

from kernels_numba import moe
from kernels_numba.flash_next import attention, chunks, hyper, ngram, pool, select
from kernels_numba.streams import COMMITTED, FIRST
from refengine.checkpoint import HyperLayerWeights
from refengine.model import Model
from refengine.verify import moe_oracle
from refengine.verify.chains.indexer import best_keys
from refengine.verify.choices import unexplained
from refengine.verify.forced import forced_layer
from refengine.verify.layer_bounds import Bounded
from refengine.verify.oracle_cases import PROMPT_PASSES

MOE, FLASH, TWO = "oracle-moe", "oracle-flash", "oracle-two-streams"
NGRAMS, SPARSE = 1, 2
"""Layers of FLASH: the n-gram branch before Gated DeltaNet, sparse attention."""

# --- Weights misread --------------------------------------------------------------------------------------------------

Change = Callable[[HyperLayerWeights], HyperLayerWeights]


def part(name: str, **change: Callable[[Any], Any]) -> Change:
    """A layer with fields of one of its parts changed, each by a function of itself."""
    return lambda w: replace(w, **{name: with_fields(getattr(w, name), **change)})


def with_fields(w: Any, **change: Callable[[Any], Any]) -> Any:
    return replace(w, **{field: function(getattr(w, field)) for field, function in change.items()})


def off_one(gain: np.ndarray) -> np.ndarray:
    """A gain without the 1 of a centred norm."""
    return gain - 1


def reversed_taps(conv: np.ndarray) -> np.ndarray:
    return conv[:, ::-1].copy()


def turned(rows: np.ndarray) -> np.ndarray:
    """Rows in another order."""
    return np.roll(rows, 1, axis=0)


def halves_swapped(rows: np.ndarray) -> np.ndarray:
    """Each expert's gate rows where its up rows belong."""
    return np.roll(rows, rows.shape[1] // 2, axis=1)


def indexer(**change: Callable[[Any], Any]) -> Change:
    return part("mixer", indexer=lambda w: with_fields(w, **change))


def first_two_swapped(multipliers: np.ndarray) -> np.ndarray:
    return multipliers[[1, 0, 2]]


WRONG_WEIGHTS: dict[str, tuple[str, int, Change]] = {
    "experts' gate and up swapped": (MOE, 1, part("mlp", gate_up=halves_swapped)),
    "each expert another": (MOE, 1, part("mlp", gate_up=turned, down=turned)),
    "router of other experts": (MOE, 1, part("mlp", router=turned)),
    "stream gain without its 1": (FLASH, 0, part("mixer_readout", norm=off_one)),
    "second stream gain without its 1": (FLASH, 0, part("mlp_readout", norm=off_one)),
    "streams written to others": (FLASH, 0, part("mixer_readout", inject=turned)),
    "index query gain without its 1": (FLASH, SPARSE, indexer(q_norm=off_one)),
    "pooled key gain without its 1": (FLASH, SPARSE, indexer(k_norm=off_one)),
    "index key before index queries": (FLASH, SPARSE, indexer(qk_proj=lambda w: np.roll(w, 128, axis=0))),
    "n-gram key gain without its 1": (FLASH, NGRAMS, part("ngrams", key_norm=off_one)),
    "n-gram query gain without its 1": (FLASH, NGRAMS, part("ngrams", query_norm=off_one)),
    "n-gram convolution's gain without its 1": (FLASH, NGRAMS, part("ngrams", conv_norm=off_one)),
    "n-gram taps newest first": (FLASH, NGRAMS, part("ngrams", conv=reversed_taps)),
    "n-gram order swapped": (FLASH, NGRAMS, part("ngrams", multipliers=first_two_swapped)),
    "tables in another order": (FLASH, NGRAMS, part("ngrams", offsets=turned, sizes=turned)),
    "the branch left out": (TWO, 0, lambda w: replace(w, ngrams=None)),
}


@pytest.mark.parametrize("wrong", WRONG_WEIGHTS)
def test_red_when_weights_are_misread(wrong: str) -> None:
    name, number, change = WRONG_WEIGHTS[wrong]
    assert held(name).layer_fraction(held(name).changed(number, change), number) > 1


def test_red_when_the_last_readout_lacks_its_1() -> None:
    one = held(FLASH)
    readout = with_fields(one.weights.readout, norm=off_one)
    assert one.layer_fraction(one.model(replace(one.weights, readout=readout)), -1) > 1


# --- Steps that are wrong ---------------------------------------------------------------------------------------------


def silu_for_sigmoid(model: Model) -> None:
    model.spec = replace(model.spec, gated_delta_net=replace(model.spec.gated_delta_net, gate="silu"))


def another_end_token(model: Model) -> None:
    model.spec = replace(model.spec, ngrams=replace(model.spec.ngrams, end=1))


def an_expert_less(model: Model) -> None:
    for number, layer in enumerate(model.layers):
        model.layers[number] = replace(layer, mlp=replace(layer.mlp, picks=layer.mlp.picks - 1))


WRONG_MODELS: dict[str, tuple[str, int, Callable[[Model], None]]] = {
    "gate silu, not sigmoid": (FLASH, 0, silu_for_sigmoid),
    "tokens before an end token counted": (FLASH, NGRAMS, another_end_token),
    "an expert too few": (MOE, 1, an_expert_less),
}


@pytest.mark.parametrize("wrong", WRONG_MODELS)
def test_red_when_the_model_is_another(wrong: str) -> None:
    name, number, spoil = WRONG_MODELS[wrong]
    model = held(name).model()
    spoil(model)
    assert held(name).layer_fraction(model, number) > 1


def unscaled(h, branch, inject, write=hyper.write_back) -> None:
    write(h, branch, np.ones_like(inject))


def shared_expert_ungated(experts, weights, logits, route=moe.route) -> None:
    route(experts, weights, logits)
    weights[:, -1] = 1


def not_renormalised(experts, weights, logits, route=moe.route) -> None:
    """A pick's share of all experts, not of the picks."""
    route(experts, weights, logits)
    exponentials = np.exp(logits[:, :-1] - logits[:, :-1].max(axis=1, keepdims=True))
    shares = exponentials / exponentials.sum(axis=1, keepdims=True)
    weights[:, :-1] = np.take_along_axis(shares, experts, axis=1)


def next_best(experts, weights, logits, route=moe.route) -> None:
    """The next best expert in place of the last pick, which alone is seen."""
    route(experts, weights, logits)
    experts[:, -1] = moe_oracle.picks(logits[:, :-1], experts.shape[1] + 1)[:, -1]


def mutant(kernel: Any, old: str, new: str) -> Callable[[], Any]:
    return lambda: mutate(kernel, old, new)


WRONG_STEPS: dict[str, tuple[str, int, Any, str, Callable[[], Any]]] = {
    "streams written back unscaled": (FLASH, 0, hyper, "write_back", lambda: unscaled),
    "shared expert without its gate": (MOE, 1, moe, "route", lambda: shared_expert_ungated),
    "weights not renormalised": (MOE, 1, moe, "route", lambda: not_renormalised),
    "the next best expert": (MOE, 1, moe, "route", lambda: next_best),
    "a block too many": (
        FLASH, SPARSE, select, "fn_qsa_select_kernel",
        mutant(
            select.fn_qsa_select_kernel, "listed, scores, row, thread, complete, cut, budget - int64(above)",
            "listed, scores, row, thread, complete, cut, budget + 1 - int64(above)",
        ),
    ),
    "a block seen a row too late": (
        FLASH, SPARSE, select, "fn_qsa_select_kernel",
        mutant(
            select.fn_qsa_select_kernel, "    complete = end // BLOCK\n    if is_sparse",
            "    complete = (end - 1) // BLOCK\n    if is_sparse",
        ),
    ),
    "a tail of the block before": (
        FLASH, SPARSE, select, "fn_qsa_select_kernel",
        mutant(
            select.fn_qsa_select_kernel, "int32(BLOCK * complete + thread)", "int32(BLOCK * complete - BLOCK + thread)"
        ),
    ),
    "the tail dropped": (
        FLASH, SPARSE, chunks, "fn_attn_chunks_kernel",
        mutant(
            chunks.fn_attn_chunks_kernel, "list_length(end, budget)", "list_length(end, budget) - (end % 4 if end > 20 else 0)"
        ),
    ),
    "pooled key turned by its last position": (
        FLASH, SPARSE, pool, "fn_qsa_pool_kernel",
        mutant(
            pool.fn_qsa_pool_kernel, "turn_head(words, cos_sin, spans, axes, stream, position,",
            "turn_head(words, cos_sin, spans, axes, stream, position + 3,",
        ),
    ),
    "pooled key of three": (
        FLASH, SPARSE, pool, "fn_qsa_pool_kernel",
        mutant(
            pool.fn_qsa_pool_kernel, "((bf16_low(k0) + bf16_low(k1)) + bf16_low(k2)) + bf16_low(k3)",
            "((bf16_low(k0) + bf16_low(k1)) + bf16_low(k2))",
        ),
    ),
    "n-gram convolution over neighbours": (
        FLASH, NGRAMS, ngram, "ngram_conv_kernel",
        mutant(ngram.ngram_conv_kernel, "(TAPS - 1 - t) * DILATION, word", "(TAPS - 1 - t), word"),
    ),
    "n-gram gate without its sign": (
        FLASH, NGRAMS, ngram, "ngram_gate_kernel", mutant(ngram.ngram_gate_kernel, "(-root if", "(root if")
    ),
    "n-gram rows dropped between passes": (FLASH, NGRAMS, ngram, "commit_tails", lambda: lambda *args: None),
    "n-gram tokens dropped between passes": (FLASH, NGRAMS, ngram, "commit_tokens", lambda: lambda *args: None),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_STEPS)
def test_red_when_a_step_is_wrong(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, number, module, attribute, replacement = WRONG_STEPS[wrong]
    monkeypatch.setattr(module, attribute, replacement())
    assert held(name).layer_fraction(held(name).model(), number) > 1


# --- Ties -------------------------------------------------------------------------------------------------------------


def keys_of_ties() -> tuple[np.ndarray, np.ndarray]:
    """(bool [W, W], what the rows of a layer read whose index queries are zero; the same by a stable sort)."""
    one = held(FLASH)
    model = one.changed(SPARSE, indexer(q_norm=np.zeros_like))
    _, chosen = forced_layer(model, SPARSE, one.backend(), one.case.ids, one.inputs[SPARSE], PROMPT_PASSES)
    scores = np.zeros((len(one.case.ids), len(one.case.ids) // 4))
    return chosen["keys"], best_keys(scores, one.case.spec.indexer.budget // 4)


def test_of_equal_scores_the_lower_block_is_read() -> None:
    assert np.array_equal(*keys_of_ties())


def to_the_higher(listed, scores, streams, rows, budget, stream=None) -> None:
    """fn_qsa_select for one stream, its ties turned."""
    for row in range(len(rows)):
        end = int(streams[0, COMMITTED] + row - streams[0, FIRST]) + 1
        if end // 4 > budget:
            order = np.argsort(scores[row, : end // 4], kind="stable")[-budget:]
            keys = [4 * block + i for block in sorted(order) for i in range(4)]
            listed[row, : 4 * budget + end % 4] = [*keys, *range(end - end % 4, end)]


def test_red_when_ties_go_to_the_higher_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "fn_qsa_select", to_the_higher)
    assert not np.array_equal(*keys_of_ties())


# --- Choices ----------------------------------------------------------------------------------------------------------

SPEC = held(TWO).case.spec


def explained(picks: list[int]) -> float:
    """That of one row whose 12 scores fall by a tenth from expert to expert, each known to about a hundredth."""
    scores = Bounded(-np.arange(12.0)[None] / 10, np.full((1, 12), 0.001))
    assert 0.005 < scores.bound[0, 0] < 0.02
    return unexplained({"experts": np.array([picks])}, {"experts": scores}, SPEC)


def test_a_choice_is_explained_by_roundings_or_red() -> None:
    assert explained([0, 1, 2, 3]) == explained([3, 1, 0, 2]) == 0
    assert explained([0, 1, 2, 4]) > 1
    assert all(explained(wrong) == np.inf for wrong in ([0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 12], [0, 1, 2, -1]))


def test_scores_closer_than_their_roundings_leave_the_choice_open() -> None:
    value = np.array([[0.0, 0.0, 0.0, 0.001, 0.002, *[-1.0] * 7]])
    scores = Bounded(value, np.full((1, 12), 0.001))
    assert 0 < unexplained({"experts": np.array([[0, 1, 2, 3]])}, {"experts": scores}, SPEC) < 1


@pytest.mark.parametrize("value", [np.eye(1, 12, 5), np.full((1, 12), np.nan)], ids=["exact", "no numbers"])
def test_red_when_exact_scores_or_none_would_hide_a_choice(value: np.ndarray) -> None:
    """The best expert is left among scores that tie without any doubt; nothing explains scores that are no numbers."""
    picks = {"experts": np.array([[0, 1, 2, 3]])}
    assert unexplained(picks, {"experts": Bounded(value, np.zeros((1, 12)))}, SPEC) > 1


def read(row: int, blocks: list[int], tail: list[int]) -> float:
    """What choices of a sequence of 32 rows are worth, all as float64 makes them but one; scores rise from block to block."""
    scores = Bounded(np.tile(np.arange(8.0), (32, 1)), np.full((32, 8), 1e-3))
    keys = best_keys(scores.value, SPEC.indexer.budget // 4)
    keys[row] = False
    keys[row, [4 * b + i for b in blocks for i in range(4)] + tail] = True
    return unexplained({"keys": keys}, {"keys": scores}, SPEC)


def test_keys_are_whole_blocks_as_many_as_there_must_be_and_the_tail() -> None:
    assert read(29, [1, 2, 3, 4, 5, 6], [28, 29]) == 0
    assert read(29, [0, 2, 3, 4, 5, 6], [28, 29]) > 1
    wrong = ([1, 2, 3, 4, 5], [28, 29]), ([1, 2, 3, 4, 5, 6], [28]), ([1, 2, 3, 4, 5, 6], [28, 29, 30])
    assert all(read(29, *one) == np.inf for one in (*wrong, ([2, 3, 4, 5, 6], [4, 5, 28, 29])))
    assert read(9, [0, 1], [8, 9]) == 0 and read(9, [1], [8, 9]) == np.inf
