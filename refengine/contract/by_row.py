"""What entries share whose kernels take rows one by one: twins are rows in other batches, a control changes a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from refengine.contract.entry import Control, Entry, Inputs, Outputs
from refengine.contract.gates import EXACT, REPEATS
from refengine.contract.workbench import Array, bits

NARROW = 32
"""Rows of the second batch, at most: a matrix product has another form up to here."""


class ByRow(Entry):
    """Kernels to which the rows of a launch are strangers. A case is a dataclass with ``rows``.

    by_row: the inputs that have a row for each row of the launch; controls change the first. ``in_place``, where a case has
    it, is off in its twins: an output of its own gives the same bits.
    """

    by_row: ClassVar[tuple[str, ...]]

    def twins(self, case: Any, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]) -> Iterator[tuple[str, Outputs]]:
        if case.rows > 1:
            edges = sorted({0, 1, min(1 + NARROW, case.rows), case.rows})
            apart = {"in_place": False} if hasattr(case, "in_place") else {}
            parts = [
                run(
                    replace(case, rows=stop - start, **apart),
                    {**inputs, **{n: inputs[n][start:stop] for n in self.by_row}},
                )
                for start, stop in zip(edges, edges[1:], strict=False)
            ]
            whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            yield "the first row alone, the others in batches", whole

    def controls(self) -> Sequence[Control]:
        return [
            Control("one element changed by one step", EXACT, lambda inputs: self.change(inputs)),
            Control("one element changed after the first run", REPEATS, lambda inputs: self.change(inputs)),
        ]

    def change(self, inputs: Inputs) -> None:
        """A small change that must show."""
        step(inputs[self.by_row[0]])


def step(x: Array) -> None:
    """Change the middle of an array by one step of its type."""
    bits(x).reshape(-1)[x.size // 2] += 1
