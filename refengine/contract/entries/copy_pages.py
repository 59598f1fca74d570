"""Copy of page runs: positions between two forms of cache, as they stand. Spec serving §4, attention §3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from kernels_numba.move_plan import Side
from refengine.contract.entry import Bounds, Control, Entry, Inputs, Modules, Outputs, contract
from refengine.contract.gates import EXACT, REPEATS
from refengine.contract.workbench import NAN, Array, Poison, Workbench

COPY, PLAN = "kernels_numba.copy_pages", "kernels_numba.move_plan"
WORD, BYTE = "word", "byte"
DTYPES = {WORD: np.uint32, BYTE: np.uint8}
GAP = 12
"""Units of poison before a plane, a multiple of 4: an address without its plane meets poison."""
SPARE = 3
"""Pages that nobody holds, the first and the last among them."""
SLACK = 5
"""Positions of a window past the last."""
CHUNK = 512
"""Positions that are drawn together, so that a position's units do not depend on how many there are."""


@dataclass(frozen=True)
class Form:
    """A form of cache. ptok: positions a page; 0: one window with room to spare. kept: rows one after the other instead."""

    ptok: int = 0
    kept: bool = False

    def __str__(self) -> str:
        return "kept" if self.kept else f"P={self.ptok}" if self.ptok else "window"


KEPT, WINDOW = Form(kept=True), Form()


@dataclass(frozen=True)
class CopyCase:
    """``positions`` positions of ``planes`` planes of ``kv_heads`` heads, rows of ``width`` units, between two forms.

    inside: both lie in one array. shift: units by which a plane's start is off a multiple of 4, of bytes alone.
    """

    source: Form
    target: Form
    positions: int
    planes: int = 4
    kv_heads: int = 2
    width: int = 32
    unit: str = WORD
    inside: bool = False
    shift: int = 0

    def __str__(self) -> str:
        heads = f"{self.planes}x{self.kv_heads}x{self.width} {self.unit}s" + (f"+{self.shift}" if self.shift else "")
        return f"{self.source} to {self.target} N={self.positions} {heads}" + (" inside" if self.inside else "")


@dataclass(frozen=True)
class Placed:
    """A side as the moves take it, the unit of every row, int64 [planes, HK, positions, width], and the units of all pages."""

    side: Side
    units: Array
    size: int


