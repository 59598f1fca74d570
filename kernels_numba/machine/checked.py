"""Checked mode: the CPU machine that watches memory, barriers and copies, and counts.

Lock step hides races, so they are found by bookkeeping: machine/shadow.py keeps it for shared memory, this file feeds it.
The first finding stops the launch with a KernelError that names kernel, both lines, thread and word.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from .arrays import GlobalArray, SharedArray, flat_index
from .cpu import Launch
from .dialect import INSTRUCTIONS
from .emulate import as_bits
from .lanes import Mask, Value
from .shadow import Access, Copies, Finding, Order, Shadow


class CheckedLaunch(Launch):
    """A launch with its bookkeeping; ``counters`` is shared by all launches of one ``checked()``."""

    counters: Counter[str]

    def __init__(self, *where: Any):
        super().__init__(*where)
        self.order, self.copies = Order(self.size, self.threads), Copies(self.size)
        self.dynamic_shadow = Shadow(self.order, self.copies, self.count_of_blocks, self.shared_bytes, 4)

    def count(self, mask: Mask, name: str) -> None:
        self.counters[name] += int(self.active(mask).sum())

    # --- Barriers ---------------------------------------------------------------------------------------------------------

    def syncthreads(self, mask: Mask) -> None:
        reached = "barrier reached by a part of the block"
        self.order.syncthreads(self.whole(mask, self.threads, reached))

    def syncwarp(self, mask: Mask) -> None:
        self.order.syncwarp(self.whole(mask, 32, "syncwarp reached by a part of the warp"))

    def whole(self, mask: Mask, threads: int, reached: str) -> np.ndarray:
        """Which groups of so many threads are there; a group of which only a part is there is a finding."""
        there = self.active(mask).reshape(-1, threads)
        some: np.ndarray = np.any(there, axis=1)
        partly = some & ~there.all(axis=1)
        if partly.any():
            group = int(partly.argmax())
            raise Finding(group * threads + int((~there[group]).argmax()), f"{reached}: this thread is missing")
        return some

    # --- Arrays -----------------------------------------------------------------------------------------------------------

    def global_array(self, name: str, data: np.ndarray) -> GlobalArray:
        return CheckedGlobal(name, data)

    def new_shared_array(self, shape: tuple[int, ...], dtype: np.dtype) -> SharedArray:
        """An array of its own has a shadow of its own; the views of the dynamic memory have one together."""
        plain = super().new_shared_array(shape, dtype)
        if shape != (0,):
            nbytes = plain.rows.shape[1] * dtype.itemsize
            return CheckedShared(plain, Shadow(self.order, self.copies, self.count_of_blocks, nbytes, dtype.itemsize))
        self.dynamic_shadow.refine(dtype.itemsize)
        return CheckedShared(plain, self.dynamic_shadow)

    # --- Instructions that touch shared memory, and the other collectives --------------------------------------------------

    def do_ldmatrix4(self, mask: Mask, memory: Any, word: Value) -> Any:
        return self.matrix_load("ldmatrix4", mask, memory, word)

    def do_ldmatrix4_trans(self, mask: Mask, memory: Any, word: Value) -> Any:
        return self.matrix_load("ldmatrix4_trans", mask, memory, word)

    def matrix_load(self, name: str, mask: Mask, memory: Any, word: Value) -> Any:
        """The load first: it checks the bounds."""
        self.whole_warps(mask, name)
        found = getattr(Launch, f"do_{name}")(self, mask, memory, word)
        memory.shadow.note_read(memory.touched(self, mask, word, 4))
        return found

    def do_cp_async16(
        self, mask: Mask, memory: Any, word: Value, source: Any, source_word: Value, nbytes: Value
    ) -> None:
        Launch.do_cp_async16(self, mask, memory, word, source, source_word, nbytes)  # type: ignore[attr-defined]
        access = memory.touched(self, mask, word, 4)
        memory.shadow.note_write(access, self.copies.commits[access.lanes])
        self.counters["global_bytes"] += int(self.full(nbytes)[self.active(mask)].sum())

    def do_cp_commit(self, mask: Mask) -> None:
        self.copies.commit(self.active(mask))

    def do_cp_wait(self, mask: Mask, pending: Value) -> None:
        self.copies.wait(self.active(mask), int(pending), self.order.number())

    def whole_warps(self, mask: Mask, name: str) -> None:
        """A collective is for whole warps."""
        if mask is not True:
            self.whole(mask, 32, f"{name} reached by a part of the warp")


def _collective(name: str) -> Any:
    plain = getattr(Launch, f"do_{name}")

    def do(launch: CheckedLaunch, mask: Mask, *operands: Value) -> Value:
        launch.whole_warps(mask, name)
        return plain(launch, mask, *operands)

    return do


for _name, _instruction in INSTRUCTIONS.items():
    if _instruction.collective and f"do_{_name}" not in vars(CheckedLaunch):
        setattr(CheckedLaunch, f"do_{_name}", _collective(_name))


def check_axes(launch: CheckedLaunch, mask: Mask, shape: tuple[int, ...], index: Any, what: str) -> None:
    """Each index of a many-dimensional element within its own axis: the flat index alone would hide a column too many."""
    for axis, (i, size) in enumerate(zip(index, shape)) if isinstance(index, tuple) else ():
        lanes = launch.full(i)
        outside = launch.active(mask) & ((lanes < 0) | (lanes >= int(size)))
        if outside.any():
            lane = int(outside.argmax())
            raise Finding(lane, f"index {int(lanes[lane])} is outside axis {axis} of {what}, which has {int(size)}")


class CheckedGlobal(GlobalArray):
    """A global array whose axes are checked, whose stores do not collide, and whose traffic is counted."""

    def load(self, launch: Any, mask: Mask, index: Any) -> Value:
        check_axes(launch, mask, self.shape, index, f"global array {self.name}")
        launch.counters["global_bytes"] += int(launch.active(mask).sum()) * self.dtype.itemsize
        return super().load(launch, mask, index)

    def store(self, launch: Any, mask: Mask, index: Any, value: Value) -> None:
        check_axes(launch, mask, self.shape, index, f"global array {self.name}")
        launch.counters["global_bytes"] += int(launch.active(mask).sum()) * self.dtype.itemsize
        super().store(launch, mask, index, value)
        self.find_lost(launch, mask, flat_index(self.shape, index), launch.full(value, self.dtype))

    def find_lost(self, launch: Any, mask: Mask, element: Value, value: np.ndarray) -> None:
        """Find a value that is not there after its store: another thread's took its place."""
        lanes = np.flatnonzero(launch.active(mask))
        at = launch.full(element)[lanes]
        lost = as_bits(self.flat)[at] != as_bits(value)[lanes]
        if lost.any():
            i = int(lost.argmax())
            place = f"element {int(at[i])} of global array {self.name}"
            raise Finding(
                int(lanes[i]), f"writes {place}, where another thread writes another value in the same statement"
            )


class CheckedShared(SharedArray):
    """A shared array with its shadow."""

    def __init__(self, plain: SharedArray, shadow: Shadow):
        super().__init__(plain.rows, tuple(map(int, plain.shape)))
        self.shadow = shadow

    def touched(self, launch: CheckedLaunch, mask: Mask, element: Value, elements: int = 1) -> Access:
        """The active lanes' accesses to ``elements`` elements from ``element`` on."""
        lanes = np.flatnonzero(launch.active(mask))
        return self.shadow.access(lanes, launch.full(element)[lanes], elements, self.dtype.itemsize)

    def element(self, launch: CheckedLaunch, mask: Mask, index: Any) -> Access:
        """The active lanes' accesses to the element of an index."""
        check_axes(launch, mask, self.shape, index, "a shared array")
        return self.touched(launch, mask, flat_index(self.shape, index))

    def load(self, launch: Any, mask: Mask, index: Any) -> Value:
        found = super().load(launch, mask, index)
        self.shadow.note_read(self.element(launch, mask, index))
        return found

    def store(self, launch: Any, mask: Mask, index: Any, value: Value) -> None:
        super().store(launch, mask, index, value)
        self.shadow.note_write(self.element(launch, mask, index))
