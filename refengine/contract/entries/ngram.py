"""The n-gram branch of Flash Next: its hash, gate and convolution, and what streams keep for them. Spec flash-next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from refengine.contract.by_row import step
from refengine.contract.entries.hyper import EPS, HYPER, NORMS, ROUNDING, HyperCase
from refengine.contract.entries.hyper import OverStreams as OverRows
from refengine.contract.entry import Bounds, Control, Inputs, Modules, Outputs, contract
from refengine.contract.gated_delta_net import InRuns, OfStreams, drawn_as, pieces, scattered, swap_runs
from refengine.contract.gates import BOUND, EXACT, REPEATS
from refengine.contract.workbench import BF16, Array, Poison, Workbench, drawn, drawn_bf16
from refengine.registry.ngrams import NgramHash, ngram_hash
from refengine.verify import flash_next_oracle as oracle
from refengine.verify import oracles

NGRAM = "kernels_numba.flash_next.ngram"
END = 7
"""The id that ends a text."""
TAPS, DILATION, TOKENS = 4, 3, 2
TAIL = (TAPS - 1) * DILATION
HALF = 0.5
"""A bound that whole numbers keep only when they are right."""
Run = Callable[[Any, Inputs], Outputs]


@dataclass(frozen=True)
class NgramCase(OfStreams):
    """width: channels, or heads of the hash. vocabulary, base: of the hash. draw: a draw of its own, whatever the seed."""

    rows: tuple[int, ...]
    width: int
    gap: int = 0
    vocabulary: int = 320
    base: int = 1000
    draw: int = 0

    @property
    def hash(self) -> NgramHash:
        return ngram_hash(self.vocabulary, 3, self.width // 2, self.base, 128, 1234)

    def alone(self, rows: int) -> NgramCase:
        """One stream of so many rows."""
        return replace(self, rows=(rows,), gap=0)

    def __str__(self) -> str:
        hashed = f" vocabulary={self.vocabulary} base={self.base}" * (self.base != 1000)
        return f"width={self.width} {super().__str__()}{hashed}" + f" draw={self.draw}" * (self.draw > 0)


class Streams(InRuns):
    """Kernels of streams that keep something. rows_input: what has a row for each row of the launch."""

    modules = (NGRAM, HYPER, NORMS, ROUNDING)
    rows_input: ClassVar[str]

    def given(self, case: NgramCase, seed: int, kept: Array, rows: Array) -> Inputs:
        owners = np.repeat(np.arange(len(case.rows)), case.rows).astype(np.int32)
        return {
            self.kept: kept, self.rows_input: rows, "streams": case.table(), "slots": case.slots(seed), "rows": owners,
        }  # fmt: skip

    def before(self, case: NgramCase, inputs: Inputs, stream: int, row: int) -> Array:
        """What a stream would keep just before a row of the launch."""
        kept = inputs[self.kept][inputs["slots"][stream]]
        return np.concatenate([kept, self.as_kept(inputs[self.rows_input][case.firsts[stream] : row])])[-len(kept) :]

    def as_kept(self, rows: Array) -> Array:
        """Rows as a stream keeps them."""
        return rows

    def in_pieces(self, case: NgramCase, inputs: Inputs, run: Run, output: str, row_inputs: Sequence[str]) -> Array:
        """Each stream's rows of an output, from launches of their own, a piece each."""
        parts = []
        for s, first, last in case.parts:
            for start, stop in pieces(first, last):
                alone = case.alone(stop - start)
                rows = {n: inputs[n][start:stop] for n in row_inputs}
                own = {
                    **inputs, **rows, self.kept: self.before(case, inputs, s, start)[None],
                    "rows": np.zeros(stop - start, np.int32), "streams": alone.table(), "slots": np.zeros(1, np.int32),
                }  # fmt: skip
                parts.append(run(alone, own)[output])
        return np.concatenate(parts)

    def controls(self) -> Sequence[Control]:
        return [
            Control("a row changed", EXACT, lambda inputs: self.change(inputs)),
            Control("a stream with another's run", EXACT, swap_runs),
            Control("what is kept shifted by a row", EXACT, lambda inputs: roll(inputs, self.kept)),
            Control("a row changed after the first run", REPEATS, lambda inputs: self.change(inputs)),
        ]

    def change(self, inputs: Inputs) -> None:
        step(inputs[self.rows_input])


