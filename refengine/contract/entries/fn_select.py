"""fn_qsa_select: the keys that rows of sparse attention read, exact. Spec flash-next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernels_numba import streams as columns
from kernels_numba.flash_next.pages import BLOCK
from kernels_numba.flash_next.select import list_width
from refengine.contract.entry import Bounds, Control, Entry, Inputs, Modules, Outputs, contract
from refengine.contract.gates import BOUND, REPEATS
from refengine.contract.workbench import NAN, Array, Poison, Workbench, drawn
from refengine.verify.selection_oracle import listed_keys

SELECT, SAMPLING, NORMS = "kernels_numba.flash_next.select", "kernels_numba.sampling", "kernels_numba.norms"
REAL = 512
"""The model's budget."""
EDGES = (2047, 2048, 2049, 2050, 2051, 2052, 2053, 2054, 2055, 2056)
"""Where rows of the model turn from dense to sparse."""
SPARE_BLOCKS, SPARE_COLUMNS = 5, 3


@dataclass(frozen=True)
class SelectCase:
    """Rows with ``ends`` keys at or before their positions; their scores are of all kinds in turn.

    Rows whose ends ascend by one are a stream's window. number: the kind of the first row's scores. apart: each row is a stream
    of its own.
    """

    budget: int
    ends: tuple[int, ...]
    number: int = 0
    apart: bool = False

    def __str__(self) -> str:
        return f"budget={self.budget} ends={runs(self.ends)}" + (f" kinds from {self.number}" if self.number else "")


def runs(numbers: tuple[int, ...]) -> str:
    """Numbers in order; of many that ascend by one, the first and the last."""
    ascend = len(numbers) > 3 and all(b == a + 1 for a, b in zip(numbers, numbers[1:], strict=False))
    return f"{numbers[0]}..{numbers[-1]}" if ascend else ",".join(map(str, numbers))


