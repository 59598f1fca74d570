"""Runs through the scheduler: turns that resume, requests that are preempted, that wait, or that ask for more than there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from backends.base import Backend
from backends.paged import PagedBackend
from backends.pool import PoolBroken
from refengine.serve.forward import Forward, Pass
from refengine.serve.prompt_cache import PromptCache
from refengine.serve.requests import Request
from refengine.serve.scheduler import Scheduler
from refengine.verify.transcripts import Transcript, transcript


@dataclass(eq=False)
class Served:
    """What requests got. lives: each one's transcripts, the last one that of its whole reply; before it those of the tokens that
    it had when it was preempted. resumed: positions that each did not read. waited: who stood in line while others ran.
    broken: what is wrong with the books, or with a request that did not finish.
    """

    lives: list[list[Transcript]]
    resumed: list[int] = field(default_factory=list)
    waited: set[int] = field(default_factory=set)
    broken: str | None = None
    begins: dict[int, int] = field(default_factory=dict)

    def end_life(self, number: int, passes: Sequence[Pass], reply: Sequence[int]) -> None:
        """What a request got since it was admitted last, if it got a token; begins: the pass at which its next life begins."""
        if reply and len(passes) > self.begins.get(number, 0):
            self.lives[number].append(transcript(number, passes[self.begins.get(number, 0) :], reply))
        self.begins[number] = len(passes)


@dataclass(eq=False)
class Service:
    """Requests through a scheduler, one list after the other, on one backend; its books are checked after every pass."""

    forward: Forward
    prompt_rows: int
    cache: PromptCache | None = None

    @property
    def backend(self) -> Backend:
        return self.forward.backend

    def serve(self, requests: Sequence[Request], between: Callable[[Scheduler], None] = lambda _: None) -> Served:
        """Run requests, numbered from 0, to their end. between: called after each pass."""
        vocabulary = self.forward.model.spec.vocabulary
        scheduler = Scheduler(self.backend, self.forward, self.prompt_rows, self.cache, True, vocabulary)
        served, passes = Served([[] for _ in requests]), list[Pass]()
        for request in requests:
            scheduler.submit(request)
        try:
            for one in scheduler.run():
                passes.append(one)
                served.waited |= {request.number for request in scheduler.waiting if not request.known}
                before = {request: list(request.reply) for request in scheduler.live}
                between(scheduler)
                for request in set(before) & set(scheduler.waiting):
                    served.end_life(request.number, passes, before[request])
            served.broken = next(self.wrong(requests), None)
        except PoolBroken as broken:
            served.broken = str(broken)
        for request in requests:
            served.end_life(request.number, passes, request.reply)
        served.resumed = [request.resumed for request in requests]
        return served

    def serve_all(self, requests: Sequence[Request], between: Callable[[Scheduler], None] = lambda _: None) -> Served:
        """As ``serve``; nobody comes afterwards, so everything is given back."""
        served = self.serve(requests, between)
        served.broken = served.broken or self.close()
        return served

    def wrong(self, requests: Sequence[Request]) -> Iterator[str]:
        """What is not as it should be when all is over."""
        for request in requests:
            if len(request.reply) < request.tokens:
                yield f"request {request.number} is {request.outcome}: {request.reason}"
        if self.backend.streams:
            yield f"streams {sorted(self.backend.streams)} are open, and nobody runs"

    def close(self) -> str | None:
        """Forget the cache; what is wrong with the pool then, which is whole if nothing is."""
        if self.cache is not None:
            self.cache.clear()
        if isinstance(self.backend, PagedBackend) and self.backend.pool.available < self.backend.pool.count:
            return f"the pool is not whole again: {self.backend.pool.available} of {self.backend.pool.count} pages are free"
        return None


# --- Who is preempted, and when -----------------------------------------------------------------------------------------

PREEMPTED_AT = (1, 0, 3)
"""Tokens that a request has when it is preempted, in turn: 0 is within its prompt, as far as a pass has read it."""
AGAIN = 2
"""Tokens more, when it is preempted the second time."""


@dataclass(eq=False)
class Preemption:
    """Preempts each request twice."""

    times: dict[int, int] = field(default_factory=dict)

    def __call__(self, scheduler: Scheduler) -> None:
        for request in list(scheduler.live):
            count = self.times.get(request.number, 0)
            due = PREEMPTED_AT[request.number % len(PREEMPTED_AT)] + count * AGAIN
            if (
                count < 2
                and len(request.reply) >= due
                and (request.goes_on if request.reply else request.place.committed)
            ):
                self.times[request.number] = count + 1
                scheduler.preempt(request)

    def everyone(self, streams: int) -> bool:
        """Whether each of so many requests was preempted twice."""
        return all(self.times.get(number) == 2 for number in range(streams))
