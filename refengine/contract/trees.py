"""Drafted windows of several streams, each a tree, and what their kernels share in the contract. Spec attention §5.5."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from refengine.contract.entry import Control, Inputs
from refengine.contract.gated_delta_net import ODD, REAL, TINY, StreamsCase
from refengine.contract.gates import EXACT
from refengine.contract.windows import path_table
from refengine.contract.workbench import Array

CHAIN, BINARY, DRAWN = "chain", "binary", "drawn"
"""Each row follows the one before it; row n follows row (n - 1) // 2; each follows any before it, or the committed rows."""


def parents_of(rows: int, shape: str) -> list[int]:
    """The row that each row of a window follows, -1: the committed rows; the same for every window of a length."""
    if shape == DRAWN:
        rng = np.random.default_rng(rows)
        return [int(rng.integers(-1, row)) for row in range(rows)]
    return [(row - 1) // 2 if shape == BINARY else row - 1 for row in range(rows)]


@dataclass(frozen=True)
class TreesCase(StreamsCase):
    """Windows of one shape."""

    shape: str = BINARY

    @property
    def parents(self) -> list[list[int]]:
        """Of each stream, by window row."""
        return [parents_of(rows, self.shape) for rows in self.rows]

    @property
    def paths(self) -> list[list[int]]:
        """Window rows from the root to each row of the launch; none for rows of nobody."""
        found: list[list[int]] = [[] for _ in range(self.total)]
        for s, first, _ in self.parts:
            for row, parent in enumerate(self.parents[s]):
                found[first + row] = [*(found[first + parent] if parent >= 0 else []), row]
        return found

    def path_to(self, row: int) -> list[int]:
        """Rows of the launch from the root to one of them."""
        return [self.first_of[row] + n for n in self.paths[row]]

    @property
    def owner_of(self) -> Array:
        """int32 [total]: stream of each row; of rows of nobody, 0."""
        owners = np.zeros(self.total, np.int32)
        for s, start, stop in self.parts:
            owners[start:stop] = s
        return owners

    @property
    def first_of(self) -> Array:
        """int64 [total]: first row of each row's window."""
        return np.array(self.firsts, np.int64)[self.owner_of]

    @property
    def depths(self) -> Array:
        """int32 [total]: rows of each path."""
        return np.array([len(path) for path in self.paths], np.int32)

    def path_table(self) -> Array:
        """int32 [total, 128]; entries past a path name the row after the launch's last."""
        return path_table(self.paths, self.first_of)

    def streams_alone(self) -> Iterator[tuple[int, slice, Self]]:
        """(stream, its rows, the case of that stream alone) of streams that have rows."""
        for s, start, stop in self.parts:
            yield s, slice(start, stop), self.alone(s)

    def alone(self, stream: int) -> Self:
        """One stream's window in a launch of its own."""
        return replace(self, rows=self.rows[stream : stream + 1], gap=0)

    def __str__(self) -> str:
        return f"{super().__str__()} {self.shape}"


@dataclass(frozen=True)
class AcceptedCase(TreesCase):
    """kept: how many rows each stream accepts of the path of its last row."""

    kept: tuple[int, ...] = ()

    @property
    def last(self) -> Array:
        """int32 [S]: the row of the launch whose path is accepted; without rows, 0."""
        rows = zip(self.firsts, self.rows, strict=True)
        return np.array([first + n - 1 if n else 0 for first, n in rows], np.int32)

    @property
    def accepted(self) -> list[list[int]]:
        """Rows of the launch that each stream accepts."""
        return [self.path_to(row)[:n] if n else [] for row, n in zip(self.last, self.kept, strict=True)]

    def written(self, slots: Array) -> Array:
        """bool [slots]: slots of streams that accept a row."""
        taken = slots[[s for s, n in enumerate(self.kept) if n]]
        return np.isin(np.arange(len(super().written(slots))), taken)

    def alone(self, stream: int) -> Self:
        one = slice(stream, stream + 1)
        return replace(self, rows=self.rows[one], gap=0, kept=self.kept[one])

    def __str__(self) -> str:
        return f"{super().__str__()} kept={','.join(map(str, self.kept))}"


# --- The tables -------------------------------------------------------------------------------------------------------


def accepted_cases(full: bool) -> list[AcceptedCase]:
    """Some rows, all and none accepted, of chains and trees; the real heads, too, if ``full``."""
    some = [AcceptedCase(TINY, (7, 3, 3, 1), kept=(3, 2, 1, 1)), AcceptedCase(ODD, (9,), shape=CHAIN, kept=(9,))]
    some += [AcceptedCase(ODD, (33, 0, 9, 4), 2, shape=DRAWN, kept=(2, 0, 0, 1))]
    real = [AcceptedCase(REAL, (16,) * 4, kept=(4, 0, 1, 5)), AcceptedCase(REAL, (128,), kept=(8,))]
    return some + real * full


def accepted_controls() -> list[AcceptedCase]:
    """Streams that accept rows between streams that accept none."""
    return [AcceptedCase(ODD, (12, 0, 5, 8), 2, kept=(4, 0, 2, 0)), AcceptedCase(ODD, (3, 0, 2), 2, kept=(2, 0, 1))]


def accepted_inputs(case: AcceptedCase) -> Inputs:
    """What says which rows are accepted."""
    return {"last": case.last, "kept": np.array(case.kept, np.int32), "paths": case.path_table()}


# --- Faults in inputs -------------------------------------------------------------------------------------------------


def other_path(inputs: Inputs) -> None:
    """The first stream accepts the path of the row before."""
    inputs["last"][0] -= 1


def fewer(inputs: Inputs) -> None:
    """The last row that the first stream accepts is left out."""
    inputs["kept"][0] -= 1


ACCEPTED_CONTROLS = (
    Control("the path of another row", EXACT, other_path), Control("one row too few accepted", EXACT, fewer),
)  # fmt: skip
