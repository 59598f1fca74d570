"""Whatever users do in whatever order, replies are right, every page is held by who maps it, and at the end all are free."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from serving_machine import FORMS, ServingMachine, serving

from backends.base import Backend, Stream
from backends.kept import Kept, restore
from backends.paged import PagedBackend, claim_of
from backends.pool import PagePool, PoolBroken
from backends.prefix import Prefix
from refengine.serve.prompt_cache import PromptCache
from refengine.serve.requests import CANCELLED, Request
from refengine.serve.scheduler import Scheduler

STEPS = 10_000
"""Of all forms together, at least."""
RUNS = settings(
    max_examples=80, stateful_step_count=50, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
EVENTS = {
    "waited",
    "refused",
    "done",
    "stopped",
    "cancelled",
    "preempted",
    "resumed",
    "evicted",
    "carried",
    "preempted again",
    "cancel live",
    "cancel queued",
}
"""What must come to pass in each form's runs, for them to say anything."""


def run(form: str, how: settings) -> type[ServingMachine]:
    machine = serving(form)
    run_state_machine_as_test(machine, settings=how)
    return machine


@pytest.mark.parametrize("form", FORMS)
def test_anything_in_any_order(form):
    machine = run(form, RUNS)
    assert machine.steps * len(FORMS) >= STEPS
    assert [event for event in EVENTS if not machine.seen[event]] == []


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_anything_in_any_order_and_other_orders_each_time(form):
    run(form, settings(RUNS, max_examples=3000, derandomize=False))


# --- Red: the machine finds each of these faults -----------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]
HUNT = settings(RUNS, max_examples=200, phases=[Phase.generate])
FOUND = (AssertionError, PoolBroken)


def shared_once_too_often(patch: pytest.MonkeyPatch) -> None:
    share = PagePool.share
    patch.setattr(PagePool, "share", lambda pool, pages: [share(pool, pages), share(pool, pages[:1])])


def given_back_while_mapped(patch: pytest.MonkeyPatch) -> None:
    """A stream that ends gives the pages that it shares back for everybody."""

    def give_back(pool: PagePool, pages: list[int]) -> None:
        pool.check_held(pages)
        pool.holders[list(pages)] = 0

    patch.setattr(PagePool, "give_back", give_back)


def hit_without_its_state(patch: pytest.MonkeyPatch) -> None:
    """The pages of a prefix are shared, the recurrent state starts at zero."""
    start = PagedBackend.start

    def started(self, stream, begin):
        start(self, stream, begin)
        if isinstance(begin, Prefix):
            self.arena.zero(self.run_base(stream), self.shape.run_words)

    patch.setattr(PagedBackend, "start", started)


def stale_tail(patch: pytest.MonkeyPatch) -> None:
    """Only the first entry of a row of the page table is cleared."""

    def forget(self, stream):
        self.pages[stream.slot * self.columns] = self.null_page

    patch.setattr(PagedBackend, "forget", forget)


def reply_adopted(patch: pytest.MonkeyPatch) -> None:
    """What a stream wrote is kept when it ends, and taken for a prompt."""
    retire = Scheduler.retire

    def retired(self, request: Request, outcome: str) -> None:
        stream = request.place
        stream.prompted = stream.committed
        if request.is_read and self.cache is not None:
            self.cache.keep([*request.prompt, *request.reply][: stream.committed], stream)
        retire(self, request, outcome)

    patch.setattr(Scheduler, "retire", retired)


def promise_not_kept(patch: pytest.MonkeyPatch) -> None:
    """A claim is a page short of the capacity."""
    claim = PagePool.claim
    patch.setattr(PagePool, "claim", lambda pool, pages, run=0: claim(pool, max(0, pages - 1), run))


