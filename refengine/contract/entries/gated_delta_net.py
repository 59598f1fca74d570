"""Gated DeltaNet but for its recurrence: convolution, its commit, gates and the gated output norm. Spec attention §5.1, §5.4."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels_numba.streams import FIRST, ROWS
from refengine.contract.by_row import ByRow
from refengine.contract.entry import Bounds, Control, Inputs, Modules, Outputs, contract
from refengine.contract.gated_delta_net import (
    GDN,
    HEAD,
    KEPT,
    ODD,
    REAL,
    SPARE_SLOTS,
    TINY,
    Heads,
    InRuns,
    StreamsCase,
    drawn_as,
    pieces,
    poisoned,
    scattered,
    swap_runs,
)
from refengine.contract.gates import EXACT, REPEATS
from refengine.contract.workbench import BF16, Array, Poison, Workbench, drawn, drawn_bf16
from refengine.verify import oracles

EPS = 1e-6
Run = Callable[[Any, Inputs], Outputs]


class OverStreams(InRuns):
    """Kernels that read streams' rows of the projection and their histories; runs of nobody hold poison."""

    modules = (GDN,)
    kept = "histories"

    def inputs(self, case: StreamsCase, poison: Poison, seed: int) -> Inputs:
        channels, seed = case.heads.channels, drawn_as(case, seed)
        mixed = poisoned(poison, (case.total, case.heads.columns))
        mixed[case.owned, :channels] = drawn_bf16((seed, *case.rows), sum(case.rows), channels)
        slots = case.slots(seed)
        histories = drawn_bf16((seed, len(slots), 1), case.written(slots).sum(), KEPT, channels)
        return {
            "mixed": mixed, "histories": scattered(histories, case.written(slots), poison), "slots": slots,
            "streams": case.table(), "taps": drawn_bf16((seed, channels), channels, 4, scale=0.5),
        }  # fmt: skip

    def controls(self) -> Sequence[Control]:
        return [
            Control("one element changed by a bf16 step", EXACT, step_of_row),
            Control("a history that is one row off", EXACT, roll_history),
            Control("a stream with another's run", EXACT, swap_runs),
            Control("one element changed after the first run", REPEATS, step_of_row),
        ]


def step_of_row(inputs: Inputs) -> None:
    """Change a stream's last row by one bf16 step."""
    streams = inputs["streams"]
    inputs["mixed"].view(np.uint16)[streams[0, FIRST] + streams[0, ROWS] - 1, 5] += 1


def roll_history(inputs: Inputs) -> None:
    """The rows that the first stream keeps, each a place further."""
    slot = inputs["slots"][0]
    inputs["histories"][slot] = np.roll(inputs["histories"][slot], 1, axis=0)


def history_before(case: StreamsCase, inputs: Inputs, stream: int, row: int) -> Array:
    """The three rows before a row of a stream: bf16 [3, C]."""
    first = case.firsts[stream]
    rows = inputs["mixed"][first:row, : case.heads.channels]
    return np.concatenate([inputs["histories"][inputs["slots"][stream]], rows])[-KEPT:]


# --- Convolution ------------------------------------------------------------------------------------------------------


