"""The delta rule of drafted windows: the step through trees and the replay of what is accepted. Spec attention §5.5."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from refengine.contract.entries.delta_rule import BY_ROW, Step, StepCase, row_too_few, step_of_state
from refengine.contract.entry import Bounds, Control, Inputs, Modules, Outputs, contract
from refengine.contract.gated_delta_net import GDN, HEAD, ODD, REAL, SPARE_SLOTS, TINY, StreamsCase, poisoned
from refengine.contract.gates import EXACT
from refengine.contract.trees import (
    ACCEPTED_CONTROLS,
    CHAIN,
    DRAWN,
    AcceptedCase,
    TreesCase,
    accepted_cases,
    accepted_controls,
    accepted_inputs,
)
from refengine.contract.windows import spared
from refengine.contract.workbench import BF16, Array, Poison, Workbench

Run = Callable[[Any, Inputs], Outputs]
TREES, PLAN = "kernels_numba.delta_trees", "kernels_numba.tree_plan"


class OnTrees(Step):
    """Rows of trees; a case without a shape is one of ``step``: the twins' kernel. Rows past a launch's last hold poison."""

    modules = (TREES, PLAN, GDN)

    def inputs(self, case: StreamsCase, poison: Poison, seed: int) -> Inputs:
        inputs = super().inputs(case, poison, seed)
        return {**inputs, **{name: spared(inputs[name], poison) for name in BY_ROW}}

    def oracle_of_path(self, case: StreamsCase, inputs: Inputs, stream: int, path: Sequence[int]) -> tuple[Any, Any]:
        """(y, state) of the rows of a path, each a value and its bound."""
        rows = np.array(path, int)
        own = {**inputs, **{name: inputs[name][rows] for name in BY_ROW}}
        return self.oracle(case, own, slice(0, len(rows)), inputs["states"][inputs["slots"][stream]])

    def of_stream(self, inputs: Inputs, stream: int, rows: slice, alone: TreesCase) -> Inputs:
        """A stream's rows as the first of a launch, its state as the first of the slots."""
        state = inputs["states"][inputs["slots"][stream]]
        return {
            **{name: inputs[name][rows.start :] for name in BY_ROW}, "streams": alone.table(),
            "states": with_spares(state[None]), "slots": np.zeros(1, np.int32),
        }  # fmt: skip


def with_spares(states: Array) -> Array:
    """States and slots of nobody after them."""
    return np.concatenate([states, np.zeros((SPARE_SLOTS, *states.shape[1:]), states.dtype)])


# --- Step through a tree ----------------------------------------------------------------------------------------------


