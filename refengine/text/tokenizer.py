"""The tokenizer of a Hugging Face checkpoint: its tokenizer.json, read by the ``tokenizers`` library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from refengine.errors import UserError
from refengine.text.extra import extra

TOKENIZER = "tokenizer.json"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MOST_UNFINISHED = 3
"""Bytes of a character that is not whole, at most; a decoder shows each, or all of them, as one REPLACEMENT."""


class TokenizerText:
    """Text by a tokenizer.json. tokenizer: a ``tokenizers.Tokenizer``."""

    def __init__(self, tokenizer: Any):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.silent = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)

    def encode(self, text: str, templated: bool = False) -> list[int]:
        """The text's tokens; a plain text gets those that the tokenizer puts around one. Raises UnicodeError for no UTF-8."""
        text.encode("utf-8")
        return self.tokenizer.encode(text, add_special_tokens=not templated).ids

    def stream(self) -> TokenizerStream:
        return TokenizerStream(self.tokenizer, self.silent)


class TokenizerStream:
    """Tokens to whole characters. silent: ids that show nothing.

    For a byte-level tokenizer, the family's kind, the pieces make up what ``Tokenizer.decode`` gives of all tokens at once.
    """

    def __init__(self, tokenizer: Any, silent: frozenset[int]):
        self.tokenizer, self.silent = tokenizer, silent
        self.ids: list[int] = []  # the last token of what is shown, for a decoder that looks back, and those after it
        self.shown = 0  # characters of their text that are out

    def push(self, token: int) -> str:
        if token in self.silent or self.tokenizer.id_to_token(token) is None:
            return ""
        self.ids.append(token)
        text = self.decode(self.ids)
        whole = finished(text)
        piece = whole[self.shown :]
        if whole == text:
            self.ids, self.shown = [token], len(self.decode([token]))
        else:
            self.shown = max(self.shown, len(whole))
        return piece

    def end(self) -> str:
        piece = self.decode(self.ids)[self.shown :]
        self.ids, self.shown = [], 0
        return piece

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def finished(text: str) -> str:
    """The text without an end that further bytes may turn into another character."""
    certain = text.rstrip(REPLACEMENT)
    return text[: max(len(certain), len(text) - MOST_UNFINISHED)]


def open_tokenizer(folder: Path, vocabulary: int) -> TokenizerText:
    """The tokenizer of a checkpoint folder. vocabulary: ids that its model has.

    Raises UserError when the library is missing, the file cannot be read, or it has ids that the model has not.
    """
    path = folder / TOKENIZER
    library = extra("tokenizers", str(path))
    try:
        tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as problem:  # the library raises nothing narrower
        raise UserError(f"{path}: cannot be read as a tokenizer: {problem}; fetch it again") from problem
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= vocabulary:
        raise UserError(f"{path}: has token id {largest}, the model's vocabulary is {vocabulary}; take the model's own")
    return TokenizerText(tokenizer)
