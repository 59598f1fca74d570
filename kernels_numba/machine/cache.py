"""Where the machine keeps what it has built: one folder, files written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder(part: str) -> Path:
    """A folder of the cache ($REFENGINE_CACHE, else ~/.cache/refengine), made if need be."""
    root = Path(os.environ.get("REFENGINE_CACHE") or Path.home() / ".cache" / "refengine")
    folder = root / part
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_once(path: Path, content: str | bytes) -> Path:
    """Write a file whole unless it is there; the name says what is in it."""
    if not path.exists():
        data = content.encode() if isinstance(content, str) else content
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.replace(temporary, path)
    return path
