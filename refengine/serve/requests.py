"""A request: a prompt, how its reply is made, and how far it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backends.base import Backend, Sizes, Stream
from refengine.errors import UserError
from refengine.serve.drafters import Drafter
from refengine.serve.drafts import Draft, chain, cut
from refengine.serve.sampling import GREEDY, Sampling
from refengine.serve.windows import Chunk, Window

DONE, CANCELLED, FAILED = "done", "cancelled", "failed"


@dataclass(eq=False)
class Request:
    """prompt: token ids. tokens: of the reply, at most. stop: tokens that end it. number: what its rows are called in a pass.

    marks: how many of its prompt's tokens a prompt cache keeps, for later ones that begin alike; None: as the cache likes.

    While it runs: stream, its place in a backend; reply, the tokens it has; ranked, what an MTP head guesses next. known: the
    tokens that it had when it was preempted, which are drafts for it now, so that they are read as windows of decode rows.
    arrival: its place in the line. resumed: positions that it did not read, since a prompt cache had them. Afterwards: outcome,
    and the reason of a failure.
    """

    prompt: Sequence[int]
    tokens: int = 1
    sampling: Sampling = GREEDY
    drafter: Drafter | None = None
    stop: frozenset[int] = frozenset()
    number: int = 0
    marks: tuple[int, ...] | None = None
    stream: Stream | None = field(default=None, init=False)
    reply: list[int] = field(default_factory=list, init=False)
    ranked: list[int] = field(default_factory=list, init=False)
    known: list[int] = field(default_factory=list, init=False)
    arrival: int = field(default=0, init=False)
    resumed: int = field(default=0, init=False)
    outcome: str = field(default="", init=False)
    reason: str = field(default="", init=False)

    def check(self, vocabulary: int = 1 << 31) -> None:
        """Raise UserError for one that cannot run. vocabulary: token ids are below it."""
        if not len(self.prompt):
            raise UserError(f"prompt {self.number}: is empty; give at least one token")
        if not is_whole(self.tokens, 1):
            raise UserError(f"request {self.number}: tokens {self.tokens!r}: a whole number, at least 1")
        for token in self.prompt:
            if not is_whole(token, 0) or token >= vocabulary:
                raise UserError(f"request {self.number}: token {token!r}: whole numbers from 0 to {vocabulary - 1}")
        for mark in self.marks or ():
            if not is_whole(mark, None):
                raise UserError(f"request {self.number}: mark {mark!r}: whole numbers, of tokens of the prompt")
        self.sampling.check()

    @property
    def positions(self) -> int:
        """Positions that the prompt and the whole reply take."""
        return len(self.prompt) + self.tokens

    @property
    def place(self) -> Stream:
        """Its stream, which it has while it runs."""
        assert self.stream is not None, f"request {self.number} has no stream"
        return self.stream

    @property
    def is_read(self) -> bool:
        """Whether the whole prompt is read: its last row gave the reply's first token."""
        return bool(self.reply)

    @property
    def goes_on(self) -> bool:
        """Whether the reply takes more tokens; one whose last logits were all NaN, so that its token is -1, does not."""
        return len(self.reply) < self.tokens and self.reply[-1] >= 0 and self.reply[-1] not in self.stop

    def capacity(self, backend: Backend) -> int:
        """Positions of its stream."""
        return capacity(self.positions, backend.sizes)

    def chunk(self, rows: int) -> Chunk:
        """The next rows of the prompt."""
        rest = tuple(self.prompt[self.place.committed :])
        return Chunk(rest[:rows], rest[rows:])

    def window(self, most: int) -> Window:
        """Its last token and a draft behind it, no more than ``most`` rows and no deeper than the reply will be."""
        rows = min(most, self.place.capacity - self.place.committed)
        return Window(self.reply[-1], cut(self.draft(), rows - 1, self.tokens - len(self.reply) - 1))

    def draft(self) -> Draft:
        """What it had written before it was preempted, or what its drafter proposes."""
        if len(self.known) > len(self.reply):
            return chain(self.known[len(self.reply) :])
        return Draft() if self.drafter is None else self.drafter.propose([*self.prompt, *self.reply], self.ranked)


def capacity(positions: int, sizes: Sizes) -> int:
    """Of a stream for a prompt and a reply: one more window, too, where the context has room for it. Spec serving §3."""
    return max(positions, min(positions + sizes.window_rows - 1, sizes.context))


def is_whole(value: Any, least: int | None) -> bool:
    """Whether a value is a whole number, and not below ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        return False
    return least is None or bool(value >= least)
