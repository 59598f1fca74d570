"""Two runs that differ: the first place where their attention parts, what each read there, and both folds until they part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from backends.base import PROMPT, Backend, Batch
from kernels_numba.fp8 import row_words
from kernels_numba.locate import locate
from kernels_numba.machine.modes import within
from kernels_numba.streams import (
    BASE,
    COMMITTED,
    FIRST,
    K_EXP_PLANE,
    K_PLANE,
    PAGE_WORDS,
    PTOK,
    TABLE,
    V_EXP_PLANE,
    V_PLANE,
)
from refengine.device import Device
from refengine.model import Model
from refengine.serve.session import Session
from refengine.verify import fp8_oracle
from refengine.verify.compare import Arm, differing, run_arm
from refengine.verify.fold_watch import Element, Fold, FoldState, FoldWatch

BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True)
class Side:
    """A run that can be had again. build: its backend, anew. planted: a fault to have while it runs."""

    name: str
    build: Callable[[], Backend]
    model: Model
    device: Device
    prompts: Sequence[Sequence[int]]
    prompt_rows: int
    tokens: int
    planted: Callable[[], AbstractContextManager[None]] = nullcontext

    def run(self) -> Arm:
        """The whole run, as compare has it."""
        with self.planted():
            return run_arm(
                self.build(), self.model, self.device, self.prompts, self.prompt_rows, self.tokens, lambda: None
            )


@dataclass(frozen=True)
class Place:
    """Where two runs part. number: of the pass, from 0; row: of the pass."""

    number: int
    phase: str
    layer: int
    row: int
    head: int
    dim: int


@dataclass(frozen=True)
class KeyRow:
    """A key's rows as one run has them. where: in words. k, v: float32 [D]."""

    position: int
    where: str
    k: np.ndarray
    v: np.ndarray


@dataclass
class Reading:
    """What one run had at a place. q: float32 [D]. keys: the row's, in order. folds: of the element. wrong_entry: what is wrong
    with the stream's page table, in words, or nothing.
    """

    q: np.ndarray
    keys: list[KeyRow]
    folds: list[Fold]
    wrong_entry: str

    @property
    def states(self) -> list[tuple[str, FoldState]]:
        """Every state after a tile with its kernel, in order of keys."""
        return [(fold.kernel, state) for fold in self.folds for state in fold.states if state.key is not None]


# --- Where they part --------------------------------------------------------------------------------------------------


def first_place(a: Arm, b: Arm) -> Place | None:
    """The first element of an attention output in which two runs of the same passes differ."""
    for number, (left, right) in enumerate(zip(a.attention, b.attention)):
        for (layer, x), (_, y) in zip(left, right):
            if (found := differing(x.view(np.uint16), y.view(np.uint16))) is not None:
                return Place(number, a.passes[number].phase, layer, *found)  # type: ignore[arg-type]
    return None


# --- What each read there ---------------------------------------------------------------------------------------------


