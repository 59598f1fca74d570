"""A stream that is not open, and a pass that makes no sense, are refused in one line; what is refused has changed nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backends.base import DECODE, PROMPT, Backend, BackendError, Norms, Sizes, backend_class
from backends.layout import Layout, locate_paged
from backends.paged import PagedBackend
from backends.paged_p256 import PagedP256Backend
from backends.pool import PoolFull
from kernels_numba.rope_store import rope_table
from refengine.model import cache_shape
from refengine.registry import load_model

CONTEXT, STREAMS, WINDOW_ROWS, PAGE_SIZE = 96, 3, 2, 16
TINY = load_model("qwen3.5-tiny")
SHAPE = cache_shape(replace(TINY, layers=4, layer_types=TINY.layer_types[:4]))
(ATTENTION,), LINEAR = SHAPE.attention_layers, SHAPE.linear_layers[0]
GAIN = np.ones(SHAPE.head_dim, np.float32)
NORMS, ROPE = Norms(GAIN, GAIN, 1e-6), rope_table(CONTEXT, 64, 1e7)


@pytest.fixture(params=["window", "paged", "paged-p256"])
def made(request) -> Backend:
    return build(request.param)


def build(name: str = "paged") -> Backend:
    return backend_class(name)(SHAPE, Sizes(CONTEXT, STREAMS, PAGE_SIZE, WINDOW_ROWS))


def projected(rows: int) -> np.ndarray:
    """Rows of q, k and v that are not zero."""
    columns = 2 * (SHAPE.heads + SHAPE.kv_heads) * SHAPE.head_dim
    return np.random.default_rng(rows).standard_normal((rows, columns), np.float32).astype("bfloat16")


def run_pass(backend: Backend, phase: str, work) -> np.ndarray:
    """A pass of the attention layer: its output."""
    batch = backend.batch(phase, work)
    q = backend.store(ATTENTION, projected(batch.rows), NORMS, ROPE, batch)
    out = backend.attend(ATTENTION, q, batch)
    backend.finish(batch)
    return out


def snapshot(backend: Backend, *streams) -> tuple:
    """All that a refused call must leave as it is."""
    pool = (backend.pool.holders.tolist(), backend.pool.promised) if backend.paged else None
    held = [(s.committed, list(s.pages), s.released) for s in streams]
    return backend.arena.words.tobytes(), backend.pages.tobytes(), list(backend.free_slots), pool, backend.current, held


def refused(words: str, call, backend: Backend, *streams, error: type[Exception] = BackendError) -> None:
    """The call raises one line with the words and changes nothing."""
    before = snapshot(backend, *streams)
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value) and snapshot(backend, *streams) == before


# --- Handles --------------------------------------------------------------------------------------------------------


USES = {
    "release": lambda s: s.release(),
    "release by the backend": lambda s: s.backend.release(s),
    "grow": lambda s: s.grow(CONTEXT),
    "state": lambda s: s.state(LINEAR),
    "prompt rows": lambda s: s.backend.batch(PROMPT, [(s, 1)]),
    "decode rows": lambda s: s.backend.batch(DECODE, [(s, 1)]),
    "no rows": lambda s: s.backend.batch(PROMPT, [(s, 0)]),
    "row of the stream table": lambda s: s.backend.stream_row(s, 0, 1),
    "bytes": lambda s: s.backend.cache_bytes(s),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_released_stream_reaches_nothing(made, use):
    """Not even what now belongs to the stream that was opened in its place."""
    stale = made.open()
    stale.release()
    heir = made.open()
    heir.grow(20)
    assert heir.slot == stale.number
    refused("stream 0: was released; open another", lambda: use(stale), made, stale, heir)


def test_another_backends_stream_is_refused(made):
    other = build()
    foreign, own = other.open(), made.open()
    for call in (
        lambda: made.batch(PROMPT, [(own, 1), (foreign, 1)]),
        lambda: made.release(foreign),
        lambda: made.claim([(own, 20), (foreign, 20)]),
        lambda: made.cache_bytes(foreign),
    ):
        refused("stream 0: belongs to another backend; open one here", call, made, own)


@pytest.mark.parametrize(
    ("capacity", "words"),
    [
        (0, "ask for at least 1$"),
        (-5, "ask for at least 1$"),
        (CONTEXT + 1, "the context is 96$"),
    ],
)
def test_a_capacity_that_no_stream_has_is_refused(made, capacity, words):
    refused(f"a stream of {capacity} positions: {words}", lambda: made.open(capacity), made)


# --- A pass that makes no sense -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "second", "words"),
    [
        ("promt", lambda a, b: (b, 1), "phase 'promt': use 'prompt' or 'decode'"),
        (PROMPT, lambda a, b: (a, 1), "stream 0: stands twice; join its rows"),
        (DECODE, lambda a, b: (a, 0), "stream 0: stands twice; join its rows"),
        (PROMPT, lambda a, b: (b, -1), "stream 1: -1 rows; at least 0"),
        (DECODE, lambda a, b: (b, -1), "stream 1: -1 rows; at least 0"),
        (DECODE, lambda a, b: (b, WINDOW_ROWS + 1), "stream 1: 3 decode rows; window_rows allows 2"),
        (PROMPT, lambda a, b: (b, 41), "stream 1: position 40 is past its capacity of 40"),
    ],
)
def test_a_pass_that_makes_no_sense_is_refused(made, phase, second, words):
    a, b = made.open(), made.open(40)
    refused(words, lambda: made.batch(phase, [(a, 2), second(a, b)]), made, a, b)


@pytest.mark.parametrize("name", ["paged", "paged-p256"])
def test_a_stream_that_was_opened_never_runs_out(name):
    """Whoever comes later is refused, and takes nothing of what was promised."""
    made = build(name)
    a, b = made.open(), made.open()
    taken = made.pool.take(made.pool.available)
    refused("1 page wanted, .* are free, .* of them promised", lambda: made.pool.take(1), made, a, b, error=PoolFull)
    assert made.batch(PROMPT, [(a, CONTEXT), (b, CONTEXT)]).rows == 2 * CONTEXT
    assert made.held_pages(a) == made.held_pages(b) == made.columns and not made.pool.free
    made.pool.give_back(taken)
    b.release()
    made.pool.take(made.pool.free - 1)
    words = f"{made.columns + made.run_pages} pages wanted, 1 of {made.pool.count} is free; release a stream"
    refused(words, made.open, made, a)


# --- A batch that is over -------------------------------------------------------------------------------------------


ENDS = {
    "finished": lambda backend, batch: backend.finish(batch),
    "replaced": lambda backend, batch: backend.batch(batch.phase, [(batch.members[1], 1)]),
    "replaced by other streams": lambda backend, batch: backend.batch(batch.phase, [(backend.open(), 1)]),
    "released": lambda backend, batch: batch.members[1].release(),
    "released, another in its place": lambda backend, batch: (batch.members[1].release(), backend.open()),
}
CALLS = {
    "store": lambda backend, batch: backend.store(ATTENTION, projected(batch.rows), NORMS, ROPE, batch),
    "attend": lambda backend, batch: backend.attend(
        ATTENTION, np.zeros((batch.rows, SHAPE.heads, SHAPE.head_dim), "bfloat16"), batch
    ),
    "layer_states": lambda backend, batch: backend.layer_states(LINEAR, batch),
    "finish": lambda backend, batch: backend.finish(batch),
}


@pytest.mark.parametrize("phase", [PROMPT, DECODE])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_batch_that_is_over_is_refused(made, phase, end, call):
    streams = made.open(), made.open()
    batch = made.batch(phase, [(stream, 2) for stream in streams])
    end(made, batch)
    refused("this batch is over: finished, replaced", lambda: call(made, batch), made, *streams)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_another_backends_batch_is_refused(made, call):
    other = build(made.name)
    streams = made.open(), other.open()
    mine, foreign = (backend.batch(PROMPT, [(s, 2)]) for backend, s in zip((made, other), streams))
    refused("this batch is over", lambda: call(made, foreign), made, *streams)
    call(made, mine)


@pytest.mark.parametrize("phase", [PROMPT, DECODE])
def test_a_stream_that_is_not_in_the_pass_may_be_released(made, phase):
    inside, outside = made.open(), made.open()
    batch = made.batch(phase, [(inside, 2)])
    outside.release()
    made.finish(batch)
    assert inside.committed == 2


# --- No rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [PROMPT, DECODE])
def test_a_stream_of_no_rows_sits_the_pass_out(made, phase):
    """The others' output is that of a pass without it, and its own cache and window stay as they are."""
    twin = build(made.name)
    streams, others = [made.open() for _ in range(3)], [twin.open() for _ in range(3)]
    for backend, members in ((made, streams), (twin, others)):
        run_pass(backend, PROMPT, [(stream, 5) for stream in members])
    with_it = run_pass(made, phase, [(streams[0], 2), (streams[1], 0), (streams[2], 1)])
    without = run_pass(twin, phase, [(others[0], 2), (others[2], 1)])
    assert with_it.tobytes() == without.tobytes() and np.isfinite(with_it.astype(np.float32)).all()
    assert [s.committed for s in streams] == [7, 5, 6] and made.arena.words.tobytes() == twin.arena.words.tobytes()


