"""argmax: the lowest id among the largest logits. Spec numerics §4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refengine.contract.by_row import ByRow
from refengine.contract.entry import Bounds, Inputs, Modules, contract
from refengine.contract.workbench import Array, Poison, Workbench, drawn

SAMPLING = "kernels_numba.sampling"
THREADS = 1024


@dataclass(frozen=True)
class ArgmaxCase:
    """``rows`` rows of ``vocabulary`` logits."""

    rows: int
    vocabulary: int

    def __str__(self) -> str:
        return f"rows={self.rows} vocabulary={self.vocabulary}"


@contract
class Argmax(ByRow):
    """ids[row] = the lowest id among the largest logits; the rows are of all kinds in turn."""

    name = "argmax"
    kernels = ("argmax_kernel",)
    modules = (SAMPLING,)
    axes = {"ids": ("row",)}
    by_row = ("logits",)

    def cases(self, full: bool) -> Sequence[ArgmaxCase]:
        some = [ArgmaxCase(34, 1), ArgmaxCase(10, 31), ArgmaxCase(10, 320), ArgmaxCase(34, 1025), ArgmaxCase(20, 5001)]
        return some + [ArgmaxCase(1, 248_320), ArgmaxCase(34, 248_320)] * full

    def control_cases(self) -> Sequence[ArgmaxCase]:
        return [ArgmaxCase(20, 5001)]

    def inputs(self, case: ArgmaxCase, poison: Poison, seed: int) -> Inputs:
        logits = drawn((seed, case.vocabulary), case.rows, case.vocabulary)
        for row in range(case.rows):
            make_kind(logits[row], row)
        return {"logits": logits}

    def launch(self, case: ArgmaxCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        ids = bench.output("ids", (case.rows,), np.int32)
        modules[SAMPLING].argmax(ids, bench.input("logits", inputs["logits"]))

    def exact(self, case: ArgmaxCase, inputs: Inputs) -> Bounds:
        """Ids are whole: half a step is far enough."""
        logits = inputs["logits"]
        best = np.where(np.isnan(logits), -np.inf, logits).max(axis=1, keepdims=True)
        among = logits == best
        value = np.where(among.any(axis=1), among.argmax(axis=1), -1).astype(np.float64)
        return {"ids": (value, np.full(value.shape, 0.5))}

    def change(self, inputs: Inputs) -> None:
        """The first logit of the first row becomes its largest."""
        inputs["logits"][0, 0] = 9.0


def make_kind(logits: Array, kind: int) -> None:
    """Rows: as drawn; ties within a warp, across warps, across a thread's turns; zeros of both signs; NaN; infinities."""
    size = len(logits)
    if kind % 10 in (1, 2, 3):
        logits[[size // 2, size // 2 + min(size - 1 - size // 2, (1, 40, THREADS)[kind % 10 - 1])]] = 9.0
    elif kind % 10 == 4:
        logits[:], logits[-1] = -0.0, 0.0
    elif kind % 10 == 5:
        logits[::2] = np.nan
    elif kind % 10 == 6:
        logits[:-1] = np.nan
    elif kind % 10 in (7, 8, 9):
        logits[:] = (np.nan, -np.inf, np.inf)[kind % 10 - 7]
