"""A state machine over the scheduler, the prompt cache and a backend: what users do, in any order, and what must hold after it.

HashStep is the forward pass, so a reply is right only if every row and state that it was made of was there, unchanged. Pools are
small: requests wait, entries are evicted, some requests never fit. ``serving(form)`` makes the machine of a form of cache.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from hash_step import SHAPE, VOCABULARY, HashStep, expected
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backends.base import Backend, BackendError, NoRoom, Sizes, Stream, backend_class
from backends.kept import Kept, save_prefix
from backends.paged import PagedBackend
from backends.prefix import Prefix
from refengine.errors import UserError
from refengine.serve.forward import Pass
from refengine.serve.prompt_cache import PromptCache
from refengine.serve.requests import CANCELLED, DONE, FAILED, Request, capacity
from refengine.serve.scheduler import Scheduler


@dataclass(frozen=True)
class Form:
    """A form of cache and sizes that are tight for it. pool: (least, most) pages. other: where kept states are carried to."""

    backend: str
    page_size: int
    context: int
    pool: tuple[int, int] | None
    other: tuple[str, int]


FORMS = {
    "paged-1": Form("paged", 1, 40, (30, 90), ("window", 1)),
    "paged-4": Form("paged", 4, 48, (9, 30), ("window", 1)),
    "paged-16": Form("paged", 16, 80, (4, 16), ("paged", 3)),
    "paged-p256": Form("paged-p256", 256, 600, (3, 10), ("paged", 48)),
    "mixed": Form("mixed", 4, 48, (8, 26), ("window", 1)),
    "window": Form("window", 1, 48, None, ("paged", 5)),
}
TEXTS = [np.random.default_rng(seed).integers(0, VOCABULARY, 700).tolist() for seed in (1, 2)]
"""What prompts begin with."""
OWN = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)
"""What they end with."""


@dataclass(eq=False)
class House:
    """A backend, what runs through it, and its prompt cache."""

    backend: Backend
    grain: int
    prompt_rows: int
    host_bytes: int

    def __post_init__(self) -> None:
        self.step = HashStep(self.backend)
        self.cache = PromptCache(self.backend, self.grain, self.host_bytes)
        self.scheduler = Scheduler(self.backend, self.step, self.prompt_rows, self.cache, check=True)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.live)

    def drain(self) -> None:
        """Rounds until every request is over: each runs a row, or takes somebody out of the line."""
        most = sum(1 + request.positions for request in [*self.scheduler.waiting, *self.scheduler.live])
        for _ in range(most):
            if self.busy:
                list(self.scheduler.round())
        assert not self.busy, "requests never end"


class ServingMachine(RuleBasedStateMachine):
    """form: of its cache. steps: rules that were run, of all runs together; seen: what came to pass in them."""

    form: ClassVar[Form]
    steps: ClassVar[int]
    seen: ClassVar[Counter[str]]

    @initialize(
        pool=st.integers(0, 100), streams=st.integers(2, 4), window_rows=st.sampled_from([1, 2, 5]),
        chunks=st.sampled_from([1, 3, 6, 16]), grain=st.sampled_from([None, 3, 4]),
        shuffle=st.sampled_from([None, 3]), host=st.sampled_from([1 << 30, 60_000, 0]),
    )  # fmt: skip
    def build(self, pool, streams, window_rows, chunks, grain, shuffle, host) -> None:
        f = self.form
        prompt_rows = -(-f.context // chunks)
        pages = None if f.pool is None else f.pool[0] + pool * (f.pool[1] - f.pool[0]) // 100
        sizes = Sizes(f.context, streams, f.page_size, window_rows, shuffle=shuffle, pool=pages)
        grain = grain or (f.page_size if f.pool else 4)
        self.house = House(backend_class(f.backend)(SHAPE, sizes), grain, prompt_rows, host)
        name, page_size = f.other
        other = backend_class(name)(SHAPE, Sizes(f.context, 1, page_size, window_rows, shuffle=5))
        self.other = House(other, 3, prompt_rows, 1 << 30)
        self.backend, self.scheduler, self.cache = self.house.backend, self.house.scheduler, self.house.cache
        self.requests: list[Request] = []
        self.line: list[Request] = []
        self.over: set[Request] = set()
        self.half: Iterator[Pass] = iter(())
        self.strangers: list[Stream] = []
        self.admitted = 0

    # --- What users do ------------------------------------------------------------------------------------------------

    @rule(
        text=st.integers(0, 1), shared=st.integers(0, 100), owns=st.lists(OWN, min_size=1, max_size=3),
        tokens=st.integers(1, 12), stop=st.none() | st.integers(0, 11),
        marks=st.none() | st.lists(st.integers(0, 100), max_size=3),
    )  # fmt: skip
    def submit(self, text, shared, owns, tokens, stop, marks) -> None:
        """Some requests that begin alike."""
        for own in owns:
            self.submit_one((TEXTS[text][: shared * self.form.context // 100] + own) or [7], tokens, stop, marks)

    def submit_one(self, prompt, tokens, stop, marks) -> None:
        stops = frozenset() if stop is None else frozenset(expected(prompt, tokens)[stop : stop + 1])
        at = None if marks is None else tuple(mark * len(prompt) // 100 for mark in marks)
        request = Request(prompt, tokens, stop=stops, number=len(self.requests), marks=at)
        if self.ever_fits(request.positions):
            self.scheduler.submit(request)
            self.requests.append(request)
            self.line.append(request)
        else:
            self.refused(request)

    def ever_fits(self, positions: int) -> bool:
        """Whether a request would fit if it were alone."""
        if positions > self.form.context:
            return False
        if not isinstance(b := self.backend, PagedBackend) or self.form.backend == "mixed":
            return True
        return -(-capacity(positions, b.sizes) // b.positions) + b.run_pages <= b.pool.count

    def refused(self, request: Request) -> None:
        """Refused alone, before it is queued."""
        before = list(self.scheduler.waiting)
        try:
            self.scheduler.submit(request)
        except UserError as refusal:
            self.seen["refused"] += 1
            most = int(str(refusal).split("give it at most ")[1].split()[0])
            assert most < request.positions and not self.ever_fits(most + 1)
            assert most == 0 or self.ever_fits(most)
        else:
            raise AssertionError("a request that never fits was queued")
        assert list(self.scheduler.waiting) == before and not request.outcome

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1000), cut=st.integers(0, 100), own=OWN, tokens=st.integers(1, 12))
    def submit_again(self, which, cut, own, tokens) -> None:
        """A prompt that begins as one that was here before."""
        prompt = self.requests[which % len(self.requests)].prompt
        self.submit_one([*prompt[: len(prompt) * cut // 100], *own] or [7], tokens, None, None)

    @rule(how=st.sampled_from(["a round", "rounds", "a pass", "the rest of a round", "all"]))
    def run(self, how) -> None:
        """A pass is the first of a round, whose rest comes later or never."""
        if how == "a pass":
            self.half = self.scheduler.round()
            next(self.half, None)
        elif how == "the rest of a round":
            list(self.half)
        elif how == "all":
            self.house.drain()
        else:
            for _ in range(1 if how == "a round" else 3):
                self.round()

    def round(self) -> None:
        """It moves somebody on, and each reply that is being written."""
        before = {r: len(r.reply) for r in self.scheduler.live if r.is_read}
        busy, passes = self.house.busy, list(self.scheduler.round())
        assert passes or not busy or any(r.outcome == FAILED for r in self.requests), "a round that does nothing"
        assert all(len(r.reply) > had for r, had in before.items()), "a reply that stands still"

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1000), times=st.integers(1, 2))
    def cancel(self, which, times) -> None:
        """Who runs, who waits, or who is over."""
        some = [*self.scheduler.live, *self.scheduler.waiting, *self.requests[-2:]]
        request = some[which % len(some)]
        self.seen[f"cancel {request.outcome or ('live' if request in self.scheduler.live else 'queued')}"] += 1
        for _ in range(times):
            self.scheduler.cancel(request)
        self.line = [one for one in self.line if one is not request]
        assert request.outcome and request not in self.scheduler.waiting and request not in self.scheduler.live

    @precondition(lambda self: self.house.busy)
    @rule(which=st.lists(st.integers(0, 3), min_size=1, max_size=3), passes=st.integers(0, 2))
    def preempt(self, which, passes) -> None:
        """Some that run, a few passes before each, perhaps the same one again."""
        for n in which:
            for _ in range(passes):
                next(self.scheduler.round(), None)
                self.the_line_keeps_its_order()
            if self.scheduler.live:
                request = self.scheduler.live[n % len(self.scheduler.live)]
                self.seen["preempted again" if request.known else "preempted"] += 1
                self.scheduler.preempt(request)
                self.line.append(request)
                self.line.sort(key=lambda one: one.arrival)

    @rule(what=st.sampled_from(["a prefix", "a kept state", "all"]))
    def forget(self, what) -> None:
        """Evict, or clear the cache."""
        if what == "all":
            self.cache.clear()
        else:
            on_host = what == "a kept state"
            some = any(isinstance(entry.begin, Kept) == on_host for entry in self.cache.entries)
            assert self.cache.evict(on_host) == some, "an entry stays, and somebody waits"

    @rule()
    def poison(self) -> None:
        self.house.step.poison()
        self.other.step.poison()

    @precondition(lambda self: self.beginnings())
    @rule(which=st.integers(0, 1000), own=OWN, back=st.booleans())
    def carry(self, which, own, back) -> None:
        """A live prompt, or an entry, is resumed in another form of cache, and kept here in the form that it came back in."""
        found = self.beginnings()
        ids, save = found[which % len(found)]
        request = Request([*ids, *own, 7], 2)
        if request.positions > self.form.context:
            return
        kept, other = save(), self.other
        assert other.cache.add(ids, kept)
        other.scheduler.submit(request)
        other.drain()
        assert request.resumed >= len(ids) and request.reply == expected(request.prompt, 2), "wrong in another form"
        self.seen["carried"] += 1
        if back and not any(entry.ids == tuple(ids) for entry in self.cache.entries):
            self.seen["carried back"] += self.cache.add(ids, kept)
        other.cache.clear()
        self.all_free(other)

    def beginnings(self) -> list[tuple[list[int], Callable[[], Kept]]]:
        """Tokens that are read, and what saves them."""
        live = [r for r in self.scheduler.live if 0 < r.place.committed == r.place.prompted]
        entries = [(list(entry.ids), lambda begin=entry.begin: as_kept(begin)) for entry in self.cache.entries]
        return [*((r.prompt[: r.place.committed], r.place.save) for r in live), *entries]

    @rule(capacity=st.integers(1, 100), come=st.booleans())
    def strangers_come_and_go(self, capacity, come) -> None:
        """Somebody opens a stream beside the scheduler; later all of them go."""
        while self.strangers and not come:
            self.strangers.pop().release()
        try:
            if come:
                self.strangers.append(self.backend.open(max(1, capacity * self.form.context // 100)))
        except NoRoom:
            self.seen["no room for a stranger"] += 1
        except BackendError as never:
            assert "ask for at most" in str(never)

    # --- What holds after every step ----------------------------------------------------------------------------------

    @invariant()
    def counted(self) -> None:
        type(self).steps += 1

    @invariant()
    def the_line_keeps_its_order(self) -> None:
        waiting = list(self.scheduler.waiting)
        gone = len(self.line) - len(waiting)
        assert gone >= 0 and self.line[gone:] == waiting, "somebody overtook"
        for request in self.line[:gone]:
            assert request.outcome or request in self.scheduler.live
        self.seen["waited"] += bool(waiting and self.scheduler.live)
        self.admitted += sum(request.outcome != FAILED for request in self.line[:gone])
        self.line = waiting

    @invariant()
    def who_runs_has_a_stream_and_nobody_else(self) -> None:
        live = {request.place for request in self.scheduler.live}
        assert live | set(self.strangers) == set(self.backend.streams.values()), "a stream of nobody's"
        assert not any(r.stream for r in self.requests if r not in self.scheduler.live), (
            "a stream of one that does not run"
        )
        assert not any(entry.pins for entry in self.cache.entries), "an entry that stays pinned"
        assert self.cache.hits + self.cache.misses == self.admitted, "an admission that is not counted"

    @invariant()
    def every_page_is_held_by_who_maps_it(self) -> None:
        self.backend.check()
        if isinstance(self.backend, PagedBackend):
            check_pages(self.backend, [e.begin for e in self.cache.entries if isinstance(e.begin, Prefix)])

    @invariant()
    def replies_are_right(self) -> None:
        for request in self.requests:
            if request not in self.over:
                wanted = expected(request.prompt, request.tokens, request.stop)
                assert request.reply == wanted[: len(request.reply)], "a wrong reply"
                assert request.outcome != DONE or request.reply == wanted, "a reply that ends early"
                assert request.outcome != FAILED or self.strangers, "failed, and nobody was in its way"
                self.note(request)

    def note(self, request: Request) -> None:
        """What a request has seen, once it is over."""
        if request.outcome:
            self.over.add(request)
            self.seen[request.outcome] += 1
            self.seen["resumed"] += request.resumed > 0
            self.seen["stopped"] += request.outcome == DONE and len(request.reply) < request.tokens

    # --- At the end ---------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Everybody goes home, and all is as at the start."""
        if sys.exc_info()[0] is not None or not hasattr(self, "house"):
            return
        while self.strangers:
            self.strangers.pop().release()
        self.house.drain()
        self.replies_are_right()
        assert all(request.outcome in (DONE, CANCELLED, FAILED) for request in self.requests)
        self.seen["evicted"] += self.cache.evicted
        self.cache.clear()
        self.all_free(self.house)

    def all_free(self, house: House) -> None:
        b, slots = house.backend, house.backend.sizes.streams
        b.check()
        assert b.free_slots == list(range(slots)) and not house.cache.entries and not house.cache.table
        if isinstance(b, PagedBackend):
            assert b.pool.free == b.pool.available == b.pool.count and not b.prefixes
            assert (b.pages == b.null_page).all()


