"""The hashes by which runs are compared. Spec serving §5."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

DIGITS = 16


def digest(data: bytes) -> str:
    """The first 16 hex digits of SHA-256."""
    return hashlib.sha256(data).hexdigest()[:DIGITS]


def logits_hash(rows: Iterable[np.ndarray]) -> str:
    """Hash of float32 logits rows, in order, as little-endian bytes."""
    return digest(b"".join(np.ascontiguousarray(r, dtype="<f4").tobytes() for r in rows))


def token_hash(tokens: Sequence[int]) -> str:
    """Hash of the ASCII text ``12,5,7``."""
    return digest(",".join(str(int(t)) for t in tokens).encode("ascii"))


def array_hash(array: np.ndarray) -> str:
    """Hash of an array's bytes."""
    return digest(np.ascontiguousarray(array).tobytes())
