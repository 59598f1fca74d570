"""Chat templates: a conversation as the one text that a model was trained on, by the checkpoint's Jinja template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypedDict

from refengine.checkpoint.strict_json import load_json
from refengine.errors import UserError
from refengine.text.extra import extra

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Message(TypedDict):
    """One turn. role: "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True)
class ChatTemplate:
    """A template. file: where it stands. specials: what it may call by name, such as bos_token."""

    file: Path
    source: str
    specials: dict[str, str]

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation, up to where the assistant's next words begin.

        Raises UserError when jinja2 is missing, or the template is damaged or refuses the conversation.
        """
        sandbox = extra("jinja2.sandbox", "--chat")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = plain_json
        environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        given = {"tools": None, "documents": None, "add_generation_prompt": True} | self.specials
        try:
            return environment.from_string(self.source).render(messages=list(messages), **given)
        except Exception as problem:  # a template is a program of somebody else's
            raise UserError(f"{self.file}: the chat template stopped: {problem}; leave --chat out") from problem


def open_chat_template(folder: Path | None) -> ChatTemplate:
    """The chat template of a checkpoint folder: a file of its own, or a key of tokenizer_config.json.

    folder: None for generated weights. Raises UserError where there is no template, or one that cannot be read.
    """
    if folder is None:
        raise UserError(f"--chat: generated weights have no chat template; name a checkpoint folder with {FILE}")
    config = load_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    if (folder / FILE).exists():
        return ChatTemplate(folder / FILE, read_utf8(folder / FILE), specials_of(config))
    if config.get("chat_template") is None:
        raise UserError(f"--chat: {folder} has no {FILE}, and no chat_template in a {CONFIG}; leave --chat out")
    return ChatTemplate(folder / CONFIG, default_of(config["chat_template"], folder), specials_of(config))


def default_of(found: Any, folder: Path) -> str:
    """The template of tokenizer_config.json: text, or the one named default of a list of {name, template}."""
    if isinstance(found, list):
        entries = [entry for entry in found if isinstance(entry, dict)]
        found = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    if not isinstance(found, str):
        raise UserError(f"{folder / CONFIG}: chat_template: must be text, or a list with one named default")
    return found


def specials_of(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens of tokenizer_config.json: each is text, or an object with its ``content``."""
    values = {key: config.get(key) for key in SPECIALS}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in values.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def read_utf8(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as problem:
        raise UserError(f"{path}: cannot be read: {problem}") from problem


def plain_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    """JSON as templates expect it: nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def refuse(reason: str) -> NoReturn:
    """What a template calls to refuse a conversation."""
    raise ValueError(reason)