def as_kept(begin: Prefix | Kept) -> Kept:
    return begin if isinstance(begin, Kept) else save_prefix(begin)


def check_pages(b: PagedBackend, prefixes: list[Prefix]) -> None:
    """The pool's books are what the page tables, the runs and the cache's entries say; a stream has its whole capacity."""
    assert set(b.prefixes) == set(prefixes), "a prefix that no entry holds"
    tables = np.asarray(b.pages).reshape(b.sizes.streams, b.columns)
    held: Counter[int] = Counter()
    for slot, stream in b.streams.items():
        mapped = tables[slot][tables[slot] != b.null_page].tolist()
        needed = 0 if b.has_window(stream) else -(-stream.capacity // b.positions)
        assert stream.claim is not None and len(mapped) + stream.claim.left == needed, "claimed is not what it may use"
        assert len(stream.claim.run) == b.run_pages
        held.update([*mapped, *stream.claim.run])
    for prefix in prefixes:
        held.update([*prefix.pages, *prefix.run])
    assert b.pool.holders.tolist() == [held[page] for page in range(b.pool.count)], "a page is not held by who maps it"
    assert b.pool.free + len(held) == b.pool.count and b.pool.promised <= b.pool.free
    assert b.pool.promised == sum(stream.claim.left for stream in b.streams.values() if stream.claim)


def serving(form: str) -> type[ServingMachine]:
    """The machine of a form of cache, its counters at zero."""
    made: dict[str, Any] = {"form": FORMS[form], "steps": 0, "seen": Counter()}
    return type(f"Serving_{form}", (ServingMachine,), made)
