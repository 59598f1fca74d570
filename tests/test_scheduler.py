"""Requests are admitted whole and in order, share passes by age, and give all back; those that never fit are refused alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hash_step import SHAPE, HashStep, expected

from backends.base import DECODE, PROMPT, Backend, NoRoom, Sizes, backend_class
from backends.pool import PoolBroken
from refengine.errors import UserError
from refengine.serve.forward import Pass, Work
from refengine.serve.prompt_cache import PromptCache
from refengine.serve.requests import CANCELLED, DONE, FAILED, Request
from refengine.serve.scheduler import Scheduler

FORMS = ("window", "paged", "paged-p256", "mixed")
TEXT = np.random.default_rng(0).integers(0, 50, 400).tolist()


class Noted(HashStep):
    """Also writes down each pass: its phase, and how many rows of which requests."""

    def __call__(self, phase: str, work: Work) -> Pass:
        self.passes.append((phase, {request.number: len(rows.ids) for request, rows in work.items()}))
        return super().__call__(phase, work)

    @property
    def passes(self) -> list[tuple[str, dict[int, int]]]:
        return self.__dict__.setdefault("noted", [])


def build(
    name: str = "paged", pool: int | None = None, streams: int = 4, window_rows: int = 1, context: int = 64
) -> Backend:
    """Pages of 4; a run is one page of them."""
    return backend_class(name)(SHAPE, Sizes(context, streams, 4, window_rows, shuffle=3, pool=pool))


def scheduler(backend: Backend, prompt_rows: int = 16, cached: bool = False) -> Scheduler:
    return Scheduler(backend, Noted(backend), prompt_rows, PromptCache(backend, 4) if cached else None, check=True)


def request(number: int, prompt: int = 6, tokens: int = 3, **more) -> Request:
    """The prompt is ``prompt`` tokens of the text; each number has its own."""
    return Request(TEXT[10 * number : 10 * number + prompt], tokens, number=number, **more)


def submitted(s: Scheduler, *requests: Request) -> list[Request]:
    for one in requests:
        s.submit(one)
    return list(requests)


def books(b: Backend) -> tuple:
    """Counters of a backend."""
    pool = (b.pool.holders.tolist(), b.pool.free, b.pool.promised) if b.paged else ()
    return pool, list(b.free_slots), b.pages.tolist(), len(b.streams)


def done(requests: Sequence[Request]) -> bool:
    return all(r.outcome == DONE and r.reply == expected(r.prompt, r.tokens, r.stop) for r in requests)


# --- Admission: whole, in order -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window_rows", [1, 4])
def test_a_request_claims_prompt_reply_and_one_more_window_at_once(window_rows):
    s = scheduler(build(window_rows=window_rows))
    (one,) = submitted(s, request(0, prompt=6, tokens=4))
    s.admit()
    assert one.place.capacity == 6 + 4 + window_rows - 1
    pages = -(-one.place.capacity // 4)
    assert (s.backend.pool.promised, s.backend.pool.count - s.backend.pool.free) == (pages, s.backend.run_pages)
    list(s.run())
    assert done([one])


def test_the_last_window_ends_at_the_context():
    s = scheduler(build(window_rows=4))
    (one,) = submitted(s, request(0, prompt=60, tokens=4))
    s.admit()
    assert one.place.capacity == 64
    list(s.run())
    assert done([one])


def test_who_was_admitted_never_runs_out_whoever_comes():
    """The pool's last pages are promised, so nobody else gets them."""
    s = scheduler(build(pool=2 * (5 + 1)))
    first = submitted(s, request(0, 2, 18), request(1, 2, 18))
    s.admit()
    with pytest.raises(NoRoom, match="2 pages wanted, 10 of 12 are free, 10 of them promised"):
        s.backend.open(1)
    late = submitted(s, *(request(n, 2, 2) for n in (2, 3)))
    list(s.run())
    assert done([*first, *late])


