"""What the entries of the sparse indexer share: streams with raw and pooled keys in their caches, rotary positions of text and
of media."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from backends.layout import LAYOUTS
from kernels_numba import streams as columns
from kernels_numba.flash_next.turns import Media
from refengine.contract.attention import BLOCK, FORMS, AttentionCase, case_data, length_for
from refengine.contract.caches import BLOCK_POSITIONS, Cache, StreamRows, build_cache
from refengine.contract.entry import Control, Entry, Inputs
from refengine.contract.gates import EXACT
from refengine.contract.workbench import Array, Poison, Workbench, drawn, drawn_bf16
from refengine.verify.attention_bits import Heads

INDEXED_PAGES = (16, 48, 128, 256, 512)
RESUMED = (12, 13, 14, 15)
"""Committed lengths: a block that begins with the pass, and blocks of which some positions came before."""
ENDS = (2047, 2048, 2049, 2051, 2052, 2055)
"""Lengths around the most blocks that a dense row has."""
TEXT, UNTURNED, MEDIA = "", "untouched", "media"
"""Rows of text; the same through the kernel of media; streams with media, and one of text beside them."""
SPARE_POSITIONS = 2
"""Rows of the cos and sin table and of the axes after those in use: poison."""
EPS = 1e-6


@dataclass(frozen=True)
class IndexedCase(AttentionCase):
    """Streams of (rows, committed). index_heads, index_dim: of the indexer. rope: rotary dims. turned: one of TEXT, UNTURNED
    and MEDIA.
    """

    index_heads: int = 2
    index_dim: int = 64
    rope: int = 16
    turned: str = TEXT

    @property
    def counts(self) -> list[int]:
        """Rows of each stream."""
        return [rows for rows, _ in self.streams]

    @property
    def positions(self) -> Array:
        """int64 [W]."""
        return np.concatenate([np.arange(c, c + r) for r, c in self.streams])

    @property
    def owners(self) -> Array:
        """int32 [W]: row -> stream."""
        return np.repeat(np.arange(len(self.streams), dtype=np.int32), self.counts)

    @property
    def pooled_spans(self) -> list[tuple[int, int, int]]:
        """(stream, first, past the last) of the blocks that each stream's rows complete."""
        return [(n, c // BLOCK_POSITIONS, (c + r) // BLOCK_POSITIONS) for n, (r, c) in enumerate(self.streams)]

    @property
    def sections(self) -> tuple[int, int, int]:
        """Rotary pairs of time, height and width: as published, or with pairs of time where the others end."""
        pairs = self.rope // 2
        return (11, 11, 10) if pairs == 32 else (pairs - pairs // 4 - pairs // 8, pairs // 4, pairs // 8)

    @property
    def cost(self) -> float:
        """About how long the case takes."""
        return 1.0 + sum(rows * (rows + committed) for rows, committed in self.streams) / 1e5

    def alone(self, stream: int) -> IndexedCase:
        """One of its streams."""
        return replace(self, streams=(self.streams[stream],), number=self.number + stream)

    def __str__(self) -> str:
        indexer = f" IH={self.index_heads} DI={self.index_dim} R={self.rope}"
        return super().__str__() + indexer + (f" {self.turned}" if self.turned else "")


class IndexedEntry(Entry):
    """What an entry says of cases like these."""

    def group(self, case: IndexedCase) -> str:
        return case.group

    def cost(self, case: IndexedCase) -> float:
        return case.cost


def other_form(case: IndexedCase) -> Any:
    """The same on another form of cache."""
    form = FORMS[1] if case.layout == "window" else FORMS[0]
    return replace(case, layout=form[0], ptok=form[1], first_page=0)


# --- Caches -----------------------------------------------------------------------------------------------------------


@lru_cache(64)
def keys_of(width: int, seed: int, stream: int, block: int, kind: int) -> Array:
    """bf16 [BLOCK, DI] of a stream's positions. kind: 5, raw keys; 6, pooled ones.

    In every eighth dim of raw keys the first and the third of a block cancel, and are so large that the second loses bits
    between them: the order of a block's sum shows. Two dims are so large that a row's sum of squares is a lane's: so does
    the order in which it adds them.
    """
    rows = drawn_bf16((seed, width, stream, kind, block), BLOCK, width)
    if kind == 5:
        rows[::BLOCK_POSITIONS, 3::8] *= rows.dtype.type(2.0**20)
        rows[2::BLOCK_POSITIONS, 3::8] = -rows[::BLOCK_POSITIONS, 3::8]
        rows[:, 4:6] *= rows.dtype.type(2.0**6)
    return rows


def stream_keys(case: IndexedCase, seed: int, stream: int, rows: int, kind: int) -> Array:
    """bf16 [rows, DI]: the first rows of a stream, raw (5) or pooled (6)."""
    blocks = [keys_of(case.index_dim, seed, stream, n, kind) for n in range(length_for(rows) // BLOCK)]
    return np.concatenate(blocks)[:rows]


def indexed_cache(case: IndexedCase, poison: Poison, seed: int) -> Cache:
    """The streams' cache with the launch's own rows, their raw keys and every complete block's pooled one."""
    rows = []
    for n, ((_, k, v), first, (r, c)) in enumerate(
        zip(case_data(case, seed), case.firsts, case.streams, strict=True), case.number
    ):
        index, pooled = (
            stream_keys(case, seed, n, count, kind) for count, kind in ((c + r, 5), ((c + r) // BLOCK_POSITIONS, 6))
        )
        rows.append(StreamRows(k[: c + r], v[: c + r], first, r, c, index, pooled))
    return build_cache(LAYOUTS[case.layout], case.ptok, rows, poison, first_page=case.first_page, kv=case.cache_kv)


# --- Rotary positions -------------------------------------------------------------------------------------------------


def turning(case: IndexedCase, poison: Poison, seed: int) -> Inputs:
    """The table of cos and sin, and the media tables of the streams: spans, axes."""
    ends = [rows + committed for rows, committed in case.streams]
    table = drawn((seed, case.rope, 1), max(ends) + 1, 2, case.rope // 2, scale=0.5)
    spans, axes, first = np.zeros((len(ends), 3), np.int64), [], 0
    for n, (rows, committed) in enumerate(case.streams):
        if case.turned == MEDIA and (n + case.number) % 3 != 1:
            length = committed + (rows + 1) // 2
            spans[n] = first, length, -(length // 3)
            axes.append(np.random.default_rng((seed, case.number + n)).integers(0, length, (length, 3), np.int32))
            first += length
    found = np.concatenate([*axes, np.zeros((0, 3), np.int32)])
    return {"cos_sin": spared(table, poison), "spans": spans, "axes": spared(found, poison)}


def spared(table: Array, poison: Poison) -> Array:
    """A table with rows of poison behind it."""
    room = np.empty((SPARE_POSITIONS, *table.shape[1:]), table.dtype)
    return np.concatenate([table, poison.filled(room.nbytes).view(table.dtype).reshape(room.shape)])


def turned_by(case: IndexedCase, inputs: Inputs, owners: Array, positions: Array) -> Array:
    """float32 [N, 2, rope / 2]: cos and sin of each pair of rows that stand at ``positions`` of the streams ``owners``."""
    pairs = np.arange(case.rope // 2)
    _, height, width = case.sections
    axis = np.where((pairs % 3 == 1) & (pairs < 3 * height), 1, np.where((pairs % 3 == 2) & (pairs < 3 * width), 2, 0))
    first, length, shift = inputs["spans"][owners].T
    inside = positions < length
    by_axis = inputs["axes"][np.where(inside, first + positions, 0)[:, None], axis]
    rows = np.where(inside[:, None], by_axis, (positions + shift)[:, None])
    return np.asarray(inputs["cos_sin"][rows[:, None], [[0], [1]], pairs])


def media_on(case: IndexedCase, inputs: Inputs, bench: Workbench, media: Any) -> Media | None:
    """The case's media on a bench. media: the class on trial."""
    if case.turned == TEXT:
        return None
    found: Media = media(*(bench.input(name, inputs[name]) for name in ("spans", "axes")), case.sections)
    return found


# --- Faults in inputs -------------------------------------------------------------------------------------------------


def moved_on(by: int) -> Any:
    """A control's plant: the first stream's committed length is off."""

    def plant(inputs: Inputs) -> None:
        inputs["cache"].streams[0, columns.COMMITTED] += by

    return plant


def shifted(inputs: Inputs) -> None:
    """The positions behind the first stream's media are one off."""
    inputs["spans"][0, 2] += 1


def swapped_table() -> Control:
    return Control("a page table whose first entry names a later page", EXACT, lambda i: i["cache"].swap_first_pages())


def indexed(form: tuple[str, int], streams: Sequence[tuple[int, int]], heads: Heads, **how: Any) -> dict[str, Any]:
    """The fields of a case."""
    return {"geometry": heads, "layout": form[0], "ptok": form[1], "streams": tuple(streams), **how}
