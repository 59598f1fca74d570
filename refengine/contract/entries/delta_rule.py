"""The delta rule: the decode step and the prompt chain, which round differently. Spec attention §5.2, §5.3."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kernels_numba.streams import FIRST, ROWS
from refengine.contract.entry import Bounds, Control, Inputs, Modules, Outputs, contract
from refengine.contract.gated_delta_net import (
    GDN,
    HEAD,
    ODD,
    REAL,
    SPARE_SLOTS,
    TINY,
    InRuns,
    StreamsCase,
    pieces,
    poisoned,
    scattered,
    swap_runs,
)
from refengine.contract.gates import EXACT, REPEATS
from refengine.contract.workbench import BF16, Array, Poison, Workbench, drawn
from refengine.verify import oracles

Run = Callable[[Any, Inputs], Outputs]
LENGTHS = (1, 3, 31, 32, 33, 63, 64, 65, 130)
BY_ROW = ("qkv", "decay", "beta")


class DeltaRule(InRuns):
    """Rows of streams, a state each. Rows of nobody, runs of nobody and runs of streams without rows hold poison.

    depth: roundings that a product passes in a sum.
    """

    modules: ClassVar[tuple[str, ...]] = (GDN,)
    kept = "states"
    axes = {"y": ("row", "element"), "states": ("slot", "head", "value", "key")}
    depth: ClassVar[int]

    def inputs(self, case: StreamsCase, poison: Poison, seed: int) -> Inputs:
        """q and k about as long as the convolution leaves them: 1 / sqrt(128) and 1."""
        heads, rows, slots = case.heads, sum(case.rows), case.slots(seed)
        qkv = drawn((seed, *case.rows), rows, heads.channels // HEAD, HEAD)
        qkv[:, : heads.key] *= np.float32(2.0**-7)
        qkv[:, heads.key : 2 * heads.key] *= np.float32(0.08)
        decay = 1 - np.abs(drawn((seed, rows, 1), rows, heads.value, scale=0.1))
        beta = np.float32(0.5) + drawn((seed, rows, 2), rows, heads.value, scale=0.125)
        held = case.written(slots)
        states = drawn((seed, len(slots), 3), int(held.sum()), heads.value, HEAD, HEAD, scale=0.3)
        by_row = (qkv.reshape(rows, heads.channels).astype(BF16), decay.astype(np.float32), beta)
        given = {name: scattered(array, case.owned, poison) for name, array in zip(BY_ROW, by_row, strict=True)}
        return {**given, "states": scattered(states, held, poison), "slots": slots, "streams": case.table()}

    def launch(self, case: StreamsCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        shape = case.total, case.heads.value * HEAD
        y = bench.changed("y", poisoned(bench.poison, shape), np.broadcast_to(case.owned[:, None], shape))
        states, runs = self.in_runs(inputs, bench, case.written(inputs["slots"]) if self.commits(case) else None)
        given = [*(bench.input(n, inputs[n]) for n in (*BY_ROW, "streams")), runs]
        self.call(case, modules, y, states, given)

    @abstractmethod
    def call(self, case: StreamsCase, modules: Modules, y: Any, states: Any, given: list[Any]) -> None:
        """Launch."""

    def commits(self, case: StreamsCase) -> bool:
        """Whether the states are written back."""
        return True

    def exact(self, case: StreamsCase, inputs: Inputs) -> Bounds:
        y = np.zeros((case.total, case.heads.value * HEAD))
        states = np.zeros(inputs["states"].shape)
        y_bound, states_bound = np.full(y.shape, np.inf), np.full(states.shape, np.inf)
        for s, start, stop in case.parts:
            rows, slot = slice(start, stop), inputs["slots"][s]
            of_rows, of_state = self.oracle(case, inputs, rows, inputs["states"][slot])
            y[rows], y_bound[rows] = (part.reshape(stop - start, -1) for part in of_rows)
            states[slot], states_bound[slot] = of_state
        return {"y": (y, y_bound), **({"states": (states, states_bound)} if self.commits(case) else {})}

    def oracle(self, case: StreamsCase, inputs: Inputs, rows: slice, state: Array) -> tuple[Any, Any]:
        """(y, state) of one stream's rows, each a value and its bound."""
        by_head = inputs["qkv"][rows].reshape(rows.stop - rows.start, -1, HEAD)
        q, k, v = np.split(by_head, [case.heads.key, 2 * case.heads.key], axis=1)
        return oracles.delta_rule(state, q, k, v, inputs["decay"][rows], inputs["beta"][rows], self.depth)

    def twins(self, case: StreamsCase, inputs: Inputs, run: Run) -> Iterator[tuple[str, Outputs]]:
        y, states = np.zeros((case.total, case.heads.value * HEAD), BF16), np.zeros_like(inputs["states"])
        for s, first, last in case.parts:
            slot = inputs["slots"][s]
            y[first:last], states[slot] = self.in_pieces(case, inputs, s, (first, last), run)
        yield "each stream alone, in pieces", {"y": y, **({"states": states} if self.commits(case) else {})}

    def in_pieces(
        self, case: StreamsCase, inputs: Inputs, stream: int, rows: tuple[int, int], run: Run
    ) -> tuple[Array, Array]:
        """(y, state) of a stream whose rows are launched a piece after the other."""
        y, state = [], inputs["states"][inputs["slots"][stream]]
        for start, stop in pieces(*rows):
            alone = self.alone(case, stop - start)
            states = np.concatenate([state[None], np.zeros((SPARE_SLOTS, *state.shape), np.float32)])
            own = {name: inputs[name][start:stop] for name in BY_ROW}
            place = {"states": states, "slots": np.zeros(1, np.int32), "streams": alone.table()}
            found = run(alone, {**own, **place})
            y.append(found["y"])
            state = found["states"][0]
        return np.concatenate(y), state

    def alone(self, case: StreamsCase, rows: int) -> StreamsCase:
        """One stream of some rows, which commits."""
        return StreamsCase(case.heads, (rows,))

    def controls(self) -> Sequence[Control]:
        return [
            Control("an element of k changed by one bf16 step", EXACT, step_of_key),
            Control("an element of a state changed by one step", EXACT, step_of_state),
            Control("a stream with another's run", EXACT, swap_runs),
            Control("a row too few", EXACT, row_too_few),
            Control("an element of k changed after the first run", REPEATS, step_of_key),
        ]


