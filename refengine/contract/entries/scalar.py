"""The scalar path: bounded by float64, and the same bits for each row alone, in slices or at once, on any cache. Spec
attention §2.

decode_scalar and the merge run as one operation. The scratch between them holds the rows of one slice, in buffers with guards
of their own; what one slice leaves there is an output, of which the slots that its rows reach, and no others, must be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from backends.layout import LAYOUTS
from kernels_numba import streams as columns
from kernels_numba.decode_plan import CHUNK
from kernels_numba.fp8 import KV_TYPES
from kernels_numba.scalar_plan import MOST_SCALAR_ROWS, ScalarPlan, pass_tables, plan_scalar
from refengine.contract.attention import (
    COMMITTED,
    FORMS,
    GROUPS,
    MIXED,
    PAGE_SIZES,
    AttentionEntry,
    attention_controls,
    case_data,
    laid_out,
    queries,
    sampled,
)
from refengine.contract.caches import Cache, StreamRows, build_cache
from refengine.contract.entries.decode import BARE, CHAIN, TREE, DecodeCase, deeper, other_ancestor, seen, window_rows
from refengine.contract.entry import Bounds, Control, Inputs, Modules, Outputs, contract
from refengine.contract.gates import EXACT
from refengine.contract.windows import path_table, spared
from refengine.contract.workbench import BF16, NAN, Array, Poison, Workbench
from refengine.verify import bounds
from refengine.verify.attention_bits import Heads
from refengine.verify.attention_oracle import attend

SCALAR, LAYOUT = "kernels_numba.decode_scalar", "backends.layout"
ROWS = (1, 127, 128, 129, 255, 256, 257, 4096)
REAL, SMALL, LEAST = Heads(24, 4), Heads(6, 1, 64), Heads(1, 1, 64)


@dataclass(frozen=True)
class ScalarCase(DecodeCase):
    """own: where the keys of the launch's rows lie. most: rows of a slice."""

    own: str = "record"
    most: int = MOST_SCALAR_ROWS

    def __str__(self) -> str:
        slices = f" most={self.most}" if self.most != MOST_SCALAR_ROWS else ""
        return f"{super().__str__()} own={self.own}{slices}"


class GuardedPlan(ScalarPlan):
    """A plan whose scratch is (po, pm, pl), each a buffer of its own."""

    def carve(self, scratch: Any) -> tuple[Any, Any, Any]:
        """As it is."""
        return scratch


