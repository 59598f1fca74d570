"""Prompts in passes, then decode: the loop of commands whose streams all have room, in an order that they choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backends.base import DECODE, PROMPT, Backend, Stream
from refengine.device import Device
from refengine.errors import UserError
from refengine.model import Head, Model, Tap
from refengine.serve.drafters import Drafter
from refengine.serve.forward import Forward, Pass
from refengine.serve.requests import Request
from refengine.serve.sampling import GREEDY, Sampling


@dataclass(eq=False)
class Session:
    """Streams through a backend. prompts: token ids of each. prompt_rows: rows of a stream in a prompt pass, at most.

    samplings, drafters: of each stream; default: greedy, no drafts. head: for drafters that take its guesses; it reads every
    row then, and the backend has its layer. stop: tokens that end a reply. Raises UserError for a prompt without tokens, passes
    without rows, samplings that cannot be or not for each prompt, and a drafter without its head.
    """

    model: Model
    backend: Backend
    device: Device
    prompts: Sequence[Sequence[int]]
    prompt_rows: int
    samplings: Sequence[Sampling] = ()
    drafters: Sequence[Drafter | None] = ()
    head: Head | None = None
    stop: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        samplings, drafters = (
            self.samplings or [GREEDY] * len(self.prompts),
            self.drafters or [None] * len(self.prompts),
        )
        for name, given in (("samplings", samplings), ("drafters", drafters)):
            if len(given) != len(self.prompts):
                raise UserError(f"{name}: {len(given)} for {len(self.prompts)} prompts; give one of each")
        if self.prompt_rows < 1:
            raise UserError(f"prompt_rows {self.prompt_rows}: at least 1")
        parts = zip(self.prompts, samplings, drafters)
        self.requests = [Request(p, 1, s, d, self.stop, number) for number, (p, s, d) in enumerate(parts)]
        for request in self.requests:
            request.check()
        self.forward = Forward(self.model, self.backend, self.device)
        self.draft_with(drafters, self.head)

    def draft_with(self, drafters: Sequence[Drafter | None], head: Head | None) -> None:
        """Who drafts from now on, for each stream; the head reads along if some drafter looks at its guesses.

        Raises UserError for drafters that miss it.
        """
        for request, drafter in zip(self.requests, drafters):
            request.drafter = drafter
        guesses = max((drafter.guesses for drafter in drafters if drafter is not None), default=0)
        if guesses and head is None:
            raise UserError(f"drafts: {self.model.spec.name} has no MTP head; draft by n-gram")
        self.forward.head, self.forward.guesses = head if guesses else None, guesses

    @property
    def opened(self) -> list[Request]:
        """The requests whose streams are open."""
        return [request for request in self.requests if request.stream is not None]

    @property
    def streams(self) -> list[Stream]:
        return [request.place for request in self.opened]

    @property
    def replies(self) -> list[list[int]]:
        return [request.reply for request in self.opened]

    def run(self, tokens: int, tap: Tap | None = None) -> Iterator[Pass]:
        """Read the prompts one by one, then write ``tokens`` tokens of every reply. Yields each pass as it ends.

        tap: as Model.forward takes it.
        """
        self.forward.tap = tap
        for _ in self.prompts:
            yield from self.read(1, tokens)
        yield from self.write(tokens)

    def read(self, streams: int, tokens: int) -> Iterator[Pass]:
        """Open the next streams with room for ``tokens`` tokens of reply, and read their prompts together.

        A reply's first token comes from its prompt's last row.
        """
        opened = len(self.opened)
        requests = self.requests[opened : opened + streams]
        for request in requests:
            request.tokens = tokens
            request.stream = self.backend.open(request.capacity(self.backend))
        while unread := [request for request in requests if not request.is_read]:
            yield self.forward(PROMPT, {request: request.chunk(self.prompt_rows) for request in unread})

    def write(self, tokens: int) -> Iterator[Pass]:
        """Decode passes of all open streams together, until each reply has ``tokens`` tokens or has met its end."""
        for request in self.opened:
            request.tokens = tokens
        most = self.backend.sizes.window_rows
        while unfinished := [request for request in self.opened if request.goes_on]:
            yield self.forward(DECODE, {request: request.window(most) for request in unfinished})
