"""MTP heads whose rows choose, experts or keys too, lie within the bound of float64 over prompt passes and windows; a head of
Flash Next put together otherwise does not.

The public implementation has no heads; their parts are those of the models' layers (test_oracle.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from buffers import normal
from held_cases import BY_NAME

from backends.base import DECODE, PROMPT, Sizes, backend_class
from kernels_numba.flash_next import hyper
from refengine.checkpoint import (
    FlashNextMtpWeights,
    MtpWeights,
    load_mtp,
    load_weights,
    make_checkpoint,
    open_checkpoint,
)
from refengine.device import open_device
from refengine.model import Head, Model, cache_shape, open_head, open_model
from refengine.registry import Mtp
from refengine.verify import oracles
from refengine.verify.bounds import worst_fraction
from refengine.verify.chains import flash_next, qwen3_5
from refengine.verify.choices import Choices, choices_of, first_of, same, unexplained
from refengine.verify.forced import joined
from refengine.verify.layer_bounds import BoundedChain, bounded
from refengine.verify.predictable import quieter

SPECS = {name: replace(BY_NAME[name].spec, mtp=Mtp(1)) for name in ("oracle-moe", "oracle-two-streams")}
MOE, FLASH = SPECS
DEVICE, ROWS = open_device("cpu"), 48
PASSES = ((PROMPT, 21), (PROMPT, 9), (DECODE, 1), (DECODE, 4), (DECODE, 1), (DECODE, 8), (DECODE, 3), (DECODE, 1))
Weights = MtpWeights | FlashNextMtpWeights
Results = tuple[np.ndarray, Choices]
"""(logits and the head's own hidden states side by side, float64 [ROWS, vocabulary + width]; what the rows chose)."""


@cache
def made(name: str) -> tuple[Model, Weights]:
    """A small model, and a head of it whose parts are all of a size, so that a fault in any shows."""
    spec = SPECS[name]
    with TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(make_checkpoint(spec, Path(folder) / name), spec)
        model = open_model(spec, load_weights(checkpoint, spec), DEVICE, ROWS)
        return model, stirred(load_mtp(checkpoint, spec), spec.hidden)


def stirred(w: Weights, size: int) -> Weights:
    """The weights with dense matrices of the embedding and the hidden state, and branches eight times as large."""
    rng = np.random.default_rng(3)
    fc = [normal(rng, size, size, scale=size**-0.5) for _ in range(2)]
    w = replace(w, layer=replace(w.layer, mixer=quieter(w.layer.mixer, 8), mlp=quieter(w.layer.mlp, 8)))
    if isinstance(w, MtpWeights):
        return replace(w, fc=np.hstack(fc))
    return replace(w, fc_embedding=fc[0], fc_hidden=fc[1])


@cache
def sequence(name: str) -> tuple[np.ndarray, np.ndarray]:
    """(ids of the tokens that follow int32 [ROWS], hidden states of the model bf16 [ROWS, width])."""
    rng, spec = np.random.default_rng(7), SPECS[name]
    return rng.integers(0, spec.vocabulary, ROWS).astype(np.int32), normal(rng, ROWS, spec.stream_width)


def found(name: str, weights: Weights | None = None, shift: int = 0) -> Results:
    """What the engine makes of the sequence on pages, pass by pass."""
    (model, own), (ids, hidden) = made(name), sequence(name)
    return in_passes(open_head(SPECS[name], weights or own, model, DEVICE), np.roll(ids, shift), hidden)


def in_passes(head: Head, ids: np.ndarray, hidden: np.ndarray) -> Results:
    sizes = Sizes(ROWS, 1, 16, window_rows=8, shuffle=1)
    backend = backend_class("paged")(cache_shape(head.spec, mtp=True), sizes)
    stream, start, parts, chosen = backend.open(), 0, [], []
    for phase, rows in PASSES:
        at, batch = slice(start, start + rows), backend.batch(phase, [(stream, rows)])
        with choices_of(ROWS) as choices:
            parts.append(head.forward(ids[at], hidden[at], backend, batch, np.arange(rows)))
        backend.finish(batch)
        chosen.append(choices)
        start += rows
    assert start == ROWS
    return np.concatenate([np.hstack([part.astype(np.float64) for part in one]) for one in parts]), joined(chosen)


def exact(name: str, chosen: Choices) -> BoundedChain:
    """The chain of the true head over the sequence, with these choices."""
    (model, weights), (ids, hidden) = made(name), sequence(name)
    chain = {MOE: qwen3_5.mtp, FLASH: flash_next.mtp}[name]
    inputs = weights, SPECS[name], model.head, *oracles.wide(model.embedding[ids], hidden)
    return bounded(lambda run: np.hstack(chain(*inputs, run)), chosen)


@cache
def own_exact(name: str) -> BoundedChain:
    """The same with the engine's choices."""
    return exact(name, found(name)[1])


def fraction(name: str, results: Results) -> float:
    """The worst |found - float64| / bound, or what the choices exceed theirs by."""
    (value, chosen), own = results, own_exact(name)
    if (excess := unexplained(first_of(chosen), own.scores, SPECS[name])) > 1:
        return excess
    chain = own if same(chosen, own.chosen) else exact(name, chosen)
    return max(unexplained(chosen, chain.scores, SPECS[name]), worst_fraction(value, chain.value, chain.bound))


@pytest.mark.parametrize("name", SPECS)
def test_a_head_lies_within_its_bound(name: str) -> None:
    value, chosen = found(name)
    assert fraction(name, (value, chosen)) <= 1 and own_exact(name).mean_square(value) <= 1
    assert set(chosen) == ({"experts", "keys"} if name == FLASH else {"experts"})
    assert name != FLASH or not chosen["keys"][-1].all(), "its last row is sparse"


@pytest.mark.parametrize("name", SPECS)
def test_red_when_a_head_takes_the_token_itself_and_not_the_next(name: str) -> None:
    assert fraction(name, found(name, shift=1)) > 1


Change = Callable[[FlashNextMtpWeights], FlashNextMtpWeights]
WRONG: dict[str, Change] = {
    "embedding and streams swapped": lambda w: replace(w, fc_embedding=w.fc_hidden, fc_hidden=w.fc_embedding),
    "embedding gain without its 1": lambda w: replace(w, embedding_norm=w.embedding_norm - 1),
    "streams' gain without its 1": lambda w: replace(w, hidden_norm=w.hidden_norm - 1),
    "gains of another stream": lambda w: replace(w, hidden_norm=np.roll(w.hidden_norm, SPECS[FLASH].hidden)),
    "readout of a block": lambda w: replace(w, readout=replace(w.layer.mlp_readout, inject=None)),
    "no attention": lambda w: replace(w, layer=replace(w.layer, mixer=quieter(w.layer.mixer, 0))),
    "no experts": lambda w: replace(w, layer=replace(w.layer, mlp=quieter(w.layer.mlp, 0))),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_red_when_the_head_is_put_together_otherwise(wrong: str) -> None:
    assert fraction(FLASH, found(FLASH, WRONG[wrong](made(FLASH)[1]))) > 1


def test_red_when_each_stream_is_normed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = hyper.norm_streams

    def alone(out, h, gain, streams, eps) -> None:
        norm(out, h, gain, SPECS[FLASH].hyper.streams, eps)

    monkeypatch.setattr(hyper, "norm_streams", alone)
    assert fraction(FLASH, found(FLASH)) > 1
