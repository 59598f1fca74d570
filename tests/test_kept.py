"""A kept state is all that a stream has committed and nothing else: the same bytes from every form of cache, and a stream
restored on any of them goes on with the same bits."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from buffers import assert_same_bits

from backends import page_copies
from backends.arena import CacheShape
from backends.base import DECODE, PROMPT, Backend, BackendError, Kept, Norms, Sizes, Stream, backend_class
from backends.kept import restore
from kernels_numba.rope_store import rope_table
from refengine.checkpoint import load_weights, make_checkpoint, open_checkpoint
from refengine.contract.backend import as_read, cells
from refengine.contract.registry import OWN_BACKENDS
from refengine.device import open_device
from refengine.model import Qwen35, cache_shape
from refengine.registry import load_model
from refengine.serve.session import Session
from refengine.verify.launches import one_of_each_kind

CPU, CONTEXT, POSITIONS = open_device("cpu"), 300, 270
SHAPE = CacheShape((1, 3), (0, 2), 4, 2, 64, 3, 128, 128, 40, 3)
PAGES = (1, 3, 16, 48, 256)
FORMS = [("window", 0), *(("paged", size) for size in PAGES), ("paged-p256", 0), ("mixed", 0), ("mixed", 48)]
"""(backend, page size); ``mixed``: its stream with a window, or with pages."""
KV = ("bf16", "fp8")


def opened(
    name: str, size: int, kv: str, positions: int = POSITIONS, shape: CacheShape = SHAPE
) -> tuple[Backend, Stream]:
    """A backend with shuffled pages, and a stream of the form."""
    made = backend_class(name)(shape, Sizes(CONTEXT, 2, size or 16, 2, 3, 7, kv))
    streams = [made.open(), made.open(positions + 3)]
    return made, streams[bool(size)]


@cache
def projected(kv_heads: int, positions: int) -> np.ndarray:
    """Rows of q, k and v, whose magnitudes differ from position to position."""
    rng = np.random.default_rng(positions)
    rows = rng.standard_normal((positions, 2 * (SHAPE.heads + kv_heads) * SHAPE.head_dim), np.float32)
    return (rows * np.exp2(np.arange(positions) % 7 - 3)[:, None]).astype("bfloat16")


def fill(made: Backend, stream: Stream, positions: int = POSITIONS) -> None:
    """Positions in every attention layer, each layer's its own; recurrent states that tell their layer and stream."""
    gain, rope = np.ones(made.shape.head_dim, np.float32), rope_table(CONTEXT, 64, 1e7)
    batch = made.batch(PROMPT, [(stream, positions)])
    for layer in made.shape.attention_layers:
        rows = projected(made.shape.kv_heads, positions) * np.float32(layer).astype("bfloat16")
        made.store(layer, rows.astype("bfloat16"), Norms(gain * layer, gain * layer, 1e-6), rope, batch)
    made.finish(batch)
    for layer in made.shape.linear_layers:
        for part in stream.state(layer):
            part[...] = np.random.default_rng(layer).standard_normal(part.shape).astype(part.dtype)


def kept_from(name: str, size: int, kv: str) -> Kept:
    made, stream = opened(name, size, kv)
    fill(made, stream)
    return stream.save()


@cache
def on_window(kv: str) -> Kept:
    return kept_from("window", 0, kv)


def assert_same(found: Kept, wanted: Kept) -> None:
    assert (found.positions, found.kv, set(found.arrays)) == (wanted.positions, wanted.kv, set(wanted.arrays))
    for name, array in wanted.arrays.items():
        assert_same_bits(found.arrays[name], array)


def differs(found: Kept, wanted: Kept) -> list[str]:
    """Names of the arrays that differ."""
    return [name for name, array in wanted.arrays.items() if found.arrays[name].tobytes() != array.tobytes()]