@contract
class Conv(OverStreams):
    """qkv of the rows, from them and the history; changes no history."""

    name = "conv"
    kernels = ("conv_kernel",)
    axes = {"qkv": ("row", "channel")}

    def cases(self, full: bool) -> Sequence[StreamsCase]:
        some = [StreamsCase(TINY, rows) for rows in ((1,), (3,), (2, 0, 5, 1), (65,))]
        some += [StreamsCase(ODD, rows) for rows in ((31, 1), (4, 33))]
        return some + [StreamsCase(REAL, rows) for rows in ((1,) * 8, (5, 0, 17), (1000,))] * full

    def control_cases(self) -> Sequence[StreamsCase]:
        """The last: a draw in which a result stands on the other side of a rounding once an order is another."""
        return [
            StreamsCase(ODD, (5, 0, 2)),
            StreamsCase(TINY, (2, 0, 5, 1)),
            StreamsCase(Heads(16, 16), (64,), draw=12),
        ]

    def inputs(self, case: StreamsCase, poison: Poison, seed: int) -> Inputs:
        """Orders of sums show where a pair of channels outweighs its head, in every other one, and where taps cancel, in
        the last channel."""
        inputs, channel = super().inputs(case, poison, seed), np.arange(2 * case.heads.key * HEAD)
        inputs["taps"][channel[(channel // HEAD % 2 == 0) & (channel % HEAD > 1)]] *= BF16.type(2.0**-5)
        inputs["taps"][-1] = np.array([2.0**20, -(2.0**20), 0.7, 0.41], BF16)
        inputs["mixed"][:, case.heads.channels - 1] = inputs["histories"][..., -1] = 1.5
        owners = np.repeat(np.arange(len(case.rows)), case.rows).astype(np.int32)
        return {**inputs, "rows": owners}

    def launch(self, case: StreamsCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        qkv = bench.output("qkv", (case.total, case.heads.channels), BF16)
        histories, runs = self.in_runs(inputs, bench)
        mixed, *given = (bench.input(n, inputs[n]) for n in ("mixed", "taps", "rows", "streams"))
        modules[GDN].conv(qkv, mixed, histories, *given, runs, case.heads.key)

    def exact(self, case: StreamsCase, inputs: Inputs) -> Bounds:
        channels, parts = case.heads.channels, []
        for s, start, stop in case.parts:
            history = history_before(case, inputs, s, start)
            mixed = inputs["mixed"][start:stop, :channels]
            parts.append(oracles.conv_qkv(history, mixed, inputs["taps"], case.heads.key))
        value, bound = (np.concatenate(part) for part in zip(*parts, strict=True))
        return {"qkv": (value, bound)}

    def twins(self, case: StreamsCase, inputs: Inputs, run: Run) -> Iterator[tuple[str, Outputs]]:
        parts = [
            self.piece(case, inputs, s, start, stop, run)
            for s, first, last in case.parts
            for start, stop in pieces(first, last)
        ]
        yield "each stream alone, in pieces", {"qkv": np.concatenate(parts)}

    def piece(self, case: StreamsCase, inputs: Inputs, stream: int, start: int, stop: int, run: Run) -> Array:
        """Rows of a stream in a launch of their own, with the history before them."""
        alone = StreamsCase(case.heads, (stop - start,))
        history = history_before(case, inputs, stream, start)
        own = {
            "mixed": inputs["mixed"][start:stop], "histories": history[None], "taps": inputs["taps"],
            "rows": np.zeros(stop - start, np.int32), "streams": alone.table(), "slots": np.zeros(1, np.int32),
        }  # fmt: skip
        return run(alone, own)["qkv"]


@contract
class CommitConv(OverStreams):
    """The last three rows of [history | rows] become the history."""

    name = "commit_conv"
    kernels = ("commit_conv_kernel",)
    axes = {"histories": ("slot", "row", "channel")}

    def cases(self, full: bool) -> Sequence[StreamsCase]:
        some = [StreamsCase(TINY, (0, 1, 2, 3, 5)), StreamsCase(ODD, (2, 0, 1), gap=2), StreamsCase(ODD, (65, 4))]
        return some + [StreamsCase(REAL, (1,) * 8), StreamsCase(REAL, (1000, 0, 2), gap=3)] * full

    def control_cases(self) -> Sequence[StreamsCase]:
        return [StreamsCase(ODD, (1, 0, 2, 5), gap=2)]

    def launch(self, case: StreamsCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        histories, runs = self.in_runs(inputs, bench, case.written(inputs["slots"]))
        mixed, streams = bench.input("mixed", inputs["mixed"]), bench.input("streams", inputs["streams"])
        modules[GDN].commit_conv(histories, mixed, streams, runs, case.heads.channels)

    def exact(self, case: StreamsCase, inputs: Inputs) -> Bounds:
        """Copies do not round."""
        value = self.committed(case, inputs).astype(np.float64)
        return {"histories": (value, np.full(value.shape, oracles.TINY / 2**10))}

    def committed(self, case: StreamsCase, inputs: Inputs) -> Array:
        """The histories after the launch, zero where nothing was written."""
        after = np.zeros(inputs["histories"].shape, BF16)
        for s, _, stop in case.parts:
            after[inputs["slots"][s]] = history_before(case, inputs, s, stop)
        return after

    def twins(self, case: StreamsCase, inputs: Inputs, run: Run) -> Iterator[tuple[str, Outputs]]:
        yield "the rows themselves", {"histories": self.committed(case, inputs)}
        after = np.zeros(inputs["histories"].shape, BF16)
        for s, first, last in case.parts:
            slot = inputs["slots"][s]
            after[slot] = self.in_pieces(case, inputs, s, first, last, run)
        yield "each stream alone, in pieces", {"histories": after}

    def in_pieces(self, case: StreamsCase, inputs: Inputs, stream: int, first: int, last: int, run: Run) -> Array:
        """A stream's history after its rows, committed a piece after the other."""
        history = inputs["histories"][inputs["slots"][stream]]
        for start, stop in pieces(first, last):
            alone = StreamsCase(case.heads, (stop - start,))
            own = {"mixed": inputs["mixed"][start:stop], "streams": alone.table(), "slots": np.zeros(1, np.int32)}
            spare = np.zeros((SPARE_SLOTS, *history.shape), BF16)
            history = run(alone, {**own, "histories": np.concatenate([history[None], spare])})["histories"][0]
        return history


# --- Gates and output norm --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowsCase:
    """``rows`` rows of the projection."""

    heads: Heads
    rows: int

    def __str__(self) -> str:
        return f"{self.heads} rows={self.rows}"


@contract
class Gates(ByRow):
    """decay and beta; every column of the projection but theirs is poison."""

    name = "gates"
    kernels = ("gates_kernel",)
    modules = (GDN,)
    axes = {"decay": ("row", "head"), "beta": ("row", "head")}
    by_row = ("mixed",)
    STEEP = np.array([-200, -88, -20, -1, -0.0, 1, 20.5, 88, 200], BF16)

    def cases(self, full: bool) -> Sequence[RowsCase]:
        some = [RowsCase(TINY, 1), RowsCase(TINY, 67), RowsCase(ODD, 9), RowsCase(ODD, 130)]
        return some + [RowsCase(REAL, rows) for rows in (1, 8, 1000)] * full

    def control_cases(self) -> Sequence[RowsCase]:
        return [RowsCase(TINY, 67)]

    def inputs(self, case: RowsCase, poison: Poison, seed: int) -> Inputs:
        heads = case.heads.value
        mixed = poisoned(poison, (case.rows, case.heads.columns))
        mixed[:, -2 * heads :] = drawn_bf16((seed, case.rows), case.rows, 2 * heads, scale=2.0)
        if case.rows >= len(self.STEEP):
            mixed[: len(self.STEEP), -2 * heads :] = self.STEEP[:, None]
        a_log, dt_bias = drawn((seed, heads, 1), heads), drawn((seed, heads, 2), heads) - np.float32(2)
        return {"mixed": mixed, "a_log": a_log, "dt_bias": dt_bias}

    def change(self, inputs: Inputs) -> None:
        inputs["mixed"].view(np.uint16)[len(inputs["mixed"]) // 2, -1] += 1

    def launch(self, case: RowsCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        decay, beta = (bench.output(n, (case.rows, case.heads.value), np.float32) for n in ("decay", "beta"))
        given = (bench.input(n, inputs[n]) for n in ("mixed", "a_log", "dt_bias"))
        modules[GDN].gates(decay, beta, *given, case.heads.key)

    def exact(self, case: RowsCase, inputs: Inputs) -> Bounds:
        b, a = np.split(inputs["mixed"][:, -2 * case.heads.value :], 2, axis=1)
        return {"decay": oracles.decay(a, inputs["a_log"], inputs["dt_bias"]), "beta": oracles.beta(b)}


@dataclass(frozen=True)
class NormCase(RowsCase):
    """gate: silu or sigmoid. in_place: the output over y. draw: as in StreamsCase, a pair of elements outweighs its head."""

    gate: str = "silu"
    in_place: bool = False
    draw: int = 0

    def __str__(self) -> str:
        apart = " in place" * self.in_place + f" draw={self.draw}" * (self.draw > 0)
        return f"{super().__str__()} {self.gate}{apart}"


@contract
class GatedNorm(ByRow):
    """out = bf16(gate(z) · ((y · inv) · gain)) by head; every column of the projection but z is poison."""

    name = "gated_norm"
    kernels = ("gated_norm_kernel",)
    modules = (GDN,)
    axes = {"out": ("row", "element")}
    by_row = ("y", "mixed")

    def cases(self, full: bool) -> Sequence[NormCase]:
        some = [NormCase(TINY, 1), NormCase(TINY, 17, "sigmoid"), NormCase(ODD, 34), NormCase(ODD, 5, in_place=True)]
        return some + [NormCase(REAL, rows) for rows in (1, 8, 1000)] * full

    def control_cases(self) -> Sequence[NormCase]:
        """The last: a draw in which a result stands on the other side of a rounding once an order is another."""
        return [NormCase(ODD, 5), NormCase(TINY, 5, "sigmoid"), NormCase(REAL, 64, draw=9)]

    def inputs(self, case: NormCase, poison: Poison, seed: int) -> Inputs:
        """The first row's y is zero, the second's so small that eps counts."""
        heads, width, seed = case.heads, case.heads.value * HEAD, drawn_as(case, seed)
        mixed = poisoned(poison, (case.rows, heads.columns))
        mixed[:, heads.channels : heads.channels + width] = drawn_bf16((seed, case.rows), case.rows, width, scale=2.0)
        y = drawn_bf16((seed, case.rows, 1), case.rows, width)
        y[0], y[1:2] = 0, y[1:2] * BF16.type(2.0**-12)
        if case.draw:
            y[:, np.arange(width) % HEAD > 1] *= BF16.type(2.0**-6)
        return {"y": y, "mixed": mixed, "gain": 1 + drawn((seed, 3), HEAD, scale=0.25)}

    def launch(self, case: NormCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        if case.in_place:
            out = y = bench.changed("out", inputs["y"], np.ones(inputs["y"].shape, bool))
        else:
            out, y = bench.output("out", inputs["y"].shape, BF16), bench.input("y", inputs["y"])
        mixed, gain = bench.input("mixed", inputs["mixed"]), bench.input("gain", inputs["gain"])
        modules[GDN].gated_norm(out, y, mixed, gain, EPS, case.heads.key, case.gate)

    def exact(self, case: NormCase, inputs: Inputs) -> Bounds:
        heads = case.heads
        z = inputs["mixed"][:, heads.channels : heads.channels + heads.value * HEAD]
        y, z = (a.reshape(case.rows, heads.value, HEAD) for a in (inputs["y"], z))
        found = oracles.gated_norm(y, z, inputs["gain"], EPS, case.gate == "silu")
        value, bound = (part.reshape(case.rows, -1) for part in found)
        return {"out": (value, bound)}
