"""Faults in a session of sparse attention: each must show in an array, in the bound, or in the guards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from backends.base import Kept
from backends.page_copies import EXPONENTS, INDEX, POOLED, ROWS, parts
from refengine.verify.sparse_bits import FENCE, Case, Form, Session, SparseBench, Step, same_bits, unequal, worst_of

KEYS, VALUES = 0, 1
"""Planes of cached rows."""
FORM = Form("paged", 16)
"""What faults are planted in."""
SHORT = 256
"""Keys of a row, at most, of which each counts so much that another one's value leaves the bound."""
Plant = Callable[[Session], None]


@dataclass(frozen=True)
class Control:
    """A fault and where it shows. plant: of a session that is filled. shows: arrays of the prompt pass or of what is stored."""

    name: str
    plant: Plant
    shows: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Reference:
    """A case's window: its steps, its streams in the end, and as they were before the first pass that attends."""

    steps: tuple[Step, ...]
    kept: tuple[Kept, ...]
    filled: tuple[Kept, ...]


# --- Plants -------------------------------------------------------------------------------------------------------------


def other_streams_page(session: Session) -> None:
    pages, columns = session.backend.pages, session.backend.columns
    pages[0] = int(pages[columns])


def exchanged_pages(session: Session) -> None:
    pages = session.backend.pages
    first, second = int(pages[0]), int(pages[1])
    pages[0], pages[1] = second, first


def copied_row(name: str, plane: int, target: int, source: int) -> Plant:
    """A row of the first stream's cache becomes another one of it, in every head; below 0: from the last one back."""

    def plant(session: Session) -> None:
        last = session.streams[0].committed
        for head in range(session.backend.shape.kv_heads if name == ROWS else 1):
            to, here = (row_units(session, name, plane, head, row % last) for row in (target, source))
            session.backend.arena.words[to] = session.backend.arena.words[here]
        if name == ROWS and session.backend.sizes.kv == "fp8":
            copied_exponents(session, plane, target % last, source % last)

    return plant


def copied_exponents(session: Session, plane: int, target: int, source: int) -> None:
    """The exponents of a row go with its codes."""
    units = session.backend.arena.words.view(np.uint8)
    for head in range(session.backend.shape.kv_heads):
        to, here = (row_units(session, EXPONENTS, plane, head, row) for row in (target, source))
        units[to] = units[here]


def row_units(session: Session, name: str, plane: int, head: int, row: int) -> slice:
    """Where a row of a part lies in the arena, in the part's units."""
    made = session.backend
    part = next(p for p in parts(made.shape, made.sizes.kv) if p.name == name)
    a_page = made.positions // part.a_row
    page = session.held(0)[row // a_page] * made.page_words * part.a_word
    start = page + int(part.planes(made.shape, made.positions, made.sizes.kv)[plane])
    start += (head * a_page + row % a_page) * part.width
    return slice(start, start + part.width)


CONTROLS = (
    Control("the other stream's first page in a page table", other_streams_page, ("scores", "out")),
    Control("the first two pages exchanged in a page table", exchanged_pages, ("scores",)),
    Control("a key that is another position's", copied_row(ROWS, KEYS, 5, 9), ("out",)),
    Control("a value that is another position's", copied_row(ROWS, VALUES, 5, 9), ("out",)),
    Control("a pooled key that is another block's", copied_row(POOLED, 0, 0, 1), ("scores",)),
    Control("a raw key of an incomplete block that is another position's", copied_row(INDEX, 0, -1, 0), ("pooled",)),
)
"""The last one shows where the prompt pass that attends begins inside a block."""


# --- Guards -------------------------------------------------------------------------------------------------------------


def before_the_arena(session: Session) -> None:
    session.backend.arena.room[FENCE - 1] = 0  # type: ignore[attr-defined]


def page_of_nobody(session: Session) -> None:
    made = session.backend
    free = next(page for page in range(made.pool.count) if not made.pool.holders[page])  # type: ignore[attr-defined]
    made.arena.words[free * made.page_words + 7] = 0


def behind_the_last_position(session: Session) -> None:
    """The slot after the first stream's last position, of the first head's keys: in a page that it holds, or in its window."""
    row = session.case.ends[0]
    assert row % session.backend.positions, "the last page has room"
    session.backend.arena.words[row_units(session, ROWS, KEYS, 0, row)] = 0


GUARDS = (
    Control("a word before the arena", before_the_arena, ("guards",)),
    Control("a word of a page that nobody holds", page_of_nobody, ("guards",)),
    Control("a row behind a stream's last position", behind_the_last_position, ("guards",)),
)


# --- Runs ---------------------------------------------------------------------------------------------------------------


def run_controls(bench: SparseBench, kv: str, case: Case, reference: Reference) -> Iterator[tuple[str, bool]]:
    """(fault, whether it came out red). None does where the same without a fault is not equal."""
    sound = not differing(planted(bench, kv, case, reference, lambda session: None), reference)
    for control in CONTROLS:
        steps = planted(bench, kv, case, reference, control.plant)
        found = differing(steps, reference)
        yield control.name, sound and all(any(f.startswith(name) for f in found) for name in control.shows)
        if case.length <= SHORT and control.plant is other_streams_page:
            worst = worst_of(steps[0], reference.steps[0], reference.kept, bench.shape)
            yield f"{control.name}, by the bound", sound and max(worst) > 1
    for guard in GUARDS:
        yield guard.name, guarded(bench, kv, case, guard.plant) > 0


def planted(bench: SparseBench, kv: str, case: Case, reference: Reference, plant: Plant) -> tuple[Step, Step]:
    """The prompt pass, and what is stored after it, of a session with a fault."""
    session = Session(bench, FORM, kv, case, 0, reference.filled)
    plant(session)
    return next(session.steps()), session.stored()


def differing(steps: tuple[Step, Step], reference: Reference) -> list[str]:
    """Arrays of a prompt pass that are not the reference's; of what is stored, pooled rows, as far as both have them."""
    prompt, stored = steps
    found = unequal(prompt, reference.steps[0])
    for n in (0, 1):
        name = f"{POOLED} of stream {n}"
        mine, wanted = stored.arrays[name], reference.steps[-1].arrays[name]
        if not same_bits(mine, np.ascontiguousarray(wanted[:, : mine.shape[1]])):
            found.append(name)
    return found


def guarded(bench: SparseBench, kv: str, case: Case, plant: Plant) -> int:
    """Strays of a session whose streams hold pages and no rows, with a fault; 0 where they are there without it."""
    session = Session(bench, FORM, kv, case, 0)
    for stream, end in zip(session.streams, case.ends, strict=True):
        stream.grow(end)
    if session.strays():
        return 0
    plant(session)
    return session.strays()