# --- From any form to any form ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("name, size", FORMS)
def test_every_form_saves_the_same_bytes(name, size, kv):
    found = kept_from(name, size, kv)
    assert_same(found, on_window(kv))
    assert found.nbytes == sum(a.nbytes for a in found.arrays.values()) > 2 * 2 * 2 * POSITIONS * 64


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("name, size", FORMS)
def test_every_form_takes_what_another_saved(name, size, kv):
    """Into pages and states that hold something else, of which the rest stays; what comes out again is what went in."""
    made, stream = opened(name, size, kv)
    made.arena.words[:] = before = np.uint32(0x7F7F7F7F)
    restore(made, on_window(kv), stream)
    assert stream.committed == POSITIONS and made.current is None
    assert_same(stream.save(), on_window(kv))
    assert (made.arena.words.view(np.uint8)[~held_bytes(made, stream)] == before & 0xFF).all()


@pytest.mark.parametrize("kv", KV)
def test_saved_rows_are_where_the_address_function_says(kv):
    """Against the contract's own reading of a cache, row by row."""
    made, stream = opened("paged", 48, kv)
    fill(made, stream)
    memory, kept = made.arena.words.view(np.uint8), stream.save()
    own = cells(made, stream, POSITIONS, CPU)
    assert_same_bits(np.moveaxis(memory[own.rows].view(np.uint32), 1, 2), kept.rows[0])
    if kept.exponents is not None:
        assert_same_bits(np.moveaxis(memory[own.exponents], 1, 2).view(np.int8), kept.exponents[0])
    assert np.isfinite(as_read(memory, own).astype(np.float32)).all()


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("name, size", [("window", 0), ("paged", 16), ("mixed", 48)])
def test_saved_bytes_do_not_depend_on_unused_slots(name, size, kv):
    """All that the address function does not name as a committed position's is changed before a second save."""
    made, stream = opened(name, size, kv)
    fill(made, stream)
    memory, held = made.arena.words.view(np.uint8), held_bytes(made, stream)
    before = stream.save()
    np.copyto(memory, ~memory, where=~held)
    assert_same(stream.save(), before)


def held_bytes(made: Backend, stream: Stream) -> np.ndarray:
    """bool [arena bytes]: the stream's committed rows of every attention layer, and its recurrent states."""
    held = np.zeros(made.arena.words.nbytes, bool)
    own, ptok = cells(made, stream, stream.committed, CPU), made.positions_of(stream)
    planes = np.array([made.shape.planes(layer, ptok, made.sizes.kv) for layer in made.shape.attention_layers])
    for k, _, k_exp, *_ in 4 * (planes - planes[0]):  # cells are the first layer's
        held[own.rows + k] = True
        if own.exponents is not None:
            held[own.exponents + k_exp] = True
    run = 4 * made.run_base(stream)
    held[run : run + 4 * made.shape.run_words] = True
    return held


def test_a_stream_of_no_positions_has_its_state():
    made, stream = opened("paged", 16, "fp8")
    for part in stream.state(0):
        part[...] = 3
    kept = stream.save()
    assert kept.positions == 0 and kept.rows.shape == (2, 2, 2, 0, 16) and (kept.states[0] == 3).all()
    again = empty_backend("fp8").restore(kept)
    assert again.committed == 0 and (again.state(0)[1] == 3).all() and (again.state(2)[0] == 0).all()