def test_nobody_overtakes_the_first_in_line():
    """The second in line would fit at once; it waits for the first."""
    s = scheduler(build(pool=14))
    running, large, small = submitted(s, request(0, 12, 12), request(1, 20, 12), request(2, 2, 2))
    list(s.round())
    while not running.outcome:
        assert list(s.waiting) == [large, small] and s.backend.free_slots and s.backend.pool.available >= 2
        list(s.round())
    list(s.round())
    assert s.live == [large, small]
    list(s.run())
    assert done([running, large, small])


@pytest.mark.parametrize("name", FORMS)
def test_the_third_waits_for_one_of_two_places(name):
    """State slots 2, streams 3, plenty of positions."""
    s = scheduler(build(name, streams=2))
    before, requests = books(s.backend), submitted(s, *(request(n, tokens=n + 3) for n in range(3)))
    list(s.round())
    assert s.live == requests[:2] and list(s.waiting) == requests[2:]
    list(s.run())
    assert done(requests) and books(s.backend) == before


def test_more_than_the_pool_holds_all_finish_and_the_pool_is_whole_again():
    s = scheduler(build(pool=20, streams=8))
    before, requests = books(s.backend), submitted(s, *(request(n, 3 + n, 1 + n % 5) for n in range(16)))
    list(s.run())
    assert done(requests) and books(s.backend) == before


def test_someone_else_holds_the_pool_so_the_request_fails_with_a_reason():
    s = scheduler(build(pool=10))
    stranger = s.backend.open(32)
    large, small = submitted(s, request(0, 10, 4), request(1, 1, 1))
    list(s.run())
    assert (large.outcome, large.reply) == (FAILED, [])
    assert large.reason == "request 0: no room, and nobody runs who gives some back"
    assert small.outcome == FAILED
    stranger.release()
    (again,) = submitted(s, request(2, 10, 4))
    list(s.run())
    assert done([again]) and s.backend.pool.free == 10


# --- Refused, alone -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window_rows", [1, 3])
@pytest.mark.parametrize(
    ("name", "pool", "prompt", "tokens", "words"),
    [
        (
            "paged",
            6,
            19,
            4,
            "pages of 4, 1 of them for the recurrent state; the pool has 6: ask for at most 20 positions",
        ),
        ("paged", 6, 100, 1, "the context is 64"),
        ("window", None, 60, 5, "the context is 64"),
        ("mixed", 6, 60, 5, "the context is 64"),
        ("paged-p256", 1, 3, 1, "ask for at most 0 positions, or make it larger"),
    ],
)
def test_one_that_never_fits_is_refused_before_it_is_queued(name, pool, prompt, tokens, words, window_rows):
    """It names the number that would do: with so many tokens the request is taken, with one more it is not."""
    s = scheduler(build(name, pool, window_rows=window_rows))
    (small,) = submitted(s, request(7, 2, 1)) if name != "paged-p256" else (None,)
    with pytest.raises(UserError, match=f"^request 3: {name}: .*{words}") as refusal:
        s.submit(request(3, prompt, tokens))
    assert list(s.waiting) == ([small] if small else [])
    most = int(str(refusal.value).split("give it at most ")[1].removesuffix(" tokens, prompt and reply together"))
    if most:
        with pytest.raises(UserError, match=f"give it at most {most} tokens"):
            s.submit(request(3, most, 1))
        submitted(s, request(4, most - 1, 1))
    list(s.run())
    assert small is None or done([small])


def test_a_prompt_of_no_tokens_a_reply_of_none_and_a_request_that_was_here_are_refused():
    s = scheduler(build())
    with pytest.raises(UserError, match="prompt 0: is empty; give at least one token"):
        s.submit(request(0, 0))
    with pytest.raises(UserError, match="request 1: tokens 0: a whole number, at least 1"):
        s.submit(request(1, tokens=0))
    one, other = submitted(s, request(2), request(3))
    list(s.round())
    s.cancel(other)
    for again in (one, other):
        with pytest.raises(UserError, match=f"request {again.number}: was submitted before; make a new one"):
            s.submit(again)
    assert s.live == [one] and not s.waiting
    with pytest.raises(UserError, match="prompt_rows 0: at least 1"):
        scheduler(build(), prompt_rows=0)