@pytest.mark.parametrize("phase", [PROMPT, DECODE])
@pytest.mark.parametrize("members", [0, 2])
def test_a_pass_of_no_rows_is_empty(made, phase, members):
    streams = [made.open() for _ in range(members)]
    before = made.arena.words.tobytes()
    out = run_pass(made, phase, [(stream, 0) for stream in streams])
    assert out.shape == (0, SHAPE.heads, SHAPE.head_dim) and made.arena.words.tobytes() == before
    assert all(stream.committed == 0 for stream in streams)


# --- A layout and its pages -----------------------------------------------------------------------------------------------


class HalfPages(PagedP256Backend):
    """Its layout has pages of 256 built in."""

    name = "half-pages"

    @classmethod
    def page_positions(cls, sizes):
        return 128


class NeverStraddling(PagedBackend):
    """Pages of any size, under a layout that looks a tile up once."""

    name = "never-straddling"
    layout = Layout("once_a_tile", straddles=False, page=None, locate=locate_paged)


@pytest.mark.parametrize(
    ("kind", "page_size", "words"),
    [
        (HalfPages, 128, "half-pages: pages of 128 positions, its layout paged_p256 has 256"),
        (
            NeverStraddling,
            48,
            "never-straddling: pages of 48 positions: .* tiles of 64 never straddle; set straddles=True",
        ),
        (NeverStraddling, 32, "never-straddling: pages of 32 positions: .* or take a multiple of 64"),
    ],
)
def test_a_layout_that_promises_what_the_pages_do_not_keep_is_refused(kind, page_size, words):
    with pytest.raises(BackendError, match=words):
        kind(SHAPE, Sizes(CONTEXT, STREAMS, page_size))


def test_a_tile_that_never_straddles_is_looked_up_once():
    """Pages of a multiple of the tile: the layout may say so, and the bits are the window's."""
    rows = [(40, "prompt"), (2, "decode")]
    outs = []
    for backend in (NeverStraddling(SHAPE, Sizes(CONTEXT, 1, 64, WINDOW_ROWS)), build("window")):
        stream = backend.open()
        outs.append([run_pass(backend, phase, [(stream, count)]) for count, phase in rows])
    for found, wanted in zip(*outs, strict=True):
        assert found.tobytes() == wanted.tobytes()
