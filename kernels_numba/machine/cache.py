"""Where the machine keeps what it has built: one folder, files written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .errors import SetupError


def cache_root() -> Path:
    """$REFENGINE_CACHE, or ~/.cache/refengine."""
    return Path(os.environ.get("REFENGINE_CACHE") or Path.home() / ".cache" / "refengine")


def cache_folder(part: str) -> Path:
    """A folder of the cache, made if need be. Raises SetupError when it cannot be written."""
    folder = cache_root() / part
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise SetupError(
            f"{folder}: cannot be made: {problem.strerror}; name another with $REFENGINE_CACHE"
        ) from problem
    if not os.access(folder, os.W_OK):
        raise SetupError(f"{folder}: cannot be written; name another with $REFENGINE_CACHE")
    return folder


def write_once(path: Path, content: str | bytes) -> Path:
    """Write a file whole, unless it is there with this content."""
    data = content.encode() if isinstance(content, str) else content
    if not holds(path, data):
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.replace(temporary, path)
    return path


def holds(path: Path, data: bytes) -> bool:
    """Whether the file is there, whole and unharmed."""
    try:
        return path.read_bytes() == data
    except OSError:
        return False
