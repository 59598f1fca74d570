"""A reply on its way to stdout: token by token, as whole characters, and with nothing that steers a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from backends.base import DECODE
from refengine.commands.report import progress_bar
from refengine.serve.forward import Pass
from refengine.serve.replies import tokens_of
from refengine.serve.session import Session
from refengine.text import TextStream


@dataclass(eq=False)
class Reply:
    """What was generated. ended: by an end token. seconds: from the first pass to the last token. drafted, accepted: drafts
    that were tried, and those that were right."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ended: bool = False
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0

    @property
    def summary(self) -> str:
        """One line."""
        end = "end token" if self.ended else "--tokens reached"
        drafts = f", {self.accepted} of {self.drafted} drafts accepted" if self.drafted else ""
        return f"{self.prompt_tokens} prompt tokens, {len(self.tokens)} tokens in {self.seconds:.1f} s, {end}{drafts}"

    def count(self, one: Pass) -> None:
        """Take a pass's drafts into the figures: behind a window's first row, rows that were kept are accepted drafts."""
        if one.phase == DECODE:
            self.drafted += one.drafted
            self.accepted += len(one.logits) - 1


def generate(session: Session, tokens: int, stream: TextStream) -> Reply:
    """Run the session and show its text piece by piece; whatever ends it, the text ends with its line."""
    reply, began = Reply(len(session.prompts[0])), time.perf_counter()
    try:
        for token in read_and_reply(session, tokens, reply):
            take(token, reply, session, stream)
        session.device.synchronize()
        reply.seconds = time.perf_counter() - began
        say(stream.end(), reply)
    finally:
        if reply.tokens:
            show("\n")
    return reply


def take(token: int, reply: Reply, session: Session, stream: TextStream) -> None:
    """The next token of a reply; one that ends it has no text."""
    reply.tokens.append(token)
    reply.ended = token in session.stop
    if not reply.ended:
        say(stream.push(token), reply)


def say(piece: str, reply: Reply) -> None:
    """The next piece of a reply's text."""
    reply.text += piece
    show(piece)


def read_and_reply(session: Session, tokens: int, reply: Reply) -> Iterator[int]:
    """The tokens, while ``reply`` counts drafts; a progress bar stands there until the prompt is read."""
    with progress_bar() as bar:
        task = bar.add_task("prompt", total=-(-len(session.prompts[0]) // session.prompt_rows))

        def passed(one: Pass) -> None:
            bar.advance(task)
            reply.count(one)

        tokens_left = tokens_of(session, tokens, passed)
        first = next(tokens_left)
    return chain([first], tokens_left)


def show(piece: str) -> None:
    """Write to stdout at once what its encoding has, and to a terminal nothing that steers it."""
    out = sys.stdout
    encoding = out.encoding or "utf-8"
    shown = piece.encode(encoding, "replace").decode(encoding)
    out.write(harmless(shown) if out.isatty() else shown)
    out.flush()


def harmless(text: str) -> str:
    """The text with U+FFFD for every control character."""
    return "".join("\N{REPLACEMENT CHARACTER}" if is_control(c) else c for c in text)


def is_control(character: str) -> bool:
    """Whether a terminal may take it for a command: C0 but newline and tab, DEL, C1."""
    return character not in "\n\t" and (character < " " or "\x7f" <= character < "\xa0")
