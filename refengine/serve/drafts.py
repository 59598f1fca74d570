"""A draft: tokens that may follow a stream's last one, as a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Draft:
    """tokens: ids. parents: of each, the place of the token that it follows, an earlier one; -1: the stream's last token."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()


def chain(tokens: Sequence[int]) -> Draft:
    """Each token follows the one before."""
    return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)))


def siblings(tokens: Sequence[int]) -> Draft:
    """Each token follows the stream's last one."""
    return Draft(tuple(tokens), (-1,) * len(tokens))


def joined(drafts: Sequence[Draft]) -> Draft:
    """The drafts as branches of one tree; what begins alike is drafted once."""
    places: dict[tuple[int, int], int] = {}
    for draft in drafts:
        here: list[int] = []
        for token, parent in zip(draft.tokens, draft.parents):
            here.append(places.setdefault((here[parent] if parent >= 0 else -1, token), len(places)))
    return Draft(tuple(token for _, token in places), tuple(parent for parent, _ in places))


def cut(draft: Draft, rows: int, depth: int) -> Draft:
    """The draft's first ``rows`` tokens of those that are at most ``depth`` tokens deep."""
    tokens: list[int] = []
    parents: list[int] = []
    kept, depths = {-1: -1}, {-1: 0}
    for place, (token, parent) in enumerate(zip(draft.tokens, draft.parents)):
        if parent in kept and depths[parent] < depth and len(tokens) < rows:
            kept[place], depths[place] = len(tokens), depths[parent] + 1
            tokens.append(token)
            parents.append(kept[parent])
    return Draft(tuple(tokens), tuple(parents))
