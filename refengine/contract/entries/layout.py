"""The address function of each form of cache, alone: far pages need numbers, not gigabytes. Spec attention §3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from refengine.contract.entry import Bounds, Control, Entry, Inputs, Modules, Outputs, contract
from refengine.contract.gates import EXACT, REPEATS
from refengine.contract.workbench import Poison, Workbench

LAYOUT, LOCATE = "backends.layout", "kernels_numba.locate"
PAGE_IDS = (0, 1, 8191, 8192, 65_535, 65_536, 131_072, 2**31 - 1)
"""Page ids at the edges of 16 bits, of a product of 32 bits, of int32."""
FAR = 2**30
"""First entry of a page table, first word of a pool: beyond 32 bits in bytes."""


@dataclass(frozen=True)
class AddressCase:
    """Positions over all of PAGE_IDS' pages of ``ptok`` positions and ``page_words`` words; or of one window of them."""

    layout: str
    ptok: int
    page_words: int
    window: bool = False

    def __str__(self) -> str:
        form = f"{self.layout} window" if self.layout == "mixed" and self.window else self.layout
        return f"{form} P={self.ptok} page of {self.page_words} words"


@contract
class Locate(Entry):
    """start and slot in 64 bits, whatever the page id, the page's size and the pool's place."""

    name = "locate"
    kernels = ("locate_kernel",)
    modules = (LAYOUT, LOCATE)
    axes = {"out": ("position", "start or slot")}

    def cases(self, full: bool) -> Sequence[AddressCase]:
        sizes = (1, 16, 48, 64, 128, 256, 512, 544)
        paged = [AddressCase("paged", size, words) for size in sizes for words in (16_384, 262_144)]
        windows = [AddressCase(layout, 9000, 1, window=True) for layout in ("window", "mixed")]
        return [*windows, *paged, AddressCase("paged_p256", 256, 262_144), AddressCase("mixed", 48, 262_144)]

    def control_cases(self) -> Sequence[AddressCase]:
        return [AddressCase(name, size, 262_144) for name, size in (("paged", 48), ("paged_p256", 256), ("mixed", 48))]

    def inputs(self, case: AddressCase, poison: Poison, seed: int) -> Inputs:
        last = case.ptok * (1 if case.window else len(PAGE_IDS))
        positions = np.unique(np.concatenate([np.arange(last - 1, -1, -max(1, last // 97)), [0, last - 1]]))
        pages = np.concatenate([np.full(3, 10**6), PAGE_IDS, np.full(2, 10**6)]).astype(np.int32)
        return {
            "positions": positions.astype(np.int64),
            "pages": pages,
            "base": 4 * FAR + 36,
            "table": -1 if case.window else 3,
        }

    def launch(self, case: AddressCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        layout = layouts(modules[LAYOUT])[case.layout]
        out = bench.output("out", (len(inputs["positions"]), 2), np.int64)
        place = (bench.input("positions", inputs["positions"]), bench.input("pages", inputs["pages"]))
        numbers = (inputs["base"], inputs["table"], case.ptok, case.page_words)
        modules[LOCATE].locate(out, *place, *numbers, layout)

    def exact(self, case: AddressCase, inputs: Inputs) -> Bounds:
        """Python's own integers, which have no width."""
        rows = [address(case, inputs, int(position)) for position in inputs["positions"]]
        value = np.array(rows, np.float64)
        return {"out": (value, np.full(value.shape, 0.5))}

    def twins(
        self, case: AddressCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        wanted = [address(case, inputs, int(position)) for position in inputs["positions"]]
        yield "integers of no width", {"out": np.array(wanted, np.int64)}
        if case.layout in ("paged_p256", "mixed") and not case.window:
            yield "layout paged", run(AddressCase("paged", case.ptok, case.page_words), inputs)

    def controls(self) -> Sequence[Control]:
        return [
            Control("a page table whose first entry names a later page", EXACT, swap_first_pages),
            Control("a page table changed after the first run", REPEATS, swap_first_pages),
        ]


def layouts(module: ModuleType) -> dict[str, Any]:
    """The module's layouts, by name."""
    return module.LAYOUTS


def address(case: AddressCase, inputs: Inputs, position: int) -> tuple[int, int]:
    """(start, slot) of a position."""
    if case.window:
        return inputs["base"], position
    entry, slot = divmod(position, case.ptok)
    return inputs["base"] + int(inputs["pages"][inputs["table"] + entry]) * case.page_words, slot


def swap_first_pages(inputs: Inputs) -> None:
    pages, first = inputs["pages"], inputs["table"]
    pages[[first, first + 1]] = pages[[first + 1, first]]
