"""Proof that an arm was exercised: page lookups and straddling items, counted by one checked block a pass; of sparse attention
the rows that chose their keys and those that read all.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from backends.base import PROMPT, Backend, Batch
from kernels_numba.machine import checked

Grid = tuple[int, int, int]
CHUNKS_A_ROW = 2
"""grid.z of decode_partial, the one decode launch whose every block reads the stream's last page."""


def prompt_block(grid: Grid) -> Grid:
    """The block of a prompt launch that sees the most keys."""
    return grid[0] - 1, 0, 0


def decode_block(grid: Grid) -> Grid | None:
    """A block of a decode pass: the last row's, at the committed keys that no whole chunk holds."""
    return (grid[0] - 1, 0, 0) if grid[2] == CHUNKS_A_ROW else None


def last_row_block(grid: Grid) -> Grid:
    """The block of the last row, of any launch of sparse attention."""
    return grid[0] - 1, 0, 0


class Witness:
    """A backend that watches one block of a launch a pass, at its first attention layer, and counts.

    lookups: loads of page tables. straddles: staged items that lie in two pages. sparse, dense: rows of sparse attention that
    chose their keys, and that read all. Everything else is the backend's own.
    """

    def __init__(self, backend: Backend):
        self.backend, self.counters = backend, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def attend(self, layer: int, q: Any, batch: Batch) -> Any:
        """As the backend's, watched at the first attention layer."""
        if layer != self.backend.shape.attention_layers[0]:
            return self.backend.attend(layer, q, batch)
        with checked(sample=prompt_block if batch.phase == PROMPT else decode_block) as report:
            out = self.backend.attend(layer, q, batch)
        self.counters += report.counters
        return out

    def attend_sparse(self, layer: int, q: Any, index_q: Any, batch: Batch) -> Any:
        """As the backend's, watched at the first attention layer."""
        if layer != self.backend.shape.attention_layers[0]:
            return self.backend.attend_sparse(layer, q, index_q, batch)
        with checked(sample=last_row_block) as report:
            out = self.backend.attend_sparse(layer, q, index_q, batch)
        dense = batch.plan.dense_rows
        self.counters += report.counters + Counter(dense=dense, sparse=batch.rows - dense)
        return out
