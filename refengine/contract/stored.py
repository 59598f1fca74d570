"""Kernels that write the cache: a launch's rows have places in the arena, which hold poison before; nothing else may change.

Forms of cache are compared by the rows gathered from there. The places are found before a fault is planted in the page table,
so that a row stored elsewhere is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels_numba import streams as columns
from refengine.contract.attention import AttentionCase
from refengine.contract.caches import Cache
from refengine.contract.entry import Outputs
from refengine.contract.workbench import BF16, Array, Poison, Workbench

Places = dict[str, Array]
"""Arena words of K and V rows, int64 [rows, HK, D/2], by "k" and "v"."""


def places(laid: Cache, counts: Sequence[int]) -> Places:
    """Where each stream's positions from its committed ones on lie, ``counts`` of them, stream by stream."""
    first = laid.streams[:, columns.COMMITTED]
    planes = {"k": laid.k_plane, "v": laid.v_plane}
    return {
        name: np.concatenate([laid.rows(n, plane, int(first[n]), int(first[n]) + c) for n, c in enumerate(counts)])
        for name, plane in planes.items()
    }


def empty(laid: Cache, own: Places, poison: Poison) -> None:
    """Poison in the places of rows."""
    for words in own.values():
        laid.arena[words] = poison.word


def on_bench(laid: Cache, own: Places, bench: Workbench) -> list[Any]:
    """arena, pages and streams as a kernel takes them; only the places may be written, and must be."""
    may_write = np.zeros(laid.arena.shape, bool)
    for words in own.values():
        may_write[words] = True
    return [
        bench.changed("arena", laid.arena, may_write),
        *(bench.input(n, getattr(laid, n)) for n in ("pages", "streams")),
    ]


def gathered(outputs: Outputs, own: Places) -> Outputs:
    """Outputs with K and V rows, bf16 [rows, HK, D], for the arena."""
    arena = outputs["arena"]
    rows = {name: np.ascontiguousarray(arena[words]).view(BF16) for name, words in own.items()}
    return {**{name: array for name, array in outputs.items() if name != "arena"}, **rows}


def page_and_slot(case: AttentionCase, counts: Sequence[int], row: int) -> str:
    """In words, where the row-th row of ``places`` lies."""
    for (_, committed), count in zip(case.streams, counts, strict=True):
        if row < count:
            position, ptok = committed + row, 256 if case.layout == "paged_p256" else case.ptok
            return f"position {position}" + (f", page {position // ptok}, slot {position % ptok}" if ptok else "")
        row -= count
    raise IndexError(row)
