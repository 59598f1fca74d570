"""The MTP head lies within the bound of float64, a row's bits are its own, and some of its drafts are the model's choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from buffers import BF16, Output, assert_same_bits, normal

from backends.base import DECODE, PROMPT, Backend, Sizes, Stream, backend_class
from kernels_numba.add_rounded import add_rounded
from refengine.checkpoint import (
    Checkpoint,
    ModelWeights,
    MtpWeights,
    load_mtp,
    load_weights,
    make_checkpoint,
    open_checkpoint,
)
from refengine.device import open_device
from refengine.model import MtpHead, Qwen35, cache_shape
from refengine.registry import ModelSpec, Mtp, load_model
from refengine.verify import layer_bounds, oracles
from refengine.verify.bounds import worst_fraction
from refengine.verify.chains import qwen3_5
from refengine.verify.layer_bounds import Bounded
from refengine.verify.oracle_cases import DENSE
from refengine.verify.predictable import predictable, scaled

DEVICE, CONTEXT = open_device("cpu"), 96
SPECS = {case.name: replace(case.spec, mtp=Mtp(1)) for case in DENSE}
D256, D128, D64 = SPECS
ROWS, PASSES = 40, ((PROMPT, 17), (PROMPT, 9), (DECODE, 1), (DECODE, 4), (DECODE, 1), (DECODE, 8))
"""Rows of a sequence, and the passes in which they come."""
Results = tuple[np.ndarray, np.ndarray]
"""(logits float32 [n, vocabulary], hidden bf16 [n, hidden])."""


@cache
def made(name: str) -> tuple[Qwen35, MtpWeights]:
    """A small model, and a head of it whose parts are all of a size, so that a fault in any shows."""
    spec = SPECS[name]
    with TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(make_checkpoint(spec, Path(folder) / name), spec)
        model, weights = Qwen35(spec, load_weights(checkpoint, spec), DEVICE, CONTEXT), load_mtp(checkpoint, spec)
    return model, stirred(spec, weights)


def stirred(spec: ModelSpec, w: MtpWeights) -> MtpWeights:
    """The weights with a dense fc and branches eight times as large."""
    fc = normal(np.random.default_rng(3), spec.hidden, 2 * spec.hidden, scale=spec.hidden**-0.5)
    mixer = replace(w.layer.mixer, o_proj=scaled(w.layer.mixer.o_proj, 8))
    mlp = replace(w.layer.mlp, down_proj=scaled(w.layer.mlp.down_proj, 8))
    return replace(w, fc=fc, layer=replace(w.layer, mixer=mixer, mlp=mlp))


def head_of(name: str, weights: MtpWeights | None = None) -> MtpHead:
    model, own = made(name)
    return MtpHead(SPECS[name], weights or own, model, DEVICE)


def backend_of(spec: ModelSpec, kind: str = "paged", streams: int = 1) -> Backend:
    sizes = Sizes(CONTEXT, streams, 16, window_rows=8, shuffle=1, spare_pages=2)
    return backend_class(kind)(cache_shape(spec, mtp=True), sizes)


def sequence(spec: ModelSpec, seed: int = 0, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """(ids of the tokens that follow int32 [rows], hidden states bf16 [rows, hidden])."""
    rng = np.random.default_rng([seed, 7])
    return rng.integers(0, spec.vocabulary, rows).astype(np.int32), normal(rng, rows, spec.hidden)


def run(head: MtpHead, backend: Backend, stream: Stream, phase: str, ids: np.ndarray, hidden: np.ndarray) -> Results:
    """One pass of one stream, committed."""
    batch = backend.batch(phase, [(stream, len(ids))])
    out = head.forward(ids, hidden, backend, batch, np.arange(len(ids)))
    backend.finish(batch)
    return out


def in_passes(
    head: MtpHead, ids: np.ndarray, hidden: np.ndarray, passes: Sequence[tuple[str, int]] = PASSES
) -> Results:
    """The whole sequence on pages, pass by pass."""
    backend, start, parts = backend_of(head.spec), 0, []
    stream = backend.open()
    for phase, rows in passes:
        at = slice(start, start + rows)
        parts.append(run(head, backend, stream, phase, ids[at], hidden[at]))
        start += rows
    assert start == len(ids)
    return joined(parts)


def joined(parts: Sequence[Results]) -> Results:
    logits, hidden = zip(*parts, strict=True)
    return np.concatenate(logits), np.concatenate(hidden)


def assert_same(found: Results, wanted: Results) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert np.isfinite(a.astype(np.float32)).all()
        assert_same_bits(a, b)


# --- Against float64 --------------------------------------------------------------------------------------------------


@cache
def bounded(name: str) -> Bounded:
    """Logits and hidden states of the sequence side by side: [ROWS, vocabulary + hidden]."""
    (model, weights), spec = made(name), SPECS[name]
    ids, hidden = sequence(spec)
    inputs = oracles.wide(model.embedding[ids], hidden)
    return layer_bounds.bounded(
        lambda take: np.concatenate(qwen3_5.mtp(weights, spec, model.head, *inputs, take), axis=1)
    )


def found(name: str, weights: MtpWeights | None = None, shift: int = 0) -> np.ndarray:
    """What the engine makes of the sequence, as ``bounded`` has it."""
    ids, hidden = sequence(SPECS[name])
    parts = in_passes(head_of(name, weights), np.roll(ids, shift), hidden)
    return np.concatenate([part.astype(np.float64) for part in parts], axis=1)


@pytest.mark.parametrize("name", SPECS)
def test_the_head_lies_within_its_bound(name):
    one, exact = found(name), bounded(name)
    assert worst_fraction(one, exact.value, exact.bound) <= 1
    assert exact.mean_square(one) <= 1


Change = Callable[[MtpWeights], MtpWeights]
WRONG: dict[str, Change] = {
    "hidden state before embedding": lambda w: replace(w, fc=np.roll(w.fc, w.fc.shape[1] // 2, axis=1)),
    "norms swapped": lambda w: replace(w, embedding_norm=w.hidden_norm, hidden_norm=w.embedding_norm),
    "embedding gain without its 1": lambda w: replace(w, embedding_norm=w.embedding_norm - 1),
    "hidden gain without its 1": lambda w: replace(w, hidden_norm=w.hidden_norm - 1),
    "final gain without its 1": lambda w: replace(w, final_norm=w.final_norm - 1),
    "no hidden state": lambda w: replace(w, fc=w.fc * (np.arange(w.fc.shape[1]) < w.fc.shape[1] // 2).astype(BF16)),
    "no attention": lambda w: replace(
        w, layer=replace(w.layer, mixer=replace(w.layer.mixer, o_proj=w.layer.mixer.o_proj * BF16.type(0)))
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_red_when_the_head_is_put_together_otherwise(wrong):
    exact = bounded(D256)
    assert worst_fraction(found(D256, WRONG[wrong](made(D256)[1])), exact.value, exact.bound) > 1


def test_red_when_it_takes_the_token_itself_and_not_the_next():
    exact = bounded(D256)
    assert worst_fraction(found(D256, shift=1), exact.value, exact.bound) > 1


def test_red_when_the_final_norm_is_taken_twice():
    """Its gain counts twice then: the hidden state of another norm."""
    (model, _), exact = made(D256), bounded(D256)
    ids, hidden = sequence(SPECS[D256])
    logits, own = in_passes(head_of(D256), ids, model.normed(hidden, None, model.final_norm))
    twice = np.concatenate([logits, own.astype(np.float64)], axis=1)
    assert worst_fraction(twice, exact.value, exact.bound) > 1


# --- Bits -------------------------------------------------------------------------------------------------------------


def test_rounded_sums_are_numpy_s():
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((2, 9, 258)).astype(np.float32)
    out = Output(a.shape)
    add_rounded(out.array, a, b)
    assert_same_bits(out.checked(), (a + b).astype(BF16))


def test_passes_and_windows_do_not_change_a_row():
    """Prompt rows cut otherwise, decode rows one by one."""
    ids, hidden = sequence(SPECS[D128])
    one_by_one = [(PROMPT, 26), *[(DECODE, 1)] * 14]
    assert_same(in_passes(head_of(D128), ids, hidden), in_passes(head_of(D128), ids, hidden, one_by_one))


@pytest.mark.parametrize("kind", ["window", "paged", "paged-p256"])
def test_streams_together_are_each_alone(kind):
    spec, lengths = SPECS[D256], ((20, 3), (33, 1), (1, 8))
    sequences = [sequence(spec, seed, sum(rows)) for seed, rows in enumerate(lengths)]
    alone = [
        in_passes(head_of(D256), *one, [(PROMPT, rows[0]), (DECODE, rows[1])])
        for one, rows in zip(sequences, lengths, strict=True)
    ]
    head, backend = head_of(D256), backend_of(spec, kind, 3)
    streams, start, parts = [backend.open() for _ in lengths], [0] * 3, [[] for _ in lengths]
    for turn, phase in enumerate((PROMPT, DECODE)):
        counts = [rows[turn] for rows in lengths]
        batch = backend.batch(phase, list(zip(streams, counts, strict=True)))
        cuts = [tuple(part[s : s + n] for part in one) for one, s, n in zip(sequences, start, counts, strict=True)]
        out = head.forward(*map(np.concatenate, zip(*cuts, strict=True)), backend, batch, np.arange(sum(counts)))
        backend.finish(batch)
        for n, edge in enumerate(np.cumsum([0, *counts])[:-1]):
            parts[n].append(tuple(part[edge : edge + counts[n]] for part in out))
        start = counts
    for mine, wanted in zip(parts, alone, strict=True):
        assert_same(joined(mine), wanted)


def test_the_rows_that_are_wanted_are_given_in_their_order():
    ids, hidden = sequence(SPECS[D64], rows=9)
    backend, head, rows = backend_of(SPECS[D64]), head_of(D64), np.array([7, 2])
    batch = backend.batch(PROMPT, [(backend.open(), 9)])
    whole = in_passes(head, ids, hidden, [(PROMPT, 9)])
    assert_same(head.forward(ids, hidden, backend, batch, rows), (whole[0][rows], whole[1][rows]))


def test_a_draft_that_is_not_kept_leaves_no_trace():
    ids, hidden = sequence(SPECS[D256], rows=20)
    head, backend = head_of(D256), backend_of(SPECS[D256])
    stream = backend.open()
    run(head, backend, stream, PROMPT, ids[:15], hidden[:15])
    dropped = backend.batch(DECODE, [(stream, 5)])
    head.forward(ids[:5], hidden[:5], backend, dropped, np.arange(5))
    kept = run(head, backend, stream, DECODE, ids[15:], hidden[15:])
    whole = in_passes(head, ids, hidden, [(PROMPT, 15), (DECODE, 5)])
    assert_same(kept, (whole[0][15:], whole[1][15:]))


# --- With its model ---------------------------------------------------------------------------------------------------


def drafted(head: MtpHead, model: Qwen35, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[int]]:
    """Greedy: (the model's tokens, the head's draft of each from the token before on). One layer more is kept a pass."""
    backend, ids, start, drafts = backend_of(model.spec), list(prompt), 0, []
    stream = backend.open()
    while len(ids) < len(prompt) + tokens:
        batch = backend.batch(PROMPT if start == 0 else DECODE, [(stream, len(ids) - start)])
        hidden = model.hidden(np.array(ids[start:], np.int32), backend, batch)
        last, start = np.array([batch.rows - 1]), len(ids)
        ids.append(int(model.logits(hidden, last).argmax()))
        logits, _ = head.forward(np.array(ids[start - batch.rows + 1 :], np.int32), hidden, backend, batch, last)
        drafts.append(int(logits.argmax()))
        backend.finish(batch)
    return ids[len(prompt) :], drafts


def plain(model: Qwen35, prompt: Sequence[int], tokens: int) -> list[int]:
    """The same without a head, by ``forward``, on a cache that has no layer for it."""
    backend = backend_class("paged")(cache_shape(model.spec), Sizes(CONTEXT, page_size=16))
    ids, start, stream = list(prompt), 0, backend.open()
    while len(ids) < len(prompt) + tokens:
        batch = backend.batch(PROMPT if start == 0 else DECODE, [(stream, len(ids) - start)])
        logits = model.forward(np.array(ids[start:], np.int32), backend, batch, np.array([batch.rows - 1]))
        start = len(ids)
        ids.append(int(logits.argmax()))
        backend.finish(batch)
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    """qwen3.5-tiny and its head, as generated."""
    spec = load_model("qwen3.5-tiny")
    return open_checkpoint(make_checkpoint(spec, tmp_path_factory.mktemp("tiny") / "tiny"), spec)


PROMPT_TEXT, TOKENS = b"Pages are runs of positions.", 32


def accepted(checkpoint: Checkpoint, change: Callable[[ModelWeights], ModelWeights]) -> float:
    """Which part of the head's drafts are the model's next token, the tokens being those of a run without a head."""
    spec = checkpoint.spec
    model = Qwen35(spec, change(load_weights(checkpoint, spec)), DEVICE, CONTEXT)
    tokens, drafts = drafted(MtpHead(spec, load_mtp(checkpoint, spec), model, DEVICE), model, list(PROMPT_TEXT), TOKENS)
    assert tokens == plain(model, list(PROMPT_TEXT), TOKENS)
    return float(np.mean([draft == token for draft, token in zip(drafts, tokens[1:], strict=False)]))


def test_some_drafts_are_the_model_s_choice_and_some_are_not(checkpoint):
    assert 0 < accepted(checkpoint, lambda weights: weights) < 1


def test_a_predictable_model_takes_many_drafts(checkpoint):
    share = accepted(checkpoint, predictable)
    print(f"{share:.0%} of the drafts accepted")
    assert 0.2 < share < 0.9