class Spy:
    """A backend whose attention is looked into at one place; everything else is the backend's own."""

    def __init__(self, backend: Backend, device: Device, place: Place):
        self.backend, self.device, self.place = backend, device, place
        self.armed, self.reading = False, list[Reading]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def attend(self, layer: int, q: Any, batch: Batch) -> Any:
        if not self.armed or layer != self.place.layer:
            return self.backend.attend(layer, q, batch)
        shape, place = self.backend.shape, self.place
        element = Element(place.row, place.head, place.dim, shape.heads // shape.kv_heads, shape.head_dim)
        watch = FoldWatch(element)
        with within(watch):
            out = self.backend.attend(layer, q, batch)
        query = self.device.get(q)[place.row, place.head].astype(np.float32)
        stream = Located(self.backend, self.device, layer, batch, element)
        self.reading.append(Reading(query, stream.keys(), watch.folds, stream.wrong_entry()))
        return out


def read_at(side: Side, place: Place) -> Reading:
    """Run again up to the place, and look."""
    with side.planted():
        spy = Spy(side.build(), side.device, place)
        session = Session(side.model, spy, side.device, side.prompts, side.prompt_rows)  # type: ignore[arg-type]
        spy.armed = place.number == 0
        for number, _ in enumerate(session.run(side.tokens)):
            if number == place.number:
                break
            spy.armed = number + 1 == place.number
    return spy.reading[0]


class Located:
    """The stream of an element in a pass, its rows found by the backend's own address function."""

    def __init__(self, backend: Backend, device: Device, layer: int, batch: Batch, element: Element):
        self.backend, self.device, self.layer, self.batch, self.element = backend, device, layer, batch, element
        owner = int(device.get(batch.owners)[element.row])
        self.stream, self.row = batch.members[owner], device.get(backend.layer_streams(layer, batch))[owner]
        self.ptok, self.paged = int(self.row[PTOK]), int(self.row[TABLE]) >= 0
        self.depth = int(device.get(batch.depths)[element.row])

    def keys(self) -> list[KeyRow]:
        """Every key that the element's row sees."""
        if self.batch.phase == PROMPT:
            return self.cached(int(self.row[COMMITTED]) + self.depth)
        return [*self.cached(int(self.row[COMMITTED])), *self.recorded()]

    def cached(self, count: int) -> list[KeyRow]:
        """The stream's first ``count`` positions, out of the cache."""
        places = self.places(np.arange(count))
        k, v = (self.plane(places, *columns) for columns in ((K_PLANE, K_EXP_PLANE), (V_PLANE, V_EXP_PLANE)))
        return [KeyRow(n, self.words(n, *place), k[n], v[n]) for n, place in enumerate(places.tolist())]

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

    def places(self, positions: np.ndarray) -> np.ndarray:
        """(start, slot) of positions: int64 [n, 2]."""
        out, row = self.device.put(np.zeros((len(positions), 2), np.int64)), self.row
        base, table, ptok, page_words = (int(row[n]) for n in (BASE, TABLE, PTOK, PAGE_WORDS))
        given = self.device.put(positions), self.backend.pages
        locate(out, *given, base, table, ptok, page_words, self.backend.layout)
        return self.device.get(out)

    def page(self, start: int) -> int:
        return (start - int(self.row[BASE])) // int(self.row[PAGE_WORDS])

    def words(self, position: int, start: int, slot: int) -> str:
        """A place in words."""
        if not self.paged:
            return f"slot {slot} of the window"
        return f"page {self.page(start)} slot {slot} (entry {position // self.ptok})"

    def plane(self, places: np.ndarray, plane: int, exponents: int) -> np.ndarray:
        """float32 [n, D]: rows of K or V as an attention kernel takes them. plane, exponents: columns of the stream table."""
        arena, kv = self.device.get(self.backend.arena.words), self.backend.sizes.kv
        words = row_words(self.backend.shape.head_dim, kv)
        in_plane = self.element.kv_head * self.ptok + places[:, 1]
        at = places[:, 0] + int(self.row[plane]) + in_plane * words
        taken = np.ascontiguousarray(arena[at[:, None] + np.arange(words)])
        if kv == "bf16":
            return taken.view(BF16).astype(np.float32)
        e = arena.view(np.int8)[4 * (places[:, 0] + int(self.row[exponents])) + in_plane]
        return fp8_oracle.widened(taken.view(np.uint8), e).astype(np.float32)

    def wrong_entry(self) -> str:
        """The first entry of the page table that does not name the stream's own page, in words."""
        own = self.stream.pages if self.paged else []
        starts = self.places(self.ptok * np.arange(len(own)))[:, 0].tolist() if own else []
        named = [self.page(start) for start in starts]
        for entry, (page, wanted) in enumerate(zip(named, own)):
            if page != wanted:
                return f"entry {entry} of the page table names page {page}, the stream's own there is {wanted}"
        return ""


# --- How they part ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parting:
    """Of two readings of one place. key: the first whose rows differ, as each has it; plane: "K" or "V". step: the first pair of
    fold states that differ, counted from 0, or None.
    """

    queries_differ: bool
    key: tuple[KeyRow, KeyRow] | None
    plane: str
    step: int | None


def parting(a: Reading, b: Reading) -> Parting:
    """Where two readings part."""
    key, plane = None, ""
    for x, y in zip(a.keys, b.keys):
        planes = [name for name, p, q in (("K", x.k, y.k), ("V", x.v, y.v)) if p.tobytes() != q.tobytes()]
        if planes:
            key, plane = (x, y), planes[0]
            break
    pairs = zip(a.states, b.states)
    step = next((n for n, ((_, x), (_, y)) in enumerate(pairs) if (x.key, x.bits()) != (y.key, y.bits())), None)
    return Parting(a.q.tobytes() != b.q.tobytes(), key, plane, step)
