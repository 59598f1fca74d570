"""The serving equalities: which runs they take, and what they say of them. Spec serving §5.

Each is a comparison of bits: the last logits row of every prompt pass, the row of every decode step, and the tokens. One that
was not put to the test is UNCHECKED, not held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from refengine.serve.drafters import Drafter, JoinedDrafter, MtpDrafter, NgramDrafter
from refengine.verify.transcripts import PLAIN, Decode, Together, Transcript, difference

TITLES = {
    "1": "paged == window",
    "2": "together == alone",
    "3": "resumed == fresh",
    "4": "drafted == plain",
    "5a": "chunked == one pass",
    "5b": "preempted or waited == not",
    "6": "overcommitted == alone",
}
HELD, FAILED, UNCHECKED = "held", "failed", "unchecked"
CHUNKED_TOKENS = 3
"""Tokens generated behind a prompt that was read in chunks."""


@dataclass(frozen=True)
class Form:
    """A form of cache: a backend, and the positions a page where it has pages."""

    backend: str
    page_size: int = 256

    def __str__(self) -> str:
        return self.backend if self.backend in ("window", "paged-p256") else f"{self.backend} {self.page_size}"


@dataclass(frozen=True)
class Check:
    """One equality of one run. streams: at once. what: besides, which run it is. note: why it did not hold."""

    equality: str
    form: str
    streams: int
    what: str
    outcome: str
    note: str = ""
    drafts: int = 0
    hashes: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        place = ", ".join(filter(None, [self.form, f"{self.streams} streams", self.what]))
        return f"{self.outcome.upper()} {self.equality} {TITLES[self.equality]}: {place}: {self.note}"


Pair = tuple[int, Transcript, Transcript]
"""(stream, what was found, what was wanted)."""


def check(equality: str, form: str, streams: int, what: str, pairs: Sequence[Pair], untested: str | None) -> Check:
    """Compare the pairs. untested: why equal pairs prove nothing, if they do not."""
    place = (equality, form, streams, what)
    drafts, hashes = sum(found.accepted for _, found, _ in pairs), [found.hashes for _, found, _ in pairs]
    for stream, found, wanted in pairs:
        if (where := difference(found, wanted)) is not None:
            return Check(*place, FAILED, f"stream {stream}, {where}", drafts, hashes)
    if not all(found.is_finite for _, found, _ in pairs):
        untested = "logits that are not finite"
    return Check(*place, UNCHECKED if untested else HELD, untested or "", drafts, hashes)


def numbered(found: Sequence[Transcript], wanted: Sequence[Transcript]) -> list[Pair]:
    return [(n, a, b) for n, (a, b) in enumerate(zip(found, wanted))]


# --- 1 and 2: the same decode in other places and other company -------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Run:
    """What a form's streams got. tables: the pages that hold a position of each."""

    form: Form
    found: Together
    tables: list[list[int]]

    def untested(self, streams: int) -> str | None:
        """Why the pages of so many streams prove nothing, if they do not."""
        tables = self.tables[:streams]
        if all(len(pages) < 2 for pages in tables):
            return f"one page only; prompts of more than {self.form.page_size} tokens take more"
        if all(sorted(pages) == pages for pages in tables):
            return "the page tables are ascending; hand the pages out in another order"
        return None


def paged_is_window(window: Run, paged: Run) -> Iterator[Check]:
    """Equality 1, for each number of streams."""
    for (streams, name), found in paged.found.items():
        pairs = numbered(found, window.found[streams, name])
        yield check("1", str(paged.form), streams, "", pairs, paged.untested(streams))


def together_is_alone(alone: Sequence[Transcript], run: Run) -> Iterator[Check]:
    """Equality 2, for each number of streams from 2 on; alone: each stream in a window."""
    for (streams, _), found in run.found.items():
        if streams > 1:
            yield check("2", str(run.form), streams, "", numbered(found, alone), None)


# --- 4: drafts --------------------------------------------------------------------------------------------------------

