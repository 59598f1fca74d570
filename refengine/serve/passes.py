"""Prompts in passes, then decode: the loop of every command that generates. Spec serving §0.

A decode pass takes a window of each stream: its last token, and behind it what its drafter proposes. Rows whose tokens are
what is drawn are kept, so a pass gives a stream one token or more. Without drafters each window has one row: plain decode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from backends.base import DECODE, PROMPT, Backend, Batch, Stream
from refengine.device import Device
from refengine.errors import UserError
from refengine.model import MtpHead, Qwen35
from refengine.model.qwen3_5 import Tap
from refengine.serve.drafters import Drafter
from refengine.serve.drafts import Draft, cut
from refengine.serve.sampling import GREEDY, Sampling, choose
from refengine.serve.windows import Chunk, Rows, Window

Work = Mapping[int, Rows]
"""The rows of a pass, by stream number."""
Draws = Mapping[int, list[int]]
"""The tokens drawn from each stream's asked rows."""


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass. logits: float32 [rows, vocabulary], of the last row of each prompt chunk, or of the decode rows that
    were kept. streams: whose each row is. drafted: how many rows were drafts, kept or not."""

    phase: str
    streams: tuple[int, ...]
    logits: np.ndarray
    drafted: int = 0


@dataclass(eq=False)
class Session:
    """Streams through a backend. prompts: token ids of each. prompt_rows: rows of a stream in a prompt pass, at most.

    samplings, drafters: of each stream; default: greedy, no drafts. head: reads every row, for drafters that take its
    guesses; the backend has its layer then. stop: tokens that end a reply. Raises UserError for a prompt without tokens, passes
    without rows, samplings that cannot be or not for each prompt, and a drafter without its head.
    """

    model: Qwen35
    backend: Backend
    device: Device
    prompts: Sequence[Sequence[int]]
    prompt_rows: int
    samplings: Sequence[Sampling] = ()
    drafters: Sequence[Drafter | None] = ()
    head: MtpHead | None = None
    stop: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.streams: list[Stream] = []
        self.replies: list[list[int]] = []
        self.ranked: dict[int, list[int]] = {}
        self.samplings = self.samplings or [GREEDY] * len(self.prompts)
        self.drafters = self.drafters or [None] * len(self.prompts)
        self.check()
        if self.guesses and self.head is None:
            raise UserError(f"drafts: {self.model.spec.name} has no MTP head; draft by n-gram")

    def check(self) -> None:
        """Raise UserError for streams that cannot run."""
        for number, prompt in enumerate(self.prompts):
            if not len(prompt):
                raise UserError(f"prompt {number}: is empty; give at least one token")
        if self.prompt_rows < 1:
            raise UserError(f"prompt_rows {self.prompt_rows}: at least 1")
        for name, given in (("samplings", self.samplings), ("drafters", self.drafters)):
            if len(given) != len(self.prompts):
                raise UserError(f"{name}: {len(given)} for {len(self.prompts)} prompts; give one of each")
        for sampling in self.samplings:
            sampling.check()

    @property
    def guesses(self) -> int:
        """Tokens of the head that some drafter looks at."""
        return max((drafter.guesses for drafter in self.drafters if drafter is not None), default=0)

    def run(self, tokens: int, tap: Tap | None = None) -> Iterator[Pass]:
        """Read the prompts one by one, then write ``tokens`` tokens of every reply. Yields each pass as it ends."""
        for _ in self.prompts:
            yield from self.read(1, tokens, tap)
        yield from self.write(tokens, tap)

    def read(self, streams: int, tokens: int, tap: Tap | None = None) -> Iterator[Pass]:
        """Open the next streams with room for ``tokens`` tokens of reply, and read their prompts together.

        A reply's first token comes from its prompt's last row.
        """
        numbers = range(len(self.streams), len(self.streams) + streams)
        self.streams += [self.backend.open(self.room(len(self.prompts[n]) + tokens)) for n in numbers]
        self.replies += [[] for _ in numbers]
        while unread := [n for n in numbers if not self.replies[n]]:
            yield self.step(PROMPT, {n: self.chunk(n) for n in unread}, tap)

    def write(self, tokens: int, tap: Tap | None = None) -> Iterator[Pass]:
        """Decode passes of all open streams together, until each reply has ``tokens`` tokens or has met its end."""
        while unfinished := [n for n, reply in enumerate(self.replies) if self.goes_on(reply, tokens)]:
            yield self.step(DECODE, {n: self.window(n, tokens) for n in unfinished}, tap)

    def goes_on(self, reply: Sequence[int], tokens: int) -> bool:
        """Whether a reply takes more tokens; one whose last logits were all NaN, so that its token is -1, does not."""
        return len(reply) < tokens and reply[-1] >= 0 and reply[-1] not in self.stop

    # --- What a stream puts into a pass ---------------------------------------------------------------------------------

    def room(self, positions: int) -> int:
        """The capacity of a stream that needs so many positions: one more window fits, where the context has room for it."""
        sizes = self.backend.sizes
        return max(positions, min(positions + sizes.window_rows - 1, sizes.context))

    def chunk(self, number: int) -> Chunk:
        """The next rows of a prompt."""
        rest = tuple(self.prompts[number][self.streams[number].committed :])
        return Chunk(rest[: self.prompt_rows], rest[self.prompt_rows :])

    def window(self, number: int, tokens: int) -> Window:
        """A stream's last token and its drafts, no more than have room and no deeper than the reply will be."""
        reply, stream = self.replies[number], self.streams[number]
        rows = min(self.backend.sizes.window_rows, stream.capacity - stream.committed)
        return Window(reply[-1], cut(self.draft(number), rows - 1, tokens - len(reply) - 1))

    def draft(self, number: int) -> Draft:
        """What the stream's drafter proposes."""
        drafter = self.drafters[number]
        if drafter is None:
            return Draft()
        return drafter.propose([*self.prompts[number], *self.replies[number]], self.ranked.get(number, []))

    # --- A pass ---------------------------------------------------------------------------------------------------------

    def step(self, phase: str, work: Work, tap: Tap | None) -> Pass:
        """One pass over the streams' rows, and the tokens that follow from it."""
        batch, first = self.batch(phase, work), first_rows(work)
        hidden = self.model.hidden(self.put(i for rows in work.values() for i in rows.ids), self.backend, batch, tap)
        asked = [(n, row) for n, rows in work.items() for row in rows.asked]
        logits = self.model.logits(hidden, self.put(first[n] + row for n, row in asked))
        draws = self.draw(logits, work)
        kept = {n: rows.kept(draws[n], self.stop) for n, rows in work.items()}
        self.guess(hidden, batch, work, draws, [first[n] + path[-1] for n, path in kept.items()])
        self.model.finish(self.backend, batch, [path[-1] for path in kept.values()] if batch.drafted else None)
        for n, rows in work.items():
            self.replies[n] += rows.chosen(draws[n], self.stop)
        places = [asked.index((n, row)) for n, path in kept.items() for row in path]
        drafted = batch.rows - len(work) if batch.drafted else 0
        return Pass(phase, tuple(asked[place][0] for place in places), self.device.get(logits)[places], drafted)

    def batch(self, phase: str, work: Work) -> Batch:
        """The backend's tables; of a drafted pass where a window has drafts."""
        rows = [(self.streams[n], len(rows.ids)) for n, rows in work.items()]
        drafted = phase == DECODE and any(count > 1 for _, count in rows)
        return self.backend.batch(phase, rows, [rows.parents for rows in work.values()] if drafted else None)

    def draw(self, logits: Any, work: Work) -> Draws:
        """A token from each asked row, by its stream's sampling and the place where it will stand."""
        samplings = [self.samplings[n] for n, rows in work.items() for _ in rows.asked]
        places = [self.streams[n].committed + rows.depth(row) + 1 for n, rows in work.items() for row in rows.asked]
        ids = iter(choose(logits, samplings, places, self.device))
        return {n: [next(ids) for _ in rows.asked] for n, rows in work.items()}

    def guess(self, hidden: Any, batch: Batch, work: Work, draws: Draws, lasts: Sequence[int]) -> None:
        """The head reads the pass's rows, too; ``ranked`` takes its guesses behind the last row kept of each stream."""
        if self.head is None:
            return
        ids_next = self.put(
            max(i, 0) for n, rows in work.items() for i in rows.following(draws[n])
        )  # -1: there was none
        logits, _ = self.head.forward(ids_next, hidden, self.backend, batch, self.put(lasts))
        ranked = np.argsort(-self.device.get(logits), axis=1, kind="stable")[:, : self.guesses]
        self.ranked.update(zip(work, ranked.tolist()))

    def put(self, numbers: Iterable[int]) -> Any:
        """Numbers as int32 on the device."""
        return self.device.put(np.fromiter(numbers, np.int32))


def first_rows(work: Work) -> dict[int, int]:
    """Where each stream's rows begin in the pass."""
    return dict(zip(work, accumulate((len(rows.ids) for rows in work.values()), initial=0)))
