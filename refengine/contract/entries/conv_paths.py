"""The convolution of drafted windows and the commit of what is accepted: a row's taps are on its path. Spec attention §5.5."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kernels_numba.streams import FIRST, ROWS
from refengine.contract.entries.gated_delta_net import CommitConv, Conv
from refengine.contract.entry import Bounds, Control, Inputs, Modules, Outputs, contract
from refengine.contract.gated_delta_net import GDN, KEPT, ODD, REAL, SPARE_SLOTS, TINY, Heads, StreamsCase
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
from refengine.verify import oracles

Run = Callable[[Any, Inputs], Outputs]


def history_behind(case: TreesCase, inputs: Inputs, stream: int, rows: Sequence[int]) -> Array:
    """What a stream keeps once these rows of the launch are committed: bf16 [3, C]."""
    own = inputs["mixed"][np.array(rows, int), : case.heads.channels]
    return np.concatenate([inputs["histories"][inputs["slots"][stream]], own])[-KEPT:]


# --- Convolution ------------------------------------------------------------------------------------------------------


@contract
class ConvPath(Conv):
    """qkv of the rows of trees. A case without a shape is one of ``conv``: its twins' kernel."""

    name = "conv_path"
    kernels = ("conv_path_kernel",)

    def cases(self, full: bool) -> Sequence[StreamsCase]:
        some = [TreesCase(TINY, (1,)), TreesCase(ODD, (15, 1)), TreesCase(TINY, (9, 0, 33), shape=DRAWN)]
        some += [TreesCase(ODD, (5, 0, 2), shape=CHAIN), TreesCase(ODD, (128,))]
        real = [TreesCase(REAL, (16,) * 4), TreesCase(REAL, (128, 0, 17), shape=DRAWN)]
        return some + real * full

    def control_cases(self) -> Sequence[StreamsCase]:
        """The last: a draw as ``conv`` has it, rows behind the same few rows."""
        return [
            TreesCase(ODD, (12, 0, 5)),
            TreesCase(TINY, (7, 0, 11), shape=DRAWN),
            TreesCase(Heads(16, 16), (64,), draw=12),
        ]

    def controls(self) -> Sequence[Control]:
        return [
            *super().controls(),
            Control("the path of the row before", EXACT, path_before),
            Control("a depth one too small", EXACT, shallower),
        ]

    def inputs(self, case: StreamsCase, poison: Poison, seed: int) -> Inputs:
        inputs = super().inputs(case, poison, seed)
        if not isinstance(case, TreesCase):
            return inputs
        mixed = spared(inputs["mixed"], poison)
        return {**inputs, "mixed": mixed, "paths": case.path_table(), "depths": case.depths}

    def launch(self, case: StreamsCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        if not isinstance(case, TreesCase):
            return super().launch(case, inputs, bench, modules)
        qkv = bench.output("qkv", (case.total, case.heads.channels), BF16)
        histories, runs = self.in_runs(inputs, bench)
        mixed, *given = (bench.input(n, inputs[n]) for n in ("mixed", "taps", "rows", "streams"))
        lines = (bench.input(n, inputs[n]) for n in ("paths", "depths"))
        modules[GDN].conv_path(qkv, mixed, histories, *given, runs, *lines, case.heads.key)

    def exact(self, case: Any, inputs: Inputs) -> Bounds:
        parts = []
        for row, owner in enumerate(case.owner_of):
            history = history_behind(case, inputs, owner, case.path_to(row)[:-1])
            own = inputs["mixed"][row : row + 1, : case.heads.channels]
            parts.append(oracles.conv_qkv(history, own, inputs["taps"], case.heads.key))
        value, bound = (np.concatenate(part) for part in zip(*parts, strict=True))
        return {"qkv": (value, bound)}

    def twins(self, case: Any, inputs: Inputs, run: Run) -> Iterator[tuple[str, Outputs]]:
        yield "each row alone, behind its ancestors", self.behind_ancestors(case, inputs, run)
        yield "each stream alone", self.streams_apart(case, inputs, run)
        if case.shape == CHAIN:
            yield "the chain", run(StreamsCase(case.heads, case.rows), inputs)

    def behind_ancestors(self, case: TreesCase, inputs: Inputs, run: Run) -> Outputs:
        """Every row as a stream of its own, whose history ends with the row's ancestors."""
        owners = enumerate(case.owner_of)
        histories = [history_behind(case, inputs, owner, case.path_to(row)[:-1]) for row, owner in owners]
        apart = StreamsCase(case.heads, (1,) * case.total)
        numbers = np.arange(case.total, dtype=np.int32)
        place = {"histories": np.stack(histories), "streams": apart.table(), "rows": numbers, "slots": numbers}
        return run(apart, {**inputs, "mixed": inputs["mixed"][: case.total], **place})

    def streams_apart(self, case: TreesCase, inputs: Inputs, run: Run) -> Outputs:
        """Every stream's tree in a launch of its own, among rows of the others."""
        found = []
        for s, rows, alone in case.streams_alone():
            own = {
                "mixed": inputs["mixed"][rows.start :], "slots": inputs["slots"][s : s + 1], "streams": alone.table(),
                "rows": alone.owner_of, "paths": alone.path_table(), "depths": alone.depths,
            }  # fmt: skip
            found.append(run(alone, {**inputs, **own})["qkv"])
        return {"qkv": np.concatenate(found)}


def path_before(inputs: Inputs) -> None:
    """The last row of the first stream takes the path of the row before it."""
    row = inputs["streams"][0, FIRST] + inputs["streams"][0, ROWS] - 1
    inputs["paths"][row], inputs["depths"][row] = inputs["paths"][row - 1], inputs["depths"][row - 1]


def shallower(inputs: Inputs) -> None:
    """The last row of the first stream takes its parent for itself."""
    inputs["depths"][inputs["streams"][0, FIRST] + inputs["streams"][0, ROWS] - 1] -= 1


# --- Commit -----------------------------------------------------------------------------------------------------------


@contract
class CommitConvPath(CommitConv):
    """The last three rows of [history | accepted rows] become the history; of streams that accept none it stays.

    Any other case is one of ``commit_conv``: its twins' kernel.
    """

    name = "commit_conv_path"
    kernels = ("commit_conv_path_kernel",)

    def cases(self, full: bool) -> Sequence[StreamsCase]:
        return accepted_cases(full)

    def control_cases(self) -> Sequence[StreamsCase]:
        return accepted_controls()

    def controls(self) -> Sequence[Control]:
        return [
            *super().controls(),
            *ACCEPTED_CONTROLS,
        ]

    def inputs(self, case: StreamsCase, poison: Poison, seed: int) -> Inputs:
        inputs = super().inputs(case, poison, seed)
        if not isinstance(case, AcceptedCase):
            return inputs
        return {**inputs, "mixed": spared(inputs["mixed"], poison), **accepted_inputs(case)}

    def launch(self, case: StreamsCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        if not isinstance(case, AcceptedCase):
            return super().launch(case, inputs, bench, modules)
        histories, runs = self.in_runs(inputs, bench, case.written(inputs["slots"]))
        mixed, streams = bench.input("mixed", inputs["mixed"]), bench.input("streams", inputs["streams"])
        accepted = (bench.input(n, inputs[n]) for n in ("paths", "last", "kept"))
        modules[GDN].commit_conv_path(histories, mixed, streams, runs, *accepted, case.heads.channels)

    def committed(self, case: Any, inputs: Inputs) -> Array:
        after = np.zeros(inputs["histories"].shape, BF16)
        for s, rows in enumerate(case.accepted):
            if rows:
                after[inputs["slots"][s]] = history_behind(case, inputs, s, rows)
        return after

    def twins(self, case: Any, inputs: Inputs, run: Run) -> Iterator[tuple[str, Outputs]]:
        yield "the rows themselves", {"histories": self.committed(case, inputs)}
        plain = StreamsCase(case.heads, case.kept)
        rows = inputs["mixed"][[row for rows in case.accepted for row in rows]]
        yield "the accepted rows as windows", run(plain, {**inputs, "mixed": rows, "streams": plain.table()})
        yield "each stream alone", {"histories": self.apart(case, inputs, run)}

    def apart(self, case: AcceptedCase, inputs: Inputs, run: Run) -> Array:
        """The histories after each stream's commit in a launch of its own."""
        after = np.zeros(inputs["histories"].shape, BF16)
        for s, rows, alone in case.streams_alone():
            slot = inputs["slots"][s]
            spare = np.zeros((SPARE_SLOTS, *after.shape[1:]), BF16)
            own = {
                "mixed": inputs["mixed"][rows.start :], "streams": alone.table(), "slots": np.zeros(1, np.int32),
                "histories": np.concatenate([inputs["histories"][slot][None], spare]), "paths": alone.path_table(),
                "last": alone.last, "kept": inputs["kept"][s : s + 1],
            }  # fmt: skip
            after[slot] = run(alone, {**inputs, **own})["histories"][0]
        return after