@contract
class CopyPages(Entry):
    """Output rows: the positions, gathered from where they went."""

    name = "copy_pages"
    kernels = ("copy_pages_kernel",)
    modules = (PLAN, COPY)
    axes = {"rows": ("plane", "KV head", "position", "unit")}

    def cases(self, full: bool) -> Sequence[CopyCase]:
        return list(full_table() if full else small_table())

    def control_cases(self) -> Sequence[CopyCase]:
        return list(control_table())

    def controls(self) -> Sequence[Control]:
        return [
            Control("two pages of the source exchanged", EXACT, exchange_pages),
            Control("one bit of the first position changed", EXACT, flip),
            Control("one position too few", EXACT, lambda inputs: inputs.update(positions=inputs["positions"] - 1)),
            Control("one bit of the first position changed after the first run", REPEATS, flip),
        ]

    def inputs(self, case: CopyCase, poison: Poison, seed: int) -> Inputs:
        source = placed(case, case.source, 0, seed)
        target = placed(case, case.target, source.size if case.inside else 0, seed + 1)
        rows = drawn_rows(case, seed)
        arrays = [poison.filled(place.size * rows.itemsize).view(rows.dtype) for place in (source, target)]
        if case.inside:
            arrays = [np.concatenate(arrays)] * 2
        arrays[0][source.units] = rows
        return {
            "source": arrays[0], "target": arrays[1], "from": source, "to": target, "rows": rows,
            "positions": case.positions, "seed": seed,
        }  # fmt: skip

    def launch(self, case: CopyCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        source, target = inputs["from"], inputs["to"]
        plan = modules[PLAN].plan_moves(source.side, target.side, inputs["positions"], case.kv_heads, case.width)
        may_write = np.zeros(inputs["target"].shape, bool)
        may_write[target.units] = True
        there = bench.changed("target", inputs["target"], may_write)
        here = there if case.inside else bench.input("source", inputs["source"])
        moves = bench.input("moves", plan.moves)
        modules[COPY].copy_pages(there, here, moves, plan.rows, plan.width, case.unit)

    def view(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        return {"rows": np.ascontiguousarray(outputs["target"][inputs["to"].units])}

    def exact(self, case: CopyCase, inputs: Inputs) -> Bounds:
        """A unit as an integer, which float64 holds exactly."""
        value = inputs["rows"].astype(np.float64)
        return {"rows": (value, np.full(value.shape, 0.5))}

    def twins(
        self, case: CopyCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        yield "the rows, indexed by NumPy", {"rows": inputs["rows"]}
        other = replace(case, source=WINDOW if case.source.ptok else Form(3), target=KEPT, inside=False)
        yield f"{other.source} to {other.target}", run(other, self.inputs(other, NAN, inputs["seed"]))


# --- A side, laid out -------------------------------------------------------------------------------------------------


def placed(case: CopyCase, form: Form, start: int, seed: int) -> Placed:
    """A form with room for the case's positions, from unit ``start`` of its array on, its pages shuffled."""
    ptok = case.positions if form.kept else form.ptok or case.positions + SLACK
    plane = case.kv_heads * ptok * case.width
    gap, shift = (0, 0) if form.kept else (GAP, case.shift)
    # The second plane follows the first, as K and V do; the others stand apart.
    planes = np.arange(case.planes) * plane + (1 + np.arange(case.planes) // 2) * gap + shift
    size = -(-(case.planes * plane + (2 + case.planes // 2) * gap + shift) // 4) * 4
    pages = -(-case.positions // ptok)
    spare = SPARE if form.ptok else 0
    starts = start + shuffled(pages, spare, seed) * size
    side = Side(starts, planes.astype(np.int64), ptok)
    return Placed(side, units_of(side, case), (pages + spare) * size)


def shuffled(pages: int, spare: int, seed: int) -> Array:
    """Ids of pages among spare ones, not in order."""
    ids = np.random.default_rng((seed, pages)).permutation(pages + spare)[:pages]
    return ids[::-1] if pages > 1 and (np.diff(ids) > 0).all() else ids


def units_of(side: Side, case: CopyCase) -> Array:
    """The unit of each element of [planes, HK, positions, width]: a page's plane is [HK, ptok, width]."""
    plane, head, position, unit = np.ix_(*map(np.arange, (case.planes, case.kv_heads, case.positions, case.width)))
    in_plane = (head * side.ptok + position % side.ptok) * case.width + unit
    return side.starts[position // side.ptok] + side.planes[plane] + in_plane


def drawn_rows(case: CopyCase, seed: int) -> Array:
    """Units [planes, HK, positions, width], all unlike poison in each byte."""
    chunks = range(-(-case.positions // CHUNK))
    bytes_a_unit = np.dtype(DTYPES[case.unit]).itemsize
    shape = (case.planes, case.kv_heads, CHUNK, case.width * bytes_a_unit)
    rows = [np.random.default_rng((seed, n)).integers(1, 60, shape, np.uint8) for n in chunks]
    return np.ascontiguousarray(np.concatenate(rows, axis=2)[:, :, : case.positions]).view(DTYPES[case.unit])


# --- Faults in inputs -------------------------------------------------------------------------------------------------


def exchange_pages(inputs: Inputs) -> None:
    """The first two pages, where the source has two."""
    starts = inputs["from"].side.starts
    starts[:2] = starts[:2][::-1].copy()


def flip(inputs: Inputs) -> None:
    """One bit of the last plane's last head, at position 0."""
    inputs["source"][inputs["from"].units[-1, -1, 0, -1]] ^= 1


# --- The table --------------------------------------------------------------------------------------------------------

PAGES = (1, 3, 16, 48, 256)


def control_table() -> Iterator[CopyCase]:
    """A page that is not full; a row longer than a warp and its turns; heads past a block's warps; bytes at any start."""
    yield CopyCase(Form(3), KEPT, 8)
    yield CopyCase(Form(16), Form(48), 50, kv_heads=5, width=33)
    yield CopyCase(WINDOW, Form(256), 300, width=64)
    yield CopyCase(Form(3), Form(16), 20, width=1, unit=BYTE, shift=3)
    yield CopyCase(KEPT, Form(48), 50, width=1, unit=BYTE)


def small_table() -> Iterator[CopyCase]:
    """Saved, restored and moved between pages, as bf16 (words) and as fp8 (words, then bytes); in one array."""
    yield from control_table()
    for size, (width, unit) in product(PAGES, ((32, WORD), (16, WORD), (1, BYTE))):
        positions = min(3 * size + size // 2, 300) + 1
        for source, target in ((Form(size), KEPT), (KEPT, Form(size)), (WINDOW, Form(size)), (Form(size), WINDOW)):
            yield CopyCase(source, target, positions, width=width, unit=unit)
        yield CopyCase(Form(size), Form(size), size, width=width, unit=unit, inside=True)
    yield from (CopyCase(Form(48), Form(16), 100, width=w, unit=u, inside=True) for w, u in ((32, WORD), (1, BYTE)))
    yield CopyCase(WINDOW, KEPT, 1)
    yield CopyCase(KEPT, WINDOW, 40, planes=1, kv_heads=1)


def full_table() -> Iterator[CopyCase]:
    """Rows of the real heads, long enough for many pieces of a row."""
    for form, (width, unit) in product((WINDOW, *map(Form, PAGES)), ((128, WORD), (64, WORD), (1, BYTE))):
        yield CopyCase(form, KEPT, 2100, planes=8, kv_heads=4, width=width, unit=unit)
        yield CopyCase(KEPT, form, 2100, planes=8, kv_heads=4, width=width, unit=unit)
    yield from small_table()
