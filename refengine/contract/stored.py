"""Kernels that write the cache: a launch's rows have places in the arena, which hold poison before; nothing else may change.

Forms of cache are compared by the rows gathered from there: as they are read, bf16, and of an fp8 cache the exponents, too.
The places are found before a fault is planted in the page table, so that a row stored elsewhere is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels_numba import streams as columns
from refengine.contract.attention import AttentionCase
from refengine.contract.caches import INDEXER, PLANES, Cache
from refengine.contract.entry import Outputs
from refengine.contract.workbench import BF16, Array, Poison, Workbench
from refengine.verify import fp8_oracle

Places = dict[str, Array]
"""Arena bytes of K and V rows, int64 [rows, HK, row bytes], by "k" and "v"; of an fp8 cache their exponents, int64 [rows,
HK], by "k_exp" and "v_exp"; of a sparse indexer raw keys, int64 [rows, 1, row bytes], by "index", or pooled ones, by
"pooled"."""


def places(laid: Cache, counts: Sequence[int]) -> Places:
    """Where each stream's positions from its committed ones on lie, ``counts`` of them, stream by stream."""
    spans = [
        (n, int(c), int(c) + count) for n, (c, count) in enumerate(zip(laid.streams[:, columns.COMMITTED], counts))
    ]
    words = {name: np.concatenate([laid.rows(n, name, *span) for n, *span in spans]) for name in PLANES}
    own = {
        name: (4 * at[..., None] + np.arange(4)).reshape(*at.shape[:2], 4 * laid.row_words)
        for name, at in words.items()
    }
    if laid.kv == "fp8":
        own |= {
            f"{name}_exp": np.concatenate([laid.exponents(n, name, *span) for n, *span in spans]) for name in PLANES
        }
    return own | (indexer_places(laid, "index", spans) if laid.index_dims else {})


def indexer_places(laid: Cache, plane: str, spans: Sequence[tuple[int, int, int]]) -> Places:
    """Where rows of a plane of the indexer lie. spans: (stream, first row, the one past the last), in order."""
    words = np.concatenate([laid.indexer_rows(n, plane, *span) for n, *span in spans])
    return {plane: (4 * words[..., None] + np.arange(4)).reshape(*words.shape[:2], 4 * words.shape[2])}


def empty(laid: Cache, own: Places, poison: Poison) -> None:
    """Poison in the places of rows."""
    memory = laid.arena.view(np.uint8)
    filling = poison.filled(memory.nbytes)
    for at in own.values():
        memory[at] = filling[at]


def on_bench(laid: Cache, own: Places, bench: Workbench) -> list[Any]:
    """arena, pages and streams as a kernel takes them; only the places may be written, and must be."""
    may_write = np.zeros(laid.arena.nbytes, bool)
    for at in own.values():
        may_write[at] = True
    if laid.kv == "bf16":
        arena = bench.changed("arena", laid.arena, may_write[::4])
    else:
        arena = bench.changed("arena", laid.arena.view(np.uint8), may_write).view(np.uint32)
    return [arena, *(bench.input(n, getattr(laid, n)) for n in ("pages", "streams"))]


def gathered(outputs: Outputs, own: Places) -> Outputs:
    """Outputs with K and V rows, bf16 [rows, HK, D], exponents, and rows of an indexer, bf16 [rows, 1, DI], for the arena."""
    arena = outputs["arena"].view(np.uint8)
    rest = {name: array for name, array in outputs.items() if name != "arena"}
    found = {name: np.ascontiguousarray(arena[at]) for name, at in own.items()}
    if "k_exp" not in own:
        return {**rest, **{name: rows.view(BF16) for name, rows in found.items()}}
    exponents = {f"{name}_exp": found[f"{name}_exp"].view(np.int8) for name in PLANES}
    rows = {name: fp8_oracle.widened(found[name], exponents[f"{name}_exp"]) for name in PLANES}
    indexer = {name: rows.view(BF16) for name, rows in found.items() if name in INDEXER}
    return {**rest, **rows, **exponents, **indexer}


def through_fp8(rows: Outputs) -> Outputs:
    """What ``gathered`` gives for an fp8 cache that holds these rows, bf16 [rows, HK, D] by "k" and "v"."""
    narrow = {name: fp8_oracle.narrowed(rows[name]) for name in PLANES}
    wide = {name: fp8_oracle.widened(*pair) for name, pair in narrow.items()}
    return {**wide, **{f"{name}_exp": exponents for name, (_, exponents) in narrow.items()}}


def page_and_slot(case: AttentionCase, counts: Sequence[int], row: int) -> str:
    """In words, where the row-th row of ``places`` lies."""
    for number, ((_, committed), count) in enumerate(zip(case.streams, counts, strict=True)):
        if row < count:
            position, ptok = committed + row, case.positions_a_page(number)
            return f"position {position}" + (f", page {position // ptok}, slot {position % ptok}" if ptok else "")
        row -= count
    raise IndexError(row)
