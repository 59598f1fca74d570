"""Decode attention: bounded by float64, and the same bits as each row alone, on any cache, however the launch is cut. Spec
attention §2.

The three kernels run as one operation. Between them stand partials: each kind has a buffer with guards of its own, of which
the slots that the plan counts for a row, and no others, must be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from backends.layout import LAYOUTS
from kernels_numba import streams as columns
from kernels_numba.decode_plan import CHUNK, GROUP_CHUNKS, MIN_GROUPED, DecodePlan, plan_decode
from kernels_numba.fp8 import KV_TYPES
from refengine.contract.attention import (
    COMMITTED,
    FORMS,
    GROUPS,
    MIXED,
    PAGE_SIZES,
    AttentionCase,
    AttentionEntry,
    attention_controls,
    case_data,
    laid_out,
    sampled,
)
from refengine.contract.caches import Cache, StreamRows, build_cache
from refengine.contract.entry import Bounds, Control, Inputs, Modules, Outputs, contract
from refengine.contract.gates import EXACT
from refengine.contract.windows import path_of, path_table, spared
from refengine.contract.workbench import BF16, NAN, Array, Poison, Workbench
from refengine.verify import bounds
from refengine.verify.attention_bits import Heads
from refengine.verify.attention_oracle import attend

DECODE, FP8, LAYOUT = "kernels_numba.decode_attention", "kernels_numba.fp8", "backends.layout"
WINDOWS = (1, 2, 15, 16, 63, 64, 65, 127, 128)
CHUNK_EDGES = (511, 512, 513)
GROUP_KEYS = GROUP_CHUNKS * CHUNK
REAL, SMALL = Heads(24, 4), Heads(6, 1, 64)
IN_PROGRAMS, IN_MERGE = 0, 10**9
"""min_grouped that has every whole group folded by a program of decode_rows, or by decode_merge."""

CHAIN, TREE, BARE = "chain", "tree", "bare"
"""Whom row i of a window follows: row i - 1; row (i - 1) // 2; as a chain, but the last row sees committed keys alone."""


@dataclass(frozen=True)
class DecodeCase(AttentionCase):
    """Windows of (rows, committed). shape: CHAIN, TREE or BARE. min_grouped: see plan_decode."""

    shape: str = CHAIN
    min_grouped: int = MIN_GROUPED

    @property
    def has_groups(self) -> bool:
        """Whether there is a whole group of keys, which two kernels can fold."""
        return any(rows and committed >= GROUP_KEYS for rows, committed in self.streams)

    def paths(self, stream: int) -> list[list[int]]:
        """The path of each row of a window: window rows from the root to itself; empty: it sees committed keys alone."""
        rows = self.streams[stream][0]
        paths = [path_of(row, self.shape == TREE) for row in range(rows)]
        return [*paths[:-1], []] if self.shape == BARE and rows else paths

    def __str__(self) -> str:
        cut = {IN_PROGRAMS: " groups in programs", IN_MERGE: " groups in the merge"}.get(self.min_grouped, "")
        return super().__str__() + (f" {self.shape}" if self.shape != CHAIN else "") + cut


class GuardedPlan(DecodePlan):
    """A plan whose scratch is (po, pm, pl), each a buffer of its own."""

    def carve(self, scratch: Any) -> tuple[Any, Any, Any]:
        """As it is."""
        return scratch


