"""A batch: the rows of one pass over several streams, as kernels take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backends.stream import Stream
from kernels_numba.streams import FIRST, ROWS

PROMPT = "prompt"
"""The phase of a pass over a prompt's rows."""
DECODE = "decode"
"""The phase of a pass over the newest rows of streams."""


@dataclass(frozen=True, eq=False)
class Path:
    """The rows of each stream that a drafted pass keeps, on the device.

    last: int32 [S], the launch row up to whose path they are kept; count: int32 [S], how many. streams: int64 [S, 13], the stream
    table of the pass with as many rows as are kept; they are the first ones where drafts are chains.
    """

    last: Any
    count: Any
    streams: Any


@dataclass(frozen=True, eq=False)
class Norms:
    """The norms of an attention layer's queries and keys: effective gains float32 [D], and eps."""

    q: Any
    k: Any
    eps: float


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one pass. rows: W rows, streams one after the other.

    table: int64 [S, 13], the stream table on the host; streams: int64 [L, S, 13] on the device, one for each attention layer
    (if there are none, one without planes); owners: int32 [W], row -> stream; runs: int64 [S], words of the arena at which
    the streams' runs start; depths: int32 [W], rows of its own stream that a row sees, itself included; decode: paths int32
    [W, 128], which of them.
    plan and scratch: how the attention is cut; None where prompt_attention takes the rows.
    drafted: the rows are drafts, of which ``finish`` keeps what it is told; parents: of each stream's rows then, and schedule,
    the order in which the recurrent layers take them. held: by name, how each recurrent part of the model takes the kept rows
    of a drafted pass.
    """

    phase: str
    members: tuple[Stream, ...]
    table: np.ndarray
    streams: Any
    owners: Any
    runs: Any
    paths: Any = None
    depths: Any = None
    plan: Any = None
    scratch: Any = None
    parents: tuple[tuple[int, ...], ...] | None = None
    schedule: Any = None
    held: dict[int | str, Callable[[Path], None]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return int(self.table[:, ROWS].sum())

    @property
    def drafted(self) -> bool:
        return self.parents is not None

    def ends(self, kept: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """(last int32 [S], kept int32 [S]): the row of the launch whose path is kept, and how many rows it has."""
        last = [first + (path[-1] if path else 0) for first, path in zip(self.table[:, FIRST], kept)]
        return np.array(last, np.int32), np.array([len(path) for path in kept], np.int32)

    def kept_path(self, kept: Sequence[Sequence[int]], xp: Any) -> Path:
        """What a drafted pass keeps, as arrays of xp."""
        last, count = self.ends(kept)
        table = self.table.copy()
        table[:, ROWS] = count
        return Path(*map(xp.asarray, (last, count, table)))

    def path(self, stream: int, row: int) -> list[int]:
        """Window rows from the root to ``row`` of a stream's window; -1: none."""
        path: list[int] = []
        while row >= 0:
            path.insert(0, row)
            row = row - 1 if self.parents is None else self.parents[stream][row]
        return path
