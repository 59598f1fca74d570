"""The pool of the sparse indexer: blocks that a pass completes, each from its four raw keys. Spec flash-next."""

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
from refengine.contract.stored import empty, gathered, indexer_places, on_bench
from refengine.contract.workbench import BF16, NAN, Array, Poison, Workbench, drawn
from refengine.verify import oracles
from refengine.verify.attention_bits import Heads

POOL, TURNS, PAGES = (f"kernels_numba.flash_next.{name}" for name in ("pool", "turns", "pages"))
LAYOUT = "backends.layout"
ANY = Heads(1, 1, 64)
"""Heads whose keys and values lie beside those of the indexer."""
REAL: dict[str, Any] = {"index_dim": 128, "rope": 64}


@contract
class FnQsaPool(IndexedEntry):
    """Output pooled, the blocks' rows gathered from the cache. Raw keys of blocks that were complete before are poison."""

    name = "fn_qsa_pool"
    kernels = ("fn_qsa_pool_kernel",)
    modules = (POOL, TURNS, PAGES, LAYOUT)
    axes = {"pooled": ("pooled row", "head", "dim")}

    def cases(self, full: bool) -> Sequence[IndexedCase]:
        return list(full_table() if full else small_table())

    def control_cases(self) -> Sequence[IndexedCase]:
        return list(control_table())

    def cost(self, case: IndexedCase) -> float:
        return 1.0 + case.total / 1e3

    def controls(self) -> Sequence[Control]:
        return [
            swapped_table(),
            Control("a raw key changed by one bf16 step", EXACT, plant_key),
            Control("a stale length", EXACT, moved_on(-1)),
            Control("a block pooled one row too early", GUARDS, moved_on(1)),
            Control("positions behind media one off", EXACT, shifted),
            Control("a raw key changed after the first run", REPEATS, plant_key),
        ]

    def inputs(self, case: IndexedCase, poison: Poison, seed: int) -> Inputs:
        gain = (1 + drawn((seed, case.index_dim, 2), case.index_dim, scale=0.3)).astype(np.float32)
        return {**turning(case, poison, seed), **room(case, poison, seed), "gain": gain, "seed": seed}

    def launch(self, case: IndexedCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        place = on_bench(inputs["cache"], inputs["own"], bench)
        norms = [bench.input(name, inputs[name]) for name in ("gain", "cos_sin")]
        layout, media = modules[LAYOUT].LAYOUTS[case.layout], media_on(case, inputs, bench, modules[TURNS].Media)
        modules[POOL].fn_qsa_pool(*place, max(case.counts), *norms, EPS, layout, media)

    def view(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        return gathered(outputs, inputs["own"])

    def exact(self, case: IndexedCase, inputs: Inputs) -> Bounds:
        """The mean is exact: float32 in the stated order is what NumPy does."""
        owners, blocks = pooled_blocks(case)
        k0, k1, k2, k3 = (
            raw_keys(inputs["cache"], owners, blocks, n).astype(np.float32) for n in range(BLOCK_POSITIONS)
        )
        mean = ((((k0 + k1) + k2) + k3) / np.float32(BLOCK_POSITIONS)).astype(BF16)
        turns = turned_by(case, inputs, owners, BLOCK_POSITIONS * blocks)
        return {"pooled": oracles.rotated_heads(mean, inputs["gain"], turns, EPS)}

    def twins(
        self, case: IndexedCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        seed, other = inputs["seed"], other_form(case)
        yield f"the same on {other.layout}", run(other, {**inputs, **room(other, NAN, seed)})
        if case.turned != MEDIA:
            text = replace(case, turned=UNTURNED if case.turned == TEXT else TEXT)
            yield "the kernel of the other kind of rows", run(text, inputs | room(text, NAN, seed))
        found = [run(one_pass, own) for one_pass, own in passes(case, inputs)]
        yield "each block in a pass of its own", {"pooled": np.concatenate([out["pooled"] for out in found])}

    def place(self, output: str, index: Sequence[int], case: IndexedCase) -> str:
        owners, blocks = pooled_blocks(case)
        return f"{super().place(output, index, case)}, block {blocks[index[0]]} of stream {owners[index[0]]}"


# --- Inputs -----------------------------------------------------------------------------------------------------------


def room(case: IndexedCase, poison: Poison, seed: int) -> Inputs:
    """What depends on the form: the cache with poison where blocks are pooled and where complete ones had raw keys, places."""
    laid = indexed_cache(case, poison, seed)
    own = indexer_places(laid, "pooled", case.pooled_spans)
    before = [(n, 0, BLOCK_POSITIONS * first) for n, first, _ in case.pooled_spans]
    empty(laid, own, poison)
    empty(laid, indexer_places(laid, "index", before), poison)
    return {"cache": laid, "own": own}


def pooled_blocks(case: IndexedCase) -> tuple[Array, Array]:
    """(streams, block numbers) of the blocks that the case pools, in order."""
    pairs = [(n, block) for n, first, last in case.pooled_spans for block in range(first, last)]
    owners, blocks = np.array(pairs, np.int64).reshape(-1, 2).T
    return owners, blocks


def raw_keys(laid: Cache, owners: Array, blocks: Array, n: int) -> Array:
    """bf16 [blocks, 1, DI]: the n-th raw key of each block."""
    words = [
        laid.indexer_rows(int(owner), "index", at, at + 1)
        for owner, at in zip(owners, BLOCK_POSITIONS * blocks + n, strict=True)
    ]
    return np.ascontiguousarray(laid.arena[np.concatenate(words)]).view(BF16)


def passes(case: IndexedCase, inputs: Inputs) -> Iterator[tuple[IndexedCase, Inputs]]:
    """The same blocks on windows: of each stream its first, completed by a pass of its rows alone, then the others."""
    for n, first, last in case.pooled_spans:
        committed, end = case.streams[n][1], sum(case.streams[n])
        edge = BLOCK_POSITIONS * (first + 1)
        for start, stop in ((committed, edge), (edge, end)) if last > first else ():
            if stop // BLOCK_POSITIONS > start // BLOCK_POSITIONS:
                alone = replace(case.alone(n), layout="window", ptok=0, first_page=0, streams=((stop - start, start),))
                yield alone, {**inputs, **room(alone, NAN, inputs["seed"]), "spans": inputs["spans"][n : n + 1]}


# --- Faults in inputs -------------------------------------------------------------------------------------------------


def plant_key(inputs: Inputs) -> None:
    """A raw key of the first stream's first block, by one bf16 step in a large step of magnitude."""
    laid: Cache = inputs["cache"]
    position = int(laid.streams[0, 2]) // BLOCK_POSITIONS * BLOCK_POSITIONS + 1
    laid.arena[laid.indexer_rows(0, "index", position, position + 1)[0, 0, 5]] += 0x100


# --- The table --------------------------------------------------------------------------------------------------------


def one(form: tuple[str, int], *streams: tuple[int, int], **how: Any) -> IndexedCase:
    return IndexedCase(ANY, *form, tuple(streams), **how)


def control_table() -> Iterator[IndexedCase]:
    """Two streams over the edge of a page; media that end with a block; rows of several words a lane; so many elements that
    the last bit of float32 shows in bf16.
    """
    yield one(("paged", 16), (9, 14), (6, 41))
    yield one(("paged", 16), (12, 14), (6, 41), (7, 30), turned=MEDIA)
    yield one(("paged", 48), (18, 42), **REAL)
    yield one(("paged", 48), (18, 42), **REAL, turned=MEDIA)
    yield one(("paged", 48), (9000, 1), (9000, 0), **REAL)


def small_table() -> Iterator[IndexedCase]:
    """Every form, page size and kind of row; every place in a block to resume at; a block that a single row completes; passes
    that complete none; the ends of dense rows; a long cache.
    """
    for n, (committed, turned) in enumerate(product(RESUMED, (TEXT, MEDIA))):
        yield one((*FORMS, MIXED)[n % 4], (6, committed), (21, 40), turned=turned)
    for size, turned in zip(INDEXED_PAGES, (TEXT, MEDIA, UNTURNED, TEXT, MEDIA), strict=True):
        yield one(("paged", size), (9, size - 5), (19, 40), turned=turned)
    yield one(MIXED, (1, 3), (1, 4), (0, 9), (3, 4), (1, 47), (2, 255))
    yield from (one((*FORMS, MIXED)[n % 4], (1, end - 1), (5, end - 3)) for n, end in enumerate(ENDS))
    yield one(("paged", 48), (40, 8960), (5, 44), **REAL)
    yield from control_table()


def full_table() -> Iterator[IndexedCase]:
    """The published dims: every form, page size and kind of row; whole prompts; long caches."""
    for form, turned in product((*FORMS, MIXED), (TEXT, UNTURNED, MEDIA)):
        yield one(form, (17, 250), (9, 13), (2048, 0), turned=turned, **REAL)
    for size, turned in product(INDEXED_PAGES, (TEXT, MEDIA)):
        yield one(("paged", size), (33, 9000), (129, 255), turned=turned, **REAL)
    yield from (one(form, (1, end - 1), (5, end), **REAL) for end, form in product(ENDS, FORMS))
    yield from small_table()
