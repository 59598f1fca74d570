"""JSON that refuses a key given twice, NaN and infinity; errors are one line."""

import json
from pathlib import Path
from typing import Any

from refengine.errors import UserError


def parse_json(text: str | bytes, file: str) -> dict[str, Any]:
    """The object that `text` holds. Raises UserError naming `file` if it is not one, or repeats a key."""
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: is not valid JSON: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise UserError(f"{file}: must hold a JSON object")
    return data


def load_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError naming the file."""
    try:
        return parse_json(path.read_bytes(), path.name)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"repeated key {next(key for key in keys if keys.count(key) > 1)}")
    return data


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
