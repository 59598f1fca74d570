"""A byte-level tokenizer as a checkpoint of the family has one, small enough for the tiny model's vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["the page of a table", "a page table of pages", "the table", "Ein Käse für 3 €"]
TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make_tokenizer():
    """A ``tokenizers.Tokenizer``: 256 bytes, some merges, and three special tokens, 300 ids in all."""
    library = pytest.importorskip("tokenizers", reason="tokenizers is not installed: the extra [hf]")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS * 4, trainer)
    return tokenizer


def with_beginning(tokenizer):
    """A copy that puts the first special token before a plain text."""
    library, first = pytest.importorskip("tokenizers"), SPECIALS[0]
    copy = library.Tokenizer.from_str(tokenizer.to_str())
    copy.post_processor = library.processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, copy.token_to_id(first))]
    )
    return copy


def byte_ids(tokenizer) -> list[int]:
    """The token id of each byte: printable bytes of Latin-1 are written as themselves, the others from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [b for b in range(256) if b not in printable]
    return [tokenizer.token_to_id(chr(b if b in printable else 256 + others.index(b))) for b in range(256)]


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json, and tokenizer_config.json with a chat template."""
    with_beginning(make_tokenizer()).save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
