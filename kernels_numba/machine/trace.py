"""Trace mode: the CPU machine that writes down what one block does to memory, and who waits for whom.

Each load, store, copy, barrier, shuffle, matrix load and mma is an event at the kernel's own line. A ``Step`` is what one
statement of the kernel did in one turn of its loops; in it, events of one line and one path of calls are added up to an ``Op``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .arrays import GlobalArray, SharedArray, flat_index
from .banks import requests_and_passes
from .cpu import Launch
from .dialect import INSTRUCTIONS
from .frontend import Program
from .lanes import Mask, Value
from .modes import Grid
from .one_block import OneBlock, one_block
from .place import Spot, Turns, kernel_frames, spot_of, turns_of

Spans = list[tuple[int, int]]
"""Elements of an array, first and one past the last of each run, ascending."""
PIECE_BYTES = 16
"""Of a cp_async copy, and of a row of a matrix load."""
DYNAMIC = "shared"
"""The name of the launch's dynamic shared memory; other shared arrays are named by the function and line of their declaration."""


@dataclass
class Op:
    """Events of one kind on one array from one path of lines, added up.

    path: the kernel's statement, then those of the device functions it is in. turns: of each, at the first event. times: events.
    warps: warps with a lane in it, summed. lanes: lanes, summed. global_bytes, shared_bytes: moved. requests, passes: see
    machine/banks.py. source, target: spans of the elements that were read and written. group: of a copy, the commit group; of a
    wait, how many groups have landed. into: of a copy, the shared array that it writes.
    """

    kind: str
    path: tuple[Spot, ...]
    array: str
    turns: tuple[Turns, ...]
    times: int = 0
    warps: int = 0
    lanes: int = 0
    global_bytes: int = 0
    shared_bytes: int = 0
    requests: int = 0
    passes: int = 0
    group: int = 0
    into: str = ""
    sources: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)

    @property
    def source(self) -> Spans:
        return spans(self.sources)

    @property
    def target(self) -> Spans:
        return spans(self.targets)

    @property
    def conflicts(self) -> int:
        """Passes that bank conflicts cost."""
        return self.passes - self.requests


@dataclass
class Step:
    """What the kernel's statement at a spot did in one turn of the kernel's loops."""

    spot: Spot
    turns: Turns
    ops: dict[tuple, Op] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """An array that the block touched. space: "global" or "shared". shape: as the kernel sees it."""

    name: str
    space: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]


@dataclass
class Trace:
    """What one block did. mode: how it was launched; None where it was not."""

    steps: list[Step] = field(default_factory=list)
    memories: dict[str, Memory] = field(default_factory=dict)
    mode: OneBlock | None = None

    @property
    def program(self) -> Program:
        assert self.mode is not None and self.mode.program is not None
        return self.mode.program

    @property
    def ops(self) -> list[Op]:
        return [op for step in self.steps for op in step.ops.values()]

    def note(self, kind: str, array: str, mask: np.ndarray, **more: int) -> Op:
        """Add an event of the line that runs now. mask: bool [lanes]; more: what it adds to the op."""
        frames = kernel_frames(sys._getframe(1))
        path, turns = tuple(map(spot_of, frames)), turns_of(frames)
        step = self.step(path[0], turns[0])
        key = (kind, path, array, more.get("group"))
        op = step.ops.get(key)
        if op is None:
            op = step.ops[key] = Op(kind, path, array, tuple(turns))
        op.times += 1
        op.warps += int(mask.reshape(-1, 32).any(axis=1).sum())
        op.lanes += int(mask.sum())
        for name, amount in more.items():
            setattr(op, name, amount if name == "group" else getattr(op, name) + amount)
        return op

    def step(self, spot: Spot, turns: Turns) -> Step:
        """The step that runs now: the last one, or a new one."""
        if not self.steps or (self.steps[-1].spot, self.steps[-1].turns) != (spot, turns):
            self.steps.append(Step(spot, turns))
        return self.steps[-1]


