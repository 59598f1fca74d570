"""Faults that engines have had between requests: in tables, admission, the prompt cache, and recurrent states that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from buffers import assert_same_bits
from hash_step import SHAPE, HashStep, expected
from test_faults import SMALL, assert_same, attend, bench, build, fill
from test_registry import changed, refusal

from backends.base import DECODE, PROMPT, Backend, Sizes, backend_class
from backends.kept import Kept
from refengine.checkpoint import load_weights, make_checkpoint, open_checkpoint
from refengine.device import open_device
from refengine.errors import UserError
from refengine.model import Model, Qwen35, cache_shape
from refengine.registry import load_model
from refengine.serve.forward import Forward, Pass
from refengine.serve.prompt_cache import PromptCache
from refengine.serve.requests import DONE, Request
from refengine.serve.scheduler import Scheduler

POISON = 0xFFFFFFFF
"""Two bf16 NaNs, a float32 NaN."""
BENCH = 8460
"""Positions of the attention layer's rows."""


# --- E: page tables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [PROMPT, DECODE])
def test_rows_of_streams_that_ended_are_neither_read_nor_written(phase):
    """Four streams of ten pages, then two of them; the others' pages and rows of the table hold what nobody may follow."""
    b, found = bench(SMALL, BENCH), []
    for ended in (2, 0):
        made = build(SMALL, "paged", 160, streams=4)
        streams = [made.open() for _ in range(4)]
        for stream in streams:
            fill(b, made, stream, 150)
        attend(b, made, DECODE, [(stream, 1) for stream in streams])
        for stream in streams[:ended]:
            held = [*stream.pages]
            stream.release()
            made.arena.words[: made.pool.count * made.page_words].reshape(made.pool.count, -1)[held] = POISON
        if ended:
            rows = made.pages.reshape(4, -1)
            assert (rows[:ended] == made.null_page).all()
            rows[:ended] = 10**6
        before = made.arena.words.copy()
        found.append(attend(b, made, phase, [(stream, 1) for stream in streams[2:]]))
        written = np.unique(np.flatnonzero(before != made.arena.words) // made.page_words)
        records = made.arena.starts["records"] // made.page_words
        assert {int(p) for p in written if p < records} <= {page for s in streams[2:] for page in s.pages}
    assert_same({"two": found[0]}, {"two": found[1]})


@pytest.mark.parametrize("tail", [-1, 0, 10**6])
def test_the_tail_of_a_row_of_the_page_table_does_not_show(tail):
    """A row of ten pages is freed, one of two pages takes its place; behind them the row holds anything."""
    b, made = bench(SMALL, BENCH), build(SMALL, "paged", 160)
    long = made.open()
    fill(b, made, long, 160)
    long.release()
    assert (made.pages == made.null_page).all()
    made.arena.words[:] = POISON
    stream = made.open(33)
    fill(b, made, stream, 25)
    made.pages[2:] = tail
    found = {PROMPT: attend(b, made, PROMPT, [(stream, 3)]), DECODE: attend(b, made, DECODE, [(stream, 1)])}
    alone = build(SMALL, "window", 160)
    other = alone.open()
    fill(b, alone, other, 25)
    assert_same(found, {phase: attend(b, alone, phase, [(other, rows)]) for phase, rows in ((PROMPT, 3), (DECODE, 1))})
    assert (made.pages[2:] == tail).all()


# --- B, I: admission ----------------------------------------------------------------------------------------------------


def hash_scheduler(sizes: Sizes, name: str = "paged", rows: int = 100) -> Scheduler:
    backend = backend_class(name)(SHAPE, sizes)
    return Scheduler(backend, HashStep(backend), rows, check=True)


@pytest.mark.parametrize("name", ["window", "paged", "mixed"])
@pytest.mark.parametrize(
    ("prompt", "tokens", "fits"),
    [(63, 1, True), (62, 2, True), (64, 1, False), (65, 1, False), (63, 2, False), (63, 0, False), (64, 0, False)],
)
def test_the_prompt_and_at_least_one_token_fit_into_the_context(name, prompt, tokens, fits):
    s = hash_scheduler(Sizes(64, 2, 16, 3), name)
    request = Request(list(range(prompt)), tokens)
    if fits:
        s.submit(request)
        list(s.run())
        assert request.outcome == DONE and request.reply == expected(request.prompt, tokens)
    else:
        with pytest.raises(
            UserError, match="tokens 0: a whole number, at least 1" if tokens == 0 else "the context is 64"
        ):
            s.submit(request)
        assert not s.waiting


def test_one_that_never_fits_is_refused_alone_and_the_small_one_behind_it_finishes():
    """Four pages of 16 for positions, one for the state of a single stream."""
    s = hash_scheduler(Sizes(256, 2, 16, pool=5))
    for prompt, tokens, words in (
        (100, 1, "ask for at most 64 positions"),
        (64, 0, "tokens 0"),
        (64, 1, "at most 64 tokens"),
    ):
        with pytest.raises(UserError, match=words):
            s.submit(Request([1] * prompt, tokens))
    whole, small = Request([1] * 63, 1), Request([2, 3], 2)
    s.submit(whole)
    s.submit(small)
    list(s.run())
    assert [one.reply for one in (whole, small)] == [expected([1] * 63, 1), expected([2, 3], 2)]
    assert s.backend.pool.free == 5


# --- J: other rows of a pass --------------------------------------------------------------------------------------------


@cache
def of_a_thousand_keys(others: int, place: int) -> np.ndarray:
    """A decode row of 1000 keys among other streams of 1 to 40 keys, at a place of the pass: bf16 [H, D]."""
    b, made = bench(SMALL, BENCH), build(SMALL, "paged", 1008, streams=1 + others)
    long, rest = made.open(), [made.open(48) for _ in range(others)]
    fill(b, made, long, 999)
    for n, stream in enumerate(rest):
        fill(b, made, stream, n % 40)
    rest.insert(place, long)
    return attend(b, made, DECODE, [(stream, 1) for stream in rest])[place]


@pytest.mark.parametrize("others", [1, 7, 31, 33])
@pytest.mark.parametrize("last", [False, True])
def test_a_row_of_1000_keys_is_the_same_beside_any_others(others, last):
    assert_same_bits(of_a_thousand_keys(others, others if last else 0), of_a_thousand_keys(0, 0))


# --- The model ----------------------------------------------------------------------------------------------------------

DEVICE, CONTEXT, P = open_device("cpu"), 96, 16
TINY = load_model("qwen3.5-tiny")
SPEC = replace(TINY, layers=4, layer_types=TINY.layer_types[:4])
TEXT = [(7 * i + i * i) % 250 for i in range(CONTEXT)]
OTHER = [(11 * i + 3) % 250 for i in range(CONTEXT)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Qwen35:
    folder = make_checkpoint(SPEC, Path(tmp_path_factory.mktemp("model")) / "four-layers")
    return Qwen35(SPEC, load_weights(open_checkpoint(folder, SPEC), SPEC), DEVICE, CONTEXT)


class House:
    """The model on a backend whose free memory is NaN, a scheduler, and a prompt cache where asked for."""

    def __init__(self, model: Model, name: str = "paged", rows: int = CONTEXT, cached: bool = False, **sizes):
        sizes = {"context": CONTEXT, "streams": 3, "page_size": P, "window_rows": 4, "shuffle": 1} | sizes
        self.backend: Backend = backend_class(name)(cache_shape(model.spec), Sizes(**sizes))
        assert (self.backend.arena.words == POISON).all()
        self.cache = PromptCache(self.backend, P) if cached else None
        step = Forward(model, self.backend, DEVICE)
        self.scheduler = Scheduler(self.backend, step, rows, self.cache, check=True)
        self.passes: list[Pass] = []

    def run(self, prompt: Sequence[int], tokens: int = 3, marks: tuple[int, ...] | None = None) -> Request:
        one = Request(list(prompt), tokens, marks=marks, number=len(self.passes))
        self.scheduler.submit(one)
        for done in self.scheduler.run():
            self.passes.append(done)
        assert one.outcome == DONE and all(np.isfinite(done.logits).all() for done in self.passes)
        return one

    def read(self, prompt: Sequence[int], decode: int = 0) -> Kept:
        """A prompt's stream once it is read, and after so many decode passes."""
        one = Request(list(prompt), decode + 2, marks=())
        self.scheduler.submit(one)
        while not one.is_read:
            next(self.scheduler.round())
        for _ in range(decode):
            list(self.scheduler.round())
        kept = one.place.save()
        self.scheduler.cancel(one)
        return kept


@pytest.fixture(scope="module")
def cold(model):
    """The reply to a prompt, and the logits rows it was drawn from: alone, in a window, in one pass."""

    @cache
    def run(prompt: tuple[int, ...], tokens: int) -> tuple[list[int], bytes]:
        house = House(model, "window", window_rows=1)
        reply = house.run(prompt, tokens).reply
        return reply, b"".join(done.logits[-1].tobytes() for done in house.passes)

    return run


def logits_of(house: House) -> bytes:
    """The rows that a lone request's tokens were drawn from."""
    last = max(n for n, done in enumerate(house.passes) if done.phase == PROMPT)
    rows = [house.passes[last].logits[-1], *(row for done in house.passes[last + 1 :] for row in done.logits)]
    return b"".join(row.tobytes() for row in rows)


def test_a_stream_among_others_that_end_is_as_alone(model, cold):
    """Lengths 5, 40, 40: the first ends, and the others take its place in the passes."""
    house, prompts = House(model), [TEXT[:5], TEXT[:40], OTHER[:40]]
    ones = [Request(prompt, tokens, number=n) for n, (prompt, tokens) in enumerate(zip(prompts, (2, 5, 6)))]
    rows: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
    for one in ones:
        house.scheduler.submit(one)
    for done in house.scheduler.run():
        for number, row in zip(done.streams, done.logits):
            rows[number].append(row.tobytes())
    for one in ones:
        assert (one.reply, b"".join(rows[one.number])) == cold(tuple(one.prompt), one.tokens)


@pytest.mark.parametrize("name", ["window", "paged", "mixed"])
@pytest.mark.parametrize("length", [1, 16, 32])
def test_a_prompt_of_whole_pages_sent_twice_runs_at_least_one_token_again(model, cold, name, length):
    house = House(model, name, cached=True)
    house.run(TEXT[:length])
    first, house.passes = logits_of(house), []
    again = house.run(TEXT[:length])
    assert again.resumed == (length - 1) // P * P < length
    assert (again.reply, logits_of(house)) == cold(tuple(TEXT[:length]), 3) and logits_of(house) == first


@pytest.mark.parametrize(("rows", "hit"), [(40, 0), (16, 0), (7, 0), (1, 0), (40, 16), (40, 32), (7, 32)])
def test_the_cached_keys_are_the_same_whatever_the_chunks_and_the_hit(model, rows, hit):
    """And a decode row stands at position L."""
    whole, house = House(model, "window").read(TEXT[:40], decode=1), House(model, rows=rows, cached=True)
    if hit:
        house.run(TEXT[:hit] + OTHER[:3], 1, marks=(hit,))
    kept = house.read(TEXT[:40], decode=1)
    assert (house.cache.hits, kept.positions, kept.prompted) == (bool(hit), 41, 40)
    for name, array in whole.arrays.items():
        assert_same_bits(kept.arrays[name], array)


@pytest.mark.parametrize("name", ["window", "paged", "paged-p256", "mixed"])
def test_a_hit_resumes_the_recurrent_state_and_without_one_all_is_read(model, cold, name):
    """A prefix of 32; the same and 8 others; trimmed back by 3, where no state was kept, and 8 others."""
    house = House(model, name, cached=True)
    house.run(TEXT[:33])
    for begin, resumed in ((TEXT[:32], 32), (TEXT[:29], 0)):
        house.passes = []
        one = house.run(begin + OTHER[:8], marks=())
        assert one.resumed == resumed and (one.reply, logits_of(house)) == cold((*begin, *OTHER[:8]), 3)


def test_red_a_hit_without_its_recurrent_state_is_seen(model, cold, monkeypatch):
    house = House(model, cached=True)
    house.run(TEXT[:33])
    monkeypatch.setattr(
        house.backend.arena, "copy", lambda source, target, words: house.backend.arena.zero(target, words)
    )
    house.passes = []
    assert house.run(TEXT[:32] + OTHER[:8]).resumed == 32
    assert logits_of(house) != cold((*TEXT[:32], *OTHER[:8]), 3)[1]


@pytest.mark.parametrize(
    ("mark", "rows"), [(1, 48), (2, 16), (15, 16), (16, 16), (31, 48), (33, 16), (48, 16), (48, 48)]
)
def test_a_state_that_is_kept_anywhere_is_the_state_there(model, cold, mark, rows):
    """Chunks that end exactly at a page, then decode; marks inside pages, at their edges, and off every tile."""
    house = House(model, rows=rows, cached=True)
    house.run(TEXT[:48], 2, marks=(mark,))
    house.passes = []
    one = house.run(TEXT[:mark] + OTHER[:16], marks=())
    assert one.resumed == mark and (one.reply, logits_of(house)) == cold((*TEXT[:mark], *OTHER[:16]), 3)


@pytest.mark.parametrize("name", ["window", "paged", "paged-p256", "mixed"])
def test_a_hit_inside_a_page_of_an_fp8_cache_is_as_without_it(model, name):
    """Codes and exponents of the page are copied; the window of mixed takes them from pages, and gives them back."""
    alone = House(model, "window", kv="fp8", window_rows=1)
    wanted = alone.run(TEXT[:37] + OTHER[:8])
    house = House(model, name, cached=True, kv="fp8")
    house.run(TEXT[:40], marks=(37,))
    beside = house.backend.open(8)
    house.passes = []
    one = house.run(TEXT[:37] + OTHER[:8], marks=())
    assert one.resumed == 37 and (one.reply, logits_of(house)) == (wanted.reply, logits_of(alone))
    beside.release()


@pytest.mark.parametrize("passes", [(1,), (2,), (4,), (4, 3)])
@pytest.mark.parametrize("cached", [False, True])
def test_preempted_a_request_comes_back_to_the_same_text(model, cold, passes, cached):
    """Before its prompt is read, after 1 and 3 tokens, and twice; whoever had its memory left NaN behind."""
    house = House(model, rows=20, cached=cached)
    one = Request(TEXT[:37], 8)
    house.scheduler.submit(one)
    for count in passes:
        for _, _pass in zip(range(count), house.scheduler.run()):
            pass
        house.scheduler.preempt(one)
        poison_free(house.backend)
    list(house.scheduler.run())
    assert one.outcome == DONE and one.reply == cold(tuple(TEXT[:37]), 8)[0]
    assert one.resumed == (32 if cached and sum(passes) > 1 else 0)


def poison_free(backend: Backend) -> None:
    """Every page that nobody holds is NaN."""
    pages = backend.arena.words[: backend.pool.count * backend.page_words].reshape(backend.pool.count, -1)
    pages[backend.pool.holders == 0] = POISON


@pytest.mark.parametrize("name", ["window", "paged", "mixed"])
def test_a_new_stream_starts_from_nothing_where_another_left_nan(model, cold, name):
    house = House(model, name, streams=1)
    house.run(OTHER[:40])
    house.backend.arena.words[:] = POISON
    house.passes = []
    assert (house.run(TEXT[:37], 8).reply, logits_of(house)) == cold(tuple(TEXT[:37]), 8)


@pytest.mark.parametrize("cuts", [(10, 15, 16), (15, 16), (1, 2, 16), (5, 10, 16)])
def test_states_and_histories_of_chunks_are_those_of_one_pass(model, cuts):
    """Ten tokens, then five in one call, then one; chunks shorter than the convolution."""
    house = House(model, cached=True)
    one = Request(TEXT[:17], 1, marks=cuts)
    house.scheduler.submit(one)
    house.scheduler.admit()
    while one.place.committed < 16:
        next(house.scheduler.round())
    found, whole = one.place.save(), House(model, "window").read(TEXT[:16])
    assert found.positions == 16 and house.cache.kept == len(cuts)
    for name, array in whole.arrays.items():
        assert_same_bits(found.arrays[name], array)


def test_sequences_of_7_9_and_1_rows_in_one_pass_are_each_alone(model):
    house, prompts = House(model), (TEXT[:7], OTHER[:9], TEXT[20:21])
    ones = [Request(list(prompt), 2) for prompt in prompts]
    for one in ones:
        house.scheduler.submit(one)
    next(house.scheduler.round())
    for one, prompt in zip(ones, prompts):
        found, alone = one.place.save(), House(model, "window").read(prompt)
        assert found.positions == len(prompt)
        for name, array in alone.arrays.items():
            assert_same_bits(found.arrays[name], array)


# --- N: positions -------------------------------------------------------------------------------------------------------


def test_a_rope_block_without_its_base_is_refused(tmp_path):
    text = changed("rope: {dims: 64, theta: 10000000}", "rope: {dims: 64}")
    assert refusal(tmp_path, text) == "rope.theta: missing key"
