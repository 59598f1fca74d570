"""A reply as it is generated: its tokens one by one, up to an end token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from refengine.serve.passes import Session
from refengine.serve.sampling import Sampling, draw


class NoToken(Exception):
    """A row of logits from which nothing can be chosen: NaN, all of them."""


@dataclass(eq=False)
class SampledSession(Session):
    """A session of one prompt, whose tokens are drawn as ``sampling`` says."""

    sampling: Sampling = Sampling()

    def greedy(self, logits: Any) -> list[int]:
        position = len(self.prompts[0]) + len(self.replies[0])
        return draw(logits, [self.sampling], [position], self.device)


def tokens_of(
    session: Session, tokens: int, end: Collection[int] = (), ticked: Callable[[], None] = lambda: None
) -> Iterator[int]:
    """The reply to the session's one prompt, at most ``tokens`` ids; one of ``end`` is the last.

    ticked: called after each pass. Raises NoToken where a token cannot be chosen.
    """
    given = 0
    for _ in session.run(tokens):
        ticked()
        for token in session.replies[0][given:]:
            if token < 0:
                raise NoToken(f"token {given + 1}: every logit is NaN")
            given += 1
            yield token
            if token in end:
                return
