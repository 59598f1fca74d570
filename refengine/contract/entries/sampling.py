"""argmax, the lowest id among the largest logits, and seeded draws: exact ids. Spec numerics §4 and §6."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from refengine.contract.by_row import ByRow
from refengine.contract.entry import Bounds, Control, Inputs, Modules, Outputs, contract
from refengine.contract.gates import BOUND
from refengine.contract.workbench import Array, Poison, Workbench, drawn
from refengine.verify.sampling_oracle import candidates

SAMPLING, NORMS = "kernels_numba.sampling", "kernels_numba.norms"
THREADS = 1024
SETTINGS = (
    (1.0, 0, 1.0), (0.0, 0, 1.0), (0.7, 20, 1.0), (1.3, 0, 0.9), (0.8, 40, 0.95), (30.0, 1, 1.0), (1.0, 0, 0.0),
    (30.0, 3, 0.5), (0.0, 5, 0.5), (4.0, 1_000_000, 0.75), (1e-30, 0, 1.0), (30.0, 0, 1e-6), (2.0, 8, 0.6),
)  # fmt: skip
"""(temperature, top_k, top_p) of the rows in turn; their number has no divisor in common with that of the kinds of rows."""


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


@dataclass(frozen=True)
class SampleCase(ArgmaxCase):
    """``rows`` rows of ``vocabulary`` logits, their kinds and settings in turn. width: how far apart logits lie."""

    width: float = 1.0

    def __str__(self) -> str:
        return f"{super().__str__()} width={self.width:g}"


@contract
class Sample(ByRow):
    """ids[row] = the token that the row's seed and position draw, the one that float64 draws with the same noise."""

    name = "sample"
    kernels = ("sample_kernel",)
    modules = (SAMPLING, NORMS)
    axes = {"ids": ("row",)}
    by_row = ("logits", "seeds", "positions", "temperatures", "top_ks", "top_ps")

    def cases(self, full: bool) -> Sequence[SampleCase]:
        some = [SampleCase(26, 1), SampleCase(26, 31), SampleCase(130, 320), SampleCase(130, 1025, width=4.0)]
        some += [SampleCase(39, 5001), SampleCase(1, 248_320)]
        return some + [SampleCase(26, 248_320), SampleCase(26, 248_320, width=4.0)] * full

    def control_cases(self) -> Sequence[SampleCase]:
        return [SampleCase(13, 1500), SampleCase(130, 320)]

    def cost(self, case: SampleCase) -> float:
        return 1.0 + case.rows * case.vocabulary / 100_000

    def inputs(self, case: SampleCase, poison: Poison, seed: int) -> Inputs:
        logits = drawn((seed, case.vocabulary), case.rows, case.vocabulary, scale=case.width)
        for row in range(case.rows):
            make_kind(logits[row], row)
        temperatures, top_ks, top_ps = zip(*(SETTINGS[row % len(SETTINGS)] for row in range(case.rows)))
        rows = np.arange(case.rows)
        return {
            "logits": logits,
            "seeds": np.random.default_rng((seed, case.rows)).integers(0, 2**64, case.rows, np.uint64),
            "positions": np.where(rows % 3 == 2, 2**33 + rows, 1000 + rows).astype(np.int64),
            "temperatures": np.array(temperatures, np.float32),
            "top_ks": np.array(top_ks, np.int32),
            "top_ps": np.array(top_ps, np.float32),
        }

    def launch(self, case: SampleCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        ids = bench.output("ids", (case.rows,), np.int32)
        modules[SAMPLING].sample(ids, *(bench.input(name, inputs[name]) for name in self.by_row))

    def exact(self, case: SampleCase, inputs: Inputs) -> Bounds:
        """From the lowest candidate to the highest; but for rare rows they are one, and half a step is far enough."""
        rows = [candidates(*values) for values in zip(*(inputs[name] for name in self.by_row))]
        low, high = (np.array([row[end] for row in rows], np.float64) for end in (0, -1))
        return {"ids": ((low + high) / 2, (high - low) / 2 + 0.5)}

    def twins(
        self, case: SampleCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        yield from super().twins(case, inputs, run)
        other = run(case, {name: inputs[name][::-1] for name in self.by_row})
        yield "the rows in reverse", {"ids": np.ascontiguousarray(other["ids"][::-1])}

    def controls(self) -> Sequence[Control]:
        return [
            *super().controls(),
            Control("every seed off by one", BOUND, lambda inputs: add_one(inputs["seeds"])),
            Control("every position off by one", BOUND, lambda inputs: add_one(inputs["positions"])),
            *(Control(f"{name} of another row", BOUND, partial(roll, name)) for name in self.by_row),
        ]

    def change(self, inputs: Inputs) -> None:
        """Of a greedy row's two equal largest logits, the second goes up by one step."""
        second = np.flatnonzero(inputs["logits"][1] == inputs["logits"][1].max())[1]
        inputs["logits"][1, second] = np.nextafter(inputs["logits"][1, second], np.float32(np.inf))


def add_one(x: Array) -> None:
    x += x.dtype.type(1)


def roll(name: str, inputs: Inputs) -> None:
    """Each row has what the row before it had."""
    inputs[name] = np.roll(inputs[name], 1, axis=0)


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