def test_a_plug_in_is_asked_where_its_pages_lie(monkeypatch):
    """Two levels of tables, which no one but its own address function can read."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "tutorials" / "two_level")
    made = importlib.import_module("two_level").TwoLevelBackend(SHAPE, Sizes(CONTEXT, 2, 16, 2, 3, 7))
    first, second = made.open(), made.open()
    fill(made, second)
    assert_same(second.save(), on_window("bf16"))
    restore(made, on_window("bf16"), first)
    assert_same(first.save(), on_window("bf16"))


# --- A model goes on ----------------------------------------------------------------------------------------------------

TINY = one_of_each_kind(load_model("qwen3.5-tiny"))
PROMPT_IDS, TOKENS = [(7 * i + 3) % 256 for i in range(71)], 3


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Qwen35:
    folder = make_checkpoint(TINY, tmp_path_factory.mktemp("model") / "tiny")
    return Qwen35(TINY, load_weights(open_checkpoint(folder, TINY), TINY), CPU, CONTEXT)


def backend_for(name: str, kv: str) -> Backend:
    return backend_class(name)(cache_shape(TINY), Sizes(CONTEXT, 1, 48, 1, 3, 7, kv))


def session_on(model: Qwen35, made: Backend, stream: Stream, rows: int) -> Session:
    """A session whose one stream is open already."""
    session = Session(model, made, CPU, [PROMPT_IDS], rows)
    session.requests[0].stream = stream
    return session


def go_on(model: Qwen35, made: Backend, stream: Stream) -> list[bytes]:
    """The rest of the prompt, then decode steps: the logits of each pass."""
    session = session_on(model, made, stream, 96)
    (request,) = session.requests
    passes = [session.forward(PROMPT, {request: request.chunk(96)}), *session.write(TOKENS)]
    assert all(np.isfinite(p.logits).all() for p in passes) and len(passes) == TOKENS
    return [p.logits.tobytes() for p in passes]


def half_read(model: Qwen35, made: Backend) -> Stream:
    """A stream that has read 50 tokens of the prompt."""
    session = session_on(model, made, made.open(), 50)
    (request,) = session.requests
    session.forward(PROMPT, {request: request.chunk(50)})
    return request.place


@pytest.fixture(scope="module")
def read(model):
    """By kv: the state that a window keeps half way, and the logits of the stream that goes on there."""

    @cache
    def reading(kv: str) -> tuple[Kept, list[bytes]]:
        made = backend_for("window", kv)
        stream = half_read(model, made)
        return stream.save(), go_on(model, made, stream)

    return reading


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("name", OWN_BACKENDS)
def test_a_restored_stream_goes_on_with_the_same_bits(model, read, name, kv):
    kept, wanted = read(kv)
    made = backend_for(name, kv)
    assert go_on(model, made, made.restore(kept)) == wanted


def test_a_stream_saved_on_pages_goes_on_in_a_window(model, read):
    made = backend_for("paged", "bf16")
    kept = half_read(model, made).save()
    window = backend_for("window", "bf16")
    assert go_on(model, window, window.restore(kept)) == read("bf16")[1]


# --- Controls: what is wrong shows ---------------------------------------------------------------------------------------


def exchanged(array: np.ndarray, first: int, second: int) -> None:
    array[[first, second]] = array[[second, first]]


def test_a_page_table_swapped_before_saving_shows():
    made, stream = opened("paged", 48, "bf16")
    fill(made, stream)
    exchanged(made.pages, stream.slot * made.columns, stream.slot * made.columns + 1)
    assert differs(stream.save(), on_window("bf16")) == ["rows"]


def test_a_state_left_out_shows(model, read):
    kept, wanted = read("bf16")
    made = backend_for("paged", "bf16")
    assert go_on(model, made, made.restore(replace(kept, states=np.zeros_like(kept.states)))) != wanted


def test_a_history_left_out_shows(model, read):
    kept, wanted = read("bf16")
    made = backend_for("paged", "bf16")
    assert go_on(model, made, made.restore(replace(kept, histories=np.zeros_like(kept.histories)))) != wanted


def test_one_exponent_off_shows(model, read):
    kept, wanted = read("fp8")
    exponents = kept.exponents.copy()
    exponents[0, 1, 0, 17] += 1
    made = backend_for("paged", "fp8")
    assert go_on(model, made, made.restore(replace(kept, exponents=exponents))) != wanted


def test_one_position_too_few_shows(model, read):
    kept, wanted = read("bf16")
    made = backend_for("window", "bf16")
    short = replace(kept, positions=49, rows=np.ascontiguousarray(kept.rows[:, :, :, :49]))
    stream = made.restore(short)
    stream.committed = 50
    made.arena.words[np.isnan(made.arena.words.view(np.float32))] = 0
    assert go_on(model, made, stream) != wanted


# --- What is refused ------------------------------------------------------------------------------------------------------


def refused(words: str, call, made: Backend) -> None:
    """One line with the words; nothing is open or taken that was not before."""
    before = made.arena.words.tobytes(), made.pages.tobytes(), list(made.free_slots), made.current
    with pytest.raises(BackendError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert (made.arena.words.tobytes(), made.pages.tobytes(), list(made.free_slots), made.current) == before


def empty_backend(kv: str = "bf16", **other) -> Backend:
    return backend_class("paged")(replace(SHAPE, **other), Sizes(CONTEXT, 2, 16, 1, 0, None, kv))


@pytest.mark.parametrize(
    "other, words",
    [
        ({"kv": "fp8"}, "paged: kept state: kv bf16, this backend has fp8; read the prompt anew"),
        ({"heads": 3, "kv_heads": 3}, "rows: KV heads 2 where this backend has 3"),
        ({"head_dim": 128}, "rows: words a row 32 where this backend has 64"),
        ({"attention_layers": (1,)}, "rows: attention layers 2 where this backend has 1"),
        ({"linear_layers": (0, 2, 4)}, "states: linear layers 2 where this backend has 3"),
        ({"value_heads": 4}, "states: value heads 3 where this backend has 4"),
        ({"conv_channels": 44}, "histories: channels 40 where this backend has 44"),
    ],
)
def test_a_state_of_another_shape_is_refused(other, words):
    made = empty_backend(**other)
    refused(words, lambda: made.restore(on_window("bf16")), made)


def test_a_state_that_is_not_whole_is_refused():
    made, kept = empty_backend(), on_window("bf16")
    wrong = {
        "rows: positions 270 where": replace(kept, positions=269),
        "holds rows, exponents, states, histories, not rows, states, histories": replace(
            kept, exponents=np.zeros((2, 2, 2, 270), np.int8)
        ),
        "states: float64 of 4 axes where C-contiguous float32 of 4": replace(
            kept, states=kept.states.astype(np.float64)
        ),
        "states: float32 of 3 axes": replace(kept, states=kept.states[0]),
        "rows: uint32 of 5 axes where C-contiguous": replace(kept, rows=kept.rows[..., ::-1]),
    }
    for words, one in wrong.items():
        refused(words, lambda one=one: made.restore(one), made)


def test_a_capacity_that_does_not_hold_the_state_is_refused():
    made = empty_backend()
    with pytest.raises(BackendError, match="a stream of 100 positions cannot begin with 270"):
        made.restore(on_window("bf16"), 100)
    made.check()
    assert made.free_slots == [0, 1] and made.pool.available == made.pool.count
    assert made.restore(on_window("bf16"), POSITIONS).capacity == POSITIONS


def test_a_full_pool_leaves_nothing_open():
    made = empty_backend()
    made.pool.take(made.pool.count - 3)
    with pytest.raises(BackendError, match="44 pages wanted, 3 of 88 are free"):
        made.restore(on_window("bf16"))
    assert made.free_slots == [0, 1] and made.pool.available == 3


def test_only_an_open_stream_between_passes_is_saved_and_only_an_empty_one_restored():
    made, stream = opened("paged", 16, "bf16")
    fill(made, stream, 5)
    refused("stream 1: has 5 positions; restore into a new one", lambda: restore(made, on_window("bf16"), stream), made)
    batch = made.batch(DECODE, [(stream, 1)])
    refused("stream 1: is in a pass; finish it first", stream.save, made)
    made.finish(batch)
    other = opened("paged", 16, "bf16")[0]
    refused("belongs to another backend", lambda: other.save(stream), other)
    stream.release()
    refused("stream 1: was released; open another", stream.save, made)


# --- One page -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("size", [16, 48, 256])
def test_a_copied_page_holds_the_first_positions_and_no_more(size, kv):
    """A stream whose table names the copy reads the same; the rest of the copy is as it was."""
    made, stream = opened("paged", size, kv)
    count = size - 3 if size < POSITIONS else 100
    fill(made, stream, count)
    before = stream.save()
    source, (target,) = stream.pages[0], made.pool.take(1)
    page = slice(target * made.page_words, (target + 1) * made.page_words)
    made.arena.words[page] = 0x55555555
    page_copies.copy_page(made, source, target, count)
    made.pages[stream.slot * made.columns] = target
    assert_same(stream.save(), before)
    rows = 2 * 2 * 2 * count
    untouched = (made.arena.words[page].view(np.uint8) == 0x55).sum()
    moved = before.rows.nbytes + (rows if kv == "fp8" else 0)
    assert untouched >= 4 * made.page_words - moved
