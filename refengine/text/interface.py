"""What turns text into token ids, and token ids into text as they come."""

from __future__ import annotations

from typing import Protocol


class TextStream(Protocol):
    """The text of one reply, token by token; what ``push`` and ``end`` return, joined, is the whole text."""

    def push(self, token: int) -> str:
        """The text that is whole now that ``token`` has come: never half a character, and perhaps nothing."""

    def end(self) -> str:
        """What is left when no token follows: U+FFFD for a character that did not become whole."""


class Text(Protocol):
    """How a model's token ids are written."""

    def encode(self, text: str, templated: bool = False) -> list[int]:
        """The token ids of a text. templated: it comes from a chat template, which has named every special token already.

        Bytes that are no UTF-8 stand in the text as Python's surrogate escapes; raises UnicodeError where a text must be
        UTF-8.
        """

    def stream(self) -> TextStream:
        """The text of a new reply. Special tokens, and ids that stand for nothing, show nothing."""
