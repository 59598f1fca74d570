"""A pass over the rows of several requests: the model, the draws, and what is kept. Spec serving §0.

A decode pass takes a window of each stream: its last token, and behind it what its drafter proposes. Rows whose tokens are
what is drawn are kept, so a pass gives a stream one token or more. Without drafters each window has one row: plain decode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from backends.base import DECODE, Backend, Batch
from refengine.device import Device
from refengine.model import Head, Model, Tap
from refengine.serve.requests import Request
from refengine.serve.sampling import choose
from refengine.serve.windows import Rows

Work = Mapping[Request, Rows]
"""The rows of a pass."""
Draws = Mapping[Request, list[int]]
"""The tokens drawn from each request's asked rows."""


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass. logits: float32 [rows, vocabulary], of the last row of each prompt chunk, or of the decode rows that
    were kept. streams: the number of the request whose each row is. drafted: how many rows were drafts, kept or not."""

    phase: str
    streams: tuple[int, ...]
    logits: np.ndarray
    drafted: int = 0


class Step(Protocol):
    """What runs a pass: the rows of requests that have streams; their replies and streams move on."""

    def __call__(self, phase: str, work: Work) -> Pass: ...


@dataclass(eq=False)
class Forward:
    """A model's passes through a backend. head: reads every row, for drafters that take its guesses, ``guesses`` of them; the
    backend has its layer then. tap: as Model.forward takes it."""

    model: Model
    backend: Backend
    device: Device
    head: Head | None = None
    guesses: int = 0
    tap: Tap | None = None

    def __call__(self, phase: str, work: Work) -> Pass:
        """One pass over the requests' rows, and the tokens that follow from it."""
        batch, first = self.batch(phase, work), first_rows(work)
        hidden = self.model.hidden(
            self.put(i for rows in work.values() for i in rows.ids), self.backend, batch, self.tap
        )
        asked = [(one, row) for one, rows in work.items() for row in rows.asked]
        logits = self.model.logits(hidden, self.put(first[one] + row for one, row in asked))
        draws = self.draw(logits, work)
        kept = {one: rows.kept(draws[one], one.stop) for one, rows in work.items()}
        self.guess(hidden, batch, work, draws, [first[one] + path[-1] for one, path in kept.items()])
        self.model.finish(self.backend, batch, [path[-1] for path in kept.values()] if batch.drafted else None)
        for one, rows in work.items():
            one.reply += rows.chosen(draws[one], one.stop)
        places = [asked.index((one, row)) for one, path in kept.items() for row in path]
        drafted = batch.rows - len(work) if batch.drafted else 0
        return Pass(phase, tuple(asked[place][0].number for place in places), self.device.get(logits)[places], drafted)

    def batch(self, phase: str, work: Work) -> Batch:
        """The backend's tables; of a drafted pass where a window has drafts."""
        rows = [(one.place, len(rows.ids)) for one, rows in work.items()]
        drafted = phase == DECODE and any(count > 1 for _, count in rows)
        return self.backend.batch(phase, rows, [rows.parents for rows in work.values()] if drafted else None)

    def draw(self, logits: Any, work: Work) -> Draws:
        """A token from each asked row, by its request's sampling and the place where it will stand."""
        samplings = [one.sampling for one, rows in work.items() for _ in rows.asked]
        places = [one.place.committed + rows.depth(row) + 1 for one, rows in work.items() for row in rows.asked]
        ids = iter(choose(logits, samplings, places, self.device))
        return {one: [next(ids) for _ in rows.asked] for one, rows in work.items()}

    def guess(self, hidden: Any, batch: Batch, work: Work, draws: Draws, lasts: Sequence[int]) -> None:
        """The head reads the pass's rows, too; ``ranked`` takes its guesses behind the last row kept of each request."""
        if self.head is None:
            return
        following = (i for one, rows in work.items() for i in rows.following(draws[one]))
        ids_next = self.put(max(i, 0) for i in following)  # -1: there was none
        logits, _ = self.head.forward(ids_next, hidden, self.backend, batch, self.put(lasts))
        ranked = np.argsort(-self.device.get(logits), axis=1, kind="stable")[:, : self.guesses]
        for one, best in zip(work, ranked.tolist()):
            one.ranked = best

    def put(self, numbers: Iterable[int]) -> Any:
        """Numbers as int32 on the device."""
        return self.device.put(np.fromiter(numbers, np.int32))


def first_rows(work: Work) -> dict[Request, int]:
    """Where each request's rows begin in the pass."""
    return dict(zip(work, accumulate((len(rows.ids) for rows in work.values()), initial=0)))
