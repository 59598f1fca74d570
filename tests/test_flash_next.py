"""Flash Next and the experts' layout through the engine: a row's logits depend on its sequence and its phase alone, on both sides
of the switch from dense to sparse attention, and a stream goes on from whatever position it was kept at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from backends.base import DECODE, PROMPT, Backend, BackendError, Sizes, Stream, backend_class
from refengine.checkpoint import load_mtp, load_weights, open_cached
from refengine.device import open_device
from refengine.model import Head, Model, cache_shape, open_head, open_model
from refengine.registry import Experts, Mlp, ModelSpec, load_model
from refengine.serve import kept_files
from refengine.serve.drafters import MtpDrafter, NgramDrafter
from refengine.serve.session import Session
from refengine.verify.launches import one_of_each_kind

CPU, CONTEXT, TOKENS = open_device("cpu"), 128, 4
TINY, DENSE = one_of_each_kind(load_model("flash-next-tiny")), one_of_each_kind(load_model("qwen3.5-tiny"))
FLASH = replace(TINY, indexer=replace(TINY.indexer, budget=32))
"""Sparse from 36 keys on."""
MOE = replace(DENSE, family="qwen3_5_moe", experts=Experts(8, 2, 64), mlp=Mlp(64))
PROMPTS = [[(7 * i + 13 * n) % 256 for i in range(length)] for n, length in enumerate((75, 50, 38))]
FORMS = [("window", 16), ("paged", 4), ("paged", 12), ("paged", 16), ("paged-p256", 256), ("mixed", 48)]


@cache
def model_of(spec: ModelSpec) -> Model:
    return open_model(spec, load_weights(open_cached(spec), spec), CPU, CONTEXT)


@cache
def head_of(spec: ModelSpec) -> Head:
    return open_head(spec, load_mtp(open_cached(spec), spec), model_of(spec), CPU)


def backend(spec: ModelSpec, name: str, size: int, streams: int = 1, mtp: bool = False, **sizes) -> Backend:
    sizes = {"window_rows": 4, "spare_pages": 2, "shuffle": 5, **sizes}
    return backend_class(name)(cache_shape(spec, mtp), Sizes(CONTEXT, streams, size, **sizes))


@dataclass(frozen=True)
class Reply:
    """Logits of the last prompt row and of the decode rows, as bytes, and the tokens."""

    logits: list[bytes]
    tokens: list[int]


def replies(made: Backend, spec: ModelSpec, prompts, rows: int, **session) -> list[Reply]:
    """Each prompt's reply, all streams together."""
    one = Session(model_of(spec), made, CPU, prompts, rows, **session)
    logits: list[list[bytes]] = [[] for _ in prompts]
    for passed in one.run(TOKENS):
        assert np.isfinite(passed.logits).all()
        for number, row in zip(passed.streams, passed.logits, strict=True):
            if passed.phase == PROMPT:
                logits[number].clear()
            logits[number].append(row.tobytes())
    for stream in one.streams:
        stream.release()
    made.check()
    return [Reply(rows, tokens) for rows, tokens in zip(logits, one.replies, strict=True)]


@cache
def alone(spec: ModelSpec) -> list[Reply]:
    """Each prompt by itself, in one pass, on a window."""
    return [replies(backend(spec, "window", 16), spec, [prompt], CONTEXT)[0] for prompt in PROMPTS]


@pytest.fixture(params=[FLASH, MOE], ids=["flash-next", "experts"])
def spec(request) -> ModelSpec:
    return request.param


# --- Passes, neighbours, pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "rows"), [(0, 13), (0, 36), (2, 1)])
def test_a_prompt_in_passes_is_the_prompt_in_one(spec, number, rows):
    assert replies(backend(spec, "paged", 12), spec, [PROMPTS[number]], rows) == [alone(spec)[number]]


@pytest.mark.parametrize(("name", "size"), FORMS)
def test_streams_together_are_each_alone(spec, name, size):
    assert replies(backend(spec, name, size, 3), spec, PROMPTS, 50) == alone(spec)


