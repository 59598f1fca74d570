"""The rows of a cache that one row of a pass sees, each found by the backend's own address function. Spec attention §3."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from backends.base import PROMPT, Backend, Batch
from kernels_numba.flash_next.pages import BLOCK
from kernels_numba.fp8 import row_words
from kernels_numba.locate import locate
from kernels_numba.streams import (
    BASE,
    COMMITTED,
    FIRST,
    INDEX_PLANE,
    K_EXP_PLANE,
    K_PLANE,
    PAGE_WORDS,
    POOLED_PLANE,
    PTOK,
    TABLE,
    V_EXP_PLANE,
    V_PLANE,
)
from refengine.device import Device
from refengine.verify import fp8_oracle
from refengine.verify.fold_watch import Element

BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True)
class KeyRow:
    """A key's rows as one run has them. where: in words. k, v: float32 [D]."""

    position: int
    where: str
    k: np.ndarray
    v: np.ndarray


@dataclass(frozen=True)
class IndexRow:
    """A row of the sparse indexer as one run has it, raw or pooled. where: in words. key: float32 [DI]."""

    where: str
    key: np.ndarray


class Located:
    """The stream of an element in a pass, and where its rows lie."""

    def __init__(self, backend: Backend, device: Device, layer: int, batch: Batch, element: Element):
        self.backend, self.device, self.layer, self.batch, self.element = backend, device, layer, batch, element
        owner = int(device.get(batch.owners)[element.row])
        self.stream, self.row = batch.members[owner], device.get(backend.layer_streams(layer, batch))[owner]
        self.ptok, self.paged = int(self.row[PTOK]), int(self.row[TABLE]) >= 0
        self.depth = int(device.get(batch.depths)[element.row])

    # --- Keys and values ----------------------------------------------------------------------------------------------

    def keys(self) -> list[KeyRow]:
        """Every key that the element's row sees, in a layer without an indexer."""
        committed = int(self.row[COMMITTED])
        if self.batch.phase == PROMPT:
            return self.cached(np.arange(committed + self.depth))
        return [*self.cached(np.arange(committed)), *self.recorded()]

    def cached(self, positions: np.ndarray) -> list[KeyRow]:
        """The stream's keys at these positions, out of the cache."""
        places = self.places(positions)
        k, v = (self.plane(places, *columns) for columns in ((K_PLANE, K_EXP_PLANE), (V_PLANE, V_EXP_PLANE)))
        found = zip(positions.tolist(), places.tolist(), k, v, strict=True)
        return [KeyRow(position, self.words(position, *place), *rows) for position, place, *rows in found]

    def recorded(self) -> list[KeyRow]:
        """The row's own path, out of the window record."""
        path = self.device.get(self.batch.paths)[self.element.row, : self.depth].tolist()
        both = self.backend.record(self.layer, self.batch)
        k, v = (self.device.get(plane)[:, self.element.kv_head].astype(np.float32) for plane in both)
        first, position = int(self.row[FIRST]), int(self.row[COMMITTED])
        return [
            KeyRow(position + n, f"row {own} of the window record", k[first + own], v[first + own])
            for n, own in enumerate(path)
        ]

    def plane(self, places: np.ndarray, plane: int, exponents: int) -> np.ndarray:
        """float32 [n, D]: rows of K or V as an attention kernel takes them. plane, exponents: columns of the stream table."""
        kv = self.backend.sizes.kv
        words = row_words(self.backend.shape.head_dim, kv)
        in_plane = self.element.kv_head * self.ptok + places[:, 1]
        taken = self.taken(places[:, 0] + int(self.row[plane]) + in_plane * words, words)
        if kv == "bf16":
            return taken.view(BF16).astype(np.float32)
        arena = self.device.get(self.backend.arena.words)
        e = arena.view(np.int8)[4 * (places[:, 0] + int(self.row[exponents])) + in_plane]
        return fp8_oracle.widened(taken.view(np.uint8), e).astype(np.float32)

    # --- The indexer's rows -------------------------------------------------------------------------------------------

    def raw(self, positions: np.ndarray) -> list[IndexRow]:
        """Raw index keys of these positions."""
        places = self.places(positions)
        keys = self.index_plane(places[:, 0], places[:, 1], INDEX_PLANE)
        found = zip(positions.tolist(), places.tolist(), keys, strict=True)
        return [IndexRow(self.words(position, *place), key) for position, place, key in found]

    def pooled(self, blocks: np.ndarray) -> list[IndexRow]:
        """Pooled index keys of these blocks."""
        places = self.places(BLOCK * blocks)
        places[:, 1] //= BLOCK
        keys = self.index_plane(places[:, 0], places[:, 1], POOLED_PLANE)
        found = zip((BLOCK * blocks).tolist(), places.tolist(), keys, strict=True)
        return [IndexRow(self.words(first, start, slot, "pooled slot"), key) for first, (start, slot), key in found]

    def index_plane(self, starts: np.ndarray, slots: np.ndarray, plane: int) -> np.ndarray:
        """float32 [n, DI]: the rows at these slots of a plane of index keys, which are bf16 in every cache."""
        words = self.backend.shape.index_dim // 2
        return self.taken(starts + int(self.row[plane]) + slots * words, words).view(BF16).astype(np.float32)

    # --- Addresses ----------------------------------------------------------------------------------------------------

    def places(self, positions: np.ndarray) -> np.ndarray:
        """(start, slot) of positions: int64 [n, 2]."""
        out, row = self.device.put(np.zeros((len(positions), 2), np.int64)), self.row
        base, table, ptok, page_words = (int(row[n]) for n in (BASE, TABLE, PTOK, PAGE_WORDS))
        given = self.device.put(positions), self.backend.pages
        locate(out, *given, base, table, ptok, page_words, self.backend.layout)
        return self.device.get(out)

    def taken(self, at: np.ndarray, words: int) -> np.ndarray:
        """uint32 [n, words]: the rows of the arena that start at these words."""
        arena = self.device.get(self.backend.arena.words)
        return np.ascontiguousarray(arena[at[:, None] + np.arange(words)])

    def page(self, start: int) -> int:
        return (start - int(self.row[BASE])) // int(self.row[PAGE_WORDS])

    def words(self, position: int, start: int, slot: int, unit: str = "slot") -> str:
        """A place in words."""
        if not self.paged:
            return f"{unit} {slot} of the window"
        return f"page {self.page(start)} {unit} {slot} (entry {position // self.ptok})"

    def wrong_entry(self) -> str:
        """The first entry of the page table that does not name the stream's own page, in words."""
        own = self.stream.pages if self.paged else []
        starts = self.places(self.ptok * np.arange(len(own)))[:, 0].tolist() if own else []
        named = [self.page(start) for start in starts]
        for entry, (page, wanted) in enumerate(zip(named, own)):
            if page != wanted:
                return f"entry {entry} of the page table names page {page}, the stream's own there is {wanted}"
        return ""
