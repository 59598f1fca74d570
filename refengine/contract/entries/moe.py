"""Mixture of experts: routing, grouping, the experts' products and their sum. Spec numerics §4 "router"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernels_numba.moe import TILE_COLUMNS, tile_count, tile_slots
from refengine.contract.by_row import ByRow, step
from refengine.contract.entry import Bounds, Control, Entry, Inputs, Modules, Outputs, contract
from refengine.contract.gates import BOUND, EXACT, REPEATS
from refengine.contract.workbench import BF16, Array, Poison, Workbench, drawn, drawn_bf16
from refengine.verify import moe_oracle

MOE, MATMUL, SAMPLING = "kernels_numba.moe", "kernels_numba.matmul", "kernels_numba.sampling"
HALF = 0.5
"""A bound that whole numbers keep only when they are right."""
Run = Callable[[Any, Inputs], Outputs]


@dataclass(frozen=True)
class RouteCase:
    """``rows`` rows pick ``picks`` of ``experts``."""

    rows: int
    experts: int
    picks: int

    def __str__(self) -> str:
        return f"rows={self.rows} E={self.experts} K={self.picks}"


TINY, QWEN36, NEXT = (8, 2), (256, 8), (512, 10)
"""(experts, picks) of models."""


# --- Routing ----------------------------------------------------------------------------------------------------------


@contract
class Route(ByRow):
    """experts and weights of rows of all kinds in turn; in some the shared gate's logit is the largest of all."""

    name = "route"
    kernels = ("route_kernel",)
    modules = (MOE, SAMPLING)
    axes = {"experts": ("row", "pick"), "weights": ("row", "pick")}
    by_row = ("logits",)

    def cases(self, full: bool) -> Sequence[RouteCase]:
        some = [RouteCase(1, *TINY), RouteCase(35, *TINY), RouteCase(9, 33, 33), RouteCase(13, *QWEN36)]
        some += [RouteCase(21, *NEXT), RouteCase(7, 1, 1)]
        return some + [RouteCase(rows, *sizes) for rows in (1, 1000) for sizes in (QWEN36, NEXT)] * full

    def control_cases(self) -> Sequence[RouteCase]:
        return [RouteCase(14, 70, 10)]

    def inputs(self, case: RouteCase, poison: Poison, seed: int) -> Inputs:
        logits = drawn((seed, case.rows, case.experts), case.rows, case.experts + 1, scale=1.5)
        for row in range(case.rows):
            make_kind(logits[row, :-1], row)
        logits[::7, -1] = 9.0
        return {"logits": logits}

    def launch(self, case: RouteCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        experts = bench.output("experts", (case.rows, case.picks), np.int32)
        weights = bench.output("weights", (case.rows, case.picks + 1), np.float32)
        modules[MOE].route(experts, weights, bench.input("logits", inputs["logits"]))

    def exact(self, case: RouteCase, inputs: Inputs) -> Bounds:
        experts = moe_oracle.picks(inputs["logits"][:, :-1], case.picks)
        return {
            "experts": (experts.astype(np.float64), np.full(experts.shape, HALF)),
            "weights": moe_oracle.route(inputs["logits"], experts),
        }

    def change(self, inputs: Inputs) -> None:
        """The last expert of the first row becomes its best."""
        inputs["logits"][0, -2] = 20.0


def make_kind(logits: Array, row: int) -> None:
    """Rows as drawn; with ties in pairs; all equal; zeros of both signs; far apart; some -inf; of few values."""
    match row % 7:
        case 1:
            logits[1::2] = logits[: len(logits) // 2 * 2 : 2]
        case 2:
            logits[:] = 0.375
        case 3:
            logits[:] = np.where(np.arange(len(logits)) % 3 == 0, -0.0, 0.0)
        case 4:
            logits *= 64
        case 5 if len(logits) > 40:
            logits[::5] = -np.inf
        case 6:
            logits[:] = np.round(logits)


# --- Grouping ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupCase(RouteCase):
    """skew: how the picks fall: evenly, the same in all rows, or most on one expert."""

    skew: str = "even"

    @property
    def slots(self) -> int:
        return self.rows * self.picks

    def drawn_picks(self, seed: int) -> Array:
        """Distinct experts of each row: int32 [rows, picks]."""
        rng = np.random.default_rng((seed, self.rows, self.experts))
        rows = np.stack([rng.permutation(self.experts)[: self.picks] for _ in range(self.rows)])
        if self.skew == "same":
            rows[:] = rows[0]
        if self.skew == "one":
            rows[:, 0] = np.where((rows == self.experts - 1).any(axis=1), rows[:, 0], self.experts - 1)
        return rows.astype(np.int32)

    def __str__(self) -> str:
        return super().__str__() + f" {self.skew}" * (self.skew != "even")


GROUPS = (
    GroupCase(1, *TINY), GroupCase(5, *TINY), GroupCase(33, *TINY), GroupCase(70, *TINY, "one"), GroupCase(90, *TINY, "same"),
    GroupCase(3, 64, 8), GroupCase(40, 1, 1), GroupCase(1, *NEXT), GroupCase(70, *QWEN36, "one"),
)  # fmt: skip


def grouped(experts: Array, count: int) -> tuple[Array, Array]:
    """(order, tiles) of picks [rows, K], by sorting."""
    flat = experts.reshape(-1)
    size = tile_slots(flat.size, count)
    tiles: list[tuple[int, int, int]] = []
    for expert in range(count):
        below, own = int((flat < expert).sum()), int((flat == expert).sum())
        end = min(below + own, expert + 1 + (below + own) // size)
        for n in range(end - len(tiles)):
            tiles.append((expert, below + n * size, max(0, min(size, own - n * size))))
    return np.argsort(flat, kind="stable").astype(np.int32), np.array(tiles, np.int32).reshape(-1, TILE_COLUMNS)


@contract
class Group(Entry):
    """Slots sorted by expert, and their tiles."""

    name = "group"
    kernels = ("group_kernel",)
    modules = (MOE,)
    axes = {"order": ("place",), "tiles": ("tile", "column")}

    def cases(self, full: bool) -> Sequence[GroupCase]:
        return [*GROUPS, *[GroupCase(rows, *sizes) for rows in (16, 1000) for sizes in (QWEN36, NEXT)] * full]

    def control_cases(self) -> Sequence[GroupCase]:
        return [GROUPS[1], GROUPS[3], GROUPS[5]]

    def inputs(self, case: GroupCase, poison: Poison, seed: int) -> Inputs:
        return {"experts": case.drawn_picks(seed)}

    def launch(self, case: GroupCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        order = bench.output("order", (case.slots,), np.int32)
        tiles = bench.output("tiles", (tile_count(case.slots, case.experts), TILE_COLUMNS), np.int32)
        modules[MOE].group(order, tiles, bench.input("experts", inputs["experts"]), case.experts)

    def exact(self, case: GroupCase, inputs: Inputs) -> Bounds:
        found = dict(zip(("order", "tiles"), grouped(inputs["experts"], case.experts), strict=True))
        return {name: (array.astype(np.float64), np.full(array.shape, HALF)) for name, array in found.items()}

    def twins(self, case: GroupCase, inputs: Inputs, run: Run) -> Iterator[tuple[str, Outputs]]:
        order, tiles = grouped(inputs["experts"], case.experts)
        yield "a stable sort", {"order": order, "tiles": tiles}

    def controls(self) -> Sequence[Control]:
        return [
            Control("a pick changed", EXACT, change_pick),
            Control("a pick changed, against the sort", BOUND, change_pick),
            Control("a pick changed after the first run", REPEATS, change_pick),
        ]


def change_pick(inputs: Inputs) -> None:
    """The first pick becomes the first expert, or the second if it is."""
    inputs["experts"][0, 0] = inputs["experts"][0, 0] == 0


# --- Products ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProductCase(GroupCase):
    """K elements to ``features``. by_slot: x has a row for each slot, not for each row. dense: one expert, by ``matmul``."""

    K: int = 48
    features: int = 66
    by_slot: bool = False
    dense: bool = False

    def __str__(self) -> str:
        return f"{super().__str__()} K={self.K} features={self.features}" + " by slot" * self.by_slot


@contract
class ExpertMatmul(Entry):
    """A slot's row times its expert's matrix. Experts that nobody picks are poison."""

    name = "expert_matmul"
    kernels = ("expert_matmul_kernel",)
    modules = (MOE, MATMUL)
    axes = {"out": ("slot", "feature")}

    def cases(self, full: bool) -> Sequence[ProductCase]:
        some = [
            ProductCase(1, *TINY), ProductCase(5, *TINY, K=144, features=70), ProductCase(33, *TINY, K=16, features=2),
            ProductCase(70, *TINY, "one", K=80, features=130, by_slot=True), ProductCase(90, *TINY, "same", by_slot=True),
            ProductCase(3, 64, 8), ProductCase(9, 64, 8, by_slot=True, features=18), ProductCase(70, 3, 2, K=272, features=6),
        ]  # fmt: skip
        real = [ProductCase(rows, *NEXT, K=2560, features=1280) for rows in (1, 16, 512)]
        real += [ProductCase(rows, *QWEN36, K=512, features=2048, by_slot=True) for rows in (1, 16, 512)]
        return some + real * full

    def control_cases(self) -> Sequence[ProductCase]:
        """The narrow form; the wide one, in which a tile is full and the next begins."""
        return [
            ProductCase(9, *TINY, K=144, features=70),
            ProductCase(70, *TINY, "one", K=144, features=70, by_slot=True),
        ]

    def inputs(self, case: ProductCase, poison: Poison, seed: int) -> Inputs:
        experts = case.drawn_picks(seed)
        shape = case.experts, case.features, case.K
        weight = poison.filled(int(np.prod(shape)) * 2).view(BF16).reshape(shape)
        picked = np.unique(experts)
        weight[picked] = drawn_bf16((seed, *shape), len(picked), *shape[1:])
        x = drawn_bf16((seed, case.rows, case.K), case.slots if case.by_slot else case.rows, case.K)
        return {"x": x, "weight": weight, "experts": experts}

    def launch(self, case: ProductCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        out = bench.output("out", (case.slots, case.features), BF16)
        x = bench.input("x", inputs["x"])
        if case.dense:
            modules[MATMUL].matmul(out, x, bench.input("weight", inputs["weight"][0]))
            return
        order, tiles = grouped(inputs["experts"], case.experts)
        given = bench.input("weight", inputs["weight"]), bench.input("order", order), bench.input("tiles", tiles)
        modules[MOE].expert_matmul(out, x, *given)

    def exact(self, case: ProductCase, inputs: Inputs) -> Bounds:
        return {
            "out": moe_oracle.expert_matmul(of_slots(case, inputs), inputs["weight"], inputs["experts"].reshape(-1))
        }

    def twins(self, case: ProductCase, inputs: Inputs, run: Run) -> Iterator[tuple[str, Outputs]]:
        """An expert's slots alone, by ``matmul``; the first row alone and the others together."""
        if case.dense:
            return
        x, owners = of_slots(case, inputs), inputs["experts"].reshape(-1)
        out = np.zeros((case.slots, case.features), BF16)
        for expert in np.unique(owners):
            own = owners == expert
            alone = replace(case, rows=int(own.sum()), experts=1, picks=1, skew="even", by_slot=True, dense=True)
            weight = inputs["weight"][expert : expert + 1]
            out[own] = run(alone, {"x": x[own], "weight": weight, "experts": np.zeros((alone.rows, 1), np.int32)})[
                "out"
            ]
        yield "each expert's slots by matmul", {"out": out}
        if case.rows > 1:
            yield "the first row alone, the others together", {"out": self.in_two(case, inputs, run)}

    def in_two(self, case: ProductCase, inputs: Inputs, run: Run) -> Array:
        share = len(inputs["x"]) // case.rows
        parts = []
        for start, stop in ((0, 1), (1, case.rows)):
            own = {"x": inputs["x"][start * share : stop * share], "experts": inputs["experts"][start:stop]}
            parts.append(run(replace(case, rows=stop - start), {**own, "weight": inputs["weight"]})["out"])
        return np.concatenate(parts)

    def controls(self) -> Sequence[Control]:
        return [
            Control("one element changed by one step", EXACT, lambda inputs: step(inputs["x"])),
            Control("one element changed after the first run", REPEATS, lambda inputs: step(inputs["x"])),
            Control("one element of a picked expert changed by one step", EXACT, step_of_expert),
            Control("a pick of another expert", BOUND, swap_picks),
        ]


def of_slots(case: ProductCase, inputs: Inputs) -> Array:
    """A row of x for each slot."""
    return inputs["x"] if case.by_slot else np.repeat(inputs["x"], case.picks, axis=0)


def step_of_expert(inputs: Inputs) -> None:
    step(inputs["weight"][inputs["experts"][0, 0]])


def swap_picks(inputs: Inputs) -> None:
    """The first row's first two picks change places."""
    inputs["experts"][0, [0, 1]] = inputs["experts"][0, [1, 0]]


# --- The sum ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CombineCase:
    """``rows`` rows of ``dims`` elements, ``picks`` and the shared expert's."""

    rows: int
    picks: int
    dims: int

    def __str__(self) -> str:
        return f"rows={self.rows} K={self.picks} D={self.dims}"


@contract
class Combine(ByRow):
    """out = bf16(sum of weight · y in the order of slots, the shared expert last)."""

    name = "combine"
    kernels = ("combine_kernel",)
    modules = (MOE,)
    axes = {"out": ("row", "dim")}
    by_row = ("y", "shared", "weights")

    def cases(self, full: bool) -> Sequence[CombineCase]:
        some = [CombineCase(1, 1, 2), CombineCase(5, 2, 130), CombineCase(34, 10, 320), CombineCase(3, 8, 2048)]
        return some + [CombineCase(rows, 10, 2560) for rows in (1, 512)] * full

    def control_cases(self) -> Sequence[CombineCase]:
        """The last: so many results that some stand on the other side of a rounding once the order is another."""
        return [CombineCase(5, 3, 130), CombineCase(64, 10, 2560)]

    def inputs(self, case: CombineCase, poison: Poison, seed: int) -> Inputs:
        y = drawn_bf16((seed, case.rows, case.dims), case.rows, case.picks, case.dims)
        shared = drawn_bf16((seed, case.rows, case.dims, 1), case.rows, case.dims)
        weights = np.abs(drawn_bf16((seed, case.rows, 2), case.rows, case.picks + 1)).astype(np.float32)
        return {"y": y, "shared": shared, "weights": weights}

    def launch(self, case: CombineCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        out = bench.output("out", (case.rows, case.dims), BF16)
        y = bench.input("y", inputs["y"].reshape(-1, case.dims))
        modules[MOE].combine(out, y, bench.input("shared", inputs["shared"]), bench.input("weights", inputs["weights"]))

    def exact(self, case: CombineCase, inputs: Inputs) -> Bounds:
        return {"out": moe_oracle.combine(inputs["y"], inputs["shared"], inputs["weights"])}

    def controls(self) -> Sequence[Control]:
        return [*super().controls(), Control("the first two picks' weights swapped", BOUND, swap_weights)]


def swap_weights(inputs: Inputs) -> None:
    inputs["weights"][:, [0, 1]] = inputs["weights"][:, [1, 0]]
