"""Kept states on disk: one safetensors file each, with the token ids that made it. Spec serving §4.

A file appears whole or not at all. Its metadata has the SHA-256 of all of its bytes, the header's too, taken with zeros in the
digest's own place; it is held against the bytes before any of them is used, so a file that changed anywhere is never read.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors import numpy as safetensors

from backends.kept import ARRAYS, Kept
from kernels_numba.fp8 import KV_TYPES
from refengine.errors import UserError

FORMAT = "refengine-kept-1"
SUFFIX = ".safetensors"
DAMAGED = ".damaged"
"""Added to the name of a file that ``load_all`` found damaged."""
ABOUT = ("format", "model", "fingerprint", "kv", "positions", "prompted")
FIELD, DIGITS = b'"sha256":"', 64
NO_DIGEST = "0" * DIGITS
DTYPES = {
    "I64": np.int64,
    "I32": np.int32,
    "U32": np.uint32,
    "I8": np.int8,
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
}
"""NumPy's types of tensors, by the file's."""
LENGTH_BYTES = 8
"""Of the header's length, at the start of a safetensors file."""


class DamagedKept(UserError):
    """A file that is no kept state, or not as it was written: one line that names the file and what is wrong."""


class UnusableKept(DamagedKept):
    """A file that may be sound, but not for this run: another's fingerprint, or the system does not let it be read."""


# --- One file ---------------------------------------------------------------------------------------------------------


def save(path: str | Path, ids: Sequence[int], kept: Kept, model: str, fingerprint: str) -> None:
    """Write a kept state and its token ids, one for each position. model: its name, for people. fingerprint: of all that bits
    depend on; ``load`` asks for the same.

    Raises UserError for ids that are not the positions', and where the file cannot be written; then nothing has changed.
    """
    path = Path(path)
    if len(ids) != kept.positions:
        raise UserError(f"{path}: {len(ids)} token ids for a state of {kept.positions} positions; give one for each")
    about = {
        "format": FORMAT,
        "model": model,
        "fingerprint": fingerprint,
        "kv": kept.kv,
        "positions": str(kept.positions),
        "prompted": str(kept.prompted),
    }
    tensors = {"ids": np.array(ids, np.int64), **kept.arrays}
    content = safetensors.save(tensors, metadata={**about, "sha256": NO_DIGEST})
    place = digest_place(content)
    digest = hashlib.sha256(content).hexdigest().encode()
    view = memoryview(content)
    write_whole(path, [view[:place], digest, view[place + DIGITS :]])


def load(path: str | Path, fingerprint: str) -> tuple[list[int], Kept]:
    """(token ids, kept state) of a file that ``save`` wrote.

    Raises DamagedKept for a file that is damaged, cut short or no kept state, and UnusableKept, which is one, for one that
    cannot be opened or has another fingerprint.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UnusableKept(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        check_digest(content)
        about = metadata(content)
        ids, kept = understood(about, arrays(content))
    except (ValueError, TypeError, KeyError, SafetensorError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise DamagedKept(f"{path}: not a kept state as it was written: {reason}") from error
    if about["fingerprint"] != fingerprint:
        raise UnusableKept(
            f"{path}: kept by {about['model']} with fingerprint {about['fingerprint']}, this run has {fingerprint}"
        )
    return ids, kept


def load_all(
    folder: str | Path, fingerprint: str, dropped: Callable[[str], None]
) -> Iterator[tuple[Path, list[int], Kept]]:
    """(path, token ids, kept state) of every good file of a folder, by name; a folder that is not there has none.

    Every other file is reported in one line and never read again: a damaged one is renamed to NAME.damaged
    (.1, .2, ...), one that is another's stays as it is. Unfinished files of a run that ended early are passed over.
    """
    for path in sorted(Path(folder).glob(f"*{SUFFIX}")):
        try:
            ids, kept = load(path, fingerprint)
        except UnusableKept as reason:
            dropped(f"{reason}; dropped, never read; it stays where it is")
        except DamagedKept as reason:
            dropped(f"{reason}; dropped, never read; {set_aside(path)}")
        else:
            yield path, ids, kept


def set_aside(path: Path) -> str:
    """Rename a damaged file; what became of it."""
    names = (path.with_name(path.name + DAMAGED + (f".{n}" if n else "")) for n in count())
    aside = next(name for name in names if not name.exists())
    try:
        path.replace(aside)
    except OSError as error:
        return f"it stays where it is: {error.strerror or error}"
    return f"now {aside.name}"


# --- What a file says -------------------------------------------------------------------------------------------------


def header_end(content: bytes) -> int:
    """The byte behind the header. Raises ValueError for a file too short to have one."""
    if len(content) < LENGTH_BYTES:
        raise ValueError(f"it has {len(content)} bytes")
    (length,) = struct.unpack_from("<Q", content)
    if length > len(content) - LENGTH_BYTES:
        raise ValueError(f"its header has {length} bytes, the file {len(content)}")
    return LENGTH_BYTES + length


def digest_place(content: bytes) -> int:
    """The byte where the digest stands. Raises ValueError where there is none."""
    found = content.find(FIELD, LENGTH_BYTES, header_end(content))
    if found < 0:
        raise ValueError("its header has no sha256")
    return found + len(FIELD)


def check_digest(content: bytes) -> None:
    """Raise ValueError unless the bytes are those that were written."""
    place, view = digest_place(content), memoryview(content)
    found = hashlib.sha256(view[:place])
    found.update(NO_DIGEST.encode())
    found.update(view[place + DIGITS :])
    if found.hexdigest().encode() != view[place : place + DIGITS]:
        raise ValueError("its bytes do not have the SHA-256 that it names")


def metadata(content: bytes) -> dict[str, str]:
    """The header's metadata."""
    header = json.loads(content[LENGTH_BYTES : header_end(content)])
    found = {name: header["__metadata__"][name] for name in ABOUT}
    if found["format"] != FORMAT:
        raise ValueError(f"format {found['format']}, this version reads {FORMAT}")
    return found


def arrays(content: bytes) -> dict[str, np.ndarray]:
    """The file's tensors by name."""
    found = {}
    for name, tensor in deserialize(content):
        if tensor["dtype"] not in DTYPES:
            raise ValueError(f"{name}: type {tensor['dtype']}, which no kept state has")
        found[name] = np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return found


def understood(about: dict[str, str], tensors: dict[str, np.ndarray]) -> tuple[list[int], Kept]:
    """(token ids, kept state). Raises ValueError or KeyError for what no state has; its shape is the backend's to check."""
    kv, positions, prompted, ids = about["kv"], int(about["positions"]), int(about["prompted"]), tensors.pop("ids")
    named: dict[str, Any] = {name: tensors.pop(name) for name in ("rows", "states", "histories")}
    named |= {name: tensors.pop(name, None) for name in ARRAYS if name not in named}
    kept = Kept(positions, prompted, kv, **named)
    if not 0 <= prompted <= positions:
        raise ValueError(f"{positions} positions, {prompted} of them prompt")
    if kv not in KV_TYPES or ids.shape != (positions,) or tensors:
        raise ValueError(f"kv {kv}, {positions} positions, {list(ids.shape)} ids, and of no use: {sorted(tensors)}")
    return [int(i) for i in ids], kept


# --- Whole or not at all ----------------------------------------------------------------------------------------------


def write_whole(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """A file of the parts: on disk under another name first, then under its own. Raises UserError where that fails."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


def sync_folder(folder: Path) -> None:
    """Make a rename last, where folders can be synchronised."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
