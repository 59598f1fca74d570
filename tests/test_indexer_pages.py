"""Pages of a model with a sparse indexer hold its raw and pooled keys behind K and V, and kept states carry them: the same bytes
from every form of cache, a window of any context, pages of any multiple of a block."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from buffers import assert_same_bits

from backends.arena import CacheShape
from backends.base import PROMPT, Backend, BackendError, Kept, Sizes, Stream, backend_class
from backends.kept import restore
from kernels_numba.locate import locate
from kernels_numba.streams import (
    BASE,
    INDEX_PLANE,
    K_EXP_PLANE,
    K_PLANE,
    PAGE_WORDS,
    POOLED_PLANE,
    PTOK,
    TABLE,
    V_PLANE,
)
from refengine.serve import kept_files

PLAIN = CacheShape((1, 3), (0,), 4, 2, 64, 3, 8, 16, 40, 3)
SHAPE = replace(PLAIN, index_dim=64, index_heads=2, index_budget=8)
CONTEXT, POSITIONS, BLOCKS = 302, 271, 67
PAGES = (4, 16, 48, 128, 256, 512)
FORMS = [("window", 0), *(("paged", size) for size in PAGES), ("paged-p256", 0), ("mixed", 0), ("mixed", 48)]
"""(backend, page size); ``mixed``: its stream with a window, or with pages."""
KV = ("bf16", "fp8")
UNUSED = np.uint32(0x7F7F7F7F)


def opened(name: str, size: int, kv: str = "bf16", shape: CacheShape = SHAPE) -> tuple[Backend, Stream]:
    """A backend with shuffled pages, and a stream of the form."""
    made = backend_class(name)(shape, Sizes(CONTEXT, 2, size or 16, 1, 3, 7, kv))
    streams = [made.open(), made.open()]
    return made, streams[bool(size)]


def places(made: Backend, stream: Stream, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Arena words of the raw keys [positions, 32] and the pooled ones [blocks, 32], as the stream table and the address function
    say."""
    row = made.layer_tables(np.array([made.stream_row(stream, 0, 0)], np.int64))[layer, 0]
    found = np.zeros((stream.committed, 2), np.int64)
    base, table, ptok, page_words = (int(row[n]) for n in (BASE, TABLE, PTOK, PAGE_WORDS))
    locate(found, np.arange(stream.committed), made.pages, base, table, ptok, page_words, made.layout)
    (start, slot), words = found.T[..., None], np.arange(32)
    raw, first = start + row[INDEX_PLANE] + slot * 32 + words, slice(0, stream.committed // 4 * 4, 4)
    return raw, start[first] + row[POOLED_PLANE] + slot[first] // 4 * 32 + words


def fill(made: Backend, stream: Stream) -> None:
    """Committed positions whose every row tells its layer, plane and place."""
    made.arena.words[:] = UNUSED
    batch = made.batch(PROMPT, [(stream, POSITIONS)])
    made.finish(batch)
    restore_rows(made, stream)
    for layer in (0, 1):
        for plane, at in enumerate(places(made, stream, layer)):
            made.arena.words[at] = np.arange(at.size).reshape(at.shape) + 10**6 * (2 * layer + plane + 1)
    for part in stream.state(0):
        part[...] = 2


def restore_rows(made: Backend, stream: Stream) -> None:
    """K and V of a kept state of another stream, so that all a state holds is finite and known."""
    other, donor = opened("window", 0, made.sizes.kv, PLAIN)
    other.arena.words[:] = np.arange(len(other.arena.words)) % 30000
    donor.committed = donor.prompted = POSITIONS
    kept = donor.save()
    blank = {"index": np.zeros((2, POSITIONS, 64)), "pooled": np.zeros((2, BLOCKS, 64))}
    stream.committed = stream.prompted = 0
    restore(made, replace(kept, **{name: array.astype(ml_dtypes.bfloat16) for name, array in blank.items()}), stream)


@cache
def on_window(kv: str) -> Kept:
    made, stream = opened("window", 0, kv)
    fill(made, stream)
    return stream.save()


def assert_same(found: Kept, wanted: Kept) -> None:
    assert list(found.arrays) == list(wanted.arrays)
    for name, array in wanted.arrays.items():
        assert_same_bits(found.arrays[name], array)


# --- Where the planes lie -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("size", (4, 16, 48, 256))
def test_planes_follow_one_another_and_start_at_16_bytes(size, kv):
    shape = replace(SHAPE, index_dim=2)
    plane, exponents = 2 * size * (32 if kv == "bf16" else 16), (size // 2 + 3) // 4 * 4 if kv == "fp8" else 0
    ends = np.cumsum([plane, plane, exponents, exponents, (size + 3) // 4 * 4, (size // 4 + 3) // 4 * 4])
    assert shape.page_words(size, kv) == 2 * ends[-1]
    k, v, k_exp, v_exp, index, pooled = shape.planes(3, size, kv)
    assert [k, v, index, pooled] == [ends[-1], *(ends[-1] + ends[[0, 3, 4]])]
    assert [k_exp, v_exp] == ([0, 0] if kv == "bf16" else [*(ends[-1] + ends[[1, 2]])])
    assert all(start % 4 == 0 for start in shape.planes(3, size, kv))


@pytest.mark.parametrize("kv", KV)
def test_a_shape_without_an_indexer_has_the_pages_that_it_had(kv):
    assert PLAIN.page_words(48, kv) == 2 * 2 * (PLAIN.plane_words(48, kv) + PLAIN.exponent_words(48, kv))
    assert PLAIN.planes(1, 48, kv)[4:] == PLAIN.planes(3, 48, kv)[4:] == (0, 0)
    made, stream = opened("paged", 48, kv, PLAIN)
    row = made.layer_tables(np.array([made.stream_row(stream, 0, 0)], np.int64))[1, 0]
    assert row[[INDEX_PLANE, POOLED_PLANE]].tolist() == [0, 0] and row[V_PLANE] > row[K_PLANE] > 0
    assert set(stream.save().arrays) & {"index", "pooled"} == set()


def test_every_layer_of_the_stream_table_has_its_planes():
    made, stream = opened("mixed", 48, "fp8")
    table = np.array([made.stream_row(s, 0, 0) for s in made.streams.values()], np.int64)
    for layer, rows in zip((1, 3), made.layer_tables(table), strict=True):
        for row in rows:
            assert (*row[[K_PLANE, V_PLANE, K_EXP_PLANE]],) == SHAPE.planes(layer, int(row[PTOK]), "fp8")[:3]
            assert (*row[[INDEX_PLANE, POOLED_PLANE]],) == SHAPE.planes(layer, int(row[PTOK]), "fp8")[4:]


@pytest.mark.parametrize("name", ("paged", "mixed"))
@pytest.mark.parametrize("size", (1, 2, 6, 47, 258))
def test_a_page_that_cuts_a_block_is_refused_by_name(name, size):
    with pytest.raises(BackendError, match=f"^{name}: pages of {size} positions would cut .* take a multiple of 4$"):
        backend_class(name)(SHAPE, Sizes(CONTEXT, 2, size))
    backend_class(name)(PLAIN, Sizes(CONTEXT, 2, size))
    backend_class(name)(replace(SHAPE, index_ratio=size), Sizes(CONTEXT, 2, size))


def test_a_window_has_any_context():
    made, stream = opened("window", 0)
    assert made.positions == CONTEXT and CONTEXT % 4 and stream.capacity == CONTEXT
    for context in (1, 3, 4):
        backend_class("window")(SHAPE, Sizes(context)).open().save()


# --- Kept states --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("name, size", FORMS)
def test_every_form_saves_and_takes_the_same_bytes(name, size, kv):
    made, stream = opened(name, size, kv)
    fill(made, stream)
    assert_same(stream.save(), on_window(kv))
    other, again = opened(name, size, kv)
    other.arena.words[:] = UNUSED
    restore(other, on_window(kv), again)
    assert_same(again.save(), on_window(kv))
    for layer in (0, 1):
        for plane, at in enumerate(places(other, again, layer)):
            assert (other.arena.words[at].reshape(-1) == np.arange(at.size) + 10**6 * (2 * layer + plane + 1)).all()


def test_raw_keys_of_the_incomplete_block_go_along_and_no_pooled_row_of_it():
    kept = on_window("bf16")
    assert kept.index.shape == (2, POSITIONS, 64) and kept.pooled.shape == (2, BLOCKS, 64) and POSITIONS % 4 == 3
    assert (kept.index.view(np.uint32)[0, -1] == np.arange(32) + 10**6 + 32 * (POSITIONS - 1)).all()


def test_a_stream_shares_full_pages_and_copies_the_rest():
    """A snapshot ends inside a page: the stream that begins with it has the raw and pooled keys of that part in its own page."""
    made, stream = opened("paged", 48)
    fill(made, stream)
    prefix = made.snapshot(stream)
    made.release(stream)
    begun = made.open(begin=prefix)
    assert begun.pages[:-1] == prefix.pages[:5] and begun.pages[-1] != prefix.pages[-1]
    assert_same(begun.save(), on_window("bf16"))


def test_a_state_goes_through_a_file(tmp_path):
    path, kept = tmp_path / "one.safetensors", on_window("fp8")
    kept_files.save(path, range(POSITIONS), kept, "a model", "mine")
    assert_same(kept_files.load(path, "mine")[1], kept)


@pytest.mark.parametrize(
    "words, change",
    [
        ("index dims 32 where this backend has 64", {"index": np.zeros((2, POSITIONS, 32), ml_dtypes.bfloat16)}),
        ("blocks 66 where this backend has 67", {"pooled": np.zeros((2, 66, 64), ml_dtypes.bfloat16)}),
        ("index: float32 of 3 axes", {"index": np.zeros((2, POSITIONS, 64), np.float32)}),
        ("holds rows, states, histories, index, not", {"pooled": None}),
    ],
)
def test_a_state_of_another_indexer_is_refused(words, change):
    made, stream = opened("paged", 16)
    with pytest.raises(BackendError, match=words):
        restore(made, replace(on_window("bf16"), **change), stream)
    assert stream.committed == 0


def test_a_model_without_an_indexer_refuses_its_keys():
    with pytest.raises(
        BackendError, match="holds rows, states, histories, index, pooled, not rows, states, histories$"
    ):
        opened("paged", 16, shape=PLAIN)[0].restore(on_window("bf16"))


def test_a_page_table_swapped_before_saving_shows_in_raw_and_pooled_keys():
    made, stream = opened("paged", 48)
    fill(made, stream)
    first = stream.slot * made.columns
    made.pages[[first, first + 1]] = made.pages[[first + 1, first]]
    found, wanted = stream.save().arrays, on_window("bf16").arrays
    assert [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()] == ["rows", "index", "pooled"]
