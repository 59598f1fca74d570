"""Who drafts: from the stream's own text, or what the MTP head makes of its last row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from refengine.serve.drafts import Draft, chain, joined, siblings


class Drafter(Protocol):
    """Proposes what may follow a stream. guesses: how many of the MTP head's tokens it looks at; 0: it needs no head."""

    @property
    def guesses(self) -> int: ...

    def propose(self, tokens: Sequence[int], ranked: Sequence[int]) -> Draft:
        """tokens: the stream's prompt and reply. ranked: the head's tokens for the next place, best first."""
        ...


@dataclass(frozen=True)
class NgramDrafter:
    """What followed the newest earlier place whose last tokens are the stream's, as many alike as possible.

    longest: tokens compared, at most. tokens: drafted, at most. earlier: a text to look in besides, an earlier reply's.
    """

    longest: int = 4
    tokens: int = 4
    earlier: tuple[int, ...] = ()
    guesses: ClassVar[int] = 0

    def propose(self, tokens: Sequence[int], ranked: Sequence[int]) -> Draft:
        text = (*self.earlier, *tokens)
        places = range(len(text) - 1, 0, -1)
        alike, end = max(((self.alike(text, place), place) for place in places), default=(0, 0))
        return chain(text[end : end + self.tokens] if alike else ())

    def alike(self, text: Sequence[int], end: int) -> int:
        """How many tokens before ``end`` are those before the text's end."""
        count = 0
        while count < min(self.longest, end) and text[end - 1 - count] == text[-1 - count]:
            count += 1
        return count


@dataclass(frozen=True)
class MtpDrafter:
    """The head's best tokens for the next place, side by side: one is a chain, more are a tree."""

    guesses: int = 1

    def propose(self, tokens: Sequence[int], ranked: Sequence[int]) -> Draft:
        return siblings(ranked[: self.guesses])


@dataclass(frozen=True)
class JoinedDrafter:
    """Several drafters' drafts as branches of one tree, the first one's rows first."""

    drafters: tuple[Drafter, ...]

    @property
    def guesses(self) -> int:
        return max(drafter.guesses for drafter in self.drafters)

    def propose(self, tokens: Sequence[int], ranked: Sequence[int]) -> Draft:
        return joined([drafter.propose(tokens, ranked) for drafter in self.drafters])