@contract
class StepTree(OnTrees):
    """y of every row, from the state after its parent; no state is written."""

    name = "step_tree"
    kernels = ("step_tree_kernel",)

    def cases(self, full: bool) -> Sequence[StreamsCase]:
        some = [TreesCase(TINY, (1,)), TreesCase(ODD, (15, 0, 3), gap=1), TreesCase(TINY, (9, 4), shape=CHAIN)]
        some += [TreesCase(ODD, (33, 10), gap=2, shape=DRAWN), TreesCase(ODD, (127,))]
        real = [TreesCase(REAL, (16,) * 4), TreesCase(REAL, (128, 0, 17), shape=DRAWN)]
        return some + real * full

    def control_cases(self) -> Sequence[StreamsCase]:
        return [TreesCase(TINY, (7, 0, 3), gap=1), TreesCase(ODD, (24, 0, 5), gap=2, shape=DRAWN)]

    def controls(self) -> Sequence[Control]:
        return [
            *(control for control in super().controls() if control.plant is not step_of_state),
            Control("an element of a state with the other sign", EXACT, sign_of_state),
            Control("a parent that is one row off", EXACT, parent_before),
        ]

    def inputs(self, case: StreamsCase, poison: Poison, seed: int) -> Inputs:
        inputs = super().inputs(case, poison, seed)
        return {**inputs, "parents": case.parents} if isinstance(case, TreesCase) else inputs

    def launch(self, case: StreamsCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        if not isinstance(case, TreesCase):
            return super().launch(case, inputs, bench, modules)
        shape = case.total, case.heads.value * HEAD
        y = bench.changed("y", poisoned(bench.poison, shape), np.broadcast_to(case.owned[:, None], shape))
        states, runs = self.in_runs(inputs, bench)
        given = (bench.input(n, inputs[n]) for n in (*BY_ROW, "streams"))
        schedule = modules[PLAN].plan_trees(inputs["parents"], case.firsts)
        visits = bench.input("visits", schedule.visits)
        modules[TREES].step_tree(y, states, *given, runs, replace(schedule, visits=visits))

    def exact(self, case: Any, inputs: Inputs) -> Bounds:
        """A path gives the rows on it; those to leaves give all."""
        y = np.zeros((case.total, case.heads.value * HEAD))
        bound, left = np.full(y.shape, np.inf), set(np.flatnonzero(case.owned).tolist())
        for row in sorted(left, reverse=True):
            if row in left:
                path = case.path_to(row)
                (value, error), _ = self.oracle_of_path(case, inputs, case.owner_of[row], path)
                y[path], bound[path] = value.reshape(len(path), -1), error.reshape(len(path), -1)
                left.difference_update(path)
        return {"y": (y, bound)}

    def twins(self, case: Any, inputs: Inputs, run: Run) -> Iterator[tuple[str, Outputs]]:
        yield "each row alone, behind its ancestors", {"y": self.behind_ancestors(case, inputs, run)}
        y = np.zeros((case.total, case.heads.value * HEAD), BF16)
        for s, rows, alone in case.streams_alone():
            own = self.of_stream(inputs, s, rows, alone)
            y[rows] = run(alone, {**own, "parents": alone.parents})["y"]
        yield "each stream alone", {"y": y}
        if case.shape == CHAIN:
            yield "the chain", run(StepCase(case.heads, case.rows, case.gap, commit=False), inputs)

    def behind_ancestors(self, case: TreesCase, inputs: Inputs, run: Run) -> Array:
        """y of every row as a stream of its own, whose state the row's parent has left; a launch for each depth."""
        y = np.zeros((case.total, case.heads.value * HEAD), BF16)
        after: dict[int, Array] = {}
        for depth in range(1, int(case.depths.max()) + 1):
            level = np.flatnonzero(case.depths == depth)
            parents = [case.path_to(row)[-2:-1] for row in level.tolist()]
            committed = inputs["states"][inputs["slots"][case.owner_of[level]]]
            states = [after[p[0]] if p else own for p, own in zip(parents, committed, strict=True)]
            apart = StepCase(case.heads, (1,) * len(level))
            place = {"streams": apart.table(), "slots": np.arange(len(level), dtype=np.int32)}
            rows = {name: inputs[name][level] for name in BY_ROW}
            found = run(apart, {**rows, **place, "states": with_spares(np.stack(states))})
            y[level], after = found["y"], dict(zip(level.tolist(), found["states"], strict=False))
        return y


def sign_of_state(inputs: Inputs) -> None:
    """Of the first stream; a step of one would be lost in y, which is bf16."""
    element = inputs["states"][inputs["slots"][0], -1, 77, 99:100]
    element *= np.float32(-1)


def parent_before(inputs: Inputs) -> None:
    """The last row of the first stream follows the row before its parent."""
    inputs["parents"][0][-1] -= 1


# --- Replay -----------------------------------------------------------------------------------------------------------


@contract
class Replay(OnTrees):
    """The states after the accepted rows; of streams that accept none they stay, unread."""

    name = "replay"
    kernels = ("replay_kernel",)

    def cases(self, full: bool) -> Sequence[StreamsCase]:
        return accepted_cases(full)

    def control_cases(self) -> Sequence[StreamsCase]:
        return accepted_controls()

    def controls(self) -> Sequence[Control]:
        return [
            *(control for control in super().controls() if control.plant is not row_too_few),
            *ACCEPTED_CONTROLS,
        ]

    def inputs(self, case: StreamsCase, poison: Poison, seed: int) -> Inputs:
        inputs = super().inputs(case, poison, seed)
        if not isinstance(case, AcceptedCase):
            return inputs
        return {**inputs, **accepted_inputs(case)}

    def launch(self, case: StreamsCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        if not isinstance(case, AcceptedCase):
            return super().launch(case, inputs, bench, modules)
        states, runs = self.in_runs(inputs, bench, case.written(inputs["slots"]))
        given = (bench.input(n, inputs[n]) for n in (*BY_ROW, "streams"))
        accepted = (bench.input(n, inputs[n]) for n in ("paths", "last", "kept"))
        modules[TREES].replay(states, *given, runs, *accepted)

    def exact(self, case: Any, inputs: Inputs) -> Bounds:
        states = np.zeros(inputs["states"].shape)
        bound = np.full(states.shape, np.inf)
        for s, rows in enumerate(case.accepted):
            if rows:
                slot = inputs["slots"][s]
                states[slot], bound[slot] = self.oracle_of_path(case, inputs, s, rows)[1]
        return {"states": (states, bound)}

    def twins(self, case: Any, inputs: Inputs, run: Run) -> Iterator[tuple[str, Outputs]]:
        plain, accepted = StepCase(case.heads, case.kept), [row for rows in case.accepted for row in rows]
        rows = {name: inputs[name][accepted] for name in BY_ROW}
        found = run(plain, {**inputs, **rows, "streams": plain.table()})
        yield "the accepted rows as windows", {"states": found["states"]}
        states = np.zeros_like(inputs["states"])
        for s, own_rows, alone in case.streams_alone():
            path = {"paths": alone.path_table(), "last": alone.last, "kept": inputs["kept"][s : s + 1]}
            own = self.of_stream(inputs, s, own_rows, alone)
            states[inputs["slots"][s]] = run(alone, {**own, **path})["states"][0]
        yield "each stream alone", {"states": states}
