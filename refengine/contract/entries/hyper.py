"""Gated hyper-connections: the copy into the streams, the readout's kernels and the write-back. Spec flash-next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from refengine.contract.by_row import ByRow
from refengine.contract.entry import Bounds, Control, Inputs, Modules, Outputs, contract
from refengine.contract.gates import BOUND
from refengine.contract.workbench import BF16, Array, Poison, Workbench, drawn, drawn_bf16
from refengine.verify import flash_next_oracle as oracle
from refengine.verify import oracles

HYPER, NORMS, ROUNDING = "kernels_numba.flash_next.hyper", "kernels_numba.norms", "kernels_numba.rounding"
EPS = 1e-6
STEEP = np.array([-800, -352, -80, -0.0, 2.0**-20, 80, 352, 800], BF16)
"""Where a sigmoid of a quarter of it is 0, 1, a half and in between."""
Run = Callable[[Any, Inputs], Outputs]


@dataclass(frozen=True)
class HyperCase:
    """``rows`` rows of ``streams`` streams of ``dims`` elements. in_place: the output over the input."""

    rows: int
    dims: int
    streams: int = 4
    in_place: bool = False

    @property
    def wide(self) -> int:
        """Elements of a row of streams."""
        return self.streams * self.dims

    def __str__(self) -> str:
        return f"rows={self.rows} S={self.streams} D={self.dims}" + " in place" * self.in_place


class OverStreams(ByRow):
    """What the kernels share: their modules, their cases."""

    modules: ClassVar[tuple[str, ...]] = (HYPER, NORMS, ROUNDING)
    axes: ClassVar[dict[str, tuple[str, ...]]] = {"out": ("row", "element"), "h": ("row", "element")}

    def cases(self, full: bool) -> Sequence[HyperCase]:
        some = [HyperCase(1, 2), HyperCase(5, 34), HyperCase(7, 320, streams=2), HyperCase(3, 2560), HyperCase(35, 128)]
        return some + [HyperCase(rows, 2560) for rows in (1, 33, 512)] * full

    def control_cases(self) -> Sequence[HyperCase]:
        """The last: so many results that some stand on the other side of a rounding once the order is another."""
        return [HyperCase(5, 322), HyperCase(24, 2560)]

    def streams_of(self, case: HyperCase, seed: int, part: int = 0, scale: float = 1.0) -> Array:
        """A row of streams for each row."""
        return drawn_bf16((seed, case.rows, case.dims, part), case.rows, case.wide, scale=scale)

    def row_of(self, case: HyperCase, seed: int) -> Array:
        return drawn_bf16((seed, case.rows, case.dims, 9), case.rows, case.dims)


@contract
class SpreadStreams(OverStreams):
    """Every stream is the row: bits."""

    name = "spread_streams"
    kernels = ("spread_kernel",)
    by_row = ("x",)

    def inputs(self, case: HyperCase, poison: Poison, seed: int) -> Inputs:
        return {"x": self.row_of(case, seed)}

    def launch(self, case: HyperCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        modules[HYPER].spread_streams(bench.output("h", (case.rows, case.wide)), bench.input("x", inputs["x"]))

    def exact(self, case: HyperCase, inputs: Inputs) -> Bounds:
        return {"h": oracles.copied(np.tile(inputs["x"], case.streams))}

    def twins(self, case: HyperCase, inputs: Inputs, run: Run) -> Iterator[tuple[str, Outputs]]:
        yield "the row, stream by stream", {"h": np.tile(inputs["x"], case.streams)}
        yield from super().twins(case, inputs, run)


@contract
class NormStreams(OverStreams):
    """out = bf16((h · inv) · gain), each stream by itself.

    The first stream is zeros, but for one element: eps counts there. Elsewhere every fifth element is so large that a sum rounds
    in each order otherwise.
    """

    name = "norm_streams"
    kernels = ("norm_streams_kernel",)
    by_row = ("h",)

    def cases(self, full: bool) -> Sequence[HyperCase]:
        return [*super().cases(full), HyperCase(5, 258, in_place=True)]

    def control_cases(self) -> Sequence[HyperCase]:
        return [*super().control_cases(), HyperCase(32, 32768)]

    def inputs(self, case: HyperCase, poison: Poison, seed: int) -> Inputs:
        gain = 1 + drawn((seed, case.dims, 1), case.wide, scale=0.3)
        h = self.streams_of(case, seed, scale=3.0)
        h *= np.repeat(2.0 ** np.arange(case.streams), case.dims).astype(BF16)
        h[:, ::5] *= BF16.type(64)
        h[0, 1 : case.dims], h[0, 0] = 0, 0.0625
        return {"h": h, "gain": gain.astype(np.float32)}

    def launch(self, case: HyperCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        if case.in_place:
            out = h = bench.changed("out", inputs["h"], np.ones(inputs["h"].shape, bool))
        else:
            out, h = bench.output("out", inputs["h"].shape), bench.input("h", inputs["h"])
        modules[HYPER].norm_streams(out, h, bench.input("gain", inputs["gain"]), case.streams, EPS)

    def exact(self, case: HyperCase, inputs: Inputs) -> Bounds:
        return {"out": oracle.norm_streams(inputs["h"], inputs["gain"], case.streams, EPS)}


@dataclass(frozen=True)
class GatesCase(HyperCase):
    """dims: R, the columns of act. inject: whether S more follow."""

    inject: bool = True

    def __str__(self) -> str:
        return f"rows={self.rows} S={self.streams} R={self.dims}" + " no inject" * (not self.inject)


@contract
class ReadoutGates(OverStreams):
    """act and inject of the low-rank product."""

    name = "readout_gates"
    kernels = ("readout_gates_kernel",)
    axes: ClassVar[dict[str, tuple[str, ...]]] = {"act": ("row", "column"), "inject": ("row", "stream")}
    by_row = ("low",)

    def cases(self, full: bool) -> Sequence[GatesCase]:
        some = [GatesCase(1, 8), GatesCase(5, 34), GatesCase(9, 320), GatesCase(5, 320, inject=False)]
        return [*some, GatesCase(7, 34, streams=2), GatesCase(7, 34, streams=6)] + [GatesCase(512, 320)] * full

    def control_cases(self) -> Sequence[GatesCase]:
        return [GatesCase(5, 34), GatesCase(5, 34, streams=6), GatesCase(200, 320)]

    def inputs(self, case: GatesCase, poison: Poison, seed: int) -> Inputs:
        columns = case.dims + case.streams * case.inject
        low = drawn_bf16((seed, case.rows, case.dims), case.rows, columns, scale=6.0)
        low[0, : len(STEEP)] = STEEP
        return {"low": low}

    def launch(self, case: GatesCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        act = bench.output("act", (case.rows, case.dims))
        inject = bench.output("inject", (case.rows, case.streams)) if case.inject else None
        modules[HYPER].readout_gates(act, inject, bench.input("low", inputs["low"]), case.streams)

    def exact(self, case: GatesCase, inputs: Inputs) -> Bounds:
        act, inject = oracle.readout_gates(inputs["low"], case.streams, case.dims)
        return {"act": act, "inject": inject} if case.inject else {"act": act}


@contract
class MixStreams(OverStreams):
    """out = the mean of the gated streams. In the last element of a row they cancel, so that the order of the sum shows."""

    name = "mix_streams"
    kernels = ("mix_kernel",)
    by_row = ("up", "normed")

    def inputs(self, case: HyperCase, poison: Poison, seed: int) -> Inputs:
        up, normed = self.streams_of(case, seed, scale=2.0), self.streams_of(case, seed, 1)
        last = slice(case.dims - 1, None, case.dims)
        up[:, last], normed[:, last] = 8.0, np.array([2.0**20, 0.69, 0.32], BF16).repeat([1, 1, case.streams - 2])
        normed[:, -1] = -(2.0**20)
        return {"up": up, "normed": normed}

    def launch(self, case: HyperCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        out = bench.output("out", (case.rows, case.dims))
        modules[HYPER].mix_streams(out, bench.input("up", inputs["up"]), bench.input("normed", inputs["normed"]))

    def exact(self, case: HyperCase, inputs: Inputs) -> Bounds:
        return {"out": oracle.mix_streams(inputs["up"], inputs["normed"], case.streams)}


@contract
class WriteBack(OverStreams):
    """h = bf16(h + bf16(branch · inject)), in place."""

    name = "write_back"
    kernels = ("write_back_kernel",)
    by_row = ("branch", "h", "inject")

    def inputs(self, case: HyperCase, poison: Poison, seed: int) -> Inputs:
        inject = np.abs(drawn_bf16((seed, case.rows, 3), case.rows, case.streams))
        return {"h": self.streams_of(case, seed), "branch": self.row_of(case, seed), "inject": inject}

    def launch(self, case: HyperCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        h = bench.changed("h", inputs["h"], np.ones(inputs["h"].shape, bool))
        modules[HYPER].write_back(h, *(bench.input(n, inputs[n]) for n in ("branch", "inject")))

    def exact(self, case: HyperCase, inputs: Inputs) -> Bounds:
        return {"h": oracle.write_back(inputs["h"], inputs["branch"], inputs["inject"])}

    def controls(self) -> Sequence[Control]:
        return [*super().controls(), Control("the streams' weights turned round", BOUND, turn_weights)]

    def change(self, inputs: Inputs) -> None:
        """An element of the branch doubles: one step would drown in the stream."""
        inputs["branch"][len(inputs["branch"]) // 2, 0] = 3.0


def turn_weights(inputs: Inputs) -> None:
    inputs["inject"][:] = inputs["inject"][:, ::-1].copy()