WINDOW_ROWS = 8
"""Rows of a stream's window, at most."""
ALTERED = 5
"""Of an earlier reply that n-grams are looked up in, every fifth token is another: some drafts are right, and some are not."""


def drafters(has_head: bool, trees: bool, earlier: Sequence[int] = ()) -> dict[str, Drafter]:
    """The drafters that a model can have, by name. trees: whether its windows take them. earlier: a reply that the n-grams come
    from besides the stream's tokens."""
    ngram = NgramDrafter(earlier=altered(earlier))
    found: dict[str, Drafter] = {"n-gram chain": ngram}
    if has_head:
        found |= {"MTP chain": MtpDrafter()}
    if has_head and trees:
        found |= {"MTP tree": MtpDrafter(3), "MTP and n-gram tree": JoinedDrafter((MtpDrafter(2), ngram))}
    return found


def altered(tokens: Sequence[int]) -> tuple[int, ...]:
    """The tokens, every ALTERED-th another; without -1, which stands for none."""
    tokens = [token for token in tokens if token >= 0]
    return tuple(other(token) if place % ALTERED == ALTERED - 1 else token for place, token in enumerate(tokens))


def other(token: int) -> int:
    """A token of the vocabulary that is not this one."""
    return token - 1 if token else 1


def turns(names: Sequence[str], streams: int) -> range:
    """Decodes that it takes until every drafter had a stream."""
    return range(-(-len(names) // streams))


def drafted_decodes(names: Sequence[str], plain: Sequence[Transcript]) -> list[Decode]:
    """Those decodes, after a plain one."""
    choices = [drafters(True, True, one.tokens) for one in plain]
    return [
        Decode(f"turn {turn}", tuple(map(dict.__getitem__, choices, in_turn(names, len(plain), turn))))
        for turn in turns(names, len(plain))
    ]


def in_turn(names: Sequence[str], streams: int, turn: int) -> list[str]:
    """Which drafter each stream has in a decode."""
    return [names[(turn * streams + stream) % len(names)] for stream in range(streams)]


def drafted_is_plain(form: Form, sampling: str, names: Sequence[str], found: Together) -> Iterator[Check]:
    """Equality 4, for each number of streams and each drafter."""
    for streams in sorted({count for count, _ in found}):
        plain = found[streams, PLAIN]
        for name in names:
            pairs = [
                (stream, found[streams, f"turn {turn}"][stream], plain[stream])
                for turn in turns(names, streams)
                for stream, taken in enumerate(in_turn(names, streams, turn))
                if taken == name
            ]
            accepted = any(one.accepted for _, one, _ in pairs)
            untested = None if accepted else "no draft was accepted; more --tokens give more chances"
            yield check("4", str(form), streams, f"{sampling}, {name}", pairs, untested)


# --- 5a: prompts in chunks --------------------------------------------------------------------------------------------


def chunked_is_one_pass(whole: Run, chunk: int, found: Together) -> Iterator[Check]:
    """Equality 5a, for each number of streams: the prompts' last rows and the first tokens behind them."""
    for (streams, name), cut in found.items():
        wanted = whole.found[streams, name]
        ends = [(n, a.first(len(a.tokens)), b.first(len(a.tokens))) for n, a, b in numbered(cut, wanted)]
        chunked = any(len(one.prompt) > 1 for one in cut) and all(len(one.prompt) == 1 for one in wanted)
        untested = None if chunked else f"no prompt is longer than {chunk} tokens"
        yield check("5a", str(whole.form), streams, f"{chunk} rows a pass", ends, untested)


# --- All of them ------------------------------------------------------------------------------------------------------


def count(checks: Sequence[Check], outcome: str) -> int:
    return sum(one.outcome == outcome for one in checks)


def verdict(checks: Sequence[Check]) -> tuple[str, bool]:
    """The last line of ``equal``, and whether all is well."""
    held, failed, unchecked = (count(checks, outcome) for outcome in (HELD, FAILED, UNCHECKED))
    return f"EQUALITIES {held} held, {failed} failed, {unchecked} unchecked", bool(held) and not failed + unchecked