def promise_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Promised pages are handed out to others."""
    patch.setattr(PagePool, "available", property(lambda pool: pool.free))


def evicted_without_its_pages(patch: pytest.MonkeyPatch) -> None:
    drop = PromptCache.drop

    def dropped(self, entry):
        with pytest.MonkeyPatch.context() as held:
            held.setattr(type(entry.begin), "release", lambda begin: None)
            drop(self, entry)

    patch.setattr(PromptCache, "drop", dropped)


def preempted_with_its_stream(patch: pytest.MonkeyPatch) -> None:
    """It goes back into the line, but keeps its stream."""

    def preempt(self, request: Request) -> None:
        self.live.remove(request)
        request.known, request.reply, request.ranked = max(request.known, request.reply, key=len), [], []
        self.waiting.appendleft(request)

    patch.setattr(Scheduler, "preempt", preempt)


def cancel_that_forgets_the_run(patch: pytest.MonkeyPatch) -> None:
    """The pages come back, the run of the recurrent state does not."""

    def retire(self, request: Request, outcome: str) -> None:
        if outcome == CANCELLED and isinstance(self.backend, PagedBackend):
            claim_of(request.place).run = []
        self.leave(request)
        request.outcome = outcome

    patch.setattr(Scheduler, "retire", retire)


def overtaking(patch: pytest.MonkeyPatch) -> None:
    """Where the first in line has no room, the second is tried."""

    admit = Scheduler.admit

    def admitted(self) -> None:
        admit(self)
        for request in list(self.waiting)[1:]:
            if self.seat(request):
                self.waiting.remove(request)
                self.live.append(request)

    patch.setattr(Scheduler, "admit", admitted)


def partial_page_shared(patch: pytest.MonkeyPatch) -> None:
    """The last page of a prefix, which is not full, is shared and not copied."""
    patch.setattr(Prefix, "full_pages", property(lambda prefix: prefix.pages))


def run_not_zeroed(patch: pytest.MonkeyPatch) -> None:
    """A stream starts from the state of whoever was there before."""
    patch.setattr("backends.arena.Arena.zero", lambda *args: None)


def never_unpinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PromptCache, "unpin", lambda self, entry: None)


def tokens_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A key is short, and trusted."""

    def look_up(self, prompt, most):
        found = [one for one in self.entries if len(one.ids) <= most and one.ids[:2] == tuple(prompt[:2])]
        return max(found, key=lambda one: len(one.ids), default=None)

    patch.setattr(PromptCache, "look_up", look_up)


def waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Entries that nobody uses stay, however long the line is."""
    seat = Scheduler.seat

    def seated(self, request: Request) -> bool:
        with pytest.MonkeyPatch.context() as held:
            held.setattr(PromptCache, "evict", lambda self, on_host=False: False)
            return seat(self, request)

    patch.setattr(Scheduler, "seat", seated)


def preempted_goes_last(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler.preempt

    def preempted(self, request: Request) -> None:
        preempt(self, request)
        self.waiting.rotate(-1)

    patch.setattr(Scheduler, "preempt", preempted)


def history_left_behind(patch: pytest.MonkeyPatch) -> None:
    """A kept state is restored with its positions, without its convolution history."""

    def restored(backend: Backend, one: Kept, stream: Stream) -> None:
        restore(backend, one, stream)
        for layer in backend.shape.linear_layers:
            stream.state(layer)[1][:] = 0

    patch.setattr("backends.base.restore", restored)


PLANTS: list[tuple[Plant, str, str]] = [
    (shared_once_too_often, "paged-4", "holders on the books"),
    (given_back_while_mapped, "paged-4", "holders on the books"),
    (hit_without_its_state, "paged-4", "a wrong reply"),
    (stale_tail, "paged-4", "of the page table names page"),
    (reply_adopted, "paged-1", "wrong"),
    (promise_not_kept, "paged-4", "its capacity takes"),
    (promise_forgotten, "paged-4", "pages are promised"),
    (evicted_without_its_pages, "paged-4", "a prefix that no entry holds"),
    (preempted_with_its_stream, "paged-4", "a stream of nobody's|failed, and nobody"),
    (cancel_that_forgets_the_run, "paged-4", "1 holders on the books, 0 in fact"),
    (overtaking, "paged-4", "somebody overtook"),
    (overtaking, "mixed", "somebody overtook"),
    (partial_page_shared, "paged-4", "a wrong reply"),
    (run_not_zeroed, "paged-4", "a wrong reply"),
    (run_not_zeroed, "window", "a wrong reply"),
    (never_unpinned, "mixed", "an entry that stays pinned"),
    (tokens_not_compared, "window", "a wrong reply"),
    (waits_for_ever, "paged-4", "failed, and nobody was in its way"),
    (preempted_goes_last, "mixed", "somebody overtook"),
    (history_left_behind, "window", "a wrong reply"),
]


@pytest.mark.parametrize(("plant", "form", "words"), PLANTS, ids=[f"{p[0].__name__}-{p[1]}" for p in PLANTS])
def test_red_a_fault_is_found(plant, form, words, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(FOUND) as found:
        run(form, HUNT)
    first = str(found.value).partition("\n")[0]
    assert re.search(words, first)
