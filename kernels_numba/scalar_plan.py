"""How a launch of the scalar path is cut: partials, scratch and slices, decided together, on the host. Spec attention §2.

The scratch holds the partials of MOST_SCALAR_ROWS rows. A launch of more rows goes in slices, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels_numba.decode_plan import carve_partials, check_heads, check_windows, row_streams, slots_of
from kernels_numba.streams import COMMITTED, FIRST, ROWS

MOST_SCALAR_ROWS = 128
"""Rows of a slice, at most."""
OWN = ("record", "cache")
"""Where the keys of a launch's own rows lie, a compile-time argument: in the window record, or, in a prompt pass, already in
the cache."""


@dataclass(frozen=True)
class ScalarPlan:
    """How one launch is cut; the bits do not depend on it.

    slots: chunks of the longest stream. rows: W. most: rows of a slice. groups: int32 [S] of zeros: every partial is a
    chunk, as decode_merge is told. sliced: False puts all rows into one launch over the scratch of a slice, which does not
    hold them: the fault that slices are for. own: one of OWN.
    """

    slots: int
    rows: int
    heads: int
    kv_heads: int
    D: int
    groups: Any
    own: str
    most: int = MOST_SCALAR_ROWS
    sliced: bool = True

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.heads // self.kv_heads

    @property
    def partials(self) -> tuple[int, int, int]:
        """(slots, rows of a slice, H): the shape of pm and pl; po has D after it."""
        return self.slots, min(self.rows, self.most), self.heads

    @property
    def scratch_size(self) -> int:
        """float32 elements that a launch needs as scratch: po, pm and pl."""
        return int(np.prod(self.partials, dtype=np.int64)) * (self.D + 2)

    def slices(self) -> Iterator[tuple[int, int]]:
        """(first row, rows) of each slice, in order."""
        return slices(self.rows, self.most if self.sliced else max(self.rows, 1))

    def to(self, xp: Any) -> ScalarPlan:
        """The plan with its array where kernels run; xp: numpy or cupy."""
        return replace(self, groups=xp.asarray(self.groups))

    def carve(self, scratch: Any) -> tuple[Any, Any, Any]:
        """(po, pm, pl) inside scratch, float32 [at least scratch_size]. Raises ValueError when it is smaller."""
        return carve_partials(scratch, self.partials, self.D)


def slices(rows: int, most: int = MOST_SCALAR_ROWS) -> Iterator[tuple[int, int]]:
    """(first, count): consecutive slices of at most ``most`` rows; of no rows, none."""
    return ((first, min(most, rows - first)) for first in range(0, rows, most))


def plan_scalar(
    streams: NDArray[np.int64], heads: int, kv_heads: int, D: int, own: str, most: int = MOST_SCALAR_ROWS
) -> ScalarPlan:
    """Cut a launch. streams: int64 [S, 13] (kernels_numba/streams.py), on the host. own: one of OWN.

    Raises ValueError for heads or D that decode does not have, rows that are not each in one stream, or, where the record
    holds them, a window of more than 128 rows.
    """
    check_heads(heads, kv_heads, D)
    if own not in OWN:
        raise ValueError(f"own {own!r}: use one of {', '.join(OWN)}")
    if own == "record":
        check_windows(streams)
    rows = len(row_streams(streams))
    slots = max((slots_of(int(s[COMMITTED]), int(s[ROWS]), 0) for s in streams), default=0)
    return ScalarPlan(slots, rows, heads, kv_heads, D, np.zeros(len(streams), np.int32), own, most)


def pass_tables(streams: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(rows, depths), int32 [W], of a prompt pass: the stream of each row, and its place in it, from 1.

    Raises ValueError unless the streams' rows cover the launch, each once.
    """
    rows = row_streams(streams)
    return rows, (np.arange(len(rows)) - streams[rows, FIRST] + 1).astype(np.int32)
