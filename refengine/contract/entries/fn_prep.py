"""The prep of a sparse layer: heads normed and rotated, keys, values and raw index keys stored. Spec flash-next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from kernels_numba.fp8 import KV_TYPES
from refengine.contract.attention import FORMS, MIXED
from refengine.contract.entry import Bounds, Control, Inputs, Modules, Outputs, contract
from refengine.contract.gates import EXACT, REPEATS
from refengine.contract.indexer import (
    ENDS,
    EPS,
    INDEXED_PAGES,
    MEDIA,
    RESUMED,
    TEXT,
    UNTURNED,
    IndexedCase,
    IndexedEntry,
    indexed_cache,
    media_on,
    moved_on,
    other_form,
    shifted,
    swapped_table,
    turned_by,
    turning,
)
from refengine.contract.stored import empty, gathered, on_bench, page_and_slot, places
from refengine.contract.workbench import BF16, NAN, Array, Poison, Workbench, bits, drawn, drawn_bf16
from refengine.verify import oracles
from refengine.verify.attention_bits import Heads

PREP, TURNS, PAGES = (f"kernels_numba.flash_next.{name}" for name in ("prep", "turns", "pages"))
LAYOUT = "backends.layout"
REAL, SMALL = Heads(24, 2), Heads(6, 2, 64)
READ = ("q", "index_q", "k", "v", "index")
"""Outputs of every form; an fp8 cache has its exponents besides."""
PASS_ROWS = 7


@contract
class FnAttnPrep(IndexedEntry):
    """Outputs q and index_q; k, v and raw index keys, gathered from the cache."""

    name = "fn_attn_prep"
    kernels = ("fn_attn_prep_kernel",)
    modules = (PREP, TURNS, PAGES, LAYOUT)
    axes = {
        "q": ("row", "head", "dim"), "index_q": ("row", "index head", "dim"), "k": ("row", "KV head", "dim"),
        "v": ("row", "KV head", "dim"), "index": ("row", "head", "dim"),
    }  # fmt: skip

    def cases(self, full: bool) -> Sequence[IndexedCase]:
        return list(full_table() if full else small_table())

    def control_cases(self) -> Sequence[IndexedCase]:
        return list(control_table())

    def controls(self) -> Sequence[Control]:
        return [
            swapped_table(),
            Control("the raw index key changed by one bf16 step", EXACT, lambda i: step(i["projection"], -1)),
            Control("an index query changed by one bf16 step", EXACT, lambda i: step(i["projection"], i["query_at"])),
            Control("a stale length", EXACT, moved_on(-1)),
            Control("a row given to another stream", EXACT, other_stream),
            Control("positions behind media one off", EXACT, shifted),
            Control("the raw index key changed after the first run", REPEATS, lambda i: step(i["projection"], -1)),
        ]

    def inputs(self, case: IndexedCase, poison: Poison, seed: int) -> Inputs:
        gains = {
            name: (1 + drawn((seed, dims, n), dims, scale=0.3)).astype(np.float32)
            for n, (name, dims) in enumerate(
                zip(("q_gain", "k_gain", "index_gain"), (*[case.geometry.head_dim] * 2, case.index_dim), strict=True)
            )
        }
        own = {**turning(case, poison, seed), **room(case, poison, seed), "seed": seed}
        return {**gains, **own, "projection": projection(case, poison, seed), "query_at": -1 - case.index_dim}

    def launch(self, case: IndexedCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        module, geometry, count = modules[PREP], case.geometry, len(inputs["projection"])
        q = bench.output("q", (count, geometry.heads, geometry.head_dim), BF16)
        index_q = bench.output("index_q", (count, case.index_heads, case.index_dim), BF16)
        rows = bench.input("projection", inputs["projection"])
        place = [*on_bench(inputs["cache"], inputs["own"], bench), bench.input("rows", inputs["rows"])]
        norms = [bench.input(name, inputs[name]) for name in ("q_gain", "k_gain", "index_gain", "cos_sin")]
        layout, media = modules[LAYOUT].LAYOUTS[case.layout], media_on(case, inputs, bench, modules[TURNS].Media)
        module.fn_attn_prep(q, index_q, rows, *place, *norms, EPS, geometry.kv_heads, layout, case.cache_kv, media)

    def view(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        return gathered(outputs, inputs["own"])

    def exact(self, case: IndexedCase, inputs: Inputs) -> Bounds:
        query, key, value, index_query, index_key = parts(case, inputs["projection"])
        turns = turned_by(case, inputs, case.owners, case.positions)
        bounds = {
            "q": oracles.rotated_heads(query, inputs["q_gain"], turns, EPS),
            "index_q": oracles.rotated_heads(index_query, inputs["index_gain"], turns, EPS),
            "k": oracles.rotated_heads(key, inputs["k_gain"], turns, EPS),
            "v": oracles.copied(value),
            "index": oracles.copied(index_key),
        }
        stored = {name: oracles.through_fp8(*bounds[name]) for name in ("k", "v")} if case.kv == "fp8" else {}
        return {**bounds, **stored}

    def twins(
        self, case: IndexedCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        other = other_form(case)
        yield f"the same on {other.layout}", run(other, {**inputs, **room(other, NAN, inputs["seed"])})
        if case.turned != MEDIA:
            text = replace(case, turned=UNTURNED if case.turned == TEXT else TEXT)
            yield "the kernel of the other kind of rows", run(text, {**inputs, **room(text, NAN, inputs["seed"])})
        size = 1 if case.total <= 16 else PASS_ROWS
        found = [run(one_pass, own) for one_pass, own in passes(case, inputs, size)]
        each = "each row alone" if size == 1 else f"passes of {size} rows"
        yield f"{each} on a window", {n: np.concatenate([out[n] for out in found]) for n in READ}

    def place(self, output: str, index: Sequence[int], case: IndexedCase) -> str:
        where = super().place(output, index, case)
        return where if output in ("q", "index_q") else f"{where}, {page_and_slot(case, case.counts, index[0])}"


# --- Inputs -----------------------------------------------------------------------------------------------------------


def room(case: IndexedCase, poison: Poison, seed: int) -> Inputs:
    """What depends on the form: the cache with poison where the rows belong, their places, tables of rows."""
    laid = indexed_cache(case, poison, seed)
    own = places(laid, case.counts)
    empty(laid, own, poison)
    return {"cache": laid, "own": own, "rows": case.owners}


def projection(case: IndexedCase, poison: Poison, seed: int) -> Array:
    """bf16 [W, columns]: rows of the projection, with poison for the gates."""
    heads, dims = 2 * case.geometry.heads + 2 * case.geometry.kv_heads, case.geometry.head_dim
    rows = drawn_bf16((seed, dims, case.total, 4), case.total, heads, dims, scale=3.0)
    gates = rows[:, 1 : 2 * case.geometry.heads : 2]
    gates[:] = poison.filled(gates.nbytes).view(BF16).reshape(gates.shape)
    width = (case.index_heads + 1) * case.index_dim
    index = drawn_bf16((seed, case.index_dim, case.total, 7), case.total, width, scale=3.0)
    return np.concatenate([rows.reshape(case.total, heads * dims), index], axis=1)


def parts(case: IndexedCase, rows: Array) -> tuple[Array, Array, Array, Array, Array]:
    """(query [W, H, D], key, value [W, HK, D], index query [W, IH, DI], index key [W, 1, DI]) of rows of the projection."""
    geometry, edge = case.geometry, 2 * case.geometry.heads
    heads = rows[:, : geometry.columns].reshape(len(rows), -1, geometry.head_dim)
    index = rows[:, geometry.columns :].reshape(len(rows), -1, case.index_dim)
    key, value = heads[:, edge : edge + geometry.kv_heads], heads[:, edge + geometry.kv_heads :]
    return heads[:, :edge:2], key, value, index[:, :-1], index[:, -1:]


def passes(case: IndexedCase, inputs: Inputs, size: int) -> Iterator[tuple[IndexedCase, Inputs]]:
    """Launches on a window of at most ``size`` rows of one stream each."""
    row = 0
    for number, (rows, committed) in enumerate(case.streams):
        for first in range(0, rows, size):
            count, here = min(size, rows - first), row + first
            window = replace(case, layout="window", ptok=0, first_page=0, streams=((count, committed + first),))
            own = {"projection": inputs["projection"][here : here + count], **room(window, NAN, inputs["seed"])}
            yield window, {**inputs, **own, "spans": inputs["spans"][number : number + 1]}
        row += rows


# --- Faults in inputs -------------------------------------------------------------------------------------------------


def step(rows: Array, at: int) -> None:
    """An element of the first row, by one bf16 step."""
    bits(rows)[0, at] += 1


def other_stream(inputs: Inputs) -> None:
    """The first row taken for the last stream's."""
    inputs["rows"][0] = len(inputs["cache"].streams) - 1


