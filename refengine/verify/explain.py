"""Two runs that differ: the first place where their attention parts, what each read there, and both folds until they part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from backends.base import Backend, Batch
from kernels_numba.machine.modes import within
from refengine.device import Device
from refengine.model import Model
from refengine.serve.session import Session
from refengine.verify.compare import Arm, differing, run_arm
from refengine.verify.fold_watch import Element, Fold, FoldState, FoldWatch
from refengine.verify.key_choice import Choice, ChoiceParting, ChoiceWatch, choice_of, choice_parting
from refengine.verify.located import KeyRow, Located


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


@dataclass
class Reading:
    """What one run had at a place. q: float32 [D]. keys: the row's, in order; of sparse attention those of its list. folds: of
    the element. wrong_entry: what is wrong with the stream's page table, in words, or nothing. choice: of a sparse row.
    """

    q: np.ndarray
    keys: list[KeyRow]
    folds: list[Fold]
    wrong_entry: str
    choice: Choice | None = None

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

    def looks(self, layer: int) -> bool:
        """Whether this is the attention to look into."""
        return self.armed and layer == self.place.layer

    @property
    def element(self) -> Element:
        shape, place = self.backend.shape, self.place
        return Element(place.row, place.head, place.dim, shape.heads // shape.kv_heads, shape.head_dim)

    def attend(self, layer: int, q: Any, batch: Batch) -> Any:
        if not self.looks(layer):
            return self.backend.attend(layer, q, batch)
        watch = FoldWatch(self.element)
        with within(watch):
            out = self.backend.attend(layer, q, batch)
        stream = Located(self.backend, self.device, layer, batch, watch.element)
        self.note(q, stream.keys(), watch, stream)
        return out

    def attend_sparse(self, layer: int, q: Any, index_q: Any, batch: Batch) -> Any:
        if not self.looks(layer):
            return self.backend.attend_sparse(layer, q, index_q, batch)
        watch = ChoiceWatch(self.element)
        with within(watch):
            out = self.backend.attend_sparse(layer, q, index_q, batch)
        stream = Located(self.backend, self.device, layer, batch, watch.element)
        own = self.device.get(index_q)[self.place.row].astype(np.float32)
        self.note(q, stream.cached(watch.keys), watch, stream, choice_of(stream, own, watch))
        return out

    def note(self, q: Any, keys: list[KeyRow], watch: FoldWatch, stream: Located, choice: Choice | None = None) -> None:
        query = self.device.get(q)[self.place.row, self.place.head].astype(np.float32)
        self.reading.append(Reading(query, keys, watch.folds, stream.wrong_entry(), choice))


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


# --- How they part ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parting:
    """Of two readings of one place. choice: where they chose different keys. key: the first that both have and whose rows differ,
    as each has it; plane: "K" or "V". step: the first pair of fold states that differ, counted from 0, or None.
    """

    queries_differ: bool
    choice: ChoiceParting | None
    key: tuple[KeyRow, KeyRow] | None
    plane: str
    step: int | None


def parting(a: Reading, b: Reading) -> Parting:
    """Where two readings part."""
    key, plane = None, ""
    others = {row.position: row for row in b.keys}
    for x, y in ((row, others[row.position]) for row in a.keys if row.position in others):
        planes = [name for name, p, q in (("K", x.k, y.k), ("V", x.v, y.v)) if p.tobytes() != q.tobytes()]
        if planes:
            key, plane = (x, y), planes[0]
            break
    pairs = zip(a.states, b.states)
    step = next((n for n, ((_, x), (_, y)) in enumerate(pairs) if (x.key, x.bits()) != (y.key, y.bits())), None)
    return Parting(a.q.tobytes() != b.q.tobytes(), choice_parting(a.choice, b.choice), key, plane, step)
