"""The scores of the sparse indexer: every complete block of every row. Spec flash-next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from refengine.contract.attention import FORMS, MIXED
from refengine.contract.caches import BLOCK_POSITIONS, Cache
from refengine.contract.entry import Bounds, Control, Inputs, Modules, Outputs, contract
from refengine.contract.gates import EXACT, GUARDS, REPEATS
from refengine.contract.indexer import (
    ENDS,
    INDEXED_PAGES,
    RESUMED,
    IndexedCase,
    IndexedEntry,
    indexed_cache,
    moved_on,
    other_form,
    stream_keys,
    swapped_table,
)
from refengine.contract.workbench import NAN, Array, Poison, Workbench, bits, drawn_bf16
from refengine.verify import oracles
from refengine.verify.attention_bits import Heads

SCORES, PAGES, LAYOUT = "kernels_numba.flash_next.scores", "kernels_numba.flash_next.pages", "backends.layout"
ANY = Heads(1, 1, 64)
"""Heads whose keys and values lie beside those of the indexer."""
REAL: dict[str, Any] = {"index_heads": 4, "index_dim": 128}
SPARE_BLOCKS = 3
"""Columns after the last complete block of the launch."""


@contract
class FnQsaScores(IndexedEntry):
    """Output scores: of a row's complete blocks; the rest of its columns may not be written."""

    name = "fn_qsa_scores"
    kernels = ("fn_qsa_scores_kernel",)
    modules = (SCORES, PAGES, LAYOUT)
    axes = {"scores": ("row", "block")}

    def cases(self, full: bool) -> Sequence[IndexedCase]:
        return list(full_table() if full else small_table())

    def control_cases(self) -> Sequence[IndexedCase]:
        return list(control_table())

    def controls(self) -> Sequence[Control]:
        return [
            swapped_table(),
            Control("a pooled key changed by one bf16 step", EXACT, plant_key),
            Control("the pooled key of another page", EXACT, other_page),
            Control("a block visible one row too early", GUARDS, moved_on(1)),
            Control("a stale length", EXACT, moved_on(-1)),
            Control("an index query changed by one bf16 step", EXACT, step_query),
            Control("a pooled key changed after the first run", REPEATS, plant_key),
        ]

    def inputs(self, case: IndexedCase, poison: Poison, seed: int) -> Inputs:
        query = drawn_bf16((seed, case.index_dim, case.total, 8), case.total, case.index_heads, case.index_dim)
        return {**room(case, poison, seed), "index_q": query, "seed": seed}

    def launch(self, case: IndexedCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        seen = complete_blocks(case)
        blocks = int(seen.max(initial=0)) + SPARE_BLOCKS
        scores = bench.output("scores", (case.total, blocks), np.float32, np.arange(blocks) < seen[:, None])
        query, rows = bench.input("index_q", inputs["index_q"]), bench.input("rows", inputs["rows"])
        place = [bench.input(name, getattr(inputs["cache"], name)) for name in ("arena", "pages", "streams")]
        modules[SCORES].fn_qsa_scores(scores, query, *place, rows, modules[LAYOUT].LAYOUTS[case.layout])

    def exact(self, case: IndexedCase, inputs: Inputs) -> Bounds:
        seen = complete_blocks(case)
        value, bound = np.zeros((2, case.total, int(seen.max(initial=0)) + SPARE_BLOCKS))
        bound += np.finfo(np.float64).tiny
        for n, last in enumerate(total_blocks(case)):
            mine = np.flatnonzero(case.owners == n)
            keys = stream_keys(case, inputs["seed"], case.number + n, last, 6)
            here = np.ix_(mine, np.arange(last))
            found = oracles.index_scores(inputs["index_q"][mine], keys)
            for whole, part in zip((value, bound), found, strict=True):
                whole[here] = np.where(np.arange(last) < seen[mine, None], part, whole[here])
        return {"scores": (value, bound)}

    def twins(
        self, case: IndexedCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        seed, other = inputs["seed"], other_form(case)
        yield f"the same on {other.layout}", run(other, {**inputs, **room(other, NAN, seed)})
        blocks = int(complete_blocks(case).max(initial=0)) + SPARE_BLOCKS
        found = np.zeros((case.total, blocks), np.float32)
        for row in range(case.total):
            alone, own = row_alone(case, inputs, row)
            scores = run(alone, own)["scores"]
            found[row, : scores.shape[1]] = scores[0]
        yield "each row alone on a window", {"scores": found}

    def place(self, output: str, index: Sequence[int], case: IndexedCase) -> str:
        row = index[0]
        return f"{super().place(output, index, case)}, position {case.positions[row]} of stream {case.owners[row]}"


# --- Inputs -----------------------------------------------------------------------------------------------------------


def room(case: IndexedCase, poison: Poison, seed: int) -> Inputs:
    """What depends on the form: the cache, and which stream a row belongs to."""
    return {"cache": indexed_cache(case, poison, seed), "rows": case.owners}


def complete_blocks(case: IndexedCase) -> Array:
    """int64 [W]: the blocks that each row sees."""
    return (case.positions + 1) // BLOCK_POSITIONS


def total_blocks(case: IndexedCase) -> list[int]:
    """The complete blocks of each stream behind its last row."""
    return [(committed + rows) // BLOCK_POSITIONS if rows else 0 for rows, committed in case.streams]


def row_alone(case: IndexedCase, inputs: Inputs, row: int) -> tuple[IndexedCase, Inputs]:
    """One row of the launch, everything before it committed, on a window."""
    stream, position = int(case.owners[row]), int(case.positions[row])
    alone = replace(case.alone(stream), layout="window", ptok=0, first_page=0, streams=((1, position),))
    return alone, {**inputs, **room(alone, NAN, inputs["seed"]), "index_q": inputs["index_q"][row : row + 1]}


# --- Faults in inputs -------------------------------------------------------------------------------------------------


def plant_key(inputs: Inputs) -> None:
    """A word of the pooled key of the first stream's first block, by one bf16 step."""
    laid: Cache = inputs["cache"]
    laid.arena[laid.indexer_rows(0, "pooled", 0, 1)[0, 0, 5]] += 1


def other_page(inputs: Inputs) -> None:
    """The first pooled key of the first stream where its second page has one: the row of the wrong page."""
    laid: Cache = inputs["cache"]
    second = int(laid.streams[0, 5]) // BLOCK_POSITIONS
    mine, other = (laid.indexer_rows(0, "pooled", block, block + 1) for block in (0, second))
    laid.arena[mine] = laid.arena[other]


def step_query(inputs: Inputs) -> None:
    """The last element of the last row's queries, by one bf16 step."""
    bits(inputs["index_q"])[-1, -1, -1] += 1


# --- The table --------------------------------------------------------------------------------------------------------


def one(form: tuple[str, int], *streams: tuple[int, int], **how: Any) -> IndexedCase:
    return IndexedCase(ANY, *form, tuple(streams), **how)


def control_table() -> Iterator[IndexedCase]:
    """Two streams over edges of pages, blocks completed inside the pass; the published dims; more than a tile of blocks."""
    yield one(("paged", 16), (9, 30), (6, 41))
    yield one(("paged", 48), (3, 300), (2, 97), **REAL)


def small_table() -> Iterator[IndexedCase]:
    """Every form and page size; every place in a block to resume at; rows without a complete block; the ends of dense rows;
    numbers of index heads; long caches.
    """
    for n, committed in enumerate(RESUMED):
        yield one((*FORMS, MIXED)[n % 4], (6, committed), (5, 40))
    yield from (one(("paged", size), (6, size - 3), (5, 40)) for size in INDEXED_PAGES)
    yield from (one(form, (2, 1), (5, 0), (0, 9), (3, 254), **REAL) for form in (*FORMS, MIXED))
    yield from (one((*FORMS, MIXED)[n % 4], (1, end - 1), **REAL) for n, end in enumerate(ENDS))
    yield from (one(FORMS[1], (4, 50), index_heads=heads) for heads in (1, 3, 8))
    yield one(("paged", 48), (2, 8999), (3, 300), **REAL)
    yield from control_table()


def full_table() -> Iterator[IndexedCase]:
    """The published dims: every form and page size, long caches, whole prompts, windows around the ends of dense rows."""
    for form, committed in product((*FORMS, MIXED), (0, 250, 2040, 9000)):
        yield one(form, (17, committed), (9, 13), **REAL)
    yield from (one(("paged", size), (33, 8970), (5, 255), **REAL) for size in INDEXED_PAGES)
    yield from (one(form, (1, end - 1), (8, end - 4), **REAL) for end, form in product(ENDS, FORMS))
    yield one(("paged", 48), (300, 0), **REAL)
    yield from small_table()
