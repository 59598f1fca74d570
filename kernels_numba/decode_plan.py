"""How a decode launch is cut: programs, groups, partials and scratch, decided together, on the host. Spec attention §2.

A stream's p committed keys and w rows make groups of 2048 keys that one program folds whole, where there are enough
of them, then chunks of 512. Each is one partial, a slot, counted from 0 in every stream. Results do not depend on the
cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels_numba.streams import COMMITTED, FIRST, ROWS

PAIRS = 16
"""(row, head) pairs a program of decode_rows."""
CHUNK = 512
"""Keys a partial."""
GROUP_CHUNKS = 4
"""Chunks a group."""
MIN_GROUPED = 64
"""Groups times rows of a stream from which a program folds a whole group."""
MOST_ROWS = 128
"""Rows of one stream's window, at most; the columns of PATHS."""


@dataclass(frozen=True)
class DecodePlan:
    """How one decode launch is cut; the bits do not depend on it.

    items: int32 [n, 3], a program of decode_rows each: stream, first (row, head) pair, code; code j >= 0 is the whole
    group j, -1 - c the c-th whole chunk after the stream's groups. groups: int32 [S], groups of a stream that are
    folded in one program. slots: partials of each stream, from 0. rows: W.
    """

    items: Any
    groups: Any
    slots: tuple[int, ...]
    rows: int
    heads: int
    kv_heads: int
    D: int

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.heads // self.kv_heads

    @property
    def partials(self) -> tuple[int, int, int]:
        """(slots, W, H): the shape of pm and pl; po has D after it."""
        return max(self.slots, default=0), self.rows, self.heads

    @property
    def scratch_size(self) -> int:
        """float32 elements that a launch needs as scratch: po, pm and pl."""
        return int(np.prod(self.partials, dtype=np.int64)) * (self.D + 2)

    @property
    def rows_grid(self) -> int:
        return len(self.items) * self.kv_heads

    @property
    def partial_grid(self) -> tuple[int, int, int]:
        return self.rows, self.kv_heads, 2

    @property
    def merge_grid(self) -> tuple[int, int]:
        return self.rows, self.heads

    def to(self, xp: Any) -> DecodePlan:
        """The plan with its arrays where kernels run; xp: numpy or cupy."""
        return replace(self, items=xp.asarray(self.items), groups=xp.asarray(self.groups))

    def carve(self, scratch: Any) -> tuple[Any, Any, Any]:
        """(po, pm, pl) inside scratch, float32 [at least scratch_size]. Raises ValueError when it is smaller."""
        return carve_partials(scratch, self.partials, self.D)


def carve_partials(scratch: Any, partials: tuple[int, int, int], D: int) -> tuple[Any, Any, Any]:
    """(po, pm, pl) of a shape inside scratch, one after the other. Raises ValueError where they have no room."""
    size = int(np.prod(partials, dtype=np.int64))
    ends = [n * size for n in (D, D + 1, D + 2)]
    if scratch.ndim != 1 or scratch.dtype != np.float32 or scratch.size < ends[2]:
        raise ValueError(f"scratch {scratch.dtype} {scratch.shape}: decode needs float32 [{ends[2]}]")
    po, pm, pl = scratch[: ends[0]], scratch[ends[0] : ends[1]], scratch[ends[1] : ends[2]]
    return po.reshape(*partials, D), pm.reshape(partials), pl.reshape(partials)


