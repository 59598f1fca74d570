"""Attention to listed keys: bounded by float64, and the bits that decode gives a row with its keys side by side. Spec
flash-next.

fn_attn_chunks and fn_attn_merge run as one operation. Between them stand partials, each kind in a buffer with guards of its own,
of which the slots that a row's list reaches, and no others, must be written. The lists are the oracle's, of drawn scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from backends.layout import LAYOUTS
from kernels_numba import streams as columns
from kernels_numba.decode_plan import CHUNK, plan_decode, row_streams
from kernels_numba.flash_next.pages import BLOCK
from kernels_numba.flash_next.select import list_width
from kernels_numba.flash_next.sparse_plan import SparsePlan, plan_sparse
from kernels_numba.fp8 import KV_TYPES
from refengine.contract.attention import (
    COMMITTED,
    FORMS,
    GROUPS,
    MIXED,
    AttentionCase,
    AttentionEntry,
    attention_controls,
    case_data,
    laid_out,
    queries,
    sampled,
)
from refengine.contract.caches import Cache, StreamRows, build_cache
from refengine.contract.entry import Bounds, Control, Inputs, Modules, Outputs, contract
from refengine.contract.gates import EXACT
from refengine.contract.windows import path_table
from refengine.contract.workbench import BF16, NAN, Array, Poison, Workbench, drawn
from refengine.verify import bounds
from refengine.verify.attention_bits import Heads
from refengine.verify.attention_oracle import attend
from refengine.verify.selection_oracle import listed_keys

FLASH_NEXT = "kernels_numba.flash_next."
ATTENTION, CHUNKS, MERGE, SELECT = (FLASH_NEXT + name for name in ("attention", "chunks", "merge", "select"))
DECODE, FP8, LAYOUT = "kernels_numba.decode_attention", "kernels_numba.fp8", "backends.layout"
BUDGET = 512
"""The model's."""
PAGES = (16, 48, 128, 256, 512)
REAL, SMALL = Heads(24, 2), Heads(12, 1, 64)


@dataclass(frozen=True)
class SparseCase(AttentionCase):
    """Streams of (rows, committed), their rows' keys in the cache. budget: blocks that a sparse row reads. ahead: as the
    kernel's. gathered: by decode_attention, each row's keys side by side."""

    budget: int = BUDGET
    ahead: bool = False
    gathered: bool = False

    def __str__(self) -> str:
        return f"{super().__str__()} budget={self.budget}" + " ahead" * self.ahead


class GuardedPlan(SparsePlan):
    """A plan whose scratch is (po, pm, pl), each a buffer of its own."""

    def carve(self, scratch: Any) -> tuple[Any, Any, Any]:
        """As it is."""
        return scratch


