"""Requests wait in line, are admitted whole, and share passes. Spec serving §3.

A request claims at admission all that it will ever need, so an admitted one never runs out. The line keeps its order: where the
first has no room, nobody overtakes. A round is a prompt pass over the streams that still read, then a decode pass over those that
write, so a long prompt does not hold replies up.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count

from backends.base import DECODE, PROMPT, Backend, BackendError, NoRoom
from refengine import debug
from refengine.errors import UserError
from refengine.serve.forward import Pass, Step, Work
from refengine.serve.prompt_cache import Entry, PromptCache
from refengine.serve.requests import CANCELLED, DONE, FAILED, Request, capacity


class Scheduler:
    """Runs requests through a backend. step: runs a pass. prompt_rows: of a prompt pass, all streams together, at most.

    cache: of prompts, the backend's; without one nothing is shared. check: look through the backend's books after every pass.
    vocabulary: token ids are below it. Raises UserError for passes without rows, and another backend's cache.
    """

    def __init__(
        self,
        backend: Backend,
        step: Step,
        prompt_rows: int,
        cache: PromptCache | None = None,
        check: bool | None = None,
        vocabulary: int = 1 << 31,
    ):
        if prompt_rows < 1:
            raise UserError(f"prompt_rows {prompt_rows}: at least 1")
        if cache is not None and cache.backend is not backend:
            raise UserError("prompt cache: is another backend's; make one for this backend")
        self.backend, self.step, self.prompt_rows, self.cache = backend, step, prompt_rows, cache
        self.checked, self.vocabulary = debug.on if check is None else check, vocabulary
        self.arrivals = count()
        self.waiting: deque[Request] = deque()
        self.live: list[Request] = []

    # --- What users ask for -----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Put a request into the line. Raises UserError, queueing nothing, for one that could never run or was here before."""
        request.check(self.vocabulary)
        if request.outcome or request.stream is not None or request in self.waiting:
            raise UserError(f"request {request.number}: was submitted before; make a new one")
        try:
            self.backend.check_fits(request.capacity(self.backend))
        except BackendError as never:
            most = self.most(request.positions)
            raise UserError(
                f"request {request.number}: {never}; give it at most {most} tokens, prompt and reply together"
            ) from never
        request.arrival = next(self.arrivals)
        self.waiting.append(request)

    def most(self, positions: int) -> int:
        """Of so many positions, how many a prompt and its reply can have; more never fit."""

        def too_many(count: int) -> bool:
            try:
                self.backend.check_fits(capacity(count, self.backend.sizes))
            except BackendError:
                return True
            return False

        return bisect_left(range(1, positions + 1), True, key=too_many)

    def cancel(self, request: Request) -> None:
        """Take a request out, wherever it is; what it held is free again. One that is over stays as it is."""
        if request in self.waiting:
            self.waiting.remove(request)
            request.outcome = CANCELLED
        elif request in self.live:
            self.retire(request, CANCELLED)

    def preempt(self, request: Request) -> None:
        """Take a live request's stream away; it gets its old place in the line, and comes back to where it was. Spec serving §0.

        Its prompt is read again, and the tokens that it has are drafts: what is drawn is held against them. Raises UserError,
        changing nothing, for one that does not run.
        """
        if request not in self.live:
            raise UserError(f"request {request.number}: does not run; preempt one that does")
        self.leave(request)
        request.known = max(request.known, request.reply, key=len)
        request.reply, request.ranked = [], []
        insort(self.waiting, request, key=lambda one: one.arrival)

    # --- Rounds -----------------------------------------------------------------------------------------------------------

    def run(self) -> Iterator[Pass]:
        """Rounds until every request is over. Yields each pass as it ends."""
        while self.waiting or self.live:
            yield from self.round()

    def round(self) -> Iterator[Pass]:
        """Admit whom there is room for; a prompt pass; a decode pass."""
        self.admit()
        if chunks := self.chunks():
            yield self.passed(PROMPT, chunks)
        if windows := self.windows():
            yield self.passed(DECODE, windows)

    def passed(self, phase: str, work: Work) -> Pass:
        """One pass, and what follows from it: prompts are kept, replies end.

        Where it raises, every request of the pass fails: its stream may have moved in part.
        """
        try:
            one = self.step(phase, work)
            for request in work if phase == PROMPT else ():
                self.keep(request)
        except BaseException as problem:
            for request in work:
                request.reason = f"request {request.number}: its pass was stopped: {problem}"
                self.retire(request, FAILED)
            raise
        for request in work:
            if request.is_read and not request.goes_on:
                self.retire(request, DONE)
        if self.checked:
            self.backend.check()
        return one

    def chunks(self) -> Work:
        """Prompt rows of the streams that still read, oldest first, as many as a pass takes; each ends at a mark."""
        work, left = {}, self.prompt_rows
        for request in self.live:
            if not request.is_read and left:
                ends = [mark for mark in self.marks(request) if mark > request.place.committed]
                rows = min([left, *(end - request.place.committed for end in ends)])
                work[request] = request.chunk(rows)
                left -= len(work[request].ids)
        return work

    def windows(self) -> Work:
        """A window of each stream that writes."""
        most = self.backend.sizes.window_rows
        return {request: request.window(most) for request in self.live if request.is_read}

    # --- Admission --------------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Open streams for the first in line, as long as there is room. Where nobody runs and there is none, it fails."""
        while self.waiting:
            request = self.waiting[0]
            if self.seat(request):
                self.live.append(self.waiting.popleft())
            elif self.live:
                return
            else:
                self.waiting.popleft()
                request.outcome = FAILED
                request.reason = f"request {request.number}: no room, and nobody runs who gives some back"

    def seat(self, request: Request) -> bool:
        """Open a stream that begins with what the cache has of the prompt; False where there is no room.

        What the cache holds goes before anyone waits; the request's own beginning only where nobody else can make room.
        """
        if not self.backend.free_slots:
            return False
        entry = self.cache.find(request.prompt) if self.cache else None
        try:
            while not self.opened(request, entry):
                if self.cache is not None and self.cache.evict():
                    continue
                if entry is None or self.live:
                    return False
                self.let_go(entry)
                entry = None
            if self.cache is not None:
                self.cache.count(resumed=entry is not None)
            return True
        finally:
            self.let_go(entry)

    def opened(self, request: Request, entry: Entry | None) -> bool:
        """Whether a stream could be opened for the request."""
        try:
            request.stream = self.backend.open(request.capacity(self.backend), entry.begin if entry else None)
        except NoRoom:
            return False
        request.resumed = request.place.committed
        return True

    def let_go(self, entry: Entry | None) -> None:
        """Unpin an entry that was found."""
        if entry is not None and self.cache is not None:
            self.cache.unpin(entry)

    # --- Prompts that are kept, replies that end --------------------------------------------------------------------------

    def marks(self, request: Request) -> Sequence[int]:
        """How much of its prompt is kept."""
        if self.cache is None:
            return ()
        return self.cache.marks(request.prompt) if request.marks is None else request.marks

    def keep(self, request: Request) -> None:
        """Keep what is read of a prompt, where it has a mark."""
        end = request.place.committed
        if self.cache is not None and end in self.marks(request):
            self.cache.keep(request.prompt[:end], request.place)

    def retire(self, request: Request, outcome: str) -> None:
        """A live request is over."""
        self.leave(request)
        request.outcome = outcome

    def leave(self, request: Request) -> None:
        """Give a live request's stream back."""
        self.live.remove(request)
        request.place.release()
        request.stream = None
