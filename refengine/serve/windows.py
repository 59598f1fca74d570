"""The rows that a stream puts into a pass: a chunk of its prompt, or a window of decode rows. Spec attention §2, serving §0.

A window's row 0 is the stream's last chosen token, its other rows are a draft's tokens. A row is accepted where its token is
what was drawn from the row that it follows, so the tokens are those of plain decode, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from refengine.serve.drafts import Draft


class Rows(Protocol):
    """What a pass asks of a stream's rows. Draws are the tokens drawn from the ``asked`` rows, in their order."""

    @property
    def ids(self) -> tuple[int, ...]:
        """The token of each row."""
        ...

    @property
    def parents(self) -> tuple[int, ...]:
        """The row that each follows, -1: what is committed."""
        ...

    @property
    def asked(self) -> range:
        """The rows from which tokens are drawn."""
        ...

    def depth(self, row: int) -> int:
        """Rows of the same stream in the pass that a row follows: how far behind the committed ones it stands."""
        ...

    def kept(self, draws: Sequence[int], stop: Collection[int]) -> list[int]:
        """The asked rows that plain passes would have run. stop: the tokens that end a reply."""
        ...

    def chosen(self, draws: Sequence[int], stop: Collection[int]) -> list[int]:
        """The tokens that the rows add to the reply."""
        ...

    def following(self, draws: Sequence[int]) -> tuple[int, ...]:
        """The token after each row's, as far as it is kept."""
        ...


@dataclass(frozen=True)
class Chunk:
    """Rows of a prompt. ids: their tokens. rest: the prompt's tokens behind them."""

    ids: tuple[int, ...]
    rest: tuple[int, ...]

    @property
    def parents(self) -> tuple[int, ...]:
        return tuple(range(-1, len(self.ids) - 1))

    @property
    def asked(self) -> range:
        return range(len(self.ids) - 1, len(self.ids))

    def depth(self, row: int) -> int:
        return row

    def kept(self, draws: Sequence[int], stop: Collection[int]) -> list[int]:
        return list(self.asked)

    def chosen(self, draws: Sequence[int], stop: Collection[int]) -> list[int]:
        return [] if self.rest else list(draws)

    def following(self, draws: Sequence[int]) -> tuple[int, ...]:
        return (*self.ids[1:], *(self.rest[:1] or draws))


@dataclass(frozen=True)
class Window:
    """Decode rows: the stream's last token, and a draft behind it."""

    last: int
    draft: Draft = Draft()

    @property
    def ids(self) -> tuple[int, ...]:
        return (self.last, *self.draft.tokens)

    @property
    def parents(self) -> tuple[int, ...]:
        return (-1, *(parent + 1 for parent in self.draft.parents))

    @property
    def asked(self) -> range:
        return range(len(self.ids))

    def depth(self, row: int) -> int:
        return 1 + self.depth(self.parents[row]) if row else 0

    def kept(self, draws: Sequence[int], stop: Collection[int]) -> list[int]:
        path: list[int] = []
        row: int | None = 0
        while row is not None:
            path.append(row)
            row = None if draws[row] in stop else self.child(row, draws[row])
        return path

    def child(self, parent: int, token: int) -> int | None:
        """The row of a token behind another row, if it was drafted."""
        rows = zip(self.asked, self.ids, self.parents)
        return next((row for row, drafted, behind in rows if (behind, drafted) == (parent, token)), None)

    def chosen(self, draws: Sequence[int], stop: Collection[int]) -> list[int]:
        return [draws[row] for row in self.kept(draws, stop)]

    def following(self, draws: Sequence[int]) -> tuple[int, ...]:
        return tuple(draws)
