"""Embedding: the bits of the table's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from refengine.contract.by_row import ByRow
from refengine.contract.entry import Bounds, Control, Inputs, Modules, Outputs, contract
from refengine.contract.gates import EXACT
from refengine.contract.workbench import BF16, Poison, Workbench, drawn_bf16
from refengine.verify.oracles import TINY

EMBEDDING = "kernels_numba.embedding"


@dataclass(frozen=True)
class EmbedCase:
    """``rows`` ids of a table of ``vocabulary`` rows of ``dims`` elements."""

    rows: int
    vocabulary: int
    dims: int

    def __str__(self) -> str:
        return f"rows={self.rows} vocabulary={self.vocabulary} D={self.dims}"


@contract
class Embed(ByRow):
    """out[i] = table[ids[i]]. Rows of the table that no id names are poison."""

    name = "embed"
    kernels = ("embed_kernel",)
    modules = (EMBEDDING,)
    axes = {"out": ("row", "dim")}
    by_row = ("ids",)

    def cases(self, full: bool) -> Sequence[EmbedCase]:
        some = [EmbedCase(1, 1, 2), EmbedCase(5, 320, 128), EmbedCase(34, 320, 258), EmbedCase(9, 70_000, 258)]
        real = [EmbedCase(1, 248_320, 1024), EmbedCase(1000, 248_320, 1024), EmbedCase(65, 1000, 5120)]
        return some + real * full

    def control_cases(self) -> Sequence[EmbedCase]:
        return [EmbedCase(9, 70_000, 258)]

    def inputs(self, case: EmbedCase, poison: Poison, seed: int) -> Inputs:
        """The first id is the table's last, the last two ids are one; the elements are of every kind."""
        ids = np.random.default_rng((seed, case.rows)).integers(0, case.vocabulary, case.rows).astype(np.int32)
        ids[0], ids[-1] = case.vocabulary - 1, ids[-2:][0]
        named = np.unique(ids)
        table = poison.filled(case.vocabulary * case.dims * 2).view(BF16).reshape(case.vocabulary, case.dims)
        table[named] = drawn_bf16((seed, case.vocabulary), len(named), case.dims)
        table[named, :2] = np.array([-0.0, 2.0**-130], BF16)
        return {"table": table, "ids": ids}

    def launch(self, case: EmbedCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        out = bench.output("out", (case.rows, case.dims), BF16)
        modules[EMBEDDING].embed(out, bench.input("table", inputs["table"]), bench.input("ids", inputs["ids"]))

    def exact(self, case: EmbedCase, inputs: Inputs) -> Bounds:
        """A copy does not round."""
        value = inputs["table"][inputs["ids"]].astype(np.float64)
        return {"out": (value, np.full(value.shape, TINY / 2**10))}

    def twins(
        self, case: EmbedCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        yield "the table's rows", {"out": inputs["table"][inputs["ids"]]}
        yield from super().twins(case, inputs, run)

    def controls(self) -> Sequence[Control]:
        return [*super().controls(), Control("an element of the table changed by one step", EXACT, step_of_table)]

    def change(self, inputs: Inputs) -> None:
        """The middle row gets the first one's id."""
        inputs["ids"][len(inputs["ids"]) // 2] = inputs["ids"][0]


def step_of_table(inputs: Inputs) -> None:
    """One element of the last row, which an id names."""
    inputs["table"].view(np.uint16)[-1, -1] += 1
