"""RMSNorm, alone and after a residual add. Spec numerics §4."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from refengine.contract.entry import Bounds, Control, Entry, Inputs, Modules, Outputs, contract
from refengine.contract.gates import EXACT, REPEATS
from refengine.contract.workbench import BF16, Poison, Workbench, bits, drawn, drawn_bf16
from refengine.verify import oracles

NORMS = "kernels_numba.norms"
EPS = 1e-6
ROWS, DIMS = (1, 5, 64), (2, 128, 258, 2560, 5120)


@dataclass(frozen=True)
class NormCase:
    """``rows`` rows of ``dims`` elements."""

    rows: int
    dims: int

    def __str__(self) -> str:
        return f"rows={self.rows} D={self.dims}"


class Norm(Entry):
    """What both norms share: rows of x, a gain; every row alone gives the row's bits."""

    modules = (NORMS,)
    axes = {"out": ("row", "dim"), "h": ("row", "dim")}

    def cases(self, full: bool) -> Sequence[NormCase]:
        some = [NormCase(5, dims) for dims in DIMS[:4]] + [NormCase(1, 2560)]
        return [NormCase(rows, dims) for rows in ROWS for dims in DIMS] if full else some

    def control_cases(self) -> Sequence[NormCase]:
        return [NormCase(5, 258), NormCase(64, 2560)]

    def inputs(self, case: NormCase, poison: Poison, seed: int) -> Inputs:
        gain = 1 + drawn((seed, case.dims, 1), case.dims, scale=0.3)
        x = drawn_bf16((seed, case.rows, case.dims), case.rows, case.dims, scale=3.0)
        return {"x": x, "gain": gain.astype(np.float32)}

    def twins(
        self, case: NormCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        if case.rows > 1:
            last = {n: a[-1:] if a.ndim == 2 else a for n, a in inputs.items()}
            alone = run(NormCase(1, case.dims), last)
            whole = {n: np.concatenate([run(case, dict(inputs))[n][:-1], a]) for n, a in alone.items()}
            yield "the last row alone", whole

    def controls(self) -> Sequence[Control]:
        return [
            Control("one element changed by a bf16 step", EXACT, lambda inputs: step(inputs["x"])),
            Control("one element changed in the last run", REPEATS, lambda inputs: step(inputs["x"])),
        ]


def step(x: np.ndarray) -> None:
    """Change the middle of an array by one bf16 step."""
    bits(x).reshape(-1)[x.size // 2] += 1


@contract
class RmsNorm(Norm):
    """out = bf16((x · inv) · gain)."""

    name = "rms_norm"
    kernels = ("rms_norm_kernel",)

    def launch(self, case: NormCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        out = bench.output("out", inputs["x"].shape, BF16)
        modules[NORMS].rms_norm(out, bench.input("x", inputs["x"]), bench.input("gain", inputs["gain"]), EPS)

    def exact(self, case: NormCase, inputs: Inputs) -> Bounds:
        return {"out": oracles.rms_norm(inputs["x"], inputs["gain"], EPS)}


@contract
class AddRmsNorm(Norm):
    """h = bf16(h + r), then its norm."""

    name = "add_rms_norm"
    kernels = ("add_rms_norm_kernel",)

    def inputs(self, case: NormCase, poison: Poison, seed: int) -> Inputs:
        inputs = super().inputs(case, poison, seed)
        return {**inputs, "h": drawn_bf16((seed, case.rows, case.dims, 2), case.rows, case.dims)}

    def launch(self, case: NormCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        h = bench.changed("h", inputs["h"], np.ones(inputs["h"].shape, bool))
        out = bench.output("out", inputs["h"].shape, BF16)
        modules[NORMS].add_rms_norm(out, h, bench.input("x", inputs["x"]), bench.input("gain", inputs["gain"]), EPS)

    def exact(self, case: NormCase, inputs: Inputs) -> Bounds:
        total = inputs["h"].astype(np.float32) + inputs["x"].astype(np.float32)
        h = total.astype(BF16)
        return {
            "h": oracles.rounded(total.astype(np.float64), 0.0 * total),
            "out": oracles.rms_norm(h, inputs["gain"], EPS),
        }
