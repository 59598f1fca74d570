"""Faults to plant in the engine, at least one for each equality, which must come out red. Spec serving §5."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from backends.arena import POISON, Arena
from backends.base import DECODE, PROMPT, Backend
from backends.paged import PagedBackend
from backends.pool import PagePool
from backends.prefix import Prefix
from refengine.serve.prompt_cache import PromptCache
from refengine.serve.scheduler import Scheduler
from refengine.serve.windows import Window


@dataclass(frozen=True)
class Fault:
    """A fault, and the equality that finds it. planted: has it, as long as it is open. tokens: of the replies that show it."""

    equality: str
    name: str
    planted: Callable[[], AbstractContextManager[None]]
    tokens: int | None = None


FAULTS: list[Fault] = []


LONG_REPLY = 24
"""Tokens: prompt and decode differ in the last bit of few sums, and most are rounded away again."""
Wrong = Callable[..., Any]


def fault(equality: str, name: str, owner: type, method: str, tokens: int | None = None) -> Callable[[Wrong], Wrong]:
    """Register a wrong form of a method; it is called with the right one, then with the method's own arguments."""

    def register(wrong: Wrong) -> Wrong:
        @contextmanager
        def planted() -> Iterator[None]:
            right = getattr(owner, method)
            setattr(owner, method, lambda *args, **named: wrong(right, *args, **named))
            try:
                yield
            finally:
                setattr(owner, method, right)

        FAULTS.append(Fault(equality, name, planted, tokens))
        return wrong

    return register


@fault("1", "an entry of a page table names the page before", PagedBackend, "enter")
def repeated_page(right: Any, self: PagedBackend, stream: Any, pages: list[int]) -> None:
    right(self, stream, pages)
    if len(stream.pages) > 1:
        first = stream.slot * self.columns + len(stream.pages) - 1
        self.pages[first] = self.pages[first - 1]


@fault("2", "a stream's recurrent state takes from its neighbour's", Backend, "layer_states")
def neighbour(right: Any, self: Backend, layer: int, batch: Any) -> tuple[Any, Any]:
    states, histories = right(self, layer, batch)
    if batch.phase == DECODE and len(batch.members) > 1:
        first, second = (self.run_base(stream) for stream in batch.members[:2])
        states[second] += states[first]
    return states, histories


@fault("3", "a hit without its recurrent state", PagedBackend, "start")
def no_state(right: Any, self: PagedBackend, stream: Any, begin: Any) -> None:
    right(self, stream, begin)
    if isinstance(begin, Prefix):
        self.arena.zero(self.run_base(stream), self.shape.run_words)


@fault("3", "a reply's positions are kept, and resumed from", Scheduler, "retire", LONG_REPLY)
def reply_kept(right: Any, self: Scheduler, request: Any, outcome: str) -> None:
    if self.cache is not None:
        stream = request.place
        stream.prompted = stream.committed
        self.cache.keep([*request.prompt, *request.reply][: stream.committed], stream)
    right(self, request, outcome)


@fault("3", "an evicted prompt keeps its pages", PromptCache, "drop")
def kept_for_ever(right: Any, self: PromptCache, entry: Any) -> None:
    self.entries.remove(entry)


@fault("4", "a draft too many is accepted", Window, "kept")
def one_more(right: Any, self: Window, draws: Any, stop: Any) -> list[int]:
    path = right(self, draws, stop)
    return path + [row for row in self.asked if self.parents[row] == path[-1]][:1]


@fault("5a", "a pass forgets the convolution's history", Backend, "tables")
def forgetful(right: Any, self: Backend, phase: str, members: Any, *rest: Any) -> Any:
    if phase == PROMPT:
        for stream in members:
            for layer in self.shape.linear_layers:
                stream.state(layer)[1][:] = 0
    return right(self, phase, members, *rest)


@fault("5b", "a stream begins with the recurrent state that another left", Arena, "zero")
def left_over(right: Any, self: Arena, start: int, words: int) -> None:
    if self.words[start] == POISON:
        right(self, start, words)


@fault("3", "a page is shared once too often", PagePool, "share")
def shared_twice(right: Any, self: PagePool, pages: Any) -> None:
    right(self, pages)
    right(self, pages)


@fault("3", "a page is given back while a kept prompt names it", PagePool, "share")
def not_shared(right: Any, self: PagePool, pages: Any) -> None:
    """Nobody is counted."""


@fault("5b", "a request that was preempted reads its own tokens as prompt", Scheduler, "preempt")
def reply_as_prompt(right: Any, self: Scheduler, request: Any) -> None:
    right(self, request)
    request.prompt, request.known = [*request.prompt, *request.known[:-1]], []


@fault("6", "a stream is not released when its request is over", Scheduler, "leave")
def left_open(right: Any, self: Scheduler, request: Any) -> None:
    self.live.remove(request)
    request.stream = None


@fault("6", "the tail of a page table is stale", PagedBackend, "forget")
def stale_tail(right: Any, self: PagedBackend, stream: Any) -> None:
    """The next stream's pages are entered over it."""
