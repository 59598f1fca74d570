"""A prompt cache on disk: each entry a kept state in a file of its own, named by its tokens and fingerprint. Spec serving §4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from backends.base import BackendError, Beginning
from backends.kept import Kept, save_prefix
from refengine.errors import UserError
from refengine.serve import kept_files
from refengine.serve.prompt_cache import PromptCache


def save_entries(cache: PromptCache, folder: str | Path, model: str, fingerprint: str) -> list[Path]:
    """Write every entry of a cache, whatever form it lies in; the files. model, fingerprint: as kept_files.save takes them.

    Raises UserError where the folder or a file cannot be written; what was written is whole.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made: {error.strerror or error}; name another folder") from error
    files = [Path(folder) / name_of(entry.ids, fingerprint) for entry in cache.entries]
    for path, entry in zip(files, cache.entries):
        kept_files.save(path, entry.ids, kept_of(entry.begin), model, fingerprint)
    return files


def load_entries(cache: PromptCache, folder: str | Path, fingerprint: str, dropped: Callable[[str], None]) -> int:
    """Add every file of a folder to a cache, whose backend may have another form; how many it took.

    dropped: called with a line for each file that is damaged, another's, or of a shape that the backend does not have.
    """
    taken = 0
    for path, ids, kept in kept_files.load_all(folder, fingerprint, dropped):
        try:
            taken += cache.add(ids, kept)
        except BackendError as unfit:
            dropped(f"{path}: {unfit}; dropped; it stays where it is")
    return taken


def kept_of(begin: Beginning) -> Kept:
    """An entry's positions and state as a kept state."""
    return begin if isinstance(begin, Kept) else save_prefix(begin)


def name_of(ids: Sequence[int], fingerprint: str) -> str:
    """The file of an entry of these tokens; another fingerprint has another."""
    return sha256(np.asarray(ids, np.int64).tobytes() + fingerprint.encode()).hexdigest()[:32] + kept_files.SUFFIX