@contract
class AttendListed(AttentionEntry):
    """Both kernels in one call."""

    name = "fn_attn_chunks"
    kernels = ("fn_attn_chunks_kernel", "fn_attn_merge_kernel")
    modules = (ATTENTION, CHUNKS, MERGE, SELECT, DECODE, "kernels_numba.cache_rows", FP8, LAYOUT)
    axes = {
        "out": ("row", "head", "dim"),
        "po": ("slot", "row", "head", "dim"),
        "pm": ("slot", "row", "head"),
        "pl": ("slot", "row", "head"),
    }

    def cases(self, full: bool) -> Sequence[SparseCase]:
        return list(full_table() if full else small_table())

    def control_cases(self) -> Sequence[SparseCase]:
        return list(control_table())

    def controls(self) -> Sequence[Control]:
        return [
            *attention_controls(),
            Control("a listed key that is its neighbour", EXACT, other_key),
            Control("two listed keys exchanged", EXACT, exchanged_keys),
            Control("the list of another row", EXACT, other_list),
        ]

    def inputs(self, case: SparseCase, poison: Poison, seed: int) -> Inputs:
        laid = laid_out(case, poison, seed, own_rows=True)
        geometry = case.geometry
        plan = plan_sparse(laid.streams, geometry.heads, geometry.kv_heads, geometry.head_dim, case.budget)
        return {
            "q": queries(case, seed), "cache": laid, "rows": row_streams(laid.streams), "seed": seed,
            "listed": table_of_lists(case, poison, seed), "plan": GuardedPlan(**vars(plan)),
        }  # fmt: skip

    def launch(self, case: SparseCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        laid, plan = inputs["cache"], inputs["plan"]
        out, q = bench.output("out", inputs["q"].shape, BF16), bench.input("q", inputs["q"])
        place = [bench.input(name, getattr(laid, name)) for name in ("arena", "pages", "streams")]
        rows, scale = bench.input("rows", inputs["rows"]), case.geometry.scale
        if case.gathered:
            paths, depths, record = (bench.input(name, inputs[name]) for name in ("paths", "depths", "record"))
            cut = replace(plan, items=bench.input("items", plan.items), groups=bench.input("groups", plan.groups))
            scratch = bench.scratch("partials", (plan.scratch_size,))
            modules[DECODE].decode_attention(
                out, q, *place, rows, paths, depths, record, record, scale, scratch, cut, laid.layout
            )
            return
        used = slots_used(plan, [len(keys) for keys in lists_of(case, inputs["seed"])])
        values = np.repeat(used[..., None], plan.D, axis=-1)
        po = bench.output("po", values.shape, np.float32, written=values)
        pm, pl = (bench.output(name, used.shape, np.float32, written=used) for name in ("pm", "pl"))
        modules[ATTENTION].attend_listed(
            out, q, *place, rows, scale, bench.input("listed", inputs["listed"]), (po, pm, pl), plan,
            modules[LAYOUT].LAYOUTS[case.layout], case.cache_kv, case.ahead,
        )  # fmt: skip

    def exact(self, case: SparseCase, inputs: Inputs) -> Bounds:
        value = np.zeros(inputs["q"].shape)
        limit = np.full(value.shape, np.inf)
        lists = lists_of(case, inputs["seed"])
        for (_, k, v), first, (rows, committed) in zip(
            case_data(case, inputs["seed"]), case.firsts, case.streams, strict=True
        ):
            chosen, keys = first + sampled(rows), committed + rows
            if len(chosen):
                visible = np.stack([np.isin(np.arange(keys), lists[row]) for row in chosen])
                found = attend(inputs["q"][chosen], k[:keys], v[:keys], visible, float(case.geometry.scale))
                value[chosen], limit[chosen] = found.out, bounds.sparse_attention(found, case.geometry.head_dim)
        return {"out": (value, limit)}

    def twins(
        self, case: SparseCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        seed = inputs["seed"]
        decode = replace(case, gathered=True)
        yield "decode_attention, each row's keys side by side", {"out": run(decode, gathered(case, seed))["out"]}
        form = FORMS[1] if case.layout == "window" else FORMS[0]
        other = replace(case, layout=form[0], ptok=form[1], first_page=0, ahead=not case.ahead)
        yield f"the same on {form[0]}, {'ahead' if other.ahead else 'plain'}", run(other, self.inputs(other, NAN, seed))


# --- Inputs -----------------------------------------------------------------------------------------------------------


def ends_of(case: SparseCase) -> list[tuple[int, int]]:
    """(number of its stream's data, keys at or before its position) of each row of the launch."""
    return [
        (case.number + n, committed + row + 1)
        for n, (rows, committed) in enumerate(case.streams)
        for row in range(rows)
    ]


def lists_of(case: SparseCase, seed: int) -> list[Array]:
    """The keys of each row of the launch."""
    return [list_at(seed, stream, end, case.budget) for stream, end in ends_of(case)]


@lru_cache(4096)
def list_at(seed: int, stream: int, end: int, budget: int) -> Array:
    """The list of a stream's row that has ``end`` keys. Scores are drawn, many of them alike; the last complete block of every
    second row is its worst.
    """
    scores = np.round(np.maximum(drawn((seed, stream, end), end // BLOCK), 0) * 4)
    if end % 2 == 0:
        scores[-1:] = -1
    return listed_keys(scores, end, budget)


def table_of_lists(case: SparseCase, poison: Poison, seed: int) -> Array:
    """int32 [R, columns]: the lists of sparse rows, poison elsewhere."""
    lists = lists_of(case, seed)
    width = list_width(case.budget)
    table = poison.filled(4 * len(lists) * width).view(np.int32).reshape(len(lists), width)
    for own, keys, (_, end) in zip(table, lists, ends_of(case), strict=True):
        if end // BLOCK > case.budget:
            own[: len(keys)] = keys
    return table


def slots_used(plan: SparsePlan, lengths: list[int]) -> Array:
    """bool [slots, R, H]: the partials that a launch must write."""
    chunks = -(-np.array(lengths, np.int64) // CHUNK)
    used = np.arange(plan.slots)[:, None] < chunks
    return np.repeat(used[..., None], plan.heads, axis=-1)


def gathered(case: SparseCase, seed: int) -> Inputs:
    """What decode_attention takes: each row a stream whose window holds the row's keys, all committed."""
    lists, geometry = lists_of(case, seed), case.geometry
    data = [d for d, (rows, _) in zip(case_data(case, seed), case.streams, strict=True) for _ in range(rows)]
    lines = [
        StreamRows(k[own], v[own], n, 1, len(own)) for n, ((_, k, v), own) in enumerate(zip(data, lists, strict=True))
    ]
    laid = build_cache(LAYOUTS["window"], 0, lines)
    plan = plan_decode(laid.streams, geometry.heads, geometry.kv_heads, geometry.head_dim)
    count = len(lines)
    return {
        "q": queries(case, seed), "cache": laid, "plan": plan, "rows": np.arange(count, dtype=np.int32),
        "depths": np.zeros(count, np.int32), "paths": path_table([[]] * count, laid.streams[:, columns.FIRST]),
        "record": np.zeros((count, geometry.kv_heads, geometry.head_dim), BF16),
    }  # fmt: skip


# --- Faults in inputs -------------------------------------------------------------------------------------------------


def first_sparse(inputs: Inputs) -> int:
    """The first row that has a list."""
    laid: Cache = inputs["cache"]
    streams = laid.streams[inputs["rows"]]
    ends = streams[:, columns.COMMITTED] + np.arange(len(streams)) - streams[:, columns.FIRST] + 1
    return int(np.argmax(ends // BLOCK > inputs["plan"].budget))


def other_key(inputs: Inputs) -> None:
    """The first listed key of a row gives way to the position after it, or before."""
    inputs["listed"][first_sparse(inputs), 0] ^= 1


def exchanged_keys(inputs: Inputs) -> None:
    """A row's first key and one in another lane: the same set in another order."""
    own = inputs["listed"][first_sparse(inputs)]
    own[[0, 9]] = own[[9, 0]]


def other_list(inputs: Inputs) -> None:
    """The blocks of the row after."""
    row, blocks = first_sparse(inputs), BLOCK * inputs["plan"].budget
    inputs["listed"][row, :blocks] = inputs["listed"][row + 1, :blocks]


# --- The table --------------------------------------------------------------------------------------------------------


def one(
    geometry: Heads, form: tuple[str, int], *streams: tuple[int, int], budget: int = BUDGET, **how: Any
) -> SparseCase:
    return SparseCase(geometry, *form, streams, budget=budget, **how)


def control_table() -> Iterator[SparseCase]:
    """Every branch in few keys: dense and sparse rows in one window, a list of three chunks, the last of 3 keys and the ends of
    pages anywhere in a tile, a dense chunk that is not full, a group of many heads and of an odd number, a page id past 16 bits;
    so many elements that what differs in the last bit of float32 shows in bf16.
    """
    yield one(SMALL, ("paged", 16), (4, 33), budget=8)
    yield one(SMALL, ("paged", 16), (3, 1100), (2, 70), budget=256, ahead=True)
    yield one(Heads(6, 2, 64), ("paged", 48), (5, 700), (3, 28), budget=140)
    yield one(Heads(2, 2, 64), ("paged", 48), (3, 150), (3, 33), budget=33, kv="fp8")
    yield one(Heads(2, 2, 128), ("paged", 16), (3, 650), budget=150, kv="fp8", ahead=True)
    yield one(Heads(1, 1, 64), ("paged", 1), (3, 70), budget=16, first_page=65_530)
    yield one(Heads(12, 1, 128), ("paged", 256), (128, 1100), budget=260)


def small_table() -> Iterator[SparseCase]:
    """The edges of the model's budget; every page size, layout, group and head_dim; lengths of 9,000; both kinds of cache."""
    yield one(SMALL, FORMS[0], (10, 2046))
    yield one(SMALL, FORMS[1], (10, 2046), ahead=True)
    yield one(REAL, FORMS[2], (1, 2051), ahead=True)
    yield one(REAL, FORMS[1], (1, 130), (2, 44), budget=16, kv="fp8")
    yield one(SMALL, FORMS[1], (1, 8999), (2, 8990), kv="fp8")
    for n, size in enumerate(PAGES):
        yield one(SMALL, ("paged", size), (2, 1200), (3, 575), budget=130, ahead=n % 2 == 1)
    for n, kv in enumerate(KV_TYPES):
        yield one(SMALL, MIXED, (3, 600), (2, 90), (1, 36), budget=20, kv=kv, ahead=n == 1)
    for n, (group, D) in enumerate(product((*GROUPS, 16), (64, 128, 256))):
        yield one(Heads(group, 1, D), FORMS[n % 3], (2, 90), budget=8 + n, kv=KV_TYPES[n // 2 % 2], ahead=n % 2 == 1)
    for n, committed in enumerate((0, 1, 63, 64, 255, 511, 512)):
        yield one(SMALL, FORMS[n % 3], (3, committed), ahead=n % 2 == 1)
    yield one(SMALL, FORMS[1], (0, 64), (2, 40), budget=8)
    yield from control_table()


def full_table() -> Iterator[SparseCase]:
    """The real heads: every edge, committed length, form, page size and kind of cache."""
    for form, kv, ahead in product((*FORMS, MIXED), KV_TYPES, (False, True)):
        yield one(REAL, form, (10, 2046), kv=kv, ahead=ahead)
        yield one(REAL, form, (16, 8990), (5, 3000), kv=kv, ahead=ahead)
    for n, (committed, size) in enumerate(product(COMMITTED, PAGES)):
        yield one(REAL, ("paged", size), (4, committed), (3, 2050), kv=KV_TYPES[n % 2], ahead=n // 2 % 2 == 1)
    for budget, (w, p) in product((8, 512), ((15, 48), (64, 513), (128, 2047))):
        yield one(REAL, FORMS[1], (w, p), budget=budget)
    yield from small_table()