def plan_decode(
    streams: NDArray[np.int64], heads: int, kv_heads: int, D: int, min_grouped: int = MIN_GROUPED
) -> DecodePlan:
    """Cut a launch. streams: int64 [S, 13] (kernels_numba/streams.py), on the host; streams of no rows take no part.

    Raises ValueError for heads or D that decode does not have, a window of more than 128 rows, or rows that are not
    each in one stream.
    """
    check_heads(heads, kv_heads, D)
    check_windows(streams)
    total = len(row_streams(streams))
    groups = [folded_groups(int(s[COMMITTED]), int(s[ROWS]), min_grouped) for s in streams]
    slots = tuple(slots_of(int(s[COMMITTED]), int(s[ROWS]), groups[n]) for n, s in enumerate(streams))
    items = [item for n, s in enumerate(streams) for item in items_of(n, s, groups[n], heads // kv_heads)]
    table = np.array(items, np.int32).reshape(-1, 3)
    return DecodePlan(table, np.array(groups, np.int32), slots, total, heads, kv_heads, D)


def folded_groups(committed: int, rows: int, min_grouped: int) -> int:
    """Groups of a stream that a program folds whole: all of them where they alone make enough programs, else none."""
    groups = committed // (GROUP_CHUNKS * CHUNK)
    return groups if groups * rows >= min_grouped else 0


def slots_of(committed: int, rows: int, groups: int) -> int:
    """Partials of a stream: its folded groups, then the chunks after them."""
    return groups + -(-(committed + rows) // CHUNK) - GROUP_CHUNKS * groups if rows else 0


def items_of(stream: int, s: NDArray[np.int64], groups: int, group: int) -> list[tuple[int, int, int]]:
    """A stream's items, key-major: programs that read the same keys are neighbours."""
    chunks = int(s[COMMITTED]) // CHUNK - GROUP_CHUNKS * groups
    codes = [*range(groups), *(-1 - c for c in range(chunks))]
    return [(stream, pair, code) for code in codes for pair in range(0, int(s[ROWS]) * group, PAIRS)]


def check_heads(heads: int, kv_heads: int, D: int) -> None:
    """Refuse heads that decode does not have."""
    if kv_heads < 1 or heads < 1 or heads % kv_heads or heads // kv_heads > PAIRS:
        raise ValueError(f"heads {heads}, kv_heads {kv_heads}: decode takes 1 to {PAIRS} query heads a KV head")
    if D not in (64, 128, 256):
        raise ValueError(f"head_dim {D}: decode has 64, 128 and 256")


def check_windows(streams: NDArray[np.int64]) -> None:
    """Refuse a window that is too long."""
    check_length(int(streams[:, ROWS].max(initial=0)))


def check_length(rows: int) -> None:
    """Refuse a window of more rows than decode takes."""
    if rows > MOST_ROWS:
        raise ValueError(f"a window of {rows} rows: decode takes {MOST_ROWS} at most, cut it into slices")


def row_streams(streams: NDArray[np.int64]) -> NDArray[np.int32]:
    """int32 [W]: the stream of each row of a launch, prompt or decode.

    Raises ValueError unless FIRST and ROWS of the streams cover the rows 0 .. W - 1, each once.
    """
    places = [np.arange(s[FIRST], s[FIRST] + s[ROWS]) for s in streams]
    rows = np.concatenate(places or [np.zeros(0, np.int64)])
    if not np.array_equal(np.sort(rows), np.arange(len(rows))):
        raise ValueError("stream table: FIRST and ROWS must cover the rows of the launch, each once")
    table = np.empty(len(rows), np.int32)
    table[rows] = np.repeat(np.arange(len(streams)), streams[:, ROWS])
    return table


def chain_tables(streams: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """(rows, paths, depths) of windows in which each row follows the one before it.

    rows: int32 [W], row -> stream. paths: int32 [W, 128], path entry -> window row, -1 past the row's depth. depths:
    int32 [W], entries of the path, the row itself included. Raises ValueError as plan_decode does.
    """
    check_windows(streams)
    rows = row_streams(streams)
    depths = (np.arange(len(rows)) - streams[rows, FIRST] + 1).astype(np.int32)
    entry = np.arange(MOST_ROWS, dtype=np.int32)
    return rows, np.where(entry < depths[:, None], entry, np.int32(-1)), depths


def tree_tables(
    streams: NDArray[np.int64], parents: Sequence[Sequence[int]]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """(rows, paths, depths), as chain_tables, of windows in which each row follows its parent.

    parents: of each stream, by window row, the row it follows, -1: the committed rows. Raises ValueError as plan_decode
    does, for a parent that is not an earlier row, and where a stream has not a parent for each of its rows.
    """
    check_parents(parents)
    if [len(window) for window in parents] != streams[:, ROWS].tolist():
        raise ValueError("parents: one list a stream of the table is wanted, with an entry for each of its ROWS")
    rows = row_streams(streams)
    paths, depths = np.full((len(rows), MOST_ROWS), -1, np.int32), np.ones(len(rows), np.int32)
    for first, window in zip(streams[:, FIRST].tolist(), parents, strict=True):
        for row, parent in enumerate(window):
            if parent >= 0:
                paths[first + row], depths[first + row] = paths[first + parent], depths[first + parent] + 1
            paths[first + row, depths[first + row] - 1] = row
    return rows, paths, depths


def check_parents(parents: Sequence[Sequence[int]]) -> None:
    """Refuse windows that are too long, or no trees."""
    for stream, window in enumerate(parents):
        check_length(len(window))
        for row, parent in enumerate(window):
            if not -1 <= parent < row:
                raise ValueError(
                    f"stream {stream}: row {row} follows row {parent}: a parent is an earlier row of the window, or -1,"
                    " the committed rows"
                )
