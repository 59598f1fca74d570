"""What commands that run a model are given: the model by name or folder, and text on the command line or in a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from backends.stream import TILES
from refengine.checkpoint import Checkpoint, open_cached, open_checkpoint, spec_of_folder
from refengine.errors import UserError
from refengine.model import cache_shape
from refengine.registry import ModelSpec, load_model


def find_model(model: str, seed: int = 0) -> tuple[ModelSpec, Path | None, Callable[[], Checkpoint]]:
    """The layout, the folder if one was named, and the checkpoint when it is wanted: a registry name gets a synthetic
    one of this seed, made once."""
    folder = Path(model)
    if folder.is_dir():
        spec = spec_of_folder(folder)
        return spec, folder, lambda: open_checkpoint(folder, spec)
    spec = load_model(model)
    return spec, None, lambda: open_cached(spec, seed)


def check_pages(flag: str, sizes: Iterable[int], spec: ModelSpec) -> None:
    """Refuse pages that the model's cache cannot have. sizes: positions a page; 0: none."""
    for size in sizes:
        try:
            cache_shape(spec).check_page(size)
        except ValueError as refusal:
            raise UserError(f"{flag} {size}: {refusal}") from refusal


def check_attention(attention: str, spec: ModelSpec) -> None:
    """Refuse kernels that the model's attention does not have."""
    if spec.indexer is not None and attention != TILES:
        raise UserError(f"--attention {attention}: {spec.name} has sparse attention, which takes one path; use {TILES}")


def given_bytes(flag: str, value: str) -> bytes:
    """The text of a flag, or the file's content after @. Raises UserError for a file that cannot be read."""
    if not value.startswith("@"):
        if os.path.isfile(value):
            raise UserError(f"{flag} {value}: names a file; write @{value} to read it")
        return os.fsencode(value)
    try:
        return Path(value[1:]).read_bytes()
    except OSError as problem:
        raise UserError(f"{flag} {value}: {problem.strerror}; name a file that can be read") from problem


def machine_gib() -> float:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
