"""SwiGLU and the output gate of attention, elementwise. Spec numerics §4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from refengine.contract.by_row import ByRow
from refengine.contract.entry import Bounds, Inputs, Modules, contract
from refengine.contract.workbench import BF16, Array, Poison, Workbench, drawn_bf16
from refengine.verify import oracles

ACTIVATIONS = "kernels_numba.activations"
STEEP = np.array([-200, -88, -20, -0.0, 2.0**-20, 20, 88, 200], BF16)
"""Gates where a sigmoid is 0, 1, a half and in between."""


@dataclass(frozen=True)
class SwigluCase:
    """``rows`` rows of ``features`` results."""

    rows: int
    features: int

    def __str__(self) -> str:
        return f"rows={self.rows} F={self.features}"


@contract
class Swiglu(ByRow):
    """out = bf16((g · sigmoid(g)) · u); a row is [g | u]."""

    name = "swiglu"
    kernels = ("swiglu_kernel",)
    modules = (ACTIVATIONS,)
    axes = {"out": ("row", "feature")}
    by_row = ("gate_up",)

    def cases(self, full: bool) -> Sequence[SwigluCase]:
        some = [SwigluCase(1, 2), SwigluCase(1, 258), SwigluCase(7, 34), SwigluCase(34, 640)]
        return some + [SwigluCase(rows, F) for rows in (1, 33, 512) for F in (3584, 9728, 17_408)] * full

    def control_cases(self) -> Sequence[SwigluCase]:
        """The last: so many results that some stand on the other side of a rounding once the order is another."""
        return [SwigluCase(7, 34), SwigluCase(64, 17_408)]

    def inputs(self, case: SwigluCase, poison: Poison, seed: int) -> Inputs:
        gate_up = drawn_bf16((seed, case.rows, case.features), case.rows, 2 * case.features, scale=2.0)
        steep = min(len(STEEP), case.features)
        gate_up[0, :steep] = STEEP[:steep]
        return {"gate_up": gate_up}

    def launch(self, case: SwigluCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        out = bench.output("out", (case.rows, case.features), BF16)
        modules[ACTIVATIONS].swiglu(out, bench.input("gate_up", inputs["gate_up"]))

    def exact(self, case: SwigluCase, inputs: Inputs) -> Bounds:
        return {"out": oracles.swiglu(inputs["gate_up"])}


@dataclass(frozen=True)
class GateCase:
    """``rows`` rows of ``heads`` heads of D dims. others: columns of the projection after the gates. in_place: over o."""

    rows: int
    heads: int
    D: int
    others: int = 256
    in_place: bool = False

    def __str__(self) -> str:
        return f"rows={self.rows} H={self.heads} D={self.D} others={self.others}" + " in place" * self.in_place


@contract
class AttentionGate(ByRow):
    """out = bf16(o · sigmoid(gate)). Queries and the columns after the gates are poison."""

    name = "attention_gate"
    kernels = ("attention_gate_kernel",)
    modules = (ACTIVATIONS,)
    axes = {"out": ("row", "element")}
    by_row = ("o", "qkv")

    def cases(self, full: bool) -> Sequence[GateCase]:
        some = [GateCase(1, 1, 64, 0), GateCase(5, 3, 64), GateCase(7, 2, 128), GateCase(34, 3, 256)]
        some += [GateCase(5, 3, 128, in_place=True)]
        real = [GateCase(rows, heads, 256, 2048) for rows in (1, 33, 512) for heads in (8, 24)]
        return some + real * full

    def control_cases(self) -> Sequence[GateCase]:
        return [GateCase(5, 3, 64), GateCase(256, 24, 256)]

    def inputs(self, case: GateCase, poison: Poison, seed: int) -> Inputs:
        shape = case.rows, case.heads, case.D
        columns = case.heads * 2 * case.D + case.others
        qkv = poison.filled(case.rows * columns * 2).view(BF16).reshape(case.rows, columns)
        gates_of(qkv, case)[:] = drawn_bf16((seed, *shape), *shape, scale=2.0)
        gates_of(qkv, case)[0, 0, : len(STEEP)] = STEEP
        return {"o": drawn_bf16((seed, *shape, 1), case.rows, case.heads * case.D), "qkv": qkv}

    def launch(self, case: GateCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        out, o = gate_buffers(case, inputs, bench)
        modules[ACTIVATIONS].attention_gate(out, o, bench.input("qkv", inputs["qkv"]), case.D)

    def exact(self, case: GateCase, inputs: Inputs) -> Bounds:
        return {"out": oracles.attention_gate(inputs["o"], gates_of(inputs["qkv"], case).reshape(case.rows, -1))}


def gate_buffers(case: GateCase, inputs: Inputs, bench: Workbench) -> tuple[Any, Any]:
    """(out, o), which are one where the case says so."""
    if case.in_place:
        both = bench.changed("out", inputs["o"], np.ones(inputs["o"].shape, bool))
        return both, both
    return bench.output("out", inputs["o"].shape, BF16), bench.input("o", inputs["o"])


def gates_of(qkv: Array, case: GateCase) -> Array:
    """[rows, heads, D], a view."""
    heads = qkv[:, : case.heads * 2 * case.D].reshape(case.rows, case.heads, 2, case.D)
    assert np.shares_memory(heads, qkv)
    return heads[:, :, 1]