# --- Passes -------------------------------------------------------------------------------------------------------------


def test_the_rows_of_a_prompt_pass_are_shared_oldest_first():
    s = scheduler(build(), prompt_rows=10)
    requests = submitted(s, request(0, 7), request(1, 14), request(2, 3))
    list(s.run())
    prompts = [rows for phase, rows in s.step.passes if phase == PROMPT]
    assert prompts == [{0: 7, 1: 3}, {1: 10}, {1: 1, 2: 3}] and done(requests)


@pytest.mark.parametrize("marks", [(5,), (4, 8, 9), (3, 11, 13, 60)])
def test_a_chunk_ends_at_a_mark(marks):
    s = scheduler(build(), prompt_rows=8, cached=True)
    (one,) = submitted(s, request(0, 12, marks=marks))
    list(s.run())
    ends = np.cumsum([rows[0] for phase, rows in s.step.passes if phase == PROMPT]).tolist()
    assert {mark for mark in marks if mark <= 12} <= set(ends) and ends[-1] == 12 and done([one])
    assert sorted(len(entry.ids) for entry in s.cache.entries) == [mark for mark in marks if mark <= 12]


def test_a_chunk_that_ends_at_a_mark_leaves_its_rows_to_the_next():
    s = scheduler(build(), prompt_rows=10, cached=True)
    submitted(s, request(0, 12, marks=(4,)), request(1, 9, marks=()))
    list(s.round())
    assert s.step.passes[0] == (PROMPT, {0: 4, 1: 6})


@pytest.mark.parametrize("name", FORMS)
def test_a_reply_gets_a_token_every_round_beside_a_long_prompt(name):
    s = scheduler(build(name), prompt_rows=4)
    (reply,) = submitted(s, request(0, 3, 20))
    list(s.round())
    (long,) = submitted(s, request(1, 50, 2))
    while not long.is_read:
        had = len(reply.reply)
        list(s.round())
        assert len(reply.reply) == had + 1 and s.step.passes[-2][0] == PROMPT and s.step.passes[-1][0] == DECODE
    assert len(reply.reply) >= 12
    list(s.run())
    assert done([reply, long])


def test_a_reply_ends_at_its_stop_token_and_gives_its_place_to_the_next():
    s = scheduler(build(streams=1))
    stop = expected(TEXT[:6], 9)[4]
    requests = submitted(s, request(0, tokens=9, stop=frozenset([stop])), request(1))
    list(s.run())
    assert len(requests[0].reply) == expected(TEXT[:6], 9).index(stop) + 1 < 9 and done(requests)


def test_broken_books_stop_a_checked_run_at_the_pass_that_broke_them():
    s = scheduler(build())
    submitted(s, request(0, tokens=5))
    list(s.round())
    s.backend.pool.holders[0] += 1
    with pytest.raises(PoolBroken, match="holders on the books"):
        list(s.round())


# --- Cancel -------------------------------------------------------------------------------------------------------------


def after(s: Scheduler, one: Request, passes: int) -> None:
    """So many passes, or until the request is over."""
    for _, _pass in zip(range(passes), s.run()):
        pass


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("passes", [0, 1, 2, 3, 4, 5, 6, 40], ids=lambda n: f"after {n} passes")
@pytest.mark.parametrize("cached", [False, True])
def test_cancelled_at_any_point_it_gives_everything_back(name, passes, cached):
    """Four chunks of four and three tokens of reply: queued, between chunks, read, writing, over; twice each time."""
    s = scheduler(build(name), prompt_rows=4, cached=cached)
    before, (one,) = books(s.backend), submitted(s, request(0, 16, 4))
    after(s, one, passes)
    outcome = one.outcome or CANCELLED
    for _ in range(2):
        s.cancel(one)
        assert one.outcome == outcome and one.stream is None and not s.live and not s.waiting
    if cached:
        s.cache.clear()
    assert books(s.backend) == before and (outcome == DONE) == (passes == 40)
    s.backend.check()


