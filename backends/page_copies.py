"""Cached rows on the move: a stream's into contiguous arrays and back, a page's into another page. Spec serving §4.

One launch a part, over all pages and layers: rows of keys and values, the exponents of an fp8 cache byte by byte, the raw and
the pooled keys of a sparse indexer. Where a page lies is asked of the backend's own address function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from backends.arena import CacheShape
from backends.stream import Stream
from kernels_numba.copy_pages import copy_pages
from kernels_numba.fp8 import row_words
from kernels_numba.locate import locate
from kernels_numba.move_plan import Side, contiguous, plan_moves
from kernels_numba.streams import BASE, PTOK, TABLE

if TYPE_CHECKING:
    from backends.base import Backend

ROWS, EXPONENTS, INDEX, POOLED = "rows", "exponents", "index", "pooled"


@dataclass(frozen=True)
class Part:
    """What one launch moves: of each layer, planes [heads, rows, width].

    columns: of CacheShape.planes, the first and the one past the last. unit: of copy_pages; a_word: units a word; width: units
    of a row. a_row: positions that have a row together.
    """

    name: str
    columns: tuple[int, int]
    heads: int
    width: int
    unit: str = "word"
    a_word: int = 1
    a_row: int = 1

    def planes(self, shape: CacheShape, ptok: int, kv: str) -> NDArray[np.int64]:
        """int64 [planes of all attention layers]: units from a page's start to each."""
        found = [shape.planes(layer, ptok, kv)[slice(*self.columns)] for layer in shape.attention_layers]
        return np.array(found, np.int64).reshape(-1) * self.a_word


def parts(shape: CacheShape, kv: str) -> list[Part]:
    """The parts of a cached row."""
    found = [Part(ROWS, (0, 2), shape.kv_heads, row_words(shape.head_dim, kv))]
    if kv == "fp8":
        found.append(Part(EXPONENTS, (2, 4), shape.kv_heads, 1, "byte", 4))
    if shape.index_dim:
        found.append(Part(INDEX, (4, 5), 1, shape.index_dim // 2))
        found.append(Part(POOLED, (5, 6), 1, shape.index_dim // 2, a_row=shape.index_ratio))
    return found


@dataclass(frozen=True, eq=False)
class Place:
    """Where cached positions lie. starts: int64 [pages], the words at which their pages start; ptok: positions a page."""

    starts: NDArray[np.int64]
    ptok: int

    def side(self, backend: Backend, part: Part) -> Side:
        """As the planner takes it."""
        planes = part.planes(backend.shape, self.ptok, backend.sizes.kv)
        return Side(self.starts * part.a_word, planes, self.ptok // part.a_row)


def out_of_cache(backend: Backend, place: Place, positions: int, arrays: dict[str, Any]) -> None:
    """Copy the first positions into ``arrays``: each part's as a kept state has it, on the device."""
    for part in parts(backend.shape, backend.sizes.kv):
        cached, kept = place.side(backend, part), contiguous_side(backend, positions, part)
        launch(backend, arrays[part.name], backend.arena.words, cached, kept, positions, part)


def into_cache(backend: Backend, place: Place, positions: int, arrays: dict[str, Any]) -> None:
    """The way back; all positions have a place."""
    for part in parts(backend.shape, backend.sizes.kv):
        cached, kept = place.side(backend, part), contiguous_side(backend, positions, part)
        launch(backend, backend.arena.words, arrays[part.name], kept, cached, positions, part)


def copy_page(backend: Backend, source: int, target: int, positions: int) -> None:
    """Copy the first positions of every layer of one page of the pool to another, by their ids; they are not the same one."""
    words = backend.arena.words
    for part in parts(backend.shape, backend.sizes.kv):
        here, there = (pages_place(backend, [page]).side(backend, part) for page in (source, target))
        launch(backend, words, words, here, there, positions, part)


# --- Sides and launches -----------------------------------------------------------------------------------------------


def stream_place(backend: Backend, stream: Stream, positions: int) -> Place:
    """Where the stream's first positions lie, as its own page table and the backend's address function say."""
    row = backend.stream_row(stream, 0, 0)
    firsts = np.arange(0, positions, row[PTOK], dtype=np.int64)
    found = backend.xp.zeros((len(firsts), 2), dtype=np.int64)
    page_words = backend.shape.page_words(row[PTOK], backend.sizes.kv)
    address = (backend.pages, row[BASE], row[TABLE], row[PTOK], page_words)
    locate(found, backend.xp.asarray(firsts), *address, layout=backend.layout)
    return Place(on_host(found)[:, 0], row[PTOK])


def pages_place(backend: Backend, pages: Sequence[int]) -> Place:
    """Where pages of the pool lie, by their ids."""
    return Place(np.array(pages, np.int64) * backend.page_words, backend.positions)


def contiguous_side(backend: Backend, positions: int, part: Part) -> Side:
    """Rows [attention layers, planes, heads, rows of the positions]."""
    planes = len(backend.shape.attention_layers) * (part.columns[1] - part.columns[0])
    return contiguous(planes, part.heads, positions // part.a_row, part.width)


def launch(
    backend: Backend, target: Any, source: Any, source_side: Side, target_side: Side, positions: int, part: Part
) -> None:
    """Copy positions from one side to the other."""
    plan = plan_moves(source_side, target_side, positions // part.a_row, part.heads, part.width)
    copy_pages(target, source, backend.xp.asarray(plan.moves), plan.rows, plan.width, part.unit)


def on_host(array: Any) -> np.ndarray:
    """A device array on the host."""
    return array.get() if hasattr(array, "get") else array