@contract
class DecodeAttention(AttentionEntry):
    """The three kernels in one call."""

    name = "decode_attention"
    kernels = ("decode_rows", "decode_partial", "decode_merge")
    modules = (DECODE, "kernels_numba.cache_rows", FP8, LAYOUT)
    axes = {
        "out": ("row", "head", "dim"),
        "po": ("slot", "row", "head", "dim"),
        "pm": ("slot", "row", "head"),
        "pl": ("slot", "row", "head"),
    }

    def cases(self, full: bool) -> Sequence[DecodeCase]:
        return list(full_table() if full else small_table())

    def control_cases(self) -> Sequence[DecodeCase]:
        return list(control_table())

    def controls(self) -> Sequence[Control]:
        return [
            *attention_controls(),
            Control("a depth one too large", EXACT, deeper),
            Control("a path entry that names another row", EXACT, other_ancestor),
            Control("a stale count of groups", EXACT, stale_groups),
        ]

    def inputs(self, case: DecodeCase, poison: Poison, seed: int) -> Inputs:
        laid = laid_out(case, poison, seed, own_rows=False)
        paths = [path for stream in range(len(case.streams)) for path in case.paths(stream)]
        return assembled(case, laid, paths, poison, seed)

    def launch(self, case: DecodeCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        laid, plan = inputs["cache"], inputs["plan"]
        out, q = bench.output("out", inputs["q"].shape, BF16), bench.input("q", inputs["q"])
        used = slots_used(plan, laid.streams)
        values = np.repeat(used[..., None], plan.D, axis=-1)
        po = bench.output("po", values.shape, np.float32, written=values)
        pm, pl = (bench.output(name, used.shape, np.float32, written=used) for name in ("pm", "pl"))
        place = [bench.input(name, getattr(laid, name)) for name in ("arena", "pages", "streams")]
        rest = [bench.input(name, inputs[name]) for name in ("rows", "paths", "depths", "k_record", "v_record")]
        cut = replace(plan, items=bench.input("items", plan.items), groups=bench.input("groups", plan.groups))
        modules[DECODE].decode_attention(
            out, q, *place, *rest, case.geometry.scale, (po, pm, pl), cut,
            modules[LAYOUT].LAYOUTS[case.layout], case.cache_kv,
        )  # fmt: skip

    def exact(self, case: DecodeCase, inputs: Inputs) -> Bounds:
        value = np.zeros(inputs["q"].shape)
        limit = np.full(value.shape, np.inf)
        for n, ((q, k, v), first, (rows, committed)) in enumerate(
            zip(case_data(case, inputs["seed"]), case.firsts, case.streams, strict=True)
        ):
            chosen = sampled(rows)
            visible = seen(case.paths(n), committed)[chosen]
            if (blind := ~visible.any(axis=1)).any():
                limit[first + chosen[blind]] = bounds.UNDERFLOW
            chosen, visible, keys = chosen[~blind], visible[~blind], committed + rows
            if len(chosen):
                found = attend(q[committed + chosen], k[:keys], v[:keys], visible, float(case.geometry.scale))
                value[first + chosen] = found.out
                limit[first + chosen] = bounds.decode_attention(found, case.geometry.head_dim)
        return {"out": (value, limit)}

    def twins(
        self, case: DecodeCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        seed = inputs["seed"]
        alone = DecodeCase(case.geometry, "window", 0, ((1, 0),) * case.total, kv=case.as_bf16)
        yield (
            "each row alone on a window of bf16, its ancestors committed",
            {"out": run(alone, lone(case, seed))["out"]},
        )
        form = FORMS[1] if case.layout == "window" else FORMS[0]
        other = replace(case, layout=form[0], ptok=form[1], first_page=0)
        yield f"the same on {form[0]}", run(other, self.inputs(other, NAN, seed))
        if case.has_groups:
            cut = replace(case, min_grouped=IN_MERGE if inputs["plan"].groups.any() else IN_PROGRAMS)
            yield "groups folded by the other kernel", {"out": run(cut, self.inputs(cut, NAN, seed))["out"]}


# --- Inputs -----------------------------------------------------------------------------------------------------------


def assembled(case: DecodeCase, laid: Cache, paths: list[list[int]], poison: Poison, seed: int) -> Inputs:
    """What a launch takes. paths: of each row of the launch."""
    q, k, v = window_rows(case, seed)
    rows = np.repeat(np.arange(len(laid.streams), dtype=np.int32), laid.streams[:, columns.ROWS])
    geometry = case.geometry
    depths = np.array([len(path) for path in paths], np.int32)
    plan = plan_decode(laid.streams, geometry.heads, geometry.kv_heads, geometry.head_dim, case.min_grouped)
    return {
        "q": q, "k_record": spared(k, poison), "v_record": spared(v, poison), "cache": laid, "rows": rows,
        "paths": path_table(paths, laid.streams[rows, columns.FIRST]), "depths": depths, "seed": seed,
        "plan": GuardedPlan(**vars(plan)),
    }  # fmt: skip


def window_rows(case: DecodeCase, seed: int) -> list[Array]:
    """q [W, H, D], k, v [W, HK, D] of the launch's rows: those of the positions that a chain would have."""
    parts = [
        [a[committed : committed + rows] for a in data]
        for data, (rows, committed) in zip(case_data(case, seed), case.streams, strict=True)
    ]
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def slots_used(plan: DecodePlan, streams: Array) -> Array:
    """bool [slots, W, H]: the partials that a launch must write."""
    used = np.zeros(plan.partials, bool)
    for slots, stream in zip(plan.slots, streams, strict=True):
        used[:slots, stream[columns.FIRST] : stream[columns.FIRST] + stream[columns.ROWS]] = True
    return used


def seen(paths: list[list[int]], committed: int) -> Array:
    """bool [w, committed + w]: the keys that each row of a window sees."""
    visible = np.zeros((len(paths), committed + len(paths)), bool)
    visible[:, :committed] = bool(paths)
    for row, path in enumerate(paths):
        visible[row, [committed + n for n in path]] = True
    return visible


def lone(case: DecodeCase, seed: int) -> Inputs:
    """Every row a stream of its own. Rows whose ancestors begin one line share the window that holds it."""
    lines: list[StreamRows] = []
    windows, committed_of = [], []
    for stream, ((_, k, v), (_, committed)) in enumerate(zip(case_data(case, seed), case.streams, strict=True)):
        ancestors = [path[:-1] for path in case.paths(stream)]
        trunks = longest(ancestors)
        for own in ancestors:
            windows.append(len(lines) + next(n for n, trunk in enumerate(trunks) if trunk[: len(own)] == own))
            committed_of.append(committed + len(own))
        for trunk in trunks:
            keys = [*range(committed), *(committed + n for n in trunk)]
            lines.append(StreamRows(k[keys], v[keys], 0, 0, len(keys)))
    laid = build_cache(LAYOUTS["window"], 0, lines)
    streams = laid.streams[windows]
    streams[:, columns.FIRST], streams[:, columns.ROWS] = np.arange(len(streams)), 1
    streams[:, columns.COMMITTED] = committed_of
    paths = [path and [0] for stream in range(len(case.streams)) for path in case.paths(stream)]
    return assembled(
        replace(case, min_grouped=MIN_GROUPED, kv=case.as_bf16), replace(laid, streams=streams), paths, NAN, seed
    )


def longest(lines: list[list[int]]) -> list[list[int]]:
    """The lines that begin no other."""
    kept: list[list[int]] = []
    for line in sorted(lines, key=len, reverse=True):
        if not any(other[: len(line)] == line for other in kept):
            kept.append(line)
    return kept


# --- Faults in inputs -------------------------------------------------------------------------------------------------


def deeper(inputs: Inputs) -> None:
    """The last row of the first window sees one key more."""
    inputs["depths"][int(inputs["cache"].streams[0, columns.ROWS]) - 1] += 1


def other_ancestor(inputs: Inputs) -> None:
    """The last row of the first window has itself for its root."""
    last = int(inputs["cache"].streams[0, columns.ROWS]) - 1
    inputs["paths"][last, 0] = last


def stale_groups(inputs: Inputs) -> None:
    """The first stream's count of whole groups from when it had none to fold, or from when it had."""
    groups, committed = inputs["plan"].groups, int(inputs["cache"].streams[0, columns.COMMITTED])
    if groups[0] == 0 and committed >= GROUP_KEYS:
        groups[0] = committed // GROUP_KEYS


# --- The table --------------------------------------------------------------------------------------------------------


def one(geometry: Heads, form: tuple[str, int], rows: int, committed: int, **how: Any) -> DecodeCase:
    return DecodeCase(geometry, *form, ((rows, committed),), **how)


def control_table() -> Iterator[DecodeCase]:
    """Every branch of the kernels in few keys: a straddled page, a tree that ends with a chunk, a window across the edge of a
    group, whole groups folded either way, chunks after them, rows that see no window and no key; so many elements that what
    differs in the last bit of float32 shows in bf16; a page id past 16 bits.
    """
    yield one(SMALL, ("paged", 48), 3, 575)
    yield one(Heads(12, 1, 64), ("paged", 16), 7, 505, shape=TREE)
    streams = ((5, 2561), (9, 2044), (1, 0))
    yield DecodeCase(Heads(4, 2, 64), "paged", 48, streams, min_grouped=IN_MERGE)
    yield DecodeCase(Heads(4, 2, 64), "paged", 48, streams, shape=BARE, min_grouped=IN_PROGRAMS)
    yield one(Heads(12, 1, 64), ("paged", 48), 128, 2600, min_grouped=IN_MERGE)
    yield DecodeCase(Heads(1, 1, 64), "paged", 1, ((2, 70),), first_page=65_530)
    yield one(Heads(6, 1), ("paged", 48), 5, 575, kv="fp8", shape=TREE)
    yield from (one(Heads(4, 2, D), ("paged", 16), 3, 505, kv="fp8") for D in (64, 128))


def full_table() -> Iterator[DecodeCase]:
    """Every window, committed length and form of the real heads; every page size, group and head_dim; several streams."""
    for w, p, form in product(WINDOWS, COMMITTED + CHUNK_EDGES, FORMS):
        yield one(REAL, form, w, p)
    for w, p, form in product(WINDOWS[::4], (COMMITTED + CHUNK_EDGES)[::3], FORMS):
        yield one(REAL, form, w, p, kv="fp8")
    for size, (w, p) in product(PAGE_SIZES, ((15, 48), (65, 255), (127, 2048), (3, 9000))):
        yield one(REAL, ("paged", size), w, p)
    for group, D, form, (w, p) in product(GROUPS, (64, 128, 256), FORMS, ((15, 48), (64, 513), (3, 2047))):
        yield one(Heads(2 * group, 2, D), form, w, p)
    for shape, form, w, p in product((TREE, BARE), FORMS, (1, 16, 128), (0, 62, 500, 2048)):
        yield one(REAL, form, w, p, shape=shape)
    yield from several_streams(REAL)
    yield from small_table()


def small_table() -> Iterator[DecodeCase]:
    """Every window and committed length once, every form, page size, group and head_dim, both folds, trees."""
    some = (
        (1, 0), (1, 1), (2, 48), (15, 255), (16, 256), (63, 257), (64, 511), (65, 513), (127, 1), (128, 512), (1, 2047),
        (16, 2048), (64, 2049), (1, 4096), (2, 9000),
    )  # fmt: skip
    for n, (w, p) in enumerate(some):
        yield one(SMALL, FORMS[n % 3], w, p)
    yield from (one(SMALL, ("paged", size), 5, 1100 if size == 544 else 130) for size in PAGE_SIZES)
    for n, (group, D) in enumerate(product(GROUPS, (64, 128, 256))):
        yield one(Heads(group, 1, D), FORMS[n % 3], 3, 575)
    for n, (shape, p) in enumerate(product((TREE, BARE), (0, 62, 500))):
        yield one(SMALL, FORMS[n % 3], 16, p, shape=shape)
        yield one(SMALL, FORMS[n % 3], 16, p, shape=shape, kv="fp8")
    for n, (size, p) in enumerate(zip(PAGE_SIZES, (0, 1, 63, 64, 511, 512, 513, 2049), strict=True)):
        yield one(Heads(3, 1, (64, 128, 256)[n % 3]), ("paged", size), 3, p, kv="fp8")
    yield one(REAL, ("paged", 48), 3, 511)
    yield from several_streams(Heads(6, 2, 64))
    yield from control_table()


def several_streams(geometry: Heads) -> Iterator[DecodeCase]:
    """Streams of one launch, one of them without rows, one at its start; whole groups in some and not in others."""
    for form in (*FORMS, MIXED):
        yield DecodeCase(geometry, *form, ((2, 513), (16, 64)))
        yield DecodeCase(geometry, *form, ((3, 300), (0, 64), (5, 0)))
    for kv in KV_TYPES:
        yield DecodeCase(geometry, "paged", 48, ((1, 511), (33, 4097), (2, 2048)), kv=kv)
        yield DecodeCase(geometry, *MIXED, ((3, 300), (0, 64), (5, 0), (1, 9000), (1, 9000), (4, 513)), kv=kv)