@pytest.mark.parametrize("size", [4, 16, 48])
def test_tables_that_descend_give_the_bits_of_the_window(size):
    made = backend(FLASH, "paged", size, 2, shuffle=None, reverse=True)
    stream = made.open()
    stream.grow(CONTEXT)
    assert stream.pages == sorted(stream.pages, reverse=True) and len(stream.pages) > 1
    stream.release()
    assert replies(made, FLASH, PROMPTS[:2], 50) == alone(FLASH)[:2]


def test_a_stream_starts_clean_where_another_was(spec):
    made = backend(spec, "paged", 16)
    assert [replies(made, spec, [p], 50)[0] for p in PROMPTS[1::-1]] == alone(spec)[1::-1]


@pytest.mark.parametrize("part", ["tokens", "tails"])
def test_what_the_n_gram_branch_keeps_of_a_stream_shows(part):
    """Control: another stream's tokens or rows in a new run change the logits."""
    made = backend(FLASH, "paged", 16)
    opened = type(made).open

    def stale(self, *given):
        stream = opened(self, *given)
        tokens, tails = self.ngrams_at(self.run_base(stream))
        (tokens if part == "tokens" else tails)[:] = 1
        return stream

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(made), "open", stale)
        assert replies(made, FLASH, PROMPTS[:1], 50) != alone(FLASH)[:1]


def test_what_ends_a_reply_is_not_what_ends_a_text():
    """The n-gram branch has an end token of its own, in whatever order the ends of replies are listed."""
    turned = replace(FLASH, tokens=replace(FLASH.tokens, end=(258, 256)))
    assert replies(backend(turned, "window", 16), turned, PROMPTS[2:], 50) == alone(FLASH)[2:]


@pytest.mark.parametrize("phase", [PROMPT, DECODE])
@pytest.mark.parametrize("streams", [0, 1])
def test_a_pass_without_rows_changes_nothing(spec, phase, streams):
    made, model = backend(spec, "paged", 12, 2, mtp=True), model_of(spec)
    work, none = [(made.open(), 0) for _ in range(streams)], np.zeros(0, np.int32)
    before, batch = made.arena.words.tobytes(), made.batch(phase, work)
    hidden = model.hidden(none, made, batch)
    found, _ = head_of(spec).forward(none, hidden, made, batch, none)
    assert model.logits(hidden, none).shape == found.shape == (0, spec.vocabulary)
    model.finish(made, batch)
    assert made.arena.words.tobytes() == before


def test_slices_of_a_pass_leave_no_trace(monkeypatch):
    from backends import sparse

    monkeypatch.setattr(sparse, "ROWS_A_SLICE", 17)
    assert replies(backend(FLASH, "paged", 12, 3), FLASH, PROMPTS, 50) == alone(FLASH)


def test_an_fp8_cache_has_the_bits_of_its_window():
    found = [
        replies(backend(FLASH, *form, 2, kv="fp8"), FLASH, PROMPTS[:2], rows)
        for form, rows in ((("window", 16), CONTEXT), (("paged", 12), 29))
    ]
    assert found[0] == found[1] != alone(FLASH)[:2]


# --- Kept states ------------------------------------------------------------------------------------------------------


def read(made: Backend, stream: Stream, ids) -> bytes:
    """Logits of the last of so many prompt rows."""
    batch = made.batch(PROMPT, [(stream, len(ids))])
    logits = model_of(FLASH).forward(np.array(ids, np.int32), made, batch, np.array([len(ids) - 1]))
    model_of(FLASH).finish(made, batch)
    return logits.tobytes()


@pytest.mark.parametrize("position", [33, 34, 35, 36, 61])
@pytest.mark.parametrize(
    ("source", "target"),
    [(("window", 16), ("paged", 12)), (("paged", 12), ("window", 16)), (("paged", 4), ("mixed", 48))],
)
def test_a_stream_goes_on_from_any_position_of_a_block_in_any_form(tmp_path: Path, source, target, position):
    here, there = backend(FLASH, *source, 2), backend(FLASH, *target, 2)
    stream, ids = here.open(), PROMPTS[0]
    read(here, stream, ids[:position])
    kept_files.save(tmp_path / "one.safetensors", ids[:position], stream.save(), FLASH.name, "mine")
    _, kept = kept_files.load(tmp_path / "one.safetensors", "mine")
    assert kept.pooled.shape[1] == position // 4 and kept.tails.any() and (kept.tokens > 0).all()
    there.open()
    assert read(there, there.restore(kept), ids[position:]) == alone(FLASH)[0].logits[0]


