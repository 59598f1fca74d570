"""A list of requests through one form of cache, round by round: the engine's scheduler, pool and prompt cache, without memory.

Nothing is computed, so a model of any size will do; who is admitted, who waits and which pages are taken is what a server does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from backends.arena import PaperArena
from backends.base import PROMPT, Backend, Stream
from backends.paged import PagedBackend
from refengine.errors import UserError
from refengine.lab.pool_books import Held, held
from refengine.lab.pool_requests import Arrival
from refengine.serve.forward import Pass, Work
from refengine.serve.paper import PaperStep
from refengine.serve.prompt_cache import PromptCache
from refengine.serve.requests import CANCELLED, DONE, FAILED, Request
from refengine.serve.scheduler import Scheduler
from refengine.serve.settings import Plan

REFUSED = "refused"
Progress = Callable[[int], object]
"""Called with the rows of each pass."""


@dataclass(eq=False)
class Life:
    """A request's rounds. joined: the line. admitted: 0 if it never was. outcome: one of done, cancelled, failed, refused."""

    joined: int
    admitted: int = 0
    over: int = 0
    outcome: str = ""
    reason: str = ""
    unused: int = 0
    """Bytes of pages that it was promised and never took."""

    @property
    def waited(self) -> int:
        """Rounds in the line before it was admitted, or was taken out."""
        return 0 if self.outcome == REFUSED else (self.admitted or self.over) - self.joined


@dataclass(frozen=True, eq=False)
class Moment:
    """The books after a pass. numbers: of the requests that had streams. waiting: how many were in the line."""

    round: int
    books: Held
    numbers: tuple[int, ...]
    waiting: int


@dataclass(eq=False)
class Story:
    """What came of a list of requests. lives: by number. moments: the fullest of each round. read: prompt rows that were run;
    resumed: positions that a prompt cache had."""

    plan: Plan
    lives: dict[int, Life] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)
    read: int = 0
    resumed: int = 0
    rounds: int = 0
    most_streams: int = 0
    shared_pages: int = 0

    @property
    def peak(self) -> Moment | None:
        """The first moment at which streams held most."""
        return max(self.moments, key=lambda one: one.books.written, default=None)

    @property
    def unused(self) -> int:
        """Bytes that were promised at the peak and never taken."""
        return sum(self.lives[number].unused for number in self.peak.numbers) if self.peak else 0

    def count(self, outcome: str) -> int:
        """Requests that ended so."""
        return sum(life.outcome == outcome for life in self.lives.values())

    @property
    def waits(self) -> list[int]:
        """Rounds that those waited who waited."""
        return [life.waited for life in self.lives.values() if life.waited]


class PagesCache(PromptCache):
    """Keeps what lies in pages. What a window's stream has read would be copied to the host, and paper has no copies."""

    def keep(self, ids: Sequence[int], stream: Stream) -> bool:
        assert isinstance(self.backend, PagedBackend)
        return not self.backend.has_window(stream) and super().keep(ids, stream)


class Simulation:
    """The run of one plan. cached: with a prompt cache, where there are pages. advance: see Progress."""

    def __init__(self, plan: Plan, arrivals: Sequence[Arrival], cached: bool = True, advance: Progress = int):
        self.backend: Backend = plan.build(arena=PaperArena)
        self.cache = PagesCache(self.backend) if cached and self.backend.paged else None
        self.paper, self.advance = PaperStep(self.backend), advance
        self.scheduler = Scheduler(self.backend, self.step, plan.settings.prompt_rows, self.cache)
        self.coming = deque(sorted(arrivals, key=lambda one: one.arrive))
        self.leaving = sorted((one for one in arrivals if one.cancel), key=lambda one: one.cancel or 0, reverse=True)
        self.active: dict[Request, Life] = {}
        self.story = Story(plan)

    def run(self) -> Story:
        """Rounds until every request is over."""
        while self.coming or self.active:
            self.story.rounds = self.next_round()
            self.arrive()
            self.cancel()
            for _ in self.scheduler.round():
                pass
            self.settle()
        return self.story

    def next_round(self) -> int:
        """The next number; rounds in which nobody is there are passed over."""
        return self.story.rounds + 1 if self.active else max(self.story.rounds + 1, self.coming[0].arrive)

    def arrive(self) -> None:
        """Put those whose round it is into the line; one that could never run is refused alone."""
        while self.coming and self.coming[0].arrive <= self.story.rounds:
            one = self.coming.popleft()
            life = self.story.lives[one.request.number] = Life(joined=self.story.rounds)
            one.request.marks = self.marks(one)
            try:
                self.scheduler.submit(one.request)
            except UserError as never:
                life.outcome, life.reason, life.over = REFUSED, str(never), self.story.rounds
            else:
                self.active[one.request] = life

    def marks(self, one: Arrival) -> tuple[int, ...]:
        """How much of its prompt is kept: the beginning that others have too, and the last whole page."""
        if self.cache is None:
            return ()
        shared = (one.shared,) if one.shared else ()
        return tuple(sorted({*shared, *self.cache.marks(one.request.prompt)}))

    def cancel(self) -> None:
        """Take those out whose round it is."""
        while self.leaving and (self.leaving[-1].cancel or 0) <= self.story.rounds:
            self.scheduler.cancel(self.leaving.pop().request)

    def step(self, phase: str, work: Work) -> Pass:
        """A pass on paper, and what the books say after it."""
        one, rows = self.paper(phase, work), sum(len(part.ids) for part in work.values())
        self.story.read += rows if phase == PROMPT else 0
        for request in work:
            self.active[request].unused = unused_bytes(self.backend, request.place)
        self.note()
        self.advance(rows)
        return one

    def note(self) -> None:
        """Write down this moment, unless another of the round was fuller."""
        live, moments = self.scheduler.live, self.story.moments
        here = Moment(
            self.story.rounds, held(self.backend), tuple(one.number for one in live), len(self.scheduler.waiting)
        )
        if moments and moments[-1].round == here.round:
            here = max(moments.pop(), here, key=lambda one: one.books.written)
        moments.append(here)
        self.story.most_streams = max(self.story.most_streams, len(live))
        self.story.shared_pages = max(self.story.shared_pages, here.books.shared_pages)

    def settle(self) -> None:
        """Who was admitted in this round, and who is over."""
        waiting, round_ = set(self.scheduler.waiting), self.story.rounds
        for request, life in list(self.active.items()):
            if not life.admitted and request not in waiting and request.outcome in ("", DONE):
                life.admitted = round_
                self.story.resumed += request.resumed
            if request.outcome:
                life.outcome, life.reason, life.over = request.outcome, request.reason, round_
                del self.active[request]


def unused_bytes(backend: Backend, stream: Stream) -> int:
    """Bytes of pages that a stream was promised and has not taken."""
    return stream.claim.left * 4 * backend.page_words if stream.claim else 0


def outcomes(story: Story) -> Iterator[tuple[str, int]]:
    """How many requests ended in each way."""
    for outcome in (DONE, CANCELLED, FAILED, REFUSED):
        yield outcome, story.count(outcome)