def test_a_request_of_another_scheduler_is_nobody_s_to_cancel():
    s = scheduler(build())
    one = request(0)
    s.cancel(one)
    assert one.outcome == ""


def test_who_waits_moves_up_when_one_in_the_middle_of_the_line_is_cancelled():
    s = scheduler(build(streams=1))
    requests = submitted(s, *(request(n) for n in range(4)))
    list(s.round())
    s.cancel(requests[2])
    assert list(s.waiting) == [requests[1], requests[3]]
    list(s.run())
    assert done([r for r in requests if r.number != 2]) and requests[2].outcome == CANCELLED


def test_one_that_was_preempted_can_be_cancelled_in_line():
    s = scheduler(build())
    before, (one,) = books(s.backend), submitted(s, request(0, tokens=6))
    list(s.round())
    s.preempt(one)
    s.cancel(one)
    assert one.outcome == CANCELLED and books(s.backend) == before


# --- Preempted ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("window_rows", [1, 3])
@pytest.mark.parametrize("passes", [1, 2, 3, 5, 7])
def test_preempted_twice_the_reply_is_the_same(name, window_rows, passes):
    """Before the prompt is read, after its last row, and after some tokens; again on the way back."""
    s = scheduler(build(name, window_rows=window_rows), prompt_rows=8)
    requests = submitted(s, request(0, 14, 9), request(1, 5, 4))
    after(s, requests[0], passes)
    for again in (1, 2):
        if requests[0] in s.live:
            had = max(requests[0].known, requests[0].reply, key=len)
            s.preempt(requests[0])
            assert s.waiting[0] is requests[0] and requests[0].stream is None and requests[0].known == had
            after(s, requests[0], again)
    list(s.run())
    assert done(requests)


def test_preempted_it_gets_its_old_place_in_the_line():
    s = scheduler(build(streams=2))
    first, second, third, fourth = submitted(s, *(request(n, tokens=6) for n in range(4)))
    list(s.round())
    s.preempt(first)
    assert list(s.waiting) == [first, third, fourth] and s.live == [second]
    s.preempt(second)
    assert list(s.waiting) == [first, second, third, fourth]
    list(s.round())
    assert s.live == [first, second] and list(s.waiting) == [third, fourth]
    list(s.run())
    assert done([first, second, third, fourth])


def test_only_one_that_runs_can_be_preempted():
    s = scheduler(build(streams=1))
    over, (live, waiting) = request(9), submitted(s, request(0, tokens=9), request(1))
    list(s.round())
    s.cancel(over)
    for one in (waiting, over):
        with pytest.raises(UserError, match=f"request {one.number}: does not run; preempt one that does"):
            s.preempt(one)
    assert s.live == [live] and list(s.waiting) == [waiting]


def test_what_it_had_written_comes_back_as_windows_of_decode_rows():
    s = scheduler(build(window_rows=4))
    (one,) = submitted(s, request(0, 6, 12))
    after(s, one, 9)
    had = len(one.reply)
    s.preempt(one)
    s.step.passes.clear()
    list(s.run())
    assert done([one]) and had == 9
    assert s.step.passes[:4] == [(PROMPT, {0: 6}), (DECODE, {0: 4}), (DECODE, {0: 4}), (DECODE, {0: 1})]


