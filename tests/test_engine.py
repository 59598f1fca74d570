"""A row's logits depend on its sequence and its phase alone: not on passes, neighbours, or who had the memory before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backends.base import DECODE, PROMPT, BackendError, Sizes, backend_class
from kernels_numba.streams import PTOK, TABLE
from refengine.checkpoint import load_weights, make_checkpoint, open_checkpoint
from refengine.device import open_device
from refengine.model import Qwen35, cache_shape
from refengine.registry import load_model
from refengine.serve.session import Session

DEVICE, CONTEXT, TOKENS = open_device("cpu"), 96, 3
TINY = load_model("qwen3.5-tiny")
SPEC = replace(TINY, layers=4, layer_types=TINY.layer_types[:4])
PROMPTS = [[(7 * i + 13 * n) % 256 for i in range(length)] for n, length in enumerate((40, 71, 1))]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Qwen35:
    folder = make_checkpoint(SPEC, tmp_path_factory.mktemp("model") / "four-layers")
    return Qwen35(SPEC, load_weights(open_checkpoint(folder, SPEC), SPEC), DEVICE, CONTEXT)


def backend(name: str = "paged", streams: int = 3, page_size: int = 16):
    return backend_class(name)(cache_shape(SPEC), Sizes(CONTEXT, streams, page_size, shuffle=1, spare_pages=2))


def run(model: Qwen35, made, prompts, rows: int) -> tuple[list[list[np.ndarray]], list[list[int]]]:
    """Each stream's logits, of the last prompt row and of every decode step, and its reply."""
    session = Session(model, made, DEVICE, prompts, rows)
    passes = list(session.run(TOKENS))
    last = [[p for p in passes if p.phase == PROMPT and p.streams == (n,)][-1].logits[-1] for n in range(len(prompts))]
    steps = [p for p in passes if p.phase != PROMPT]
    logits = [[last[n], *(step.logits[n] for step in steps)] for n in range(len(prompts))]
    for stream in session.streams:
        stream.release()
    return logits, session.replies


def same(a, b) -> bool:
    return all(np.isfinite(x).all() and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def alone(model):
    """Each prompt alone, in one pass, on a window."""
    return [run(model, backend("window", 1), [prompt], 96) for prompt in PROMPTS]


@pytest.mark.parametrize("rows", [1, 17, 32])
def test_a_prompt_in_passes_is_the_prompt_in_one(model, alone, rows):
    logits, replies = run(model, backend(), PROMPTS[:1], rows)
    assert same(logits[0], alone[0][0][0]) and replies == alone[0][1]


@pytest.mark.parametrize("name", ["window", "paged", "paged-p256"])
def test_streams_together_are_each_alone(model, alone, name):
    logits, replies = run(model, backend(name), PROMPTS, 50)
    for n in range(len(PROMPTS)):
        assert same(logits[n], alone[n][0][0]) and replies[n] == alone[n][1][0]


def test_a_stream_starts_clean_where_another_was(model, alone):
    made = backend("paged", streams=1)
    run(model, made, PROMPTS[1:2], 50)
    logits, replies = run(model, made, PROMPTS[:1], 50)
    assert same(logits[0], alone[0][0][0]) and replies == alone[0][1]


def test_released_pages_and_tables_are_as_at_the_start(model):
    made = backend()
    table = made.pages.copy()
    run(model, made, PROMPTS, 50)
    made.check()
    assert made.pool.available == made.pool.count and (made.pages == table).all() and made.free_slots == [0, 1, 2]


def test_the_recurrent_state_of_a_stale_stream_would_show(model, alone):
    """Control: a slot that is not zeroed changes the logits."""
    made = backend("paged", streams=1)
    opened = type(made).open

    def stale(self, capacity=None):
        stream = opened(self, capacity)
        stream.state(0)[0][:] = 1
        return stream

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(made), "open", stale)
        logits, _ = run(model, made, PROMPTS[:1], 50)
    assert not same(logits[0], alone[0][0][0])


@pytest.mark.parametrize("phase", [PROMPT, DECODE])
def test_a_stream_of_no_rows_keeps_its_recurrent_state(model, phase):
    made = backend()
    streams = [made.open() for _ in range(3)]
    forward(model, made, PROMPT, streams, (9, 5, 1))
    before = [part.tobytes() for layer in made.shape.linear_layers for part in streams[1].state(layer)]
    forward(model, made, phase, streams, (1, 0, 1))
    assert [part.tobytes() for layer in made.shape.linear_layers for part in streams[1].state(layer)] == before


def test_a_batch_that_is_over_touches_no_state(model):
    """Its slot may be another stream's by now, and the first layers of a model have no cache rows."""
    made = backend(streams=1)
    stream = made.open()
    batch = made.batch(PROMPT, [(stream, 3)])
    stream.release()
    before = made.arena.words.tobytes()
    with pytest.raises(BackendError, match="this batch is over"):
        model.forward(np.arange(3, dtype=np.int32), made, batch, np.array([2]))
    assert made.arena.words.tobytes() == before


def forward(model, made, phase, streams, rows) -> None:
    """One pass of the model."""
    batch = made.batch(phase, list(zip(streams, rows)))
    model.forward(np.arange(sum(rows), dtype=np.int32), made, batch, np.array([0]))
    made.finish(batch)


@pytest.mark.parametrize("name", ["window", "paged", "paged-p256"])
def test_a_stream_is_refused_beyond_its_capacity(name):
    made = backend(name, streams=1)
    stream = made.open(40)
    with pytest.raises(BackendError, match="position 40 is past its capacity of 40"):
        made.batch(PROMPT, [(stream, 41)])
    made.batch(PROMPT, [(stream, 40)])
    with pytest.raises(BackendError, match="no stream is free"):
        made.open()
    stream.release()
    with pytest.raises(BackendError, match="stream 0: was released; open another"):
        stream.release()
    with pytest.raises(BackendError, match="the context is 96"):
        made.open(97)


def test_windows_and_pages_say_where_they_are():
    window, paged, p256 = (backend(n, 2, 48) for n in ("window", "paged", "paged-p256"))
    rows = {b.name: b.stream_row(b.open(), 0, 1) for b in (window, paged, p256)}
    assert {n: (r[PTOK], r[TABLE]) for n, r in rows.items()} == {
        "window": (96, -1),
        "paged": (48, 0),
        "paged-p256": (256, 0),
    }


@pytest.mark.parametrize("field", ["context", "streams", "page_size", "window_rows"])
def test_sizes_that_make_no_sense_are_refused(field):
    with pytest.raises(BackendError, match=f"{field} 0: at least 1"):
        backend_class("paged")(cache_shape(SPEC), replace(Sizes(96), **{field: 0}))
