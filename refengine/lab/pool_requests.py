"""The list of requests that ``refengine pool`` simulates: in short on the command line, or a YAML file.

    16x109000+512,4x2000+48                      count x prompt + reply, in tokens

    - {count: 8, prompt: 9000, tokens: 64, shared: {with: manual, tokens: 8000}, arrive: 3}
    - {prompt: 100, tokens: 4000, cancel: 40}

shared: prompts with the same name begin alike, with so many tokens. arrive, cancel: the rounds before which a request joins the
line, and is taken out wherever it is; the first round is 1.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from refengine.errors import UserError
from refengine.registry.reader import Where, read
from refengine.registry.strict_yaml import load_yaml
from refengine.serve.requests import Request

SHORT = re.compile(r"(?:([1-9][0-9]{0,8})x)?([1-9][0-9]{0,8})\+([1-9][0-9]{0,8})")
MOST_REQUESTS, MOST_TOKENS = 4096, 1 << 26
"""Of a whole list: what a simulation gets through."""


@dataclass(frozen=True)
class Shared:
    """How a prompt begins: as every other with this name. tokens: how much of it, at most the whole."""

    name: str
    tokens: int


@dataclass(frozen=True)
class Entry:
    """``count`` requests of ``prompt`` tokens each, whose replies have ``tokens``. arrive, cancel: rounds."""

    prompt: int
    tokens: int
    count: int = 1
    shared: Shared | None = None
    arrive: int = 1
    cancel: int | None = None


@dataclass(frozen=True, eq=False)
class Arrival:
    """A request and its rounds. shared: tokens of its prompt that others begin with, too."""

    request: Request
    arrive: int
    cancel: int | None
    shared: int


# --- Reading --------------------------------------------------------------------------------------------------------------


def read_requests(given: str) -> list[Entry]:
    """The entries of a list in short, or of a file. Raises UserError that names what is wrong and what would do."""
    parts = [SHORT.fullmatch(part.strip()) for part in given.split(",")]
    if all(parts):
        entries = [Entry(int(p[2]), int(p[3]), int(p[1] or 1)) for p in parts if p]
        return checked(entries, f"--requests {given}")
    if not os.path.isfile(given):
        raise UserError(
            f"--requests {given}: no such file; name a YAML file, or write COUNTxPROMPT+REPLY: 16x109000+512"
        )
    path = Path(given)
    data, where = load_yaml(path), Where(path.name)
    if not isinstance(data, list):
        raise where.error("", "must be a list of requests: - {count: 16, prompt: 109000, tokens: 512}")
    return checked([read_entry(one, where.file, f"[{n}]") for n, one in enumerate(data)], path.name)


def read_entry(data: Any, file: str, path: str) -> Entry:
    """An entry of a file, whose numbers make sense."""
    where = Where(file, {f"{path}.shared.name": f"{path}.shared.with"})
    if isinstance(data, dict) and isinstance(shared := data.get("shared"), dict):
        for key in shared:
            if key not in ("with", "tokens"):
                raise Where(file).error(f"{path}.shared.{key}", "unknown key; known keys: with, tokens")
        data = data | {"shared": {"name" if key == "with" else key: value for key, value in shared.items()}}
    entry = read(Entry, data, where, path)
    for key, least in {"count": 1, "prompt": 1, "tokens": 1, "arrive": 1}.items():
        if (value := getattr(entry, key)) < least:
            raise where.error(f"{path}.{key}", f"{value}; at least {least}")
    if entry.cancel is not None and entry.cancel <= entry.arrive:
        raise where.error(
            f"{path}.cancel", f"round {entry.cancel}; it arrives in round {entry.arrive}: name a later one"
        )
    if entry.shared is not None and not 1 <= entry.shared.tokens <= entry.prompt:
        raise where.error(
            f"{path}.shared.tokens", f"{entry.shared.tokens}; the prompt has {entry.prompt}: 1 to that many"
        )
    return entry


def checked(entries: Sequence[Entry], named: str) -> list[Entry]:
    """The entries. Raises UserError for none, or more than a simulation gets through."""
    if not entries:
        raise UserError(f"{named}: is empty; name at least one request")
    count = sum(entry.count for entry in entries)
    if count > MOST_REQUESTS:
        raise UserError(f"{named}: {count} requests; at most {MOST_REQUESTS}")
    tokens = sum(entry.count * (entry.prompt + entry.tokens) for entry in entries)
    if tokens > MOST_TOKENS:
        raise UserError(f"{named}: {tokens} tokens of prompts and replies; at most {MOST_TOKENS} all together")
    return list(entries)


# --- Making ---------------------------------------------------------------------------------------------------------------


def arrivals(entries: Sequence[Entry], vocabulary: int, seed: int) -> list[Arrival]:
    """The requests, numbered from 1 in the order of the list, with random prompts."""
    found: list[Arrival] = []
    for entry in chain.from_iterable(repeat(one, one.count) for one in entries):
        number = len(found) + 1
        request = Request(prompt_of(entry, number, vocabulary, seed), entry.tokens, number=number)
        found.append(Arrival(request, entry.arrive, entry.cancel, entry.shared.tokens if entry.shared else 0))
    return found


def prompt_of(entry: Entry, number: int, vocabulary: int, seed: int) -> array[int]:
    """The token ids of a request's prompt: those of the name that it shares, then its own."""
    shared = entry.shared
    tokens = array("i")
    for stream, count in parts(shared, entry.prompt, number):
        tokens.frombytes(
            np.random.default_rng([seed, *stream]).integers(vocabulary, size=count, dtype=np.int32).tobytes()
        )
    return tokens


def parts(shared: Shared | None, prompt: int, number: int) -> Iterator[tuple[tuple[int, int], int]]:
    """The random streams of a prompt and how many tokens each gives."""
    if shared is not None:
        yield (0, crc32(shared.name.encode())), shared.tokens
    yield (1, number), prompt - (shared.tokens if shared else 0)