def test_each_round_ends_and_moves_on_with_three_streams_and_room_for_one_and_a_half():
    s = scheduler(build(pool=9, streams=3))
    requests = submitted(s, *(request(n, 8, 8) for n in range(3)))
    for n in range(40):
        moved = [(len(r.reply), r.place.committed if r.stream else 0, r.outcome) for r in requests]
        passes = list(s.round())
        assert len(passes) <= 2
        assert (
            moved != [(len(r.reply), r.place.committed if r.stream else 0, r.outcome) for r in requests] or not s.live
        )
        if n in (3, 7) and s.live:
            s.preempt(s.live[0])
    assert done(requests) and s.backend.pool.free == 9


# --- With a cache -------------------------------------------------------------------------------------------------------


def test_entries_that_nobody_uses_are_evicted_before_anyone_waits():
    s = scheduler(build(pool=12), cached=True)
    for n in range(2):
        submitted(s, request(n, 9, 1))
        list(s.run())
    assert len(s.cache.entries) == 2 and s.backend.pool.available == 6
    running, large = submitted(s, request(2, 3, 2, marks=()), request(3, 20, 4, marks=()))
    s.admit()
    assert s.live == [running, large] and s.cache.evicted == 2 and not s.cache.entries
    list(s.run())
    assert done([running, large])


def test_what_it_begins_with_stays_while_others_are_evicted_for_it():
    s = scheduler(build(pool=11), cached=True)
    submitted(s, request(0, 9, 1))
    list(s.run())
    submitted(s, request(1, 9, 1))
    list(s.run())
    (again,) = submitted(s, request(0, 9, 16))
    s.admit()
    assert again.resumed == 8 and [list(e.ids) for e in s.cache.entries] == [TEXT[:8]] and s.cache.entries[0].pins == 0
    list(s.run())
    assert done([again])


def test_where_only_its_own_beginning_is_in_the_way_it_begins_with_nothing():
    """The entry's run and its pages leave no room for the copy of its last page."""
    s = scheduler(build(pool=6), cached=True)
    submitted(s, request(0, 7, 1, marks=(6,)))
    list(s.run())
    (again,) = submitted(s, request(0, 7, 13, marks=()))
    list(s.run())
    assert done([again]) and again.resumed == 0 and not s.cache.entries and s.cache.evicted == 1
    assert (s.cache.hits, s.cache.misses) == (0, 2)


def test_a_request_that_waits_is_one_hit_however_often_it_is_tried():
    s = scheduler(build(streams=2, pool=14), cached=True)
    submitted(s, request(0, 9, 1))
    list(s.run())
    stranger = s.backend.open(8)
    running, again = submitted(s, request(1, 9, 8, marks=()), request(0, 9, 4))
    list(s.run())
    stranger.release()
    assert done([running, again]) and again.resumed == 8 and (s.cache.hits, s.cache.misses) == (1, 2)


def test_preempted_it_resumes_from_what_was_kept_of_its_prompt():
    """Prompt 48, pages of 16 in three, preempted after four tokens; what is left to read is counted again."""
    b = backend_class("paged")(SHAPE, Sizes(80, 2, 16, 4, pool=8))
    s = scheduler(b, 100, cached=False)
    s.cache = PromptCache(b)
    (one,) = submitted(s, request(0, 49, 9))
    list(s.round())
    for _ in range(3):
        list(s.round())
    s.preempt(one)
    assert b.pool.free == 8 - 3 - b.run_pages
    s.step.passes.clear()
    list(s.run())
    assert one.resumed == 48 and s.step.passes[0] == (PROMPT, {0: 1}) and done([one])