# --- The table --------------------------------------------------------------------------------------------------------


def one(form: tuple[str, int], *streams: tuple[int, int], heads: Heads = SMALL, **how: Any) -> IndexedCase:
    return IndexedCase(heads, *form, tuple(streams), **how)


def control_table() -> Iterator[IndexedCase]:
    """Two streams over the edge of a page, text and media; so many elements that the last bit of float32 shows in bf16; heads
    of several words a lane; an fp8 cache.
    """
    yield one(("paged", 16), (9, 12), (3, 40))
    yield one(("paged", 16), (9, 12), (3, 40), (5, 30), turned=MEDIA)
    yield one(("paged", 48), (5, 44), heads=Heads(3, 1), index_heads=4, index_dim=128, rope=64)
    yield one(("paged", 48), (5, 44), heads=Heads(3, 1), index_heads=4, index_dim=128, rope=64, turned=MEDIA)
    yield one(("paged", 16), (5, 13), heads=Heads(2, 3, 128), rope=32, kv="fp8")


def small_table() -> Iterator[IndexedCase]:
    """Every form, page size, head_dim and kind of row; blocks that began before; several streams; the published heads."""
    real: dict[str, Any] = {"heads": REAL, "index_heads": 4, "index_dim": 128, "rope": 64}
    for n, (committed, turned) in enumerate(product(RESUMED, (TEXT, MEDIA))):
        yield one((*FORMS, MIXED)[n % 4], (6, committed), (5, 40), turned=turned)
    for size, turned in zip(INDEXED_PAGES, (TEXT, MEDIA, UNTURNED, TEXT, MEDIA), strict=True):
        yield one(("paged", size), (9, size - 5), (19, 40), turned=turned)
    for D, form in product((64, 128, 256), (FORMS[1], MIXED)):
        yield one(form, (5, 44), (4, 14), heads=Heads(3, 1, D), index_dim=128, rope=D // 4 if D > 64 else 64, kv="fp8")
    yield from (one(("paged", 48), (3, 46), turned=turned, **real) for turned in (TEXT, MEDIA))
    yield one(("paged", 48), (9, 2047))
    yield from control_table()


def full_table() -> Iterator[IndexedCase]:
    """The published heads: every form and page size, kind of row, ends of dense rows, long caches."""
    real: dict[str, Any] = {"heads": REAL, "index_heads": 4, "index_dim": 128, "rope": 64}
    for form, turned, kv in product((*FORMS, MIXED), (TEXT, UNTURNED, MEDIA), KV_TYPES):
        yield one(form, (17, 250), (9, 13), turned=turned, kv=kv, **real)
    for size, turned in product(INDEXED_PAGES, (TEXT, MEDIA)):
        yield one(("paged", size), (33, 9000), (129, 255), heads=Heads(6, 2), index_dim=128, rope=64, turned=turned)
    yield from (one(form, (1, end - 1), (5, end), **real) for end, form in product(ENDS, FORMS))
    yield one(("paged", 48), (2048, 0), **real)
    yield from small_table()
