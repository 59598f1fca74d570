"""Heads normed and rotated, keys and values stored: the same rows whatever the cache, the pass or the kernel. Spec numerics §4.

Two kernels do it, of a prompt into the cache and of a decode launch into its record. They are forms of one entry, so that
each is the other's twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from kernels_numba import streams as columns
from kernels_numba.fp8 import KV_TYPES
from refengine.contract.attention import COMMITTED, MIXED, PAGE_SIZES, AttentionCase, laid_out
from refengine.contract.attention import FORMS as CACHE_FORMS
from refengine.contract.entry import Bounds, Control, Entry, Inputs, Modules, Outputs, contract
from refengine.contract.gates import EXACT, REPEATS
from refengine.contract.stored import empty, gathered, on_bench, page_and_slot, places, through_fp8
from refengine.contract.windows import path_of
from refengine.contract.workbench import BF16, NAN, Array, Poison, Workbench, bits, drawn, drawn_bf16
from refengine.verify import oracles
from refengine.verify.attention_bits import Heads

ROPE, LAYOUT = "kernels_numba.rope_store", "backends.layout"
ROWS_OF_CACHE, FP8 = "kernels_numba.cache_rows", "kernels_numba.fp8"
RECORD = ("record", 0)
"""The form that is no cache: the window record of a decode launch."""
FORMS = (*CACHE_FORMS, RECORD)
ROTARY = ((64, 16), (64, 64), (128, 32), (128, 128), (256, 64), (256, 256), (128, 8), (256, 16))
"""(D, rotary dims): a quarter, the whole, the fewest."""
REAL, SMALL = Heads(24, 4), Heads(6, 2, 64)
ROWS = (1, 16, 17, 33, 129)
EPS = 1e-6
PASS_ROWS = 7
READ = ("q", "k", "v")
"""Outputs of every form; an fp8 cache has its exponents besides."""
SPARE_POSITIONS = 2
"""Positions of the cos and sin table after the last row's: poison."""


@dataclass(frozen=True)
class RopeCase(AttentionCase):
    """Rows of streams. rope: rotary dims. tree: rows stand at the depth they have in a tree (the record alone)."""

    rope: int = 16
    tree: bool = False

    @property
    def kept(self) -> list[int]:
        """Rows of each stream."""
        return [rows for rows, _ in self.streams]

    @property
    def depths(self) -> Array:
        """int32 [W]: positions from the stream's committed ones to the row's, that one included."""
        return np.array([len(path_of(r, self.tree)) for n in self.kept for r in range(n)], np.int32)

    @property
    def positions(self) -> Array:
        """int64 [W]."""
        return np.repeat([committed for _, committed in self.streams], self.kept) + self.depths - 1

    def __str__(self) -> str:
        return super().__str__() + f" R={self.rope}" + (" tree" if self.tree else "")