@contract
class QsaSelect(Entry):
    """The lists of sparse rows; scores of blocks that are not complete, and what is no list, are poison."""

    name = "fn_qsa_select"
    kernels = ("fn_qsa_select_kernel",)
    modules = (SELECT, SAMPLING, NORMS)
    axes = {"listed": ("row", "entry")}

    def cases(self, full: bool) -> Sequence[SelectCase]:
        return list(full_table() if full else small_table())

    def control_cases(self) -> Sequence[SelectCase]:
        return [SelectCase(8, tuple(range(31, 75))), SelectCase(8, (4100, 8200, 9001, 12_345), number=1)]

    def cost(self, case: SelectCase) -> float:
        return 1.0 + sum(case.ends) / 20_000

    def inputs(self, case: SelectCase, poison: Poison, seed: int) -> Inputs:
        scores = poisoned_scores(case, poison)
        for row, end in enumerate(case.ends):
            complete = end // BLOCK
            scores[row, :complete] = scores_of_kind(case.number + row, (seed, row), complete, case.budget)
        return {"scores": scores, **places(case, poison)}

    def launch(self, case: SelectCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        must = [len(sparse_list(case, inputs, row)) for row in range(len(case.ends))]
        width = list_width(case.budget) + SPARE_COLUMNS
        listed = bench.output("listed", (len(must), width), np.int32, np.arange(width) < np.array(must)[:, None])
        arrays = (bench.input(name, inputs[name]) for name in ("scores", "streams", "rows"))
        modules[SELECT].fn_qsa_select(listed, *arrays, case.budget)

    def exact(self, case: SelectCase, inputs: Inputs) -> Bounds:
        """By a stable sort. Positions are whole: half a step is far enough."""
        value = np.zeros((len(case.ends), list_width(case.budget) + SPARE_COLUMNS))
        for row in range(len(value)):
            own = sparse_list(case, inputs, row)
            value[row, : len(own)] = own
        return {"listed": (value, np.full(value.shape, 0.5))}

    def twins(
        self, case: SelectCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        other = replace(case, ends=case.ends[::-1], apart=True)
        found = run(other, {"scores": inputs["scores"][::-1], **places(other, NAN)})["listed"]
        yield "each row a stream of its own, in reverse", {"listed": np.ascontiguousarray(found[::-1])}

    def controls(self) -> Sequence[Control]:
        return [
            Control("scores of another row", BOUND, lambda i: roll(i["scores"])),
            Control("the best block's score lost", BOUND, forget_best),
            Control("a stale length", BOUND, shorten),
            Control("the best block's score lost after the first run", REPEATS, forget_best),
        ]


# --- Inputs -----------------------------------------------------------------------------------------------------------


def places(case: SelectCase, poison: Poison) -> Inputs:
    """streams, of which the kernel may read where rows stand, and rows."""
    starts = [n for n, end in enumerate(case.ends) if n == 0 or case.apart or end != case.ends[n - 1] + 1]
    streams = poison.filled(len(starts) * columns.COLUMNS * 8).view(np.int64).reshape(-1, columns.COLUMNS)
    streams[:, columns.FIRST], streams[:, columns.COMMITTED] = starts, [case.ends[n] - 1 for n in starts]
    rows = np.searchsorted(starts, np.arange(len(case.ends)), side="right") - 1
    return {"streams": streams, "rows": rows.astype(np.int32)}


def poisoned_scores(case: SelectCase, poison: Poison) -> Array:
    """float32 [rows, blocks] of poison."""
    shape = len(case.ends), max(case.ends) // BLOCK + SPARE_BLOCKS
    return poison.filled(4 * shape[0] * shape[1]).view(np.float32).reshape(shape)


def scores_of_kind(kind: int, seed: tuple[int, ...], complete: int, budget: int) -> Array:
    """float32 [complete]: scores of one of the kinds, in turn."""
    scores = drawn((3, *seed), complete)
    block = np.arange(complete)
    kinds: tuple[Callable[[], Array], ...] = (
        lambda: np.maximum(scores, 0),
        lambda: np.zeros(complete, np.float32),
        # Ties across the cut.
        lambda: np.round(np.maximum(scores, 0)),
        lambda: scores,
        # Ascending, descending: neighbours one step apart.
        lambda: np.float32(1) + block.astype(np.float32) * np.float32(2.0**-23),
        lambda: np.float32(1) - block.astype(np.float32) * np.float32(2.0**-24),
        # Too few numbers: NaNs and -inf are taken, too, the lower blocks first.
        lambda: np.where(block % (2 + complete // max(budget // 2, 1)) == 1, scores, (np.nan, -np.inf)[kind % 2]),
        lambda: np.where(block % 3 == 0, np.float32(0), np.float32(-0.0)),
        # The last block alone stands out: it is taken; infinite scores like any other.
        lambda: np.where(block == complete - 1, np.float32(np.inf), np.float32(2)),
    )
    return kinds[kind % len(kinds)]().astype(np.float32)


def sparse_list(case: SelectCase, inputs: Inputs, row: int) -> Array:
    """The list of a row by the oracle; none where the row is dense."""
    end = case.ends[row]
    return listed_keys(inputs["scores"][row], end, case.budget) if end // BLOCK > case.budget else np.empty(0, np.int64)


# --- Faults in inputs -------------------------------------------------------------------------------------------------


def roll(scores: Array) -> None:
    scores[:] = np.roll(scores, 1, axis=0)


def forget_best(inputs: Inputs) -> None:
    """The best block of the last row ranks last."""
    stream = inputs["streams"][inputs["rows"][-1]]
    end = stream[columns.COMMITTED] + len(inputs["rows"]) - stream[columns.FIRST]
    own = inputs["scores"][-1, : end // BLOCK]
    own[np.nanargmax(own)] = -np.inf


def shorten(inputs: Inputs) -> None:
    """Every committed length is one short."""
    inputs["streams"][:, columns.COMMITTED] -= 1


# --- The table --------------------------------------------------------------------------------------------------------


def small_table() -> Iterator[SelectCase]:
    """Every kind of score at the edges of a small budget and of the model's; strips of 1024 blocks, not full and full."""
    for number in range(0, 9, 3):
        yield SelectCase(8, tuple(range(33, 45)), number)
    for number in range(0, 9, 4):
        yield SelectCase(REAL, EDGES, number)
    yield SelectCase(1, (4, 5, 7, 8, 9, 11, 12, 13, 40))
    yield SelectCase(33, (131, 132, 136, 139, 4095, 4096, 4099, 4100, 4101))
    yield SelectCase(REAL, (9000,) * 9)
    yield SelectCase(8, (1, 3, 35, 36))


def full_table() -> Iterator[SelectCase]:
    """Every kind for every edge, and as long as the model's window."""
    for number in range(9):
        yield SelectCase(REAL, EDGES, number)
        yield SelectCase(REAL, tuple(range(8990, 9001)), number)
    yield SelectCase(REAL, (32_768, 100_001, 262_144))
    yield from small_table()