@contract
class DecodeScalar(AttentionEntry):
    """decode_scalar and decode_merge in one call, slice by slice."""

    name = "decode_scalar"
    kernels = ("decode_scalar",)
    modules = (SCALAR, LAYOUT)
    axes = {
        "out": ("row", "head", "dim"),
        "po": ("slot", "row", "head", "dim"),
        "pm": ("slot", "row", "head"),
        "pl": ("slot", "row", "head"),
    }

    def cases(self, full: bool) -> Sequence[ScalarCase]:
        return list(full_table() if full else small_table())

    def control_cases(self) -> Sequence[ScalarCase]:
        return list(control_table())

    def controls(self) -> Sequence[Control]:
        return [
            *attention_controls(),
            Control("a depth one too large", EXACT, deeper),
            Control("a path entry that names another row", EXACT, other_ancestor),
            Control("slices that leave the row tables at row 0", EXACT, tables_at_row_0),
            Control("an exponent one too large", EXACT, other_exponent),
        ]

    def inputs(self, case: ScalarCase, poison: Poison, seed: int) -> Inputs:
        laid = laid_out(case, poison, seed, own_rows=case.own == "cache")
        return assembled(case, laid, queries(case, seed), poison, seed)

    def launch(self, case: ScalarCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        laid, plan = inputs["cache"], inputs["plan"]
        out, q = bench.output("out", inputs["q"].shape, BF16), bench.input("q", inputs["q"])
        scratch = partials(plan, laid.streams, bench)
        place = [bench.input(name, getattr(laid, name)) for name in ("arena", "pages", "streams")]
        names = ("rows", "paths", "depths", "k_record", "v_record")
        rest = [None if inputs[name] is None else bench.input(name, inputs[name]) for name in names]
        modules[SCALAR].scalar_attention(
            out, q, *place, *rest, case.geometry.scale, scratch,
            replace(plan, groups=bench.input("groups", plan.groups)), modules[LAYOUT].LAYOUTS[case.layout], case.cache_kv,
        )  # fmt: skip

    def exact(self, case: ScalarCase, inputs: Inputs) -> Bounds:
        value = np.zeros(inputs["q"].shape)
        limit = np.full(value.shape, np.inf)
        for n, ((_, k, v), first, (rows, committed)) in enumerate(
            zip(case_data(case, inputs["seed"]), case.firsts, case.streams, strict=True)
        ):
            chosen = sampled(rows)
            visible = visible_keys(case, n, chosen)
            if (blind := ~visible.any(axis=1)).any():
                limit[first + chosen[blind]] = bounds.UNDERFLOW
            chosen, visible, keys = chosen[~blind], visible[~blind], committed + rows
            if len(chosen):
                q = inputs["q"][first + chosen]
                found = attend(q, k[:keys], v[:keys], visible, float(case.geometry.scale))
                value[first + chosen] = found.out
                limit[first + chosen] = bounds.scalar_attention(found, case.geometry.head_dim)
        return {"out": (value, limit)}

    def twins(
        self, case: ScalarCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        seed = inputs["seed"]
        yield "each row alone on a bf16 window, its ancestors committed", {"out": run(*alone(case, seed))["out"]}
        form = FORMS[1] if case.layout == "window" else FORMS[0]
        other = replace(case, layout=form[0], ptok=form[1], first_page=0)
        yield f"the same on {form[0]}", run(other, self.inputs(other, NAN, seed))
        if case.kv == "fp8":
            wide = replace(case, kv=case.as_bf16)
            yield "the bf16 kernel on the widened rows", run(wide, self.inputs(wide, NAN, seed))
        if case.total > case.most:
            whole = replace(case, most=case.total)
            yield "one launch of all rows", {"out": run(whole, self.inputs(whole, NAN, seed))["out"]}


# --- Inputs -----------------------------------------------------------------------------------------------------------


def assembled(case: ScalarCase, laid: Cache, q: Array, poison: Poison, seed: int) -> Inputs:
    """What a launch takes. q: bf16 [W, H, D]."""
    rows, depths = pass_tables(laid.streams)
    inputs: Inputs = {
        "q": q, "cache": laid, "rows": rows, "paths": None, "depths": depths, "k_record": None,
        "v_record": None, "seed": seed, "plan": guarded(case, laid),
    }  # fmt: skip
    if case.own == "record":
        paths = [path for stream in range(len(case.streams)) for path in case.paths(stream)]
        _, k, v = window_rows(case, seed)
        inputs["paths"] = path_table(paths, laid.streams[rows, columns.FIRST])
        inputs["depths"] = np.array([len(path) for path in paths], np.int32)
        inputs["k_record"], inputs["v_record"] = spared(k, poison), spared(v, poison)
    return inputs


def guarded(case: ScalarCase, laid: Cache) -> GuardedPlan:
    """The plan of the case's launch."""
    geometry = case.geometry
    heads = geometry.heads, geometry.kv_heads, geometry.head_dim
    return GuardedPlan(**vars(plan_scalar(laid.streams, *heads, case.own, case.most)))


def partials(plan: ScalarPlan, streams: Array, bench: Workbench) -> tuple[Any, Any, Any]:
    """(po, pm, pl): outputs where one slice takes all rows, else scratch."""
    shape = plan.partials
    if plan.rows > plan.most:
        return bench.scratch("po", (*shape, plan.D)), bench.scratch("pm", shape), bench.scratch("pl", shape)
    used = np.zeros(shape, bool)
    for s in streams:
        first, rows, committed = (int(s[c]) for c in (columns.FIRST, columns.ROWS, columns.COMMITTED))
        used[: -(-(committed + rows) // CHUNK), first : first + rows] = True
    values = np.repeat(used[..., None], plan.D, axis=-1)
    po = bench.output("po", values.shape, np.float32, written=values)
    pm, pl = (bench.output(name, shape, np.float32, written=used) for name in ("pm", "pl"))
    return po, pm, pl


def visible_keys(case: ScalarCase, stream: int, chosen: Array) -> Array:
    """bool [chosen, committed + rows]: the keys that rows of a stream see."""
    rows, committed = case.streams[stream]
    if case.shape != CHAIN:
        return seen(case.paths(stream), committed)[chosen]
    return np.arange(committed + rows) <= committed + chosen[:, None]


def alone(case: ScalarCase, seed: int) -> tuple[ScalarCase, Inputs]:
    """Every row a stream of its own on a bf16 window, its ancestors and its own key in the cache."""
    lines, line_of, depths = chains(case, seed) if case.shape == CHAIN else branches(case, seed)
    laid = build_cache(LAYOUTS["window"], 0, lines)
    streams = laid.streams[line_of]
    streams[:, columns.FIRST], streams[:, columns.ROWS] = np.arange(case.total), 1
    if case.shape == CHAIN:
        streams[:, columns.COMMITTED] += np.arange(case.total) - np.array(case.firsts)[line_of]
    single = replace(case, layout="window", ptok=0, streams=((1, 0),) * case.total, own="cache", kv=case.as_bf16)
    inputs = assembled(single, replace(laid, streams=streams), queries(case, seed), NAN, seed)
    return single, {**inputs, "depths": depths}


def chains(case: ScalarCase, seed: int) -> tuple[list[StreamRows], Array, Array]:
    """(lines, line of each row, depths): the rows of a stream share the line of its positions."""
    data = zip(case_data(case, seed), case.streams, strict=True)
    lines = [StreamRows(k[: c + r], v[: c + r], 0, r, c) for (_, k, v), (r, c) in data]
    return lines, np.repeat(np.arange(len(lines)), [r for r, _ in case.streams]), np.ones(case.total, np.int32)


def branches(case: ScalarCase, seed: int) -> tuple[list[StreamRows], Array, Array]:
    """The same where each row has a line of its own: the committed keys and its path."""
    lines, depths = [], []
    for n, ((_, k, v), (_, committed)) in enumerate(zip(case_data(case, seed), case.streams, strict=True)):
        for path in case.paths(n):
            keys = [*range(committed), *(committed + row for row in path)]
            depths.append(min(len(path), 1))
            lines.append(StreamRows(k[keys], v[keys], 0, 1, len(keys) - depths[-1]))
    return lines, np.arange(len(lines)), np.array(depths, np.int32)


# --- Faults in inputs -------------------------------------------------------------------------------------------------


def tables_at_row_0(inputs: Inputs) -> None:
    """The rows of each slice but the first with the tables of the first slice's."""
    for first, count in inputs["plan"].slices():
        for name in ("rows", "depths", "paths"):
            if inputs[name] is not None:
                inputs[name][first : first + count] = inputs[name][:count]


def other_exponent(inputs: Inputs) -> None:
    """The exponent of the first stream's first key, by one; where the cache has exponents."""
    laid: Cache = inputs["cache"]
    if laid.kv == "fp8":
        laid.arena.view(np.int8)[laid.exponents(0, "k", 0, 1)] += 1


# --- The table --------------------------------------------------------------------------------------------------------


def windows(geometry: Heads, form: tuple[str, int], *streams: tuple[int, int], **how: Any) -> ScalarCase:
    """Drafted windows: their rows lie in the record."""
    return ScalarCase(geometry, *form, streams, **how)


def prompt(geometry: Heads, form: tuple[str, int], *streams: tuple[int, int], **how: Any) -> ScalarCase:
    """Prompt passes: their rows lie in the cache."""
    return ScalarCase(geometry, *form, streams, own="cache", **how)


def control_table() -> Iterator[ScalarCase]:
    """Every branch in few keys: a straddled page, a tree that ends with a chunk, slices that cross from one stream to another,
    a chunk that some rows do not reach, rows that see no key, an odd group of heads, exponents, a page id past 16 bits.
    """
    yield windows(SMALL, ("paged", 48), (3, 575))
    yield windows(Heads(3, 1, 64), ("paged", 16), (7, 509), (2, 0), shape=TREE)
    yield windows(LEAST, ("paged", 48), (100, 440), (128, 1))
    yield windows(Heads(2, 2, 64), ("paged", 48), (9, 60), (1, 0), shape=BARE, kv="fp8")
    yield prompt(Heads(2, 1, 64), ("paged", 48), (140, 450))
    yield prompt(LEAST, ("paged", 1), (2, 70), first_page=65_530)


def small_table() -> Iterator[ScalarCase]:
    """Every row count in both places and both kinds of cache; every form, page size, group and head_dim; trees."""
    yield from in_record(SMALL, LEAST)
    for n, (w, p) in enumerate(((1, 600), (127, 0), (128, 448), (129, 1), (255, 0), (256, 63), (257, 255))):
        yield prompt(LEAST, FORMS[n % 3], (w, p), kv=("bf16", "fp8")[n % 2])
    yield prompt(LEAST, FORMS[1], *((64, 0),) * 64)
    yield from (windows(LEAST, ("paged", size), (3, 1100 if size == 544 else 130), kv="fp8") for size in PAGE_SIZES)
    for n, (group, D) in enumerate([*product((*GROUPS, 16), (64,)), (3, 128), (2, 128), (3, 256), (2, 256)]):
        yield windows(Heads(group, 1, D), FORMS[n % 3], (2, 70), kv=("bf16", "fp8")[n % 2])
    yield from (windows(LEAST, form, (9, 508), (5, 0), shape=shape) for shape, form in product((TREE, BARE), FORMS))
    yield windows(REAL, ("paged", 48), (2, 300), kv="fp8")
    for kv in ("bf16", "fp8"):
        yield windows(LEAST, MIXED, (100, 60), (100, 1), (30, 500), kv=kv)
        yield prompt(LEAST, MIXED, (60, 300), (200, 7), kv=kv)
    yield windows(LEAST, FORMS[1], (2, 2560), (1, 2047), (0, 64), (3, 0))
    yield from control_table()


def in_record(geometry: Heads, least: Heads) -> Iterator[ScalarCase]:
    """Every row count, in windows of at most 128; slices that cross from one stream to the next."""
    streams = (
        ((1, 700),), ((127, 0),), ((128, 390),), ((100, 40), (29, 500)), ((128, 0), (127, 48)), ((128, 255), (128, 1)),
        ((100, 129), (128, 0), (29, 513)),
    )  # fmt: skip
    for n, some in enumerate(streams):
        yield windows(geometry if some[0][0] == 1 else least, FORMS[n % 3], *some, kv=("bf16", "fp8")[n // 3 % 2])
    yield windows(least, FORMS[1], *((64, 0),) * 64)


def full_table() -> Iterator[ScalarCase]:
    """The real heads: every row count, committed length, form and kind of cache in a prompt pass; windows as the small table's;
    every page size, group and head_dim."""
    for n, (w, p) in enumerate(product(ROWS, COMMITTED)):
        yield prompt(REAL, FORMS[n % 3], (w, p), kv=KV_TYPES[n // 3 % 2])
    for w, form, kv in product((127, 128, 129, 255, 256, 257, 4096), (FORMS[1], MIXED), KV_TYPES):
        yield prompt(REAL, form, (w // 2, 300), (w - w // 2, 48), kv=kv)
    yield from in_record(REAL, REAL)
    for size, kv, (w, p) in product(PAGE_SIZES, KV_TYPES, ((65, 255), (3, 9000))):
        yield windows(REAL, ("paged", size), (w, p), kv=kv)
    for group, D, form, (w, p) in product((*GROUPS, 16), (64, 128, 256), FORMS, ((15, 48), (3, 2047))):
        yield windows(Heads(2 * group, 2, D), form, (w, p))
    yield from small_table()