def roll(inputs: Inputs, kept: str) -> None:
    """The rows that the first stream keeps, each a place further."""
    slot = inputs["slots"][0]
    inputs[kept][slot] = np.roll(inputs[kept][slot], 1, axis=0)


class Committed(Streams):
    """Kernels that only copy rows to what a stream keeps."""

    def committed(self, case: NgramCase, inputs: Inputs) -> Array:
        """What is kept after the launch, zero where nothing was written."""
        after = np.zeros_like(inputs[self.kept])
        for s, _, stop in case.parts:
            after[inputs["slots"][s]] = self.before(case, inputs, s, stop)
        return after

    def exact(self, case: NgramCase, inputs: Inputs) -> Bounds:
        after = self.committed(case, inputs)
        return {self.kept: (after.astype(np.float64), np.full(after.shape, oracles.TINY / 2**10))}

    def twins(self, case: NgramCase, inputs: Inputs, run: Run) -> Iterator[tuple[str, Outputs]]:
        yield "the rows themselves", {self.kept: self.committed(case, inputs)}


# --- The hash ---------------------------------------------------------------------------------------------------------


class WithIds(Streams):
    """Token ids: one in four ends a text; a stream in three has no token yet, one has a single one."""

    kept, rows_input = "tokens", "ids"

    def inputs(self, case: NgramCase, poison: Poison, seed: int) -> Inputs:
        rng, slots = np.random.default_rng((seed, case.total)), case.slots(seed)
        ids = rng.integers(0, case.vocabulary, case.total).astype(np.int32)
        ids[rng.random(case.total) < 0.25] = END
        ids[:1] = case.vocabulary - 1
        tokens = rng.integers(1, case.vocabulary + 1, (case.written(slots).sum(), TOKENS)).astype(np.int32)
        tokens[::3], tokens[1::3, 0] = 0, 0
        ids = scattered(ids[case.owned], case.owned, poison)
        return self.given(case, seed, scattered(tokens, case.written(slots), poison), ids)

    def as_kept(self, rows: Array) -> Array:
        return rows + np.int32(1)

    def change(self, inputs: Inputs) -> None:
        """The first row with an owner gets another id."""
        first = inputs["streams"][:, 0].min()
        inputs["ids"][first] = 11 if inputs["ids"][first] != 11 else 12