@contract
class RopeStore(Entry):
    """Outputs q, k and v: rows of the record, or gathered from the cache."""

    name = "rope_store"
    kernels = ("rope_store_kernel", "rope_record_kernel")
    modules = (ROPE, ROWS_OF_CACHE, FP8, LAYOUT)
    axes = {"q": ("row", "head", "dim"), "k": ("row", "KV head", "dim"), "v": ("row", "KV head", "dim")}

    def cases(self, full: bool) -> Sequence[RopeCase]:
        return list(full_table() if full else small_table())

    def control_cases(self) -> Sequence[RopeCase]:
        return list(control_table())

    def controls(self) -> Sequence[Control]:
        return [
            Control(
                "a page table whose first entry names a later page", EXACT, lambda i: i["cache"].swap_first_pages()
            ),
            Control("a value changed by one bf16 step", EXACT, step_value),
            Control("a stale length", EXACT, stale_length),
            Control("a depth one too large", EXACT, deeper),
            Control("a row given to another stream", EXACT, other_stream),
            Control("a value changed after the first run", REPEATS, step_value),
        ]

    def inputs(self, case: RopeCase, poison: Poison, seed: int) -> Inputs:
        geometry, last = case.geometry, int(case.positions.max())
        seeds = (seed, geometry.head_dim, case.rope)
        table = drawn((*seeds, 1), last + 1, 2, case.rope // 2, scale=0.5)
        spare = poison.filled(SPARE_POSITIONS * table[0].nbytes).view(np.float32).reshape(-1, *table.shape[1:])
        q_gain, k_gain = (1 + drawn((*seeds, n), geometry.head_dim, scale=0.3) for n in (2, 3))
        return {
            **room(case, poison, seed), "qkv": projection(case, poison, seed), "q_gain": q_gain.astype(np.float32),
            "k_gain": k_gain.astype(np.float32), "cos_sin": np.concatenate([table, spare]), "seed": seed,
        }  # fmt: skip

    def launch(self, case: RopeCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        module, laid, geometry = modules[ROPE], inputs["cache"], case.geometry
        rows = len(inputs["qkv"])
        q = bench.output("q", (rows, geometry.heads, geometry.head_dim), BF16)
        qkv, of_rows = bench.input("qkv", inputs["qkv"]), bench.input("rows", inputs["rows"])
        norms = [bench.input(name, inputs[name]) for name in ("q_gain", "k_gain", "cos_sin")]
        if case.layout == RECORD[0]:
            k, v = (bench.output(name, (rows, geometry.kv_heads, geometry.head_dim), BF16) for name in ("k", "v"))
            streams, depths = bench.input("streams", laid.streams), bench.input("depths", inputs["depths"])
            module.rope_record(q, qkv, k, v, streams, of_rows, depths, *norms, EPS, case.cache_kv)
        else:
            place = on_bench(laid, inputs["own"], bench)
            layout = modules[LAYOUT].LAYOUTS[case.layout]
            module.rope_store(q, qkv, *place, of_rows, *norms, EPS, geometry.kv_heads, layout, case.cache_kv)

    def view(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        return gathered(outputs, inputs["own"]) if "arena" in outputs else outputs

    def exact(self, case: RopeCase, inputs: Inputs) -> Bounds:
        query, key, value = parts(case.geometry, inputs["qkv"])
        turns = inputs["cos_sin"][case.positions]
        bounds = {
            "q": oracles.rotated_heads(query, inputs["q_gain"], turns, EPS),
            "k": oracles.rotated_heads(key, inputs["k_gain"], turns, EPS),
            "v": oracles.copied(value),
        }
        stored = {name: oracles.through_fp8(*bounds[name]) for name in ("k", "v")} if case.kv == "fp8" else {}
        return {**bounds, **stored}

    def twins(
        self, case: RopeCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        if not case.tree:
            other = in_form(case, FORMS[1] if case.layout == "window" else FORMS[0])
            found = run(other, {**inputs, **room(other, NAN, inputs["seed"])})
            names = READ if case.layout == RECORD[0] else tuple(found)
            yield f"the same on {other.layout}", {name: found[name] for name in names}
            if case.kv == "fp8":
                wide = replace(in_form(case, RECORD), kv="bf16")
                rows = run(wide, {**inputs, **room(wide, NAN, inputs["seed"])})
                stored = {"q": rows["q"], **through_fp8(rows)}
                yield "rows of bf16, narrowed by NumPy", {name: stored[name] for name in names}
            record = in_form(case, FORMS[1] if case.layout == RECORD[0] else RECORD)
            found = run(record, {**inputs, **room(record, NAN, inputs["seed"])})
            yield f"the same on {record.layout}", {name: found[name] for name in READ}
        size = 1 if case.total <= 16 or case.tree else PASS_ROWS
        parts = [run(one_pass, own) for one_pass, own in passes(case, inputs, size)]
        each = "each row alone" if size == 1 else f"passes of {size} rows"
        yield f"{each} on a window", {n: np.concatenate([out[n] for out in parts]) for n in READ}

    def place(self, output: str, index: Sequence[int], case: RopeCase) -> str:
        where = super().place(output, index, case)
        stored = output in ("k", "v") and case.layout != RECORD[0]
        return f"{where}, {page_and_slot(case, case.kept, index[0])}" if stored else where


# --- Inputs -----------------------------------------------------------------------------------------------------------


def in_form(case: RopeCase, form: tuple[str, int]) -> RopeCase:
    """The same rows in another form of cache."""
    return replace(case, layout=form[0], ptok=form[1], first_page=0)


def room(case: RopeCase, poison: Poison, seed: int) -> Inputs:
    """What depends on the form: the cache with poison where the rows belong, their places, tables of rows."""
    form = in_form(case, FORMS[0]) if case.layout == RECORD[0] else case
    laid = laid_out(form, poison, seed, own_rows=True)
    own = places(laid, case.kept)
    empty(laid, own, poison)
    rows = np.repeat(np.arange(len(case.streams), dtype=np.int32), case.kept)
    return {"cache": laid, "own": own, "rows": rows, "depths": case.depths}


def projection(case: RopeCase, poison: Poison, seed: int) -> Array:
    """bf16 [W, (2·H + 2·HK)·D]: rows of the projection, with poison for the gates."""
    geometry = case.geometry
    heads = 2 * geometry.heads + 2 * geometry.kv_heads
    qkv = drawn_bf16((seed, geometry.head_dim, case.total, 4), case.total, heads, geometry.head_dim, scale=3.0)
    gates = qkv[:, 1 : 2 * geometry.heads : 2]
    gates[:] = poison.filled(gates.nbytes).view(BF16).reshape(gates.shape)
    return qkv.reshape(case.total, heads * geometry.head_dim)


def parts(geometry: Heads, qkv: Array) -> tuple[Array, Array, Array]:
    """(query [W, H, D], key, value [W, HK, D]) of rows of the projection."""
    blocks, edge = qkv.reshape(len(qkv), -1, geometry.head_dim), 2 * geometry.heads
    return blocks[:, :edge:2], blocks[:, edge : edge + geometry.kv_heads], blocks[:, edge + geometry.kv_heads :]


def passes(case: RopeCase, inputs: Inputs, size: int) -> Iterator[tuple[RopeCase, Inputs]]:
    """Launches on a window of at most ``size`` rows of one stream each."""
    row = 0
    for rows, _ in case.streams:
        for first in range(row, row + rows, size):
            count, position = min(size, row + rows - first), int(case.positions[first])
            one_pass = replace(in_form(case, FORMS[0]), streams=((count, position),), tree=False)
            own = {"qkv": inputs["qkv"][first : first + count], **room(one_pass, NAN, inputs["seed"])}
            yield one_pass, {**inputs, **own}
        row += rows


# --- Faults in inputs -------------------------------------------------------------------------------------------------


def step_value(inputs: Inputs) -> None:
    """The first element of the last KV head's value, by one bf16 step."""
    bits(inputs["qkv"])[0, -len(inputs["q_gain"])] += 1


def stale_length(inputs: Inputs) -> None:
    """A committed length that is one short."""
    inputs["cache"].streams[0, columns.COMMITTED] -= 1


def deeper(inputs: Inputs) -> None:
    """A row of the record a position too far."""
    inputs["depths"][0] += 1


def other_stream(inputs: Inputs) -> None:
    """The first row taken for the last stream's."""
    inputs["rows"][0] = len(inputs["cache"].streams) - 1


# --- The table --------------------------------------------------------------------------------------------------------


def one(geometry: Heads, form: tuple[str, int], rows: int, committed: int, **how: Any) -> RopeCase:
    return RopeCase(geometry, *form, ((rows, committed),), **how)


def control_table() -> Iterator[RopeCase]:
    """Both kernels, two streams each, over the edge of a page; a tree; heads that fill no block of four, of several words a
    lane; so many elements that what differs in the last bit of float32 shows in bf16; a page id past 16 bits.
    """
    yield RopeCase(SMALL, "paged", 16, ((9, 12), (3, 40)))
    yield RopeCase(SMALL, *RECORD, ((9, 12), (3, 40)))
    yield one(SMALL, RECORD, 7, 20, tree=True)
    yield one(Heads(5, 1), RECORD, 5, 44, rope=64)
    yield one(REAL, RECORD, 65, 100, rope=64)
    yield one(Heads(1, 1, 64), ("paged", 1), 3, 2, first_page=65_530)
    yield from (one(Heads(2, 3, D), ("paged", 16), 5, 14, kv="fp8") for D in (64, 128, 256))
    yield one(Heads(2, 1, 64), RECORD, 3, 14, kv="fp8")


def full_table() -> Iterator[RopeCase]:
    """Every row count, committed length and form of the real heads; every page size, head_dim and rotary dims."""
    for rows, committed, form in product(ROWS, COMMITTED[:-1], FORMS):
        yield one(REAL, form, rows, committed, rope=64)
    for size, (rows, committed) in product(PAGE_SIZES, ((17, 48), (129, 255), (33, 9000))):
        yield one(Heads(6, 2), ("paged", size), rows, committed, rope=64)
    for (D, rope), form, kv in product(ROTARY, FORMS, KV_TYPES):
        yield one(Heads(24, 4, D), form, 17, 250, rope=rope, kv=kv)
    yield from (one(REAL, form, 129, 2047, rope=64, kv="fp8") for form in FORMS)
    yield from small_table()


def small_table() -> Iterator[RopeCase]:
    """Every head_dim with its rotary dims, every form and page size, heads that fill no block of four, several streams."""
    for n, (rows, committed) in enumerate(((1, 0), (17, 0), (33, 47), (40, 250), (65, 255), (129, 1), (9, 2047))):
        yield one(SMALL, FORMS[n % 4], rows, committed)
    for n, (D, rope) in enumerate(ROTARY):
        yield one(Heads(3, 1, D), FORMS[n % 4], 9, 44, rope=rope)
        yield one(Heads(4, 1, D), FORMS[(n + 1) % 4], 5, 255, rope=rope)
    yield from (one(SMALL, ("paged", size), 19, 40) for size in PAGE_SIZES)
    yield one(REAL, ("paged", 48), 3, 46, rope=64)
    for form in (*FORMS, MIXED):
        yield RopeCase(SMALL, *form, ((5, 40), (0, 9), (1, 255), (20, 0)))
        yield RopeCase(SMALL, *form, ((5, 40), (0, 9), (1, 255), (20, 0)), kv="fp8")
    for D, form in zip((64, 128, 256), FORMS, strict=False):
        yield one(Heads(3, 2, D), form, 7, 44, kv="fp8")
    yield from control_table()
