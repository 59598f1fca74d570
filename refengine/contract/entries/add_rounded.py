"""The rounded sum of two float32 matrices, elementwise. Spec attention §6."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from refengine.contract.by_row import ByRow
from refengine.contract.entry import Bounds, Control, Inputs, Modules, Outputs, contract
from refengine.contract.gates import EXACT
from refengine.contract.workbench import BF16, Poison, Workbench, drawn
from refengine.verify import oracles

ADD_ROUNDED = "kernels_numba.add_rounded"
A = np.array([1, 1, -0.0, 1, 3, 1], np.float32)
B = np.array([2.0**-8, 2.0**-8 + 2.0**-20, -0.0, 2.0**-8 - 2.0**-20, -3, 2.0**-8 + 2.0**-25], np.float32)
"""Sums that are a tie of bf16, just above it and below, two zeros, nothing left, and a tie made by the first rounding."""


@dataclass(frozen=True)
class AddCase:
    """``rows`` rows of ``dims`` elements."""

    rows: int
    dims: int

    def __str__(self) -> str:
        return f"rows={self.rows} D={self.dims}"


@contract
class AddRounded(ByRow):
    """out = bf16(a + b), the sum in float32."""

    name = "add_rounded"
    kernels = ("add_rounded_kernel",)
    modules = (ADD_ROUNDED,)
    axes = {"out": ("row", "element")}
    by_row = ("a", "b")

    def cases(self, full: bool) -> Sequence[AddCase]:
        some = [AddCase(1, 2), AddCase(1, 258), AddCase(7, 34), AddCase(34, 640)]
        return some + [AddCase(rows, dims) for rows in (1, 33, 512) for dims in (1024, 2560, 5120)] * full

    def control_cases(self) -> Sequence[AddCase]:
        return [AddCase(7, 34), AddCase(64, 5120)]

    def inputs(self, case: AddCase, poison: Poison, seed: int) -> Inputs:
        """The first row starts with sums at the edges of a rounding."""
        a, b = (drawn((seed, case.rows, case.dims, n), case.rows, case.dims, scale=2.0) for n in (0, 1))
        edges = min(len(A), case.dims)
        a[0, :edges], b[0, :edges] = A[:edges], B[:edges]
        return {"a": a, "b": b}

    def launch(self, case: AddCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        out = bench.output("out", (case.rows, case.dims), BF16)
        modules[ADD_ROUNDED].add_rounded(out, bench.input("a", inputs["a"]), bench.input("b", inputs["b"]))

    def exact(self, case: AddCase, inputs: Inputs) -> Bounds:
        return {"out": oracles.add_rounded(inputs["a"], inputs["b"])}

    def twins(
        self, case: AddCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        yield "the sums as NumPy rounds them", {"out": (inputs["a"] + inputs["b"]).astype(BF16)}
        yield "b + a", run(case, {"a": inputs["b"], "b": inputs["a"]})
        yield from super().twins(case, inputs, run)

    def controls(self) -> Sequence[Control]:
        return [*super().controls(), Control("an element of b changed by a part in 128", EXACT, grow_b)]

    def change(self, inputs: Inputs) -> None:
        """One step of float32 may round away: a part in 128."""
        inputs["a"].reshape(-1)[-1] = inputs["a"].reshape(-1)[-1] * np.float32(1 + 2.0**-7) + np.float32(2.0**-5)


def grow_b(inputs: Inputs) -> None:
    """The last element."""
    inputs["b"].reshape(-1)[-1] = inputs["b"].reshape(-1)[-1] * np.float32(1 + 2.0**-7) + np.float32(2.0**-5)
