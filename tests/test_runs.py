"""A stream's run holds its recurrent states and histories and may lie anywhere in the arena: no bit shows where, and no word
beside it is touched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backends.arena import POISON, CacheShape, aligned
from backends.base import DECODE, PROMPT, Backend, Sizes, Stream
from backends.mixed import MixedBackend
from backends.paged import PagedBackend
from backends.window import WindowBackend
from refengine.checkpoint import load_weights, make_checkpoint, open_checkpoint
from refengine.device import open_device
from refengine.model import Qwen35, cache_shape
from refengine.registry import load_model

TINY = load_model("qwen3.5-tiny")
SPEC = replace(TINY, layers=4, layer_types=TINY.layer_types[:4])
SHAPE = cache_shape(SPEC)
SIZES = Sizes(context=32, streams=3, page_size=16, window_rows=3)
GAP = 12
"""Words of nobody's beside each run."""
APART = SHAPE.run_words + GAP
BACKENDS = [WindowBackend, PagedBackend, MixedBackend]
NO_RUN = CacheShape((0,), (), 2, 1, 64, 0, 0, 0, 0, 0)
UNEVEN = CacheShape((1,), (0, 2), 2, 1, 64, value_heads=3, value_dim=1, key_dim=3, conv_channels=3, conv_rows=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Qwen35:
    folder = make_checkpoint(SPEC, tmp_path_factory.mktemp("model") / "four-layers")
    return Qwen35(SPEC, load_weights(open_checkpoint(folder, SPEC), SPEC), open_device("cpu"), SIZES.context)


def with_runs_on_top(cls: type[Backend], apart: int = APART) -> type[Backend]:
    """The backend with its runs at the top of the cache's part, the first stream's uppermost, ``apart`` words a run."""

    class OnTop(cls):  # type: ignore[misc, valid-type]
        @classmethod
        def cache_words(cls, shape: CacheShape, sizes: Sizes) -> int:
            return aligned(super().cache_words(shape, sizes) + GAP) + sizes.streams * APART

        def run_base(self, stream: Stream) -> int:
            return self.arena.starts["runs"] - GAP - SHAPE.run_words - stream.slot * apart

    return OnTop


def answers(model: Qwen35, made: Backend) -> list[bytes]:
    """Logits of a prompt, a decode step, drafts of which some are accepted, and a decode step; then every stream's state."""
    streams, found = [made.open() for _ in range(SIZES.streams)], []
    passes = [
        (PROMPT, (9, 5, 1), None, None), (DECODE, (1, 0, 1), None, None),
        (DECODE, (3, 2, 1), [[-1, 0, 0], [-1, 0], [-1]], [2, 0, -1]), (DECODE, (1, 1, 1), None, None),
    ]  # fmt: skip
    for phase, rows, parents, accepted in passes:
        batch = made.batch(phase, list(zip(streams, rows, strict=True)), parents)
        ids = np.arange(sum(rows), dtype=np.int32)
        found.append(model.forward(ids, made, batch, np.arange(sum(rows))).tobytes())
        model.finish(made, batch, accepted)
    return found + [part.tobytes() for s in streams for layer in SHAPE.linear_layers for part in s.state(layer)]


@pytest.mark.parametrize("cls", BACKENDS)
def test_no_bit_shows_where_a_run_lies(model, cls):
    assert answers(model, with_runs_on_top(cls)(SHAPE, SIZES)) == answers(model, cls(SHAPE, SIZES))


@pytest.mark.parametrize("cls", BACKENDS)
def test_no_word_beside_a_run_is_touched(model, cls):
    made = with_runs_on_top(cls)(SHAPE, SIZES)
    answers(model, made)
    runs = made.arena.starts["runs"]
    between = made.arena.words[runs - SIZES.streams * APART - GAP : runs].copy()
    for slot in range(SIZES.streams):
        end = len(between) - GAP - slot * APART
        assert (between[end - SHAPE.run_words : end] != POISON).all()
        between[end - SHAPE.run_words : end] = POISON
    assert (between == POISON).all()
    assert (made.arena.words[runs : made.arena.starts["records"]] == POISON).all()


def test_red_when_two_runs_overlap(model):
    overlapping = with_runs_on_top(WindowBackend, SHAPE.run_words - 1)(SHAPE, SIZES)
    assert answers(model, overlapping) != answers(model, WindowBackend(SHAPE, SIZES))


@pytest.mark.parametrize("cls", BACKENDS)
def test_a_new_stream_has_zeros_in_its_run_and_nowhere_else(cls):
    made = cls(SHAPE, SIZES)
    made.open()
    made.arena.words[:] = POISON
    stream = made.open()
    base = made.run_base(stream)
    assert (np.flatnonzero(made.arena.words == 0) == np.arange(base, base + SHAPE.run_words)).all()


def test_a_stream_s_state_is_the_memory_itself():
    made = PagedBackend(SHAPE, SIZES)
    stream = [made.open(), made.open()][1]
    for number, layer in enumerate(SHAPE.linear_layers):
        state, history = stream.state(layer)
        state[:], history[:] = number + 1, -number - 1
    run = made.arena.words[made.run_base(stream) :][: SHAPE.run_words]
    assert (run != 0).all() and len(np.unique(run)) == 2 * len(SHAPE.linear_layers)
    assert (made.arena.words == 0).sum() == SHAPE.run_words


@pytest.mark.parametrize("shape", [SHAPE, UNEVEN])
def test_the_parts_of_a_run_follow_each_other_at_multiples_of_16_bytes(shape: CacheShape):
    offsets = [place(layer) for layer in shape.linear_layers for place in (shape.state_offset, shape.history_offset)]
    sizes = [size for _ in shape.linear_layers for size in (shape.state_words, shape.history_words)]
    assert [*offsets, shape.run_words] == [0, *np.cumsum(sizes)] and not any(n % 4 for n in offsets)
    assert shape.state_words >= shape.value_heads * shape.value_dim * shape.key_dim
    assert 2 * shape.history_words >= shape.conv_rows * shape.conv_channels


def test_a_model_without_recurrent_layers_has_runs_of_no_words():
    made = WindowBackend(NO_RUN, SIZES)
    batch = made.batch(PROMPT, [(made.open(), 3), (made.open(), 2)])
    assert NO_RUN.run_words == 0 and (made.arena.words == POISON).all()
    assert batch.runs.tolist() == [made.arena.starts["runs"]] * 2 == [made.arena.starts["records"]] * 2
