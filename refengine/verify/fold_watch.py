"""The fold of one output element, tile by tile, as the attention kernels have it in their registers: m, l and o.

The kernel's own lock-step run is watched: each time it comes to the head of its loop over tiles, the lane that owns the element
is read. Spec attention §1, §2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import numpy as np

from kernels_numba.decode_attention import TILE as DECODE_TILE
from kernels_numba.decode_scalar import LANES
from kernels_numba.machine import cpu
from kernels_numba.machine.frontend import Program
from kernels_numba.machine.modes import Grid
from kernels_numba.machine.place import program_of
from kernels_numba.prompt_attention import TILE, WARP_ROWS, WARPS
from kernels_numba.streams import FIRST, ROWS


@dataclass(frozen=True)
class Element:
    """One element of an attention output. row: of the pass. group: query heads a KV head. dims: head_dim."""

    row: int
    head: int
    dim: int
    group: int
    dims: int

    @property
    def kv_head(self) -> int:
        return self.head // self.group

    @property
    def place(self) -> int:
        """Of the head in its group."""
        return self.head % self.group


@dataclass(frozen=True)
class FoldState:
    """The fold before any key (key None), or after the tile that starts at ``key``: running maximum, sum, unscaled output.

    key: a position; of sparse attention an entry of the row's list.
    """

    key: int | None
    m: np.float32
    l: np.float32  # noqa: E741
    o: np.float32

    def bits(self) -> tuple[str, str, str]:
        """m, l and o in hex."""
        return tuple(f"0x{int(x.view(np.uint32)):08x}" for x in map(np.float32, (self.m, self.l, self.o)))  # type: ignore[return-value]


@dataclass
class Fold:
    """The states of one program, in order. kernel: by name. block: of its grid."""

    kernel: str
    block: Grid
    states: list[FoldState] = field(default_factory=list)


@dataclass(frozen=True)
class Seat:
    """Who holds an element: a block, a thread of it, and what that thread calls m, l and o."""

    block: Grid
    lane: int
    read: Callable[[Mapping[str, Any]], tuple[Any, Any, Any]]
    key: Callable[[Mapping[str, Any]], int]


Arguments = Mapping[str, Any]


# --- Where each kernel keeps an element -------------------------------------------------------------------------------


def prompt_seats(e: Element, args: Arguments, grid: Grid) -> Iterator[Seat]:
    """prompt_attention: 16 rows a warp, HPC heads a block; the launch is one stream's."""
    first, rows = (int(args["streams"][args["stream"], column]) for column in (FIRST, ROWS))
    if not first <= e.row < first + rows:
        return
    per_kv_head = grid[1] // int(args["kv_heads"])
    heads = e.group // per_kv_head
    block_row, row = divmod(e.row - first, WARP_ROWS * WARPS // heads)
    warp = row // WARP_ROWS * heads + e.place % heads
    part, g = divmod(row % WARP_ROWS, 8)
    at = (e.dim // 16, 4 * (e.dim % 16 // 8) + 2 * part + e.dim % 2)
    m, total = (("m_low", "l_low"), ("m_high", "l_high"))[part]
    yield Seat(
        (block_row, e.kv_head * per_kv_head + e.place // heads, 0),
        32 * warp + 4 * g + e.dim % 8 // 2,
        lambda held: (held[m], held[total], held["o"].data[at]),
        lambda held: TILE * int(held["tile"]),
    )


def tile_seat(block: Grid, pair: int, e: Element, key: Callable[[Mapping[str, Any]], int]) -> Seat:
    """decode_rows and decode_partial: pair 0 to 15 of a block, a quarter of the columns a warp."""
    part, g = divmod(pair, 8)
    warp, column = divmod(e.dim, e.dims // 4)
    at = (column // 8, 2 * part + column % 2)
    return Seat(
        block, 32 * warp + 4 * g + column % 8 // 2,
        lambda held: (held["state"].data[part], held["state"].data[2 + part], held["o"].data[at]), key,
    )  # fmt: skip


def rows_seats(e: Element, args: Arguments, grid: Grid) -> Iterator[Seat]:
    """decode_rows: a program for each whole chunk or group of the row's stream."""
    for number, (stream, pair0, _) in enumerate(np.asarray(args["items"]).tolist()):
        first, rows = (int(args["streams"][stream, column]) for column in (FIRST, ROWS))
        pair = (e.row - first) * e.group + e.place - pair0
        if first <= e.row < first + rows and 0 <= pair < 16:
            yield tile_seat((number * int(args["kv_heads"]) + e.kv_head, 0, 0), pair, e, lambda held: int(held["here"]))


def partial_seats(e: Element, args: Arguments, grid: Grid) -> Iterator[Seat]:
    """decode_partial: the rest of the committed keys and the row's own path, in at most two programs."""
    for z in range(grid[2]):
        yield tile_seat((e.row, e.kv_head, z), e.place, e, lambda held: int(held["here"]))


def scalar_seats(e: Element, args: Arguments, grid: Grid) -> Iterator[Seat]:
    """decode_scalar: 16 lanes a head, two columns a word; a program for each chunk."""
    word = e.dim // 2
    at = 2 * (word // LANES) + e.dim % 2
    for chunk in range(grid[2]):
        yield Seat(
            (e.row, e.kv_head, chunk), LANES * e.place + word % LANES,
            lambda held: (held["state"].data[0], held["state"].data[1], held["o"].data[at]),
            lambda held: int(held["key0"]),
        )  # fmt: skip


def chunk_seats(e: Element, args: Arguments, grid: Grid) -> Iterator[Seat]:
    """fn_attn_chunks: a program for each 512 entries of the row's list; keys are counted by entry."""
    for chunk in range(grid[2]):
        yield tile_seat((e.row, e.kv_head, chunk), e.place, e, lambda held: int(held["first"]) - DECODE_TILE)


SEATS: dict[str, tuple[str, Callable[[Element, Arguments, Grid], Iterator[Seat]]]] = {
    "prompt_attention": ("tile", prompt_seats),
    "decode_rows": ("tile", rows_seats),
    "decode_partial": ("tile", partial_seats),
    "decode_scalar": ("n", scalar_seats),
    "fn_attn_chunks_kernel": ("tile", chunk_seats),
}
"""Of each attention kernel the variable of its loop over tiles, and who holds an element."""
SLICED = ("decode_scalar", "fn_attn_chunks_kernel")
"""Kernels of which a pass has a launch for each slice of its rows; grid.x is those of the slice."""


# --- Watching ---------------------------------------------------------------------------------------------------------


class FoldWatch:
    """A mode of the CPU machine: launches run as they are; the blocks that hold an element run once more, watched.

    folds: what they held, in order of their launch, which is that of their keys. done: rows of earlier launches of a kernel
    of SLICED.
    """

    def __init__(self, element: Element):
        self.element, self.folds, self.done = element, list[Fold](), 0

    def run(self, program: Program, grid: Grid, threads: int, shared_bytes: int, args: tuple) -> None:
        cpu.run(program, cpu.fast(program), grid, threads, shared_bytes, args)
        self.watch(program, grid, threads, shared_bytes, args)

    def beside_gpu(self, program: Program, grid: Grid, threads: int, shared_bytes: int, args: tuple) -> None:
        """After a launch on a GPU: the same here, on copies of the arrays."""
        self.watch(program, grid, threads, shared_bytes, tuple(a.get() if hasattr(a, "get") else a for a in args))

    def watch(self, program: Program, grid: Grid, threads: int, shared_bytes: int, args: tuple) -> None:
        if program.name not in SEATS:
            return
        variable, seats = SEATS[program.name]
        element = self.element
        if program.name in SLICED:
            element = replace(element, row=element.row - self.done)
            self.done += grid[0]
            if not 0 <= element.row < grid[0]:
                return
        for seat in seats(element, dict(zip(program.params, args)), grid):
            fold = Fold(program.name.removesuffix("_kernel"), seat.block)
            watched = watching(cpu.stepped(program), program, variable, seat, fold)
            cpu.run(program, watched, grid, threads, shared_bytes, args, only=seat.block)
            if len(fold.states) > 1:
                self.folds.append(fold)


def watching(
    function: Callable[..., Any], program: Program, variable: str, seat: Seat, fold: Fold
) -> Callable[..., Any]:
    """The lock-step function, its fold noted each time that it stands at the head of its loop over tiles."""
    head = loop_head(program, variable)

    def note(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and frame.f_lineno == head:
            fold.states.append(state_of(frame.f_locals, variable, seat))
        return note

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return note if program_of(frame) is program else None

    def watched(*args: Any) -> Any:
        before = sys.gettrace()
        sys.settrace(enter)
        try:
            return function(*args)
        finally:
            sys.settrace(before)

    return watched


def loop_head(program: Program, variable: str) -> int:
    """The line of the kernel's outermost loop over this variable."""
    loops = [s for s in program.counted.body if type(s).__name__ == "For" and s.target.id == variable]  # type: ignore[attr-defined]
    return loops[0].lineno


def state_of(held: Mapping[str, Any], variable: str, seat: Seat) -> FoldState:
    """What the seat's lane holds."""
    values = [np.float32(x if np.ndim(x) == 0 else x[seat.lane]) for x in seat.read(held)]
    return FoldState(None if held[variable] is None else seat.key(held), *values)