@contract
class NgramRows(WithIds):
    """Rows of the table by the hash of the last tokens."""

    name = "ngram_rows"
    kernels = ("ngram_rows_kernel",)
    axes = {"out": ("row", "head")}

    def cases(self, full: bool) -> Sequence[NgramCase]:
        real = NgramCase((9, 1, 40), 16, vocabulary=248_320, base=20_000_000)
        some = [NgramCase((1,), 16), NgramCase((2, 0, 5, 1, 1), 4), NgramCase((65, 3), 2), real]
        return some + [replace(real, rows=(1,) * 8), replace(real, rows=(2000,))] * full

    def control_cases(self) -> Sequence[NgramCase]:
        return [NgramCase((5, 0, 1, 2, 1), 4), NgramCase((9, 1, 4), 16, vocabulary=248_320, base=20_000_000)]

    def launch(self, case: NgramCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        out = bench.output("out", (case.total, case.width), np.int32)
        numbers = {n: np.array(getattr(case.hash, n), np.uint64) for n in ("multipliers", "sizes", "offsets")}
        tokens, runs = self.in_runs(inputs, bench)
        ids, rows, streams = (bench.input(n, inputs[n]) for n in ("ids", "rows", "streams"))
        hashed = (bench.input(n, array) for n, array in numbers.items())
        modules[NGRAM].ngram_rows(out, ids, tokens, *hashed, rows, streams, runs, END)

    def exact(self, case: NgramCase, inputs: Inputs) -> Bounds:
        value = np.array(
            [self.hashed(case, inputs, s, row) for s, a, b in case.parts for row in range(a, b)], np.float64
        )
        return {"out": (value, np.full(value.shape, HALF))}

    def hashed(self, case: NgramCase, inputs: Inputs, stream: int, row: int) -> list[int]:
        """A row's heads by whole numbers without end."""
        older, last = (END if t == 0 else int(t) - 1 for t in self.before(case, inputs, stream, row))
        token, (m0, m1, m2), heads = int(inputs["ids"][row]), case.hash.multipliers, case.width // 2
        pair = (token * m0) ^ (last * m1)
        mixed = [pair] * heads + [pair ^ ((END if last == END else older) * m2)] * heads
        return [o + x % n for o, x, n in zip(case.hash.offsets, mixed, case.hash.sizes, strict=True)]

    def twins(self, case: NgramCase, inputs: Inputs, run: Run) -> Iterator[tuple[str, Outputs]]:
        yield "each stream alone, in pieces", {"out": self.in_pieces(case, inputs, run, "out", ["ids"])}


@contract
class CommitTokens(WithIds, Committed):
    """A stream's last two tokens."""

    name = "commit_tokens"
    kernels = ("commit_tokens_kernel",)
    axes = {"tokens": ("slot", "token")}

    def cases(self, full: bool) -> Sequence[NgramCase]:
        return [NgramCase((1, 0, 2, 3, 1, 1), 2, gap=2), NgramCase((65,), 2), NgramCase((1,) * 130, 2)]

    def control_cases(self) -> Sequence[NgramCase]:
        return [NgramCase((1, 0, 2, 3, 1, 1), 2, gap=2)]

    def launch(self, case: NgramCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        tokens, runs = self.in_runs(inputs, bench, case.written(inputs["slots"]))
        modules[NGRAM].commit_tokens(tokens, *(bench.input(n, inputs[n]) for n in ("ids", "streams")), runs)


# --- The gate ---------------------------------------------------------------------------------------------------------


@contract
class NgramGate(OverRows):
    """gated values of rows of all kinds: dot products far from zero, zero, and of both signs."""

    name = "ngram_gate"
    kernels = ("ngram_gate_kernel",)
    modules = (NGRAM, HYPER, NORMS, ROUNDING)
    by_row = ("keys", "values", "h")

    def cases(self, full: bool) -> Sequence[HyperCase]:
        some = [HyperCase(1, 2), HyperCase(5, 34), HyperCase(7, 320, streams=2), HyperCase(3, 2560), HyperCase(35, 128)]
        return some + [HyperCase(rows, 2560) for rows in (1, 512)] * full

    def control_cases(self) -> Sequence[HyperCase]:
        return [HyperCase(7, 34), HyperCase(9, 770), HyperCase(40, 2560)]

    def inputs(self, case: HyperCase, poison: Poison, seed: int) -> Inputs:
        keys, h = self.streams_of(case, seed, 1), self.streams_of(case, seed, scale=2.0)
        keys[1::4], keys[2::4] = h[1::4], -h[2::4]
        keys[3::8] = 0
        gains = (1 + drawn((seed, case.dims, part), case.wide, scale=0.3) for part in (5, 6))
        key_gain, query_gain = (g.astype(np.float32) for g in gains)
        return {"keys": keys, "values": self.row_of(case, seed), "h": h, "key_gain": key_gain, "query_gain": query_gain}

    def launch(self, case: HyperCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        given = (bench.input(n, inputs[n]) for n in ("keys", "values", "h", "key_gain", "query_gain"))
        modules[NGRAM].ngram_gate(bench.output("out", (case.rows, case.wide)), *given, EPS)

    def exact(self, case: HyperCase, inputs: Inputs) -> Bounds:
        gains = inputs["key_gain"], inputs["query_gain"]
        return {"out": oracle.ngram_gate(inputs["keys"], inputs["values"], inputs["h"], gains, EPS)}

    def controls(self) -> Sequence[Control]:
        return [*super().controls(), Control("the values of the rows turned round", BOUND, turn_values)]

    def change(self, inputs: Inputs) -> None:
        step(inputs["values"])


def turn_values(inputs: Inputs) -> None:
    inputs["values"][:] = inputs["values"][::-1].copy()


# --- The convolution --------------------------------------------------------------------------------------------------


class WithTails(Streams):
    """Rows of normed values and the tails before them."""

    kept, rows_input = "tails", "normed"

    def inputs(self, case: NgramCase, poison: Poison, seed: int) -> Inputs:
        seed, width = drawn_as(case, seed), case.width
        slots = case.slots(seed)
        tails = drawn_bf16((seed, len(slots), 1), case.written(slots).sum(), TAIL, width)
        rows = drawn_bf16((seed, *case.rows), sum(case.rows), width)
        tails[..., -1] = rows[:, -1] = 1.5
        normed = scattered(rows, case.owned, poison)
        return self.given(case, seed, scattered(tails, case.written(slots), poison), normed)


@contract
class NgramConv(WithTails):
    """h with the branch added. In the last channel the taps cancel, so that the order of the sum shows."""

    name = "ngram_conv"
    kernels = ("ngram_conv_kernel",)
    axes = {"h": ("row", "channel")}

    def cases(self, full: bool) -> Sequence[NgramCase]:
        some = [NgramCase(rows, 34) for rows in ((1,), (3,), (10,), (2, 0, 5, 1))] + [NgramCase((31, 4), 320)]
        return some + [NgramCase((1,) * 8, 10_240), NgramCase((5, 0, 300), 10_240)] * full

    def control_cases(self) -> Sequence[NgramCase]:
        return [NgramCase((5, 0, 2, 12), 34), NgramCase((64,), 2560)]

    def inputs(self, case: NgramCase, poison: Poison, seed: int) -> Inputs:
        inputs, (rows, width) = super().inputs(case, poison, seed), (case.total, case.width)
        weight = drawn_bf16((seed, width, 3), width, TAPS, scale=0.5)
        weight[-1] = np.array([2.0**20, -(2.0**20), 0.7, 0.41], BF16)
        h, gated = (drawn_bf16((seed, rows, part), rows, width) for part in (4, 5))
        return {**inputs, "weight": weight, "h": h, "gated": gated}

    def launch(self, case: NgramCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        h = bench.changed("h", inputs["h"], np.ones(inputs["h"].shape, bool))
        tails, runs = self.in_runs(inputs, bench)
        gated, normed, *given = (bench.input(n, inputs[n]) for n in ("gated", "normed", "weight", "rows", "streams"))
        modules[NGRAM].ngram_conv(h, gated, normed, tails, *given, runs)

    def exact(self, case: NgramCase, inputs: Inputs) -> Bounds:
        taps = []
        for s, start, stop in case.parts:
            rows = np.concatenate([self.before(case, inputs, s, start), inputs["normed"][start:stop]])
            taps += [rows[n : n + TAIL + 1 : DILATION].T for n in range(stop - start)]
        return {"h": oracle.ngram_conv(inputs["h"], inputs["gated"], np.array(taps), inputs["weight"])}

    def twins(self, case: NgramCase, inputs: Inputs, run: Run) -> Iterator[tuple[str, Outputs]]:
        rows = self.in_pieces(case, inputs, run, "h", ["normed", "gated", "h"])
        yield "each stream alone, in pieces", {"h": rows}

    def change(self, inputs: Inputs) -> None:
        """An element of the first row grows enough to show in the streams."""
        inputs["normed"][0, 0] += BF16.type(4)


@contract
class CommitTails(WithTails, Committed):
    """A stream's last nine rows."""

    name = "commit_tails"
    kernels = ("commit_tails_kernel",)
    axes = {"tails": ("slot", "row", "channel")}

    def cases(self, full: bool) -> Sequence[NgramCase]:
        some = [NgramCase((0, 1, 2, 9, 10, 5), 34), NgramCase((2, 0, 12), 258, gap=2), NgramCase((65, 4), 34)]
        return some + [NgramCase((1,) * 8, 10_240), NgramCase((1000, 0, 2), 10_240, gap=3)] * full

    def control_cases(self) -> Sequence[NgramCase]:
        return [NgramCase((1, 0, 2, 12, 9), 258, gap=2)]

    def launch(self, case: NgramCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        tails, runs = self.in_runs(inputs, bench, case.written(inputs["slots"]))
        modules[NGRAM].commit_tails(tails, *(bench.input(n, inputs[n]) for n in ("normed", "streams")), runs)

    def change(self, inputs: Inputs) -> None:
        """The first stream's last row."""
        streams = inputs["streams"]
        step(inputs["normed"][streams[0, 0] + streams[0, 1] - 1])
