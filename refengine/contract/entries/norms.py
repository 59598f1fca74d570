"""RMSNorm, alone and after a residual add. Spec numerics §4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from refengine.contract.by_row import ByRow
from refengine.contract.entry import Bounds, Inputs, Modules, contract
from refengine.contract.workbench import BF16, Array, Poison, Workbench, drawn, drawn_bf16
from refengine.verify import oracles

NORMS = "kernels_numba.norms"
EPS = 1e-6
ROWS, DIMS = (1, 5, 64), (2, 128, 258, 2560, 5120)


@dataclass(frozen=True)
class NormCase:
    """``rows`` rows of ``dims`` elements. in_place: the output over the input, where a kernel allows it."""

    rows: int
    dims: int
    in_place: bool = False

    def __str__(self) -> str:
        return f"rows={self.rows} D={self.dims}" + " in place" * self.in_place


class Norm(ByRow):
    """What both norms share: rows of x, a gain. The first row is zeros, but for one element: eps counts there."""

    modules = (NORMS,)
    axes = {"out": ("row", "dim"), "h": ("row", "dim")}
    by_row: ClassVar[tuple[str, ...]] = ("x",)

    def cases(self, full: bool) -> Sequence[NormCase]:
        some = [NormCase(5, dims) for dims in DIMS[:4]] + [NormCase(1, 2560), NormCase(34, 128)]
        return [NormCase(rows, dims) for rows in ROWS for dims in DIMS] if full else some

    def control_cases(self) -> Sequence[NormCase]:
        """The last: so many results that some stand on the other side of a rounding once a sum has another order."""
        return [NormCase(5, 258), NormCase(64, 2560), NormCase(128, 32768)]

    def inputs(self, case: NormCase, poison: Poison, seed: int) -> Inputs:
        gain = 1 + drawn((seed, case.dims, 1), case.dims, scale=0.3)
        x = drawn_bf16((seed, case.rows, case.dims), case.rows, case.dims, scale=3.0)
        x[0, 1:], x[0, 0] = 0, 0.0625
        return {"x": x, "gain": gain.astype(np.float32)}


@contract
class RmsNorm(Norm):
    """out = bf16((x · inv) · gain)."""

    name = "rms_norm"
    kernels = ("rms_norm_kernel",)

    def cases(self, full: bool) -> Sequence[NormCase]:
        return [*super().cases(full), NormCase(5, 258, in_place=True)]

    def launch(self, case: NormCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        if case.in_place:
            out = x = bench.changed("out", inputs["x"], np.ones(inputs["x"].shape, bool))
        else:
            out, x = bench.output("out", inputs["x"].shape, BF16), bench.input("x", inputs["x"])
        modules[NORMS].rms_norm(out, x, bench.input("gain", inputs["gain"]), EPS)

    def exact(self, case: NormCase, inputs: Inputs) -> Bounds:
        return {"out": oracles.rms_norm(inputs["x"], inputs["gain"], EPS)}


@contract
class AddRmsNorm(Norm):
    """h = bf16(h + r), then its norm."""

    name = "add_rms_norm"
    kernels = ("add_rms_norm_kernel",)
    by_row = ("x", "h")

    def inputs(self, case: NormCase, poison: Poison, seed: int) -> Inputs:
        inputs = super().inputs(case, poison, seed)
        h = drawn_bf16((seed, case.rows, case.dims, 2), case.rows, case.dims)
        h[0] = 0
        return {**inputs, "h": h}

    def launch(self, case: NormCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        h = bench.changed("h", inputs["h"], np.ones(inputs["h"].shape, bool))
        out = bench.output("out", inputs["h"].shape, BF16)
        modules[NORMS].add_rms_norm(out, h, bench.input("x", inputs["x"]), bench.input("gain", inputs["gain"]), EPS)

    def exact(self, case: NormCase, inputs: Inputs) -> Bounds:
        h = added(inputs)
        return {"h": oracles.rounded(h.astype(np.float64), np.zeros(h.shape)), "out": self.normed(inputs)}

    def normed(self, inputs: Inputs) -> tuple[Array, Array]:
        """Of the sum as it is stored: rounded."""
        return oracles.rms_norm(added(inputs).astype(BF16), inputs["gain"], EPS)


def added(inputs: Inputs) -> Array:
    """h + r in float32, the rounding of which bf16 does not see."""
    return np.asarray(inputs["h"].astype(np.float32) + inputs["x"].astype(np.float32))
