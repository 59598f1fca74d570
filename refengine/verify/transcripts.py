"""What streams got from the engine, kept to be compared: many decodes, in other company or with other drafters, behind
prompts that are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from backends.base import DECODE, PROMPT
from refengine.model import Head
from refengine.serve.drafters import Drafter
from refengine.serve.forward import Pass
from refengine.serve.session import Session
from refengine.verify.hashes import logits_hash, token_hash

Progress = Callable[[], None]
"""Called when prompts are read, and after each decode."""


@dataclass(frozen=True, eq=False)
class Transcript:
    """One stream's. prompt: float32 [prompt passes, vocabulary], the last row of each. decode: float32 [tokens - 1,
    vocabulary]. tokens: its reply. accepted: drafts among the decode rows."""

    prompt: np.ndarray
    decode: np.ndarray
    tokens: tuple[int, ...]
    accepted: int = 0

    @property
    def hashes(self) -> tuple[str, str]:
        """Of the logits and of the tokens."""
        return logits_hash([*self.prompt, *self.decode]), token_hash(self.tokens)

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.prompt).all() and np.isfinite(self.decode).all())

    def first(self, tokens: int) -> Transcript:
        """From the prompt's last row to the first tokens of the reply: what no cut of the prompt into passes may change."""
        return replace(self, prompt=self.prompt[-1:], decode=self.decode[: tokens - 1], tokens=self.tokens[:tokens])


def transcript(number: int, passes: Sequence[Pass], reply: Sequence[int]) -> Transcript:
    """A stream's part of a session."""
    rows = {phase: [r for p in passes if p.phase == phase for r in rows_of(p, number)] for phase in (PROMPT, DECODE)}
    took = sum(p.phase == DECODE and number in p.streams for p in passes)
    empty = np.empty((0, passes[0].logits.shape[1]), np.float32)
    prompt, decode = (np.array(rows[phase]) if rows[phase] else empty for phase in (PROMPT, DECODE))
    return Transcript(prompt, decode, tuple(reply), len(decode) - took)


def rows_of(one: Pass, number: int) -> list[np.ndarray]:
    return [row for owner, row in zip(one.streams, one.logits) if owner == number]


def difference(found: Transcript, wanted: Transcript) -> str | None:
    """Where two transcripts part: the first row and token, both values in hex; None when all their bits are equal."""
    for name, a, b in (("prompt pass", found.prompt, wanted.prompt), ("decode row", found.decode, wanted.decode)):
        rows = min(len(a), len(b))
        where = np.argwhere(a[:rows].view(np.uint32) != b[:rows].view(np.uint32))
        if len(where):
            row, token = (int(i) for i in where[0])
            return f"{name} {row + 1}, token {token}: {hexed(a[row, token])} against {hexed(b[row, token])}"
        if len(a) != len(b):
            return f"{len(a)} {name}s against {len(b)}"
    return None if found.tokens == wanted.tokens else f"tokens {found.tokens} against {wanted.tokens}"


def hexed(value: np.float32) -> str:
    return f"0x{value.view(np.uint32):08x}"


# --- Decodes behind the same prompts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decode:
    """A decode of a session's streams by name. drafters: of each stream, none in plain decode."""

    name: str
    drafters: tuple[Drafter | None, ...] = ()


class Start:
    """A session whose prompts are read, kept so that several decodes begin there."""

    def __init__(self, session: Session):
        for stream in session.streams:
            stream.grow(stream.capacity)
        self.session, self.words = session, session.backend.arena.words.copy()
        self.places = [(one, one.place.committed, list(one.reply), one.ranked) for one in session.opened]

    def put_back(self) -> None:
        """Make caches, states, replies and guesses what they were; the streams' pages have not changed."""
        self.session.backend.arena.words[:] = self.words
        for one, committed, reply, ranked in self.places:
            one.place.committed, one.reply, one.ranked = committed, list(reply), ranked


PLAIN = "plain"
Together = dict[tuple[int, str], list[Transcript]]
"""Each stream's transcript, by how many streams there were and by the decode's name; PLAIN is among them."""
Drafted = Callable[[list[Transcript]], Sequence[Decode]]
"""The decodes with drafts that follow a plain one."""


def together(
    session: Session, counts: Sequence[int], tokens: int, done: Progress, drafted: Drafted = lambda plain: ()
) -> Together:
    """Plain decode of the first n streams together, for each n of ``counts``, ascending, and the decodes with drafts that
    follow; then the next streams join. Streams that join together read their prompts together, for the session's drafters.
    """
    found: Together = {}
    head, drafters, prompts = session.head, [one.drafter for one in session.requests], list[Pass]()
    for count in counts:
        session.draft_with(drafters, head)
        prompts += session.read(count - len(session.streams), tokens)
        start = Start(session)
        done()
        plain = found[count, PLAIN] = decoded(start, head, Decode(PLAIN), prompts, tokens)
        done()
        for decode in drafted(plain):
            found[count, decode.name] = decoded(start, head, decode, prompts, tokens)
            done()
    return found


def decoded(start: Start, head: Head | None, decode: Decode, prompts: Sequence[Pass], tokens: int) -> list[Transcript]:
    """A decode from the start, which is put back. head: reads along if a drafter looks at its guesses."""
    session = start.session
    session.draft_with(decode.drafters or [None] * len(session.streams), head)
    passes = [*prompts, *session.write(tokens)]
    found = [transcript(n, passes, session.replies[n]) for n in range(len(session.streams))]
    start.put_back()
    return found


def alone(sessions: Sequence[Session], tokens: int, done: Progress) -> list[Transcript]:
    """The transcript of the one stream of each session; the sessions may share a backend."""
    found = []
    for session in sessions:
        passes = list(session.run(tokens))
        found.append(transcript(0, passes, session.replies[0]))
        session.streams[0].release()
        done()
    return found