def dynamic_name(trace: Trace, dtype: np.dtype) -> str:
    """The dynamic memory's name; of another type than it was first declared with, one that says so."""
    known = trace.memories.get(DYNAMIC)
    return DYNAMIC if known is None or known.dtype == str(dtype) else f"{DYNAMIC} as {dtype}"


def spans(indices: list[np.ndarray]) -> Spans:
    """The runs of consecutive numbers."""
    if not indices:
        return []
    at = np.unique(np.concatenate(indices))
    edges = np.flatnonzero(np.diff(at) != 1)
    firsts, lasts = at[np.concatenate([[0], edges + 1])], at[np.concatenate([edges, [len(at) - 1]])]
    return [(int(a), int(b) + 1) for a, b in zip(firsts, lasts)] if len(at) else []


def pieces(first: np.ndarray, elements: int) -> np.ndarray:
    """``elements`` element numbers from each on."""
    found: np.ndarray = (first[:, None] + np.arange(elements)).reshape(-1)
    return found


# --- The machine ------------------------------------------------------------------------------------------------------


class TracedLaunch(Launch):
    """A launch that notes its events in ``trace``."""

    trace: Trace

    def __init__(self, *where: Any):
        super().__init__(*where)
        self.commits = 0

    def count(self, mask: Mask, name: str) -> None:
        self.trace.note("count", name, self.active(mask))

    def syncthreads(self, mask: Mask) -> None:
        self.trace.note("barrier", "", self.active(mask))

    def syncwarp(self, mask: Mask) -> None:
        self.trace.note("warp barrier", "", self.active(mask))

    # --- Arrays -------------------------------------------------------------------------------------------------------

    def global_array(self, name: str, data: np.ndarray) -> GlobalArray:
        self.trace.memories[name] = Memory(name, "global", str(data.dtype), data.dtype.itemsize, data.shape)
        return TracedGlobal(name, data)

    def shared_array(self, place: str, shape: Any, kind: str) -> SharedArray:
        made = super().shared_array(place, shape, kind)
        if isinstance(made, TracedShared):
            return made
        spot = spot_of(kernel_frames(sys._getframe(1))[-1])
        name = f"{spot.program.name}:{spot.line}" if shape != 0 else dynamic_name(self.trace, made.dtype)
        plain = tuple(map(int, made.shape))
        self.trace.memories[name] = Memory(name, "shared", str(made.dtype), made.dtype.itemsize, plain)
        self.shared[(*self.path, place)] = traced = TracedShared(name, made.rows, plain)
        return traced

    # --- Instructions that touch memory -------------------------------------------------------------------------------

    def do_ldmatrix4(self, mask: Mask, memory: Any, word: Value) -> Any:
        return self.matrix_load("ldmatrix4", mask, memory, word)

    def do_ldmatrix4_trans(self, mask: Mask, memory: Any, word: Value) -> Any:
        return self.matrix_load("ldmatrix4_trans", mask, memory, word)

    def matrix_load(self, name: str, mask: Mask, memory: Any, word: Value) -> Any:
        found = getattr(Launch, f"do_{name}")(self, mask, memory, word)
        memory.note(self, "matrix load", mask, word, PIECE_BYTES)
        return found

    def do_cp_async16(
        self, mask: Mask, memory: Any, word: Value, source: Any, source_word: Value, nbytes: Value
    ) -> None:
        Launch.do_cp_async16(self, mask, memory, word, source, source_word, nbytes)  # type: ignore[attr-defined]
        active, words = self.active(mask), PIECE_BYTES // 4
        reading = active & (self.full(nbytes) != 0)
        op = self.trace.note(
            "copy", source.name, active, group=self.commits, global_bytes=int(reading.sum()) * PIECE_BYTES
        )
        op.into = memory.name
        op.sources.append(pieces(self.full(source_word)[reading], words))
        op.targets.append(pieces(self.full(word)[active], words))
        memory.move(op, self, active, word, PIECE_BYTES)

    def do_cp_commit(self, mask: Mask) -> None:
        self.trace.note("commit", "", self.active(mask), group=self.commits)
        self.commits += 1

    def do_cp_wait(self, mask: Mask, pending: Value) -> None:
        self.trace.note("wait", "", self.active(mask), group=max(0, self.commits - int(pending)))


