"""Which text a model has: its checkpoint's tokenizer, or bytes."""

from __future__ import annotations

from pathlib import Path

from refengine.errors import UserError
from refengine.registry import ModelSpec
from refengine.text.byte_text import ByteText
from refengine.text.interface import Text
from refengine.text.tokenizer import TOKENIZER, open_tokenizer

OTHER_FORMS = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt")
"""Files of a checkpoint that has a tokenizer."""


def open_text(spec: ModelSpec, folder: Path | None) -> Text:
    """The text of a model. folder: its checkpoint's; None for generated weights, which have no tokenizer.

    Raises UserError where the model has a tokenizer and there is none to read, and as open_tokenizer does.
    """
    if folder is None:
        if spec.tokens.text != "bytes":
            raise UserError(
                f"{spec.name}: generated weights have no tokenizer; name a checkpoint folder with {TOKENIZER}"
            )
        return ByteText()
    if spec.tokens.text == "bytes":
        refuse_other_forms(folder)
        return ByteText()
    return open_tokenizer(folder, spec.vocabulary)


def refuse_other_forms(folder: Path) -> None:
    """A checkpoint with a tokenizer in another form is none of bytes."""
    for name in OTHER_FORMS:
        if (folder / name).exists():
            raise UserError(f"{folder / TOKENIZER}: is missing beside {name}; put the model's own there")