@pytest.mark.parametrize("position", [32, 33, 34, 35])
def test_a_stream_that_begins_with_anothers_pages_is_a_fresh_one(position):
    made = backend(FLASH, "paged", 16, 3)
    first, ids = made.open(), PROMPTS[0]
    read(made, first, ids[:position])
    prefix = made.snapshot(first)
    read(made, first, [5, 6, 7, 8, 9])
    assert read(made, made.open(begin=prefix), ids[position:]) == alone(FLASH)[0].logits[0]
    prefix.release()
    made.check()


@pytest.mark.parametrize("lost", ["index", "pooled", "tokens", "tails"])
def test_a_state_that_lost_a_part_goes_on_with_other_bits(lost):
    """Control: each part of a kept state counts. It ends in a block that was begun."""
    here, there = backend(FLASH, "window", 16), backend(FLASH, "paged", 12)
    stream, ids = here.open(), PROMPTS[0]
    read(here, stream, ids[:62])
    kept = stream.save()
    other = there.restore(replace(kept, **{lost: np.zeros_like(getattr(kept, lost))}))
    assert [read(there, other, [token]) for token in ids[62:]] != [read(here, stream, [token]) for token in ids[62:]]


# --- Drafts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size"), [("window", 16), ("paged", 12)])
@pytest.mark.parametrize("accepted", [-1, 0, 1, 2, 3])
def test_accepted_drafts_are_committed_as_if_generated(name, size, accepted):
    """Drafts that complete a block, from a position where some rows are dense and some are sparse."""
    made, ids = backend(FLASH, name, size, 2), PROMPTS[0]
    drafted, plain = made.open(), made.open()
    for stream in (drafted, plain):
        read(made, stream, ids[:33])
    model, window = model_of(FLASH), np.array(ids[33:37], np.int32)
    batch = made.batch(DECODE, [(drafted, 4)], [[-1, 0, 1, 2]])
    rows = model.forward(window, made, batch, np.arange(4))
    model.finish(made, batch, [accepted])
    for row, token in enumerate(window[: accepted + 1]):
        assert step(made, plain, token) == rows[row].tobytes()
    assert drafted.committed == plain.committed
    for token in (3, 1, 4, 1, 5):
        assert step(made, drafted, token) == step(made, plain, token)


def step(made: Backend, stream: Stream, token: int) -> bytes:
    """Logits of one decode row."""
    batch = made.batch(DECODE, [(stream, 1)])
    logits = model_of(FLASH).forward(np.array([token], np.int32), made, batch, np.array([0]))
    model_of(FLASH).finish(made, batch)
    return logits.tobytes()


@pytest.mark.parametrize("drafter", [MtpDrafter(), NgramDrafter()], ids=["mtp", "n-gram"])
def test_drafts_change_no_reply(spec, drafter):
    made = backend(spec, "paged", 12, 2, mtp=True)
    found = replies(made, spec, PROMPTS[:2], 50, drafters=[drafter] * 2, head=head_of(spec))
    assert found == alone(spec)[:2]


def test_trees_of_drafts_are_refused():
    made = backend(FLASH, "window", 16)
    with pytest.raises(
        BackendError, match="window: parents: rows of sparse attention see all before them; draft chains"
    ):
        made.batch(DECODE, [(made.open(), 3)], [[-1, 0, 0]])


def test_sparse_attention_has_one_path():
    with pytest.raises(
        BackendError, match="paged: attention 'scalar-batch': sparse attention has one path; use 'tiles'"
    ):
        backend(FLASH, "paged", 12, attention="scalar-batch")