def step_of_key(inputs: Inputs) -> None:
    """Of the first stream's first row; k's last element of its last head."""
    first, value_heads = inputs["streams"][0, FIRST], inputs["decay"].shape[1]
    inputs["qkv"].view(np.uint16)[first, -value_heads * HEAD - 1] += 1


def step_of_state(inputs: Inputs) -> None:
    inputs["states"].view(np.uint32)[inputs["slots"][0], -1, 77, 99] += 1


def row_too_few(inputs: Inputs) -> None:
    inputs["streams"][0, ROWS] -= 1


@contract
class Chain(DeltaRule):
    """A prompt: states are written back."""

    name = "chain"
    kernels = ("chain_kernel",)
    depth = oracles.CHAIN_DEPTH

    def cases(self, full: bool) -> Sequence[StreamsCase]:
        some = [StreamsCase(TINY if n % 2 else ODD, (length,)) for n, length in enumerate(LENGTHS)]
        some += [StreamsCase(TINY, (7, 0, 33, 1), gap=2), StreamsCase(ODD, (0, 65, 0))]
        return some + [StreamsCase(REAL, rows) for rows in ((1,), (65, 0, 130), (1000,))] * full

    def control_cases(self) -> Sequence[StreamsCase]:
        return [StreamsCase(TINY, (5, 0, 2), gap=1), StreamsCase(TINY, (130,))]

    def call(self, case: StreamsCase, modules: Modules, y: Any, states: Any, given: list[Any]) -> None:
        modules[GDN].chain(y, states, *given)


@dataclass(frozen=True)
class StepCase(StreamsCase):
    """commit: whether the states are written back; without, the rows are drafts."""

    commit: bool = True

    def __str__(self) -> str:
        return super().__str__() + ("" if self.commit else " drafts")


@contract
class Step(DeltaRule):
    """Decode: one row a stream, or a window of drafts, which leaves the states as they are."""

    name = "step"
    kernels = ("step_kernel",)
    depth = oracles.STEP_DEPTH

    def cases(self, full: bool) -> Sequence[StreamsCase]:
        some = [
            StepCase(heads, rows) for heads, rows in ((TINY, (1,)), (ODD, (1, 1, 0, 1)), (TINY, (3,)), (ODD, (31, 33)))
        ]
        some += [StepCase(TINY, (4, 0, 9, 1), gap=2), StepCase(ODD, (5, 0, 17), gap=1, commit=False)]
        real = [StepCase(REAL, (1,) * 8), StepCase(REAL, (4, 0, 9), gap=5), StepCase(REAL, (17,), commit=False)]
        return some + real * full

    def control_cases(self) -> Sequence[StreamsCase]:
        return [StepCase(TINY, (5, 0, 2), gap=1), StepCase(TINY, (3, 0, 2), gap=1, commit=False)]

    def commits(self, case: StreamsCase) -> bool:
        return isinstance(case, StepCase) and case.commit

    def alone(self, case: StreamsCase, rows: int) -> StreamsCase:
        return StepCase(case.heads, (rows,))

    def call(self, case: StreamsCase, modules: Modules, y: Any, states: Any, given: list[Any]) -> None:
        modules[GDN].step(y, states, *given, commit=self.commits(case))
