"""Keep: a path of a window moves from the record into the cache as it stands, behind the committed rows. Spec attention §2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from kernels_numba import streams as columns
from kernels_numba.fp8 import KV_TYPES
from refengine.contract.attention import FORMS, MIXED, PAGE_SIZES, AttentionCase, case_data, laid_out
from refengine.contract.entry import Bounds, Control, Entry, Inputs, Modules, Outputs, contract
from refengine.contract.gates import EXACT, REPEATS
from refengine.contract.stored import empty, gathered, on_bench, page_and_slot, places, through_fp8
from refengine.contract.windows import path_of, path_table, spared
from refengine.contract.workbench import NAN, Array, Poison, Workbench, bits
from refengine.verify import oracles
from refengine.verify.attention_bits import Heads

KEEP, LAYOUT = "kernels_numba.keep", "backends.layout"
ROWS_OF_CACHE, FP8 = "kernels_numba.cache_rows", "kernels_numba.fp8"
REAL, SMALL, WIDE = Heads(24, 4), Heads(4, 2, 64), Heads(9, 9)
"""WIDE: a row is more than a block copies at once, and no multiple of it."""


@dataclass(frozen=True)
class KeepCase(AttentionCase):
    """Windows of (rows, committed). kept: rows of each stream's path to keep. tree: the last row's path leads through a tree."""

    kept: tuple[int, ...] = ()
    tree: bool = False

    @property
    def last(self) -> list[int]:
        """The row of the launch whose path is kept, of each stream: its last."""
        return [max(first + rows - 1, 0) for first, (rows, _) in zip(self.firsts, self.streams, strict=True)]

    @property
    def paths(self) -> list[list[int]]:
        """The path of each row of the launch."""
        return [path_of(row, self.tree) for rows, _ in self.streams for row in range(rows)]

    def kept_rows(self) -> Array:
        """Rows of the launch in the order of the positions they take, stream by stream."""
        paths = self.paths
        chosen = zip(self.firsts, self.last, self.kept, strict=True)
        return np.array([first + n for first, last, kept in chosen if kept for n in paths[last][:kept]], np.int64)

    def __str__(self) -> str:
        return f"{super().__str__()} kept={','.join(map(str, self.kept))}" + (" tree" if self.tree else "")


@contract
class Keep(Entry):
    """Outputs k and v, the kept rows gathered from the cache."""

    name = "keep"
    kernels = ("keep_kernel",)
    modules = (KEEP, ROWS_OF_CACHE, FP8, LAYOUT)
    axes = {"k": ("kept row", "KV head", "dim"), "v": ("kept row", "KV head", "dim")}

    def cases(self, full: bool) -> Sequence[KeepCase]:
        return list(full_table() if full else small_table())

    def control_cases(self) -> Sequence[KeepCase]:
        return list(control_table())

    def controls(self) -> Sequence[Control]:
        return [
            Control(
                "a page table whose first entry names a later page", EXACT, lambda i: i["cache"].swap_first_pages()
            ),
            Control("a K row of the record changed by one bf16 step", EXACT, lambda i: step(i["k_record"])),
            Control("a V row of the record changed by one bf16 step", EXACT, lambda i: step(i["v_record"])),
            Control("a stale length", EXACT, stale_length),
            Control("the path of another row", EXACT, other_path),
            Control("one row too few kept", EXACT, fewer),
            Control("a K row of the record changed after the first run", REPEATS, lambda i: step(i["k_record"])),
        ]

    def inputs(self, case: KeepCase, poison: Poison, seed: int) -> Inputs:
        laid = laid_out(case, poison, seed, own_rows=True)
        empty(laid, places(laid, [rows for rows, _ in case.streams]), poison)
        data = zip(case_data(case, seed), case.streams, strict=True)
        rows = [(k[c : c + r], v[c : c + r]) for (_, k, v), (r, c) in data]
        k, v = (np.concatenate(part) for part in zip(*rows, strict=True))
        firsts = np.repeat(laid.streams[:, columns.FIRST], laid.streams[:, columns.ROWS])
        return {
            "cache": laid, "own": places(laid, case.kept), "paths": path_table(case.paths, firsts),
            "last": np.array(case.last, np.int32), "kept": np.array(case.kept, np.int32),
            "k_record": spared(k, poison), "v_record": spared(v, poison), "seed": seed,
        }  # fmt: skip

    def launch(self, case: KeepCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        laid = inputs["cache"]
        place = on_bench(laid, inputs["own"], bench)
        rest = [bench.input(name, inputs[name]) for name in ("paths", "last", "kept", "k_record", "v_record")]
        modules[KEEP].keep(*place, *rest, max(case.kept) + 1, modules[LAYOUT].LAYOUTS[case.layout], case.cache_kv)

    def view(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        return gathered(outputs, inputs["own"])

    def exact(self, case: KeepCase, inputs: Inputs) -> Bounds:
        rows = case.kept_rows()
        return {name: oracles.copied(inputs[f"{name}_record"][rows]) for name in ("k", "v")}

    def twins(
        self, case: KeepCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        seed, form = inputs["seed"], FORMS[1] if case.layout == "window" else FORMS[0]
        other = replace(case, layout=form[0], ptok=form[1], first_page=0)
        yield f"the same on {form[0]}", run(other, self.inputs(other, NAN, seed))
        if case.kv == "fp8":
            rows = {name: inputs[f"{name}_record"][case.kept_rows()] for name in ("k", "v")}
            yield "the record's rows, narrowed by NumPy", through_fp8(rows)
        streams = enumerate(zip(case.streams, case.kept, strict=True))
        alone = [replace(case, streams=(s,), kept=(k,), number=case.number + n) for n, (s, k) in streams if k]
        found = [run(one, self.inputs(one, NAN, seed)) for one in alone]
        yield "each stream alone", {name: np.concatenate([out[name] for out in found]) for name in ("k", "v")}

    def place(self, output: str, index: Sequence[int], case: KeepCase) -> str:
        return f"{super().place(output, index, case)}, {page_and_slot(case, case.kept, index[0])}"


# --- Faults in inputs -------------------------------------------------------------------------------------------------


def step(record: Array) -> None:
    """One element of the root of the first window, by one bf16 step."""
    bits(record)[0, 0, 7] += 1


def stale_length(inputs: Inputs) -> None:
    """A committed length that is one short."""
    inputs["cache"].streams[0, columns.COMMITTED] -= 1


def other_path(inputs: Inputs) -> None:
    """The path of the row before."""
    inputs["last"][0] -= 1


def fewer(inputs: Inputs) -> None:
    """The last kept row of the first stream left behind."""
    inputs["kept"][0] -= 1


# --- The table --------------------------------------------------------------------------------------------------------


def one(geometry: Heads, form: tuple[str, int], rows: int, committed: int, kept: int, **how: Any) -> KeepCase:
    return KeepCase(geometry, *form, ((rows, committed),), kept=(kept,), **how)


def control_table() -> Iterator[KeepCase]:
    """Two streams over the edge of a page; trees; a row wider than a block; a page id past 16 bits."""
    yield KeepCase(SMALL, "paged", 16, ((7, 13), (5, 40)), kept=(7, 3))
    yield KeepCase(SMALL, "paged", 16, ((7, 13), (16, 40)), kept=(3, 5), tree=True)
    yield one(WIDE, ("paged_p256", 256), 3, 255, 2)
    yield one(Heads(1, 1, 64), ("paged", 1), 3, 2, 2, first_page=65_530)
    yield from (one(Heads(6, 6, D), ("paged", 16), 5, 13, 4, kv="fp8") for D in (64, 128, 256))


def full_table() -> Iterator[KeepCase]:
    """Windows and committed lengths of the real heads on every form and page size, as chains and as trees."""
    windows = ((1, 0, 1), (16, 48, 9), (128, 255, 128), (65, 2047, 64))
    for (rows, committed, kept), form, kv in product(windows, FORMS, KV_TYPES):
        yield one(REAL, form, rows, committed, kept, kv=kv)
    for size, (rows, committed, kept) in product(PAGE_SIZES, windows):
        yield one(REAL, ("paged", size), rows, committed, kept)
    yield from (one(REAL, form, 128, 250, 8, tree=True) for form in FORMS)
    yield from small_table()


def small_table() -> Iterator[KeepCase]:
    """Every form, page size and head_dim; some rows, all and none; several streams."""
    for n, (rows, committed, kept) in enumerate(((1, 0, 1), (16, 48, 9), (128, 255, 128), (65, 500, 1), (5, 2047, 4))):
        yield one(SMALL, FORMS[n % 3], rows, committed, kept)
    yield from (one(SMALL, ("paged", size), 19, 40, 17) for size in PAGE_SIZES)
    yield from (one(Heads(4, 1, D), form, 6, 44, 5) for D, form in product((64, 128, 256), FORMS))
    yield one(REAL, ("paged", 48), 3, 46, 3)
    for form in (*FORMS, MIXED):
        yield KeepCase(SMALL, *form, ((5, 46), (4, 0), (0, 9), (3, 255)), kept=(5, 0, 0, 2))
        yield KeepCase(SMALL, *form, ((5, 46), (4, 0), (0, 9), (3, 255)), kept=(5, 0, 0, 2), kv="fp8")
    yield from control_table()
