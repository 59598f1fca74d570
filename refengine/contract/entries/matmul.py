"""Matrix product: each element one chain over K, whatever the batch and the form. Spec numerics §4."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from refengine.contract.by_row import ByRow, step
from refengine.contract.entry import Bounds, Control, Inputs, Modules, Outputs, contract
from refengine.contract.gates import EXACT
from refengine.contract.workbench import BF16, Poison, Workbench, drawn_bf16
from refengine.verify import oracles

MATMUL = "kernels_numba.matmul"
ROWS = (1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 129, 257)
SHAPES = ((16, 2), (48, 66), (128, 320), (144, 70), (272, 6), (320, 18))
"""(K, features): K of one step, of less and more than a slab of either form; features of part of a warp and of a block."""
REAL = ((1024, 3584), (2560, 2560), (5120, 1088), (6144, 640), (17_408, 320))


@dataclass(frozen=True)
class MatmulCase:
    """``rows`` tokens of K elements to ``features``. rounded: to bf16, else the float32 sums."""

    rows: int
    K: int
    features: int
    rounded: bool = True

    def __str__(self) -> str:
        return f"rows={self.rows} K={self.K} features={self.features} {'bf16' if self.rounded else 'float32'}"


@contract
class Matmul(ByRow):
    """out = x · weightᵀ. The narrow form takes up to 32 rows, the wide one any number."""

    name = "matmul"
    kernels = ("matmul_kernel",)
    modules = (MATMUL,)
    axes = {"out": ("row", "feature")}
    by_row = ("x",)

    def cases(self, full: bool) -> Sequence[MatmulCase]:
        some = [MatmulCase(rows, *SHAPES[n % len(SHAPES)], n % 3 > 0) for n, rows in enumerate(ROWS)]
        some += [MatmulCase(rows, 144, 77, rounded=False) for rows in (5, 40)]
        if not full:
            return some
        table = [MatmulCase(rows, *shape, rounded) for rows in ROWS for shape in SHAPES for rounded in (True, False)]
        real = [MatmulCase(rows, *shape) for rows in (1, 32, 33, 512) for shape in REAL]
        return list(dict.fromkeys([*some, *table, *real, MatmulCase(4, 1024, 4097, rounded=False)]))

    def control_cases(self) -> Sequence[MatmulCase]:
        """The narrow form; the wide one; its sums as they are, in which another order shows."""
        return [MatmulCase(9, 144, 70), MatmulCase(43, 144, 70), MatmulCase(43, 144, 77, rounded=False)]

    def inputs(self, case: MatmulCase, poison: Poison, seed: int) -> Inputs:
        x = drawn_bf16((seed, case.rows, case.K), case.rows, case.K)
        return {"x": x, "weight": drawn_bf16((seed, case.features, case.K, 1), case.features, case.K)}

    def launch(self, case: MatmulCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        out = bench.output("out", (case.rows, case.features), BF16 if case.rounded else np.float32)
        modules[MATMUL].matmul(out, bench.input("x", inputs["x"]), bench.input("weight", inputs["weight"]))

    def exact(self, case: MatmulCase, inputs: Inputs) -> Bounds:
        return {"out": oracles.matmul(inputs["x"], inputs["weight"], case.rounded)}

    def twins(
        self, case: MatmulCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        yield from super().twins(case, inputs, run)
        cut = case.features // 4 * 2
        if cut:
            parts = [
                run(replace(case, features=len(weight)), {**inputs, "weight": weight})["out"]
                for weight in (inputs["weight"][:cut], inputs["weight"][cut:])
            ]
            yield "its features in two weights", {"out": np.concatenate(parts, axis=1)}

    def controls(self) -> Sequence[Control]:
        changed = Control("one element of the weight changed by one step", EXACT, lambda i: step(i["weight"]))
        return [*super().controls(), changed]
