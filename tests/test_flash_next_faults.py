"""Faults that sparse attention has had elsewhere: pooled keys of the wrong stream or page, ties, blocks seen too early, rows that
write past their own, chunks of an fp8 cache. Each is planted once and seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buffers import assert_same_bits, normal
from mutants import module_from, mutate
from paging import StreamRows, build_cache
from test_fn_select import lists
from test_serving_faults import OTHER, TEXT, House, logits_of

from backends import page_copies, sparse
from backends.base import DECODE, PROMPT, Kept, backend_class
from backends.layout import paged, window
from kernels_numba.decode_plan import row_streams
from kernels_numba.flash_next import scores as scores_module
from kernels_numba.flash_next.select import fn_qsa_select_kernel
from kernels_numba.streams import BASE, COMMITTED, TABLE
from refengine.checkpoint import load_weights, make_checkpoint, open_checkpoint
from refengine.device import open_device
from refengine.model import Model, open_model
from refengine.registry import load_model
from refengine.serve.requests import Request
from refengine.verify.selection_oracle import listed_keys
from refengine.verify.sparse_bits import UNSCORED, WINDOW, Case, Form, Session, SparseBench, Step

TINY = load_model("flash-next-tiny")
FORMS = [WINDOW, Form("paged", 16), Form("paged", 48)]
ONE, DEVICE = 0x3F80, open_device("cpu")
"""1 in bf16."""
H, HK, D, IH, DI, ROPE = 4, 2, 64, 2, 64, 16


def small_bench(blocks: int) -> SparseBench:
    """Small heads; a sparse row reads so many blocks."""
    spec = replace(
        TINY,
        attention=replace(TINY.attention, heads=H, kv_heads=HK, head_dim=D),
        indexer=replace(TINY.indexer, heads=IH, head_dim=DI, budget=4 * blocks),
        rope=replace(TINY.rope, dims=ROPE),
    )
    return SparseBench(spec, 300, DEVICE)


def columns(what: str) -> slice:
    """Of a row of the projection."""
    values, index = (2 * H + HK) * D, 2 * (H + HK) * D
    return {
        "values": slice(values, index),
        "index queries": slice(index, index + IH * DI),
        "index key": slice(index + IH * DI, None),
    }[what]


def reveal(bench: SparseBench, unit: int) -> None:
    """Values become one-hot in the position's number // unit: an attention row says in its dims what it has read."""
    values = bench.rows[:, columns("values")].reshape(-1, HK, D)
    values[:] = 0
    for position in range(min(len(values), unit * D)):
        values[position, :, position // unit] = ONE


def point(bench: SparseBench, positions: slice, what: str) -> None:
    """Index queries or keys of some positions become one direction, of dims that do not turn."""
    rows = bench.rows[positions, columns(what)].reshape(-1, DI)
    rows[:, :32], rows[:, 32:] = 0, ONE
    bench.rows[positions, columns(what)] = rows.reshape(-1, bench.rows[:1, columns(what)].shape[1])


def units_read(step: Step, row: int) -> set[int]:
    """What a row of revealed values has read; the same in every head."""
    read = step.arrays["out"][row].astype(np.float32) > 0
    assert (read == read[0]).all()
    return {int(unit) for unit in np.flatnonzero(read[0])}


def last_row(bench: SparseBench, form: Form, length: int, kv: str = "bf16") -> Step:
    """The pass of the last position of streams of ``length`` and about half as many positions."""
    session = Session(bench, form, kv, Case(length, 1), 5)
    session.fill()
    return next(session.steps())


# --- P1: two streams ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    """Four layers, the last one sparse from position 20 on."""
    spec = replace(TINY, layers=4, layer_types=TINY.layer_types[:4], indexer=replace(TINY.indexer, budget=16))
    folder = make_checkpoint(spec, Path(tmp_path_factory.mktemp("model")) / "four-layers")
    return open_model(spec, load_weights(open_checkpoint(folder, spec), spec), DEVICE, 96)


@pytest.fixture(scope="module")
def cold(model) -> Callable[..., list[bytes]]:
    """The logits rows that a prompt's reply was drawn from: alone, in a window, in one pass."""

    @cache
    def run(prompt: tuple[int, ...], tokens: int = 3, kv: str = "bf16") -> list[bytes]:
        house = House(model, "window", kv=kv)
        house.run(prompt, tokens)
        return [done.logits[-1].tobytes() for done in house.passes]

    return run


def together(house: House, prompts: list[list[int]], tokens: int = 3) -> tuple[list[list[bytes]], list[int]]:
    """Each prompt's logits rows, all read and answered side by side; how many positions each resumed."""
    ones = [Request(prompt, tokens, marks=(), number=n) for n, prompt in enumerate(prompts)]
    rows: list[list[bytes]] = [[] for _ in prompts]
    for one in ones:
        house.scheduler.submit(one)
    for done in house.scheduler.run():
        for number, row in zip(done.streams, done.logits):
            rows[number].append(row.tobytes())
    return rows, [one.resumed for one in ones]


@pytest.mark.parametrize("name", ["window", "paged", "mixed"])
def test_two_streams_of_equal_lengths_are_each_alone(model, cold, name):
    prompts = [TEXT[:40], OTHER[:40]]
    assert together(House(model, name), prompts)[0] == [cold(tuple(prompt)) for prompt in prompts]


@pytest.mark.parametrize("mark", [32, 37])
def test_two_streams_that_share_a_prefix_are_each_alone(model, cold, mark):
    """It ends with a page, and inside a block."""
    house, prompts = House(model, cached=True), [TEXT[:mark] + OTHER[: 48 - mark], TEXT[:48]]
    house.run(TEXT[: mark + 1], 1, marks=(mark,))
    assert together(house, prompts) == ([cold(tuple(prompt)) for prompt in prompts], [mark, mark])


def one_streams_pooled_keys(right: Callable[..., None]) -> Callable[..., None]:
    """Pooled keys are found by position alone: every stream reads the first one's."""

    def wrong(scores: Any, index_q: Any, arena: Any, pages: Any, streams: Any, *rest: Any) -> None:
        shared = streams.copy()
        shared[:, [BASE, TABLE]] = streams[0, [BASE, TABLE]]
        right(scores, index_q, arena, pages, shared, *rest)

    return wrong


@pytest.mark.parametrize("name", ["window", "paged"])
def test_red_pooled_keys_found_by_position_alone_are_seen(model, cold, name, monkeypatch):
    prompts = [TEXT[:40], OTHER[:40]]
    monkeypatch.setattr(sparse, "fn_qsa_scores", one_streams_pooled_keys(sparse.fn_qsa_scores))
    rows, _ = together(House(model, name), prompts)
    assert rows[0] == cold(tuple(prompts[0])) and rows[1] != cold(tuple(prompts[1]))


def forked(form: Form) -> tuple[list[Kept], list[Step]]:
    """A stream of 38 positions and a copy of it on another form, each with a pass and a window of its own after them."""
    bench = small_bench(4)
    session = Session(bench, WINDOW, "bf16", Case(38, 4), 3)
    session.fill()
    session.attended("prompt", PROMPT, session.case.last_rows)
    kept = session.streams[0].save()
    copied = Session(bench, form, "bf16", Case(38, 4), 3, [kept, kept])
    steps = [copied.attended("prompt", PROMPT, [7, 7]), copied.attended("window", DECODE, [5, 5])]
    return [stream.save() for stream in copied.streams], steps


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_copied_stream_and_the_first_go_on_apart(form):
    """Both go on with other rows; the first as if it had never been copied."""
    (first, second), steps = forked(form)
    whole = Session(small_bench(4), WINDOW, "bf16", Case(38, 4), 3)
    whole.fill()
    for rows in (4, 7, 5):
        step = whole.attended("prompt", PROMPT, [rows, 0])
    for name, array in whole.streams[0].save().arrays.items():
        assert_same_bits(first.arrays[name], array)
    assert_same_bits(steps[-1].arrays["out"][:5], step.arrays["out"])
    assert_same_bits(first.pooled[0, :9], second.pooled[0, :9])
    assert (first.pooled[0, 10:] != second.pooled[0, 10:]).any(axis=1).all()


def test_red_a_copy_that_leaves_its_pooled_keys_behind_is_seen(monkeypatch):
    wanted = forked(FORMS[1])[1][0]
    right = page_copies.into_cache
    monkeypatch.setattr("backends.kept.into_cache", lambda b, p, n, a: right(b, p, n, a | {"pooled": a["pooled"] * 0}))
    assert (forked(FORMS[1])[1][0].arrays["scores"] != wanted.arrays["scores"]).any()


# --- P2: a far key ------------------------------------------------------------------------------------------------------


def far_block(form: Form, length: int) -> tuple[set[int], Step]:
    """Blocks that the last row of a stream reads, whose index queries point to the raw keys of block 1."""
    bench = small_bench(8)
    reveal(bench, 4)
    point(bench, slice(4, 8), "index key")
    point(bench, slice(length - 1, length), "index queries")
    step = last_row(bench, form, length)
    return units_read(step, 0), step


@pytest.mark.parametrize("length", [24, 32, 36, 200])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_far_key_that_is_marked_is_read_whatever_the_context(form, length):
    read, step = far_block(form, length)
    wanted = listed_keys(step.arrays["scores"][0], length, 8)
    assert 1 in read and read == {int(p) // 4 for p in wanted} and len(read) == min(8, length // 4)


def test_red_a_pooled_key_found_in_other_units_is_seen(monkeypatch):
    """Two blocks take one row of the page."""
    source = Path(scores_module.__file__).read_text(encoding="utf-8")
    wrong = source.replace("slot // BLOCK * (DI // 2)", "slot // (2 * BLOCK) * (DI // 2)")
    assert wrong != source
    monkeypatch.setattr(sparse, "fn_qsa_scores", module_from(wrong, scores_module.__name__).fn_qsa_scores)
    assert 1 not in far_block(FORMS[1], 200)[0]


@pytest.mark.parametrize("form", FORMS[1:], ids=str)
def test_no_two_blocks_share_a_pooled_key(form):
    """Of two streams of 200 and 103 positions: as many places as blocks, all inside pages that the stream holds."""
    session = Session(small_bench(8), form, "bf16", Case(200, 8), 5)
    made, places = session.backend, []
    session.fill()
    session.attended("prompt", PROMPT, [8, 8])
    plane = made.shape.planes(0, made.positions, "bf16")[5]
    pooled = [s.save().pooled[0] for s in session.streams]
    for stream, rows in zip(session.streams, pooled):
        for block, row in enumerate(rows):
            page, slot = stream.pages[4 * block // made.positions], 4 * block % made.positions // 4
            start = page * made.page_words + plane + slot * DI // 2
            assert made.arena.words[start : start + DI // 2].tobytes() == row.tobytes()
            places.append(start)
    assert len(set(places)) == len(places) == 50 + 25 and len({row.tobytes() for rows in pooled for row in rows}) == 75


# --- P4: ties -----------------------------------------------------------------------------------------------------------


def tied() -> tuple[Session, Step]:
    """Ten blocks, all keys equal, three are read."""
    bench = small_bench(3)
    reveal(bench, 4)
    point(bench, slice(None), "index key")
    session = Session(bench, FORMS[1], "bf16", Case(43, 3), 5)
    session.fill()
    return session, session.attended("prompt", PROMPT, session.case.last_rows)


def test_of_equal_keys_the_lowest_blocks_are_read_in_every_run():
    session, step = tied()
    assert len(np.unique(step.arrays["scores"][2, :10])) == 1 and step.arrays["scores"][2, 0] > 0
    assert units_read(step, 2) == {0, 1, 2, 10}
    first = step.arrays["scores"][:3]
    for _ in range(100):
        assert lists(first, [41, 42, 43], 3) == [[*range(12), *range(40, end)] for end in (41, 42, 43)]


def test_two_blocks_tied_at_the_cut_give_the_lower_one_in_every_run():
    scores = np.array([5, 1, 7, 2, 2, 1, 0, 2, 1, 0], np.float32)[None]
    assert all(lists(scores, [41], 3) == [[0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15, 40]] for _ in range(100))


def test_red_a_tie_that_goes_to_the_higher_block_is_seen():
    higher = "(standing == TIED and equal >= all_of_them // TIED - spare)"
    wrong = mutate(fn_qsa_select_kernel, "(standing == TIED and equal < spare)", higher)
    scores = np.array([5, 1, 7, 2, 2, 1, 0, 2, 1, 0], np.float32)[None]
    assert lists(scores, [41], 3, wrong) != lists(scores, [41], 3)


# --- P5: whole blocks, and the tail ---------------------------------------------------------------------------------------


def in_chunks(form: Form, cuts: list[int]) -> tuple[list[int], list[set[int]]]:
    """How many blocks each of positions 0 .. 9 sees, and which positions it reads, one block and the tail."""
    bench = small_bench(1)
    reveal(bench, 1)
    session, seen, read = Session(bench, form, "bf16", Case(10, 10), 5), [], []
    for count in cuts:
        step = session.attended("prompt", PROMPT, [count, 0])
        seen += (step.arrays["scores"] != UNSCORED).sum(axis=1).tolist() if step.arrays["scores"].size else [0] * count
        read += [units_read(step, row) for row in range(count)]
    return seen, read


@pytest.mark.parametrize("cuts", [[10], [3, 7], [4, 6], [5, 5], [3, 1, 1, 5], [1] * 10], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_row_sees_whole_blocks_and_reads_its_tail(form, cuts):
    seen, read = in_chunks(form, cuts)
    assert seen == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert read[:7] == [set(range(position + 1)) for position in range(7)]
    for position in (7, 8, 9):
        assert read[position] in ({0, 1, 2, 3} | set(range(8, position + 1)), set(range(4, position + 1)))


def test_red_a_block_scored_before_it_is_whole_is_seen(monkeypatch):
    right = scores_module.fn_qsa_scores

    def early(scores: Any, index_q: Any, arena: Any, pages: Any, streams: Any, *rest: Any) -> None:
        streams = streams.copy()
        streams[:, COMMITTED] += 1
        right(scores, index_q, arena, pages, streams, *rest)

    monkeypatch.setattr("refengine.verify.sparse_bits.fn_qsa_scores", early)
    assert in_chunks(WINDOW, [10])[0] == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


# --- P7: rows of very different windows -------------------------------------------------------------------------------------

BLOCKS = (5, 70, 1)
"""Blocks that the last row of each stream sees."""


def scored_together(layout: Any, ptok: int, kernel: Any, streams: tuple[int, ...] = (0, 1, 2)) -> np.ndarray:
    """float32 [rows, 96] over -inf: three rows of each stream, the last of which completes a block."""
    laid, queries = [], []
    for n in streams:
        rng, end = np.random.default_rng(n), 4 * BLOCKS[n]
        k, v = (normal(rng, end, 1, 64) for _ in "kv")
        index, pooled = (normal(rng, rows, DI) for rows in (end, BLOCKS[n]))
        laid.append(StreamRows(k, v, 3 * len(laid), 3, end - 3, index, pooled))
        queries.append(normal(rng, 3, IH, DI))
    cache, query = build_cache(layout, ptok, laid), np.concatenate(queries)
    scores = np.full((len(query), 96), -np.inf, np.float32)
    place = cache.arena, cache.pages, cache.streams, row_streams(cache.streams)
    kernel.at(IH=IH, DI=DI, layout=layout)[(len(query), 2), scores_module.THREADS](
        scores, query, *place, np.sqrt(np.float32(DI))
    )
    return scores


def outside(scores: np.ndarray) -> int:
    """Finite numbers where a row has no block."""
    seen = np.array([count - (row < 2) for count in BLOCKS for row in range(3)])
    assert all(np.isfinite(row[:count]).all() for row, count in zip(scores, seen))
    return int(np.isfinite(scores[np.arange(scores.shape[1]) >= seen[:, None]]).sum())


@pytest.mark.parametrize("layout, ptok", [(window, 0), (paged, 16), (paged, 48)])
def test_nothing_is_written_outside_a_rows_own_blocks(layout, ptok):
    found = scored_together(layout, ptok, scores_module.fn_qsa_scores_kernel)
    assert outside(found) == 0
    alone = [scored_together(window, 0, scores_module.fn_qsa_scores_kernel, (n,)) for n in range(3)]
    assert_same_bits(found, np.concatenate(alone))


def test_red_a_whole_tile_that_is_stored_is_seen():
    wrong = mutate(scores_module.fn_qsa_scores_kernel, "if seen and lane == 0:", "if lane == 0:")
    assert outside(scored_together(window, 0, wrong)) > 0


# --- P8: chunks of an fp8 cache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["window", "paged", "mixed"])
def test_three_chunks_of_an_fp8_cache_are_as_one(model, cold, name):
    house = House(model, name, rows=20, kv="fp8")
    house.run(TEXT[:60])
    assert sum(done.phase == PROMPT for done in house.passes) == 3
    assert logits_of(house) == b"".join(cold(tuple(TEXT[:60]), 3, "fp8"))
    assert cold(tuple(TEXT[:60]), 3, "fp8") != cold(tuple(TEXT[:60]))


@pytest.mark.parametrize("hit", [32, 37])
def test_a_prefix_hit_of_an_fp8_cache_is_as_one_chunk(model, cold, hit):
    house = House(model, rows=20, cached=True, kv="fp8")
    house.run(TEXT[:hit] + OTHER[:3], 1, marks=(hit,))
    house.passes = []
    assert house.run(TEXT[:60]).resumed == hit
    assert logits_of(house) == b"".join(cold(tuple(TEXT[:60]), 3, "fp8"))


def test_red_an_earlier_chunk_that_comes_back_with_other_exponents_is_seen(model, cold, monkeypatch):
    right = backend_class("paged").finish

    def finish(self: Any, batch: Any, accepted: Any = None) -> None:
        right(self, batch, accepted)
        plane = self.shape.planes(3, self.positions, "fp8")[2]
        exponents = self.arena.words.view(np.int8)[4 * (batch.members[0].pages[0] * self.page_words + plane) :]
        exponents[: self.positions] += batch.members[0].committed == 20

    monkeypatch.setattr(backend_class("paged"), "finish", finish)
    house = House(model, rows=20, kv="fp8")
    house.run(TEXT[:60])
    assert logits_of(house) != b"".join(cold(tuple(TEXT[:60]), 3, "fp8"))
