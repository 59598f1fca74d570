"""A reply as it is generated: its tokens one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from refengine.serve.forward import Pass
from refengine.serve.session import Session


class NoToken(Exception):
    """A row of logits from which nothing can be chosen: NaN, all of them."""


def tokens_of(session: Session, tokens: int, passed: Callable[[Pass], None] = lambda _: None) -> Iterator[int]:
    """The reply to the session's one prompt, at most ``tokens`` ids; one of the session's ``stop`` is the last.

    passed: called with each pass, before its tokens. Raises NoToken where a token cannot be chosen.
    """
    given = 0
    for one in session.run(tokens):
        passed(one)
        for token in session.replies[0][given:]:
            given += 1
            if token < 0:
                raise NoToken(f"token {given}: every logit is NaN")
            yield token
