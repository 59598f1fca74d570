"""Attention through a whole backend, on random rows, for any shape: what the equality tables and recorded hashes are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from backends.arena import CacheShape
from backends.base import DECODE, PROMPT, Backend, Norms, Sizes, backend_class
from kernels_numba.rope_store import rope_table
from refengine.device import Device
from refengine.verify.hashes import array_hash

ROPE_DIMS, THETA, EPS = 64, 1e7, 1e-6
SPARE_PAGES = 3


@dataclass(frozen=True)
class Heads:
    """H query heads, HK KV heads of D dims."""

    heads: int
    kv_heads: int
    head_dim: int = 256

    @property
    def scale(self) -> np.float32:
        """The factor of a score."""
        return np.float32(self.head_dim**-0.5)

    @property
    def columns(self) -> int:
        """Columns of a projected row: queries and gates, keys, values."""
        return 2 * (self.heads + self.kv_heads) * self.head_dim

    @property
    def shape(self) -> CacheShape:
        """A model of one attention layer."""
        return CacheShape((0,), (), self.heads, self.kv_heads, self.head_dim, 0, 0, 0, 0, 0)

    def __str__(self) -> str:
        return f"H={self.heads}/{self.kv_heads} D={self.head_dim}"


@dataclass(frozen=True)
class Case:
    """``rows`` rows of a phase after ``committed`` positions, on a backend with pages of ``page_size``."""

    backend: str
    page_size: int
    phase: str
    rows: int
    committed: int


def projected_rows(heads: Heads, positions: int, seed: int = 0) -> np.ndarray:
    """Random projections of every position: bf16 [positions, columns], from integers, the same on every platform."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(-(2**11), 2**11, (4, positions, heads.columns), dtype=np.int32).sum(axis=0)
    return (drawn.astype(np.float32) * np.float32(2.0**-11)).astype(ml_dtypes.bfloat16)


class Bench:
    """Rows of one head geometry on a device, attended to through any backend."""

    def __init__(self, heads: Heads, positions: int, device: Device):
        self.heads, self.positions, self.device = heads, positions, device
        rng = np.random.default_rng(1)
        gains = (rng.integers(192, 320, (2, heads.head_dim)) / 256).astype(np.float32)
        self.norms = Norms(device.put(gains[0]), device.put(gains[1]), EPS)
        self.rope = device.put(rope_table(positions, ROPE_DIMS, THETA))
        self.rows = device.put(projected_rows(heads, positions))

    def attend(self, case: Case) -> np.ndarray:
        """Attention output of the case's rows: bf16 [rows, H, D]; rows before them are stored in one prompt pass."""
        backend = self.build(case)
        stream = backend.open()
        self.store(backend, PROMPT, stream, case.committed)
        out = self.store(backend, case.phase, stream, case.rows, attend=True)
        stream.release()
        return self.device.get(out)

    def build(self, case: Case) -> Backend:
        sizes = Sizes(
            self.positions, 1, case.page_size, max(1, case.rows if case.phase == DECODE else 1), SPARE_PAGES, 7
        )
        return backend_class(case.backend)(self.heads.shape, sizes, self.device.xp)

    def store(self, backend: Backend, phase: str, stream: Any, rows: int, attend: bool = False) -> Any:
        """One pass of a single layer."""
        if rows == 0:
            return None
        start = stream.committed
        batch = backend.batch(phase, [(stream, rows)])
        q = backend.store(0, self.rows[start : start + rows], self.norms, self.rope, batch)
        out = backend.attend(0, q, batch) if attend else None
        backend.finish(batch)
        return out


def equal_backends(
    bench: Bench, phase: str, rows: int, committed: int, paged: Sequence[tuple[str, int]]
) -> Iterator[tuple[Case, bool, str]]:
    """Each paged backend against the window: (case, whether its bits are the window's and finite, hash)."""
    window = bench.attend(Case("window", 256, phase, rows, committed))
    finite = bool(np.isfinite(window.astype(np.float32)).all())
    for name, page_size in paged:
        case = Case(name, page_size, phase, rows, committed)
        found = bench.attend(case)
        yield case, finite and found.tobytes() == window.tobytes(), array_hash(found.view(np.uint16))