# --- What goes wrong hurts nobody else ----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [PROMPT, DECODE])
def test_where_a_pass_is_stopped_its_requests_fail_and_give_all_back(phase):
    """The state has moved in part, so nobody may go on from there; those that were not in the pass are served."""
    s = scheduler(build(streams=2), prompt_rows=4, cached=True)
    before = books(s.backend)
    first, second, third = submitted(s, *(request(n, prompt=9) for n in range(3)))
    step, moved = s.step, []

    def stopped(pass_phase: str, work: Work) -> Pass:
        one = step(pass_phase, work)
        if pass_phase == phase and not moved:
            moved.append(list(work))
            raise OSError("out of paper")
        return one

    s.step = stopped
    with pytest.raises(OSError, match="out of paper"):
        list(s.run())
    failed = moved[0]
    assert failed and all(one.outcome == FAILED and one.stream is None for one in failed)
    assert failed[0].reason == f"request {failed[0].number}: its pass was stopped: out of paper"
    list(s.run())
    assert done([one for one in (first, second, third) if one not in failed])
    assert s.cache is not None
    s.cache.clear()
    assert books(s.backend) == before


@pytest.mark.parametrize("token", [-1, 50, 2**40, 1.5, "a", True])
def test_a_token_that_is_none_is_refused_alone(token):
    b = build()
    s = Scheduler(b, HashStep(b), 16, vocabulary=50)
    one = Request([3, token, 5], 2, number=1)
    with pytest.raises(UserError, match=r"request 1: token .*: whole numbers from 0 to 49"):
        s.submit(one)
    good = Request([3, 49, 5], 2, number=2)
    s.submit(good)
    list(s.run())
    assert done([good]) and not one.outcome and not one.reply


@pytest.mark.parametrize(
    ("change", "words"),
    [({"tokens": 2.5}, "tokens 2.5: a whole number"), ({"tokens": "3"}, "tokens '3': a whole number"),
     ({"marks": (2.5,)}, "mark 2.5: whole numbers"), ({"marks": ("4",)}, "mark '4': whole numbers")],
)  # fmt: skip
def test_numbers_that_are_not_whole_are_refused(change, words):
    s = scheduler(build(), cached=True)
    with pytest.raises(UserError, match=words):
        s.submit(Request([1, 2, 3], **({"tokens": 2} | change)))
    assert not s.waiting


def test_a_request_that_runs_elsewhere_is_refused():
    s, other = scheduler(build()), scheduler(build())
    (one,) = submitted(s, request(0))
    s.admit()
    with pytest.raises(UserError, match="request 0: was submitted before; make a new one"):
        other.submit(one)
    list(s.run())
    assert done([one])


def test_another_backend_s_prompt_cache_is_refused():
    b = build()
    with pytest.raises(UserError, match="prompt cache: is another backend's; make one for this backend"):
        Scheduler(b, HashStep(b), 16, PromptCache(build()))


def test_where_no_place_is_free_nothing_is_evicted():
    """Pages would not help."""
    s = scheduler(build(streams=1), cached=True)
    submitted(s, request(0, prompt=9))
    list(s.run())
    assert s.cache is not None and len(s.cache.entries) == 1
    submitted(s, request(1, tokens=20), request(2))
    list(s.round())
    assert len(s.live) == len(s.waiting) == 1 and s.cache.evicted == 0


def test_what_a_request_begins_with_stays_while_others_run_who_give_room_back():
    """Its own entry goes only where nobody else can make room."""
    b = build(pool=2 + 5 + 5)
    s = scheduler(b, cached=True)
    submitted(s, request(0, prompt=9))
    list(s.run())
    assert s.cache is not None and [len(entry.ids) for entry in s.cache.entries] == [8]
    big, again = submitted(s, request(1, prompt=9, tokens=11, marks=()), Request(TEXT[:9], 20, number=2, marks=()))
    list(s.round())
    assert s.live == [big] and list(s.waiting) == [again] and len(s.cache.entries) == 1
    list(s.run())
    assert done([big, again]) and again.resumed == 8


def test_guesses_of_before_are_forgotten_when_preempted():
    s = scheduler(build())
    (one,) = submitted(s, request(0, tokens=6))
    list(s.round())
    one.ranked = [3, 4]
    s.preempt(one)
    assert one.ranked == []