def _noted(name: str) -> Any:
    plain, kind = getattr(Launch, f"do_{name}"), "mma" if name == "mma" else "shuffle"

    def do(launch: TracedLaunch, mask: Mask, *operands: Value) -> Any:
        launch.trace.note(kind, "", launch.active(mask))
        return plain(launch, mask, *operands)

    return do


for _name, _instruction in INSTRUCTIONS.items():
    if _instruction.collective and f"do_{_name}" not in vars(TracedLaunch):
        setattr(TracedLaunch, f"do_{_name}", _noted(_name))


class TracedGlobal(GlobalArray):
    """A global array whose traffic is noted."""

    def load(self, launch: Any, mask: Mask, index: Any) -> Value:
        found = super().load(launch, mask, index)
        self.note(launch, "global load", mask, index)
        return found

    def store(self, launch: Any, mask: Mask, index: Any, value: Value) -> None:
        super().store(launch, mask, index, value)
        self.note(launch, "global store", mask, index)

    def note(self, launch: TracedLaunch, kind: str, mask: Mask, index: Any) -> None:
        active = launch.active(mask)
        op = launch.trace.note(kind, self.name, active, global_bytes=int(active.sum()) * self.dtype.itemsize)
        touched = op.targets if kind == "global store" else op.sources
        touched.append(launch.full(flat_index(self.shape, index))[active])


class TracedShared(SharedArray):
    """A shared array whose traffic is noted."""

    def __init__(self, name: str, rows: np.ndarray, shape: tuple[int, ...]):
        super().__init__(rows, shape)
        self.name = name

    def load(self, launch: Any, mask: Mask, index: Any) -> Value:
        found = super().load(launch, mask, index)
        self.note(launch, "shared load", mask, flat_index(self.shape, index), self.dtype.itemsize)
        return found

    def store(self, launch: Any, mask: Mask, index: Any, value: Value) -> None:
        super().store(launch, mask, index, value)
        self.note(launch, "shared store", mask, flat_index(self.shape, index), self.dtype.itemsize)

    def note(self, launch: TracedLaunch, kind: str, mask: Mask, element: Value, width: int) -> None:
        """width: bytes a lane, from the element on."""
        active = launch.active(mask)
        op = launch.trace.note(kind, self.name, active)
        touched = op.targets if kind == "shared store" else op.sources
        touched.append(pieces(launch.full(element)[active], max(1, width // self.dtype.itemsize)))
        self.move(op, launch, active, element, width)

    def move(self, op: Op, launch: TracedLaunch, active: np.ndarray, element: Value, width: int) -> None:
        """Add one access to the op's bytes, requests and passes."""
        lanes = np.flatnonzero(active)
        requests, passes = requests_and_passes(lanes, launch.full(element)[lanes] * self.dtype.itemsize, width)
        op.shared_bytes += len(lanes) * width
        op.requests += requests
        op.passes += passes


@contextmanager
def traced(kernel: str, block: Grid = (0, 0, 0)) -> Iterator[Trace]:
    """Inside, one block of the kernel's first launch is traced; the body ends where the block does, see ``one_block``.

    The trace has no ``mode`` where the kernel was not launched. Raises KernelError as launches do.
    """
    trace = Trace()
    launch = type("Traced", (TracedLaunch,), {"trace": trace})
    with one_block(kernel, block, launch) as mode:
        yield trace
    trace.mode = mode if mode.program is not None else None
