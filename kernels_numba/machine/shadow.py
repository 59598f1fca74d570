"""What checked mode knows of shared memory: who touched each word last, and whether a barrier lies between.

Accesses are numbered in the order that lock step runs them. A thread's access comes after another thread's if the block has
met at a syncthreads in between, or, where both are of one warp, the warp at a syncwarp. What a cp.async copy brings is there
once the thread that copied has waited for it, and for others once a barrier has followed that wait.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

NOBODY, SEVERAL = -1, -2
NEVER = -1
WORD = 4


class Finding(Exception):
    """Something a correct kernel does not do. lane: which lane of the launch was caught."""

    def __init__(self, lane: int, message: str):
        super().__init__(message)
        self.lane = lane


def kernel_line() -> int:
    """The line of the kernel that is being run."""
    frame = sys._getframe(1)
    while frame is not None and "__lockstep__" not in frame.f_globals:
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_lineno if frame is not None else 0


class Order:
    """The order that barriers give to what a launch does. lines: the kernel's line of each numbered access and wait."""

    def __init__(self, lanes: int, threads: int):
        self.threads, self.lines = threads, list[int]()
        self.block_met, self.warp_met = np.zeros(lanes // threads, np.int64), np.zeros(lanes // 32, np.int64)

    def number(self) -> int:
        """The number of an access that happens now."""
        self.lines.append(kernel_line())
        return len(self.lines) - 1

    def syncthreads(self, blocks: np.ndarray) -> None:
        self.block_met[blocks] = len(self.lines)

    def syncwarp(self, warps: np.ndarray) -> None:
        self.warp_met[warps] = len(self.lines)

    def before(self, number: np.ndarray, same_warp: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Whether a barrier lies between the access of that number and now. same_warp: it was by a lane of this warp."""
        return (number < self.block_met[lanes // self.threads]) | (same_warp & (number < self.warp_met[lanes // 32]))


class Copies:
    """The commit groups of each lane's cp.async copies. landed: [lanes, groups], the number of the lane's wait for them."""

    def __init__(self, lanes: int):
        self.commits = np.zeros(lanes, np.int64)
        self.landed = np.full((lanes, 8), NEVER, np.int64)

    def commit(self, active: np.ndarray) -> None:
        self.commits += active
        if self.commits.max() >= self.landed.shape[1]:
            self.landed = np.concatenate([self.landed, np.full_like(self.landed, NEVER)], axis=1)

    def wait(self, active: np.ndarray, pending: int, number: int) -> None:
        """All groups but the newest ``pending`` have landed."""
        old = np.arange(self.landed.shape[1]) < self.commits[:, None] - pending
        self.landed[active[:, None] & old & (self.landed == NEVER)] = number


@dataclass(frozen=True)
class Access:
    """One statement's accesses to an array. lanes: whose; at: which units of its shadow; itemsize: the array's, in bytes."""

    lanes: np.ndarray
    at: np.ndarray
    itemsize: int

    def only(self, some: np.ndarray) -> Access:
        return Access(self.lanes[some], self.at[some], self.itemsize)


class Shadow:
    """Who wrote and who read each unit of a piece of shared memory; every table is flat, [blocks × units].

    A unit is a 32-bit word, or an element where elements are smaller. Of the reads since the last barrier, ``reader`` keeps
    the lane and ``read_warp`` the warp, SEVERAL where they differ.
    """

    TABLES = ("writer", "written", "group", "reader", "read_warp", "read")

    def __init__(self, order: Order, copies: Copies, blocks: int, nbytes: int, itemsize: int):
        self.order, self.copies = order, copies
        self.unit = min(itemsize, WORD)
        self.units = nbytes // self.unit

        def table(fill: int) -> np.ndarray:
            return np.full(blocks * self.units, fill, np.int64)

        self.writer, self.written, self.group = table(NOBODY), table(NEVER), table(NEVER)
        self.reader, self.read_warp, self.read = table(NOBODY), table(NOBODY), table(NEVER)

    def refine(self, itemsize: int) -> None:
        """Make the units no larger than these elements: another type looks at the same memory."""
        parts = max(1, self.unit // itemsize)
        self.unit, self.units = self.unit // parts, self.units * parts
        for name in self.TABLES:
            setattr(self, name, np.repeat(getattr(self, name), parts))

    def access(self, lanes: np.ndarray, element: np.ndarray, elements: int, itemsize: int) -> Access:
        """The lanes' accesses to ``elements`` elements from ``element`` on."""
        wide = itemsize // self.unit
        at = (lanes // self.order.threads * self.units + element * wide)[:, None] + np.arange(elements * wide)
        return Access(np.repeat(lanes, elements * wide), at.reshape(-1), itemsize)

    def note_read(self, access: Access) -> None:
        """Find what nobody wrote and writes that are not over; then note the reads."""
        lanes, at = access.lanes, access.at
        self.complain(self.writer[at] == NOBODY, access, "reads {what} of shared memory that nothing has written")
        self.find_open_writes(access, "reads")
        warps = lanes // 32
        reader, warp = self.reader[at], self.read_warp[at]
        counts = ~self.order.before(self.read[at], warp == warps, lanes)
        self.reader[at] = np.where(counts & (reader != lanes), SEVERAL, lanes)
        self.read_warp[at] = np.where(counts & (warp != warps), SEVERAL, warps)
        self.read[at] = self.order.number()
        self.reader[at[self.reader[at] != lanes]] = SEVERAL
        self.read_warp[at[self.read_warp[at] != warps]] = SEVERAL

    def note_write(self, access: Access, group: np.ndarray | int = NEVER) -> None:
        """Find reads and writes that are not over and two lanes that write one place; then note the writes.

        group: of a copy, the commit group of each access.
        """
        lanes, at = access.lanes, access.at
        read, reader = self.read[at], self.reader[at]
        late = (reader != lanes) & ~self.order.before(read, self.read_warp[at] == lanes // 32, lanes)
        self.complain(late, access, "writes {what} read by {who} on line {line} with no barrier", reader, read)
        self.find_open_writes(access, "writes")
        self.writer[at], self.written[at], self.group[at] = lanes, self.order.number(), group
        writer = self.writer[at]
        self.complain(writer != lanes, access, "writes {what} that {who} writes in the same statement", writer)

    def find_open_writes(self, access: Access, verb: str) -> None:
        """Find stores of others with no barrier since, and copies that are still on their way."""
        lanes, at = access.lanes, access.at
        writer, written, group = self.writer[at], self.written[at], self.group[at]
        copied = group != NEVER
        open_stores = ~copied & (writer != lanes) & ~self.order.before(written, writer // 32 == lanes // 32, lanes)
        self.complain(
            open_stores, access, verb + " {what} written by {who} on line {line} with no barrier", writer, written
        )
        if copied.any():
            self.find_open_copies(access.only(copied), verb, writer[copied], written[copied], group[copied])

    def find_open_copies(
        self, access: Access, verb: str, copier: np.ndarray, started: np.ndarray, group: np.ndarray
    ) -> None:
        """Until its cp_wait nobody may touch what a copy brings; from there on its thread, behind a barrier the others."""
        lanes, landed = access.lanes, self.copies.landed[copier, group]
        flying = verb + " {what} that the cp.async of {who} on line {line} may still be bringing: no cp_wait"
        self.complain(landed == NEVER, access, flying, copier, started)
        hidden = (copier != lanes) & ~self.order.before(landed, copier // 32 == lanes // 32, lanes)
        unseen = verb + " {what} copied by {who} on line {line} with no barrier after its cp_wait"
        self.complain(hidden, access, unseen, copier, started)

    def complain(
        self, bad: np.ndarray, access: Access, message: str, who: np.ndarray | None = None,
        number: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Raise the first bad access as a Finding. who, number: the lane and number of the access that it meets."""
        if not bad.any():
            return
        i = int(bad.argmax())
        element = int(access.at[i] % self.units) * self.unit // access.itemsize
        facts: dict[str, Any] = {"what": f"{'word' if access.itemsize == WORD else 'element'} {element}"}
        if who is not None:
            facts["who"] = "several threads" if who[i] == SEVERAL else f"thread {who[i] % self.order.threads}"
        if number is not None:
            facts["line"] = self.order.lines[number[i]]
        raise Finding(int(access.lanes[i]), message.format(**facts))
