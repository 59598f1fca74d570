"""Checked mode: the CPU machine that watches memory, barriers and copies, and counts.

Lock step hides races, so they are found by bookkeeping, a word of shared memory at a time: who wrote it and in which epoch
(an epoch ends at a barrier), who read it, and for a cp.async copy, which commit group of which thread brings it and when
that thread waited for it. The first finding stops the launch with a KernelError that names kernel, both lines, thread and word.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import numpy as np

from .arrays import GlobalArray, SharedArray, flat_index
from .cpu import Launch
from .dialect import INSTRUCTIONS
from .lanes import Mask, Value

NOBODY, SEVERAL = -1, -2
NEVER = -1


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


class Shadow:
    """What is known of each 32-bit word of one shared array; every table is [blocks, words]."""

    def __init__(self, blocks: int, words: int):
        def table(fill: int) -> np.ndarray:
            return np.full((blocks, words), fill, np.int64)

        self.writer, self.write_epoch, self.write_turn, self.write_line = (
            table(NOBODY),
            table(NEVER),
            table(0),
            table(0),
        )
        self.reader, self.read_epoch, self.read_turn, self.read_line = table(NOBODY), table(NEVER), table(0), table(0)
        self.copier, self.group = table(NOBODY), table(NEVER)


class CheckedLaunch(Launch):
    """A launch with its bookkeeping; ``counters`` is shared by all launches of one ``checked()``."""

    counters: Counter[str]

    def __init__(self, *where: Any):
        super().__init__(*where)
        self.epoch = 0
        self.warp_turn = np.zeros(self.size // 32, np.int64)
        self.commits = np.zeros(self.size, np.int64)
        self.waited = np.full((self.size, 8), NEVER, np.int64)
        self.shadows: dict[int, Shadow] = {}

    # --- Barriers ---------------------------------------------------------------------------------------------------------

    def syncthreads(self, mask: Mask) -> None:
        there = self.active(mask).reshape(self.count_of_blocks, self.threads)
        partly = there.any(axis=1) & ~there.all(axis=1)
        if partly.any():
            block = int(partly.argmax())
            thread = int((~there[block]).argmax())
            raise Finding(
                block * self.threads + thread, "barrier reached by a part of the block: this thread is missing"
            )
        self.epoch += 1

    def syncwarp(self, mask: Mask) -> None:
        self.whole_warps(mask, "syncwarp")
        self.warp_turn += self.active(mask).reshape(-1, 32).any(axis=1)

    def whole_warps(self, mask: Mask, name: str) -> None:
        """A collective is for whole warps."""
        if mask is True:
            return
        there = self.active(mask).reshape(-1, 32)
        partly = there.any(axis=1) & ~there.all(axis=1)
        if partly.any():
            warp = int(partly.argmax())
            lane = warp * 32 + int((~there[warp]).argmax())
            raise Finding(lane, f"{name} reached by a part of the warp: this thread is missing")

    def count(self, mask: Mask, name: str) -> None:
        self.counters[name] += int(self.active(mask).sum())

    # --- Arrays -----------------------------------------------------------------------------------------------------------

    def global_array(self, name: str, data: np.ndarray) -> GlobalArray:
        return CheckedGlobal(name, data)

    def shared_array(self, shape: Any, kind: str) -> SharedArray:
        plain = super().shared_array(shape, kind)
        memory = plain.rows.__array_interface__["data"][0]
        if memory not in self.shadows:
            self.shadows[memory] = Shadow(self.count_of_blocks, -(-plain.rows[0].nbytes // 4))
        return CheckedShared(plain, self.shadows[memory])

    def places(self, mask: Mask, index: Value, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(lanes, blocks, words) of the active lanes' accesses to ``width`` words from index."""
        lanes = np.flatnonzero(self.active(mask))
        words = self.full(index)[lanes][:, None] + np.arange(width)
        lanes = np.repeat(lanes, width)
        return lanes, lanes // self.threads, words.reshape(-1)

    # --- Shared memory --------------------------------------------------------------------------------------------------

    def read(self, shadow: Shadow, lanes: np.ndarray, blocks: np.ndarray, words: np.ndarray) -> None:
        """Note reads; find words nobody wrote, copies still on their way, writes of others in this epoch."""
        at = (blocks, words)
        threads = lanes % self.threads
        self.complain(
            shadow.writer[at] == NOBODY, lanes, words, "reads word {word} of shared memory that nothing has written"
        )
        self.check_copies(shadow, at, lanes, words, threads)
        plain = shadow.group[at] == NEVER
        fresh = plain & self.unordered(shadow.writer[at], shadow.write_epoch[at], shadow.write_turn[at], lanes, threads)
        self.complain(fresh, lanes, words, "reads word {word} written by thread {other} on line {line} with no barrier", at,
                      shadow.writer, shadow.write_line)  # fmt: skip
        same = (shadow.read_epoch[at] == self.epoch) & (shadow.reader[at] != threads)
        shadow.reader[at] = np.where(same, SEVERAL, threads)
        shadow.read_epoch[at], shadow.read_turn[at], shadow.read_line[at] = (
            self.epoch,
            self.warp_turn[lanes // 32],
            kernel_line(),
        )
        self.mark_shared_reads(shadow, at, threads)

    def mark_shared_reads(self, shadow: Shadow, at: tuple, threads: np.ndarray) -> None:
        """A word that several lanes read in one statement has several readers."""
        differs = shadow.reader[at] != threads
        shadow.reader[at[0][differs], at[1][differs]] = SEVERAL

    def check_copies(
        self, shadow: Shadow, at: tuple, lanes: np.ndarray, words: np.ndarray, threads: np.ndarray
    ) -> None:
        copied = np.flatnonzero(shadow.group[at] != NEVER)
        if not copied.size:
            return
        where = (at[0][copied], at[1][copied])
        copier, group = shadow.copier[where], shadow.group[where]
        lane_of_copier = where[0] * self.threads + copier
        landed = self.waited[lane_of_copier, group]
        flying = landed == NEVER
        self.complain(flying, lanes[copied], words[copied],
                      "reads word {word} that the cp.async of thread {other} on line {line} may still be bringing: no cp_wait",
                      where, shadow.writer, shadow.write_line)  # fmt: skip
        hidden = (landed == self.epoch) & (copier != threads[copied])
        self.complain(hidden, lanes[copied], words[copied],
                      "reads word {word} copied by thread {other} on line {line} with no barrier after its cp_wait",
                      where, shadow.writer, shadow.write_line)  # fmt: skip

    def write(
        self, shadow: Shadow, lanes: np.ndarray, blocks: np.ndarray, words: np.ndarray, group: np.ndarray | int
    ) -> None:
        """Note writes; find others' reads and writes in this epoch, and two threads writing one word at once."""
        at = (blocks, words)
        threads = lanes % self.threads
        late = self.unordered(shadow.reader[at], shadow.read_epoch[at], shadow.read_turn[at], lanes, threads)
        self.complain(late, lanes, words, "writes word {word} read by thread {other} on line {line} with no barrier", at,
                      shadow.reader, shadow.read_line)  # fmt: skip
        twice = self.unordered(shadow.writer[at], shadow.write_epoch[at], shadow.write_turn[at], lanes, threads)
        self.complain(twice, lanes, words, "writes word {word} written by thread {other} on line {line} with no barrier", at,
                      shadow.writer, shadow.write_line)  # fmt: skip
        shadow.writer[at], shadow.write_epoch[at] = threads, self.epoch
        shadow.write_turn[at], shadow.write_line[at] = self.warp_turn[lanes // 32], kernel_line()
        shadow.copier[at], shadow.group[at] = threads, group
        together = "writes word {word} that thread {other} writes in the same statement"
        self.complain(shadow.writer[at] != threads, lanes, words, together, at, shadow.writer, shadow.write_line)

    def unordered(
        self, who: np.ndarray, epoch: np.ndarray, turn: np.ndarray, lanes: np.ndarray, threads: np.ndarray
    ) -> np.ndarray:
        """Whether an earlier access by another thread has neither a barrier nor, within a warp, a syncwarp after it."""
        other = (epoch == self.epoch) & (who != threads) & (who != NOBODY)
        same_warp = (who >= 0) & (who // 32 == threads // 32)
        return other & ~(same_warp & (turn < self.warp_turn[lanes // 32]))

    def complain(self, bad: np.ndarray, lanes: np.ndarray, words: np.ndarray, message: str, at: tuple | None = None,
                 who: np.ndarray | None = None, line: np.ndarray | None = None) -> None:  # fmt: skip
        """Raise the first bad access as a Finding."""
        if not bad.any():
            return
        i = int(bad.argmax())
        facts: dict[str, Any] = {"word": int(words[i])}
        if at is not None and who is not None and line is not None:
            here = (at[0][i], at[1][i])
            facts["other"] = int(who[here]) if who[here] >= 0 else "several"
            facts["line"] = int(line[here])
        raise Finding(int(lanes[i]), message.format(**facts))

    # --- Instructions that touch shared memory, and the other collectives --------------------------------------------------

    def do_ldmatrix4(self, mask: Mask, memory: Any, word: Value) -> Any:
        return self.matrix_load("ldmatrix4", mask, memory, word)

    def do_ldmatrix4_trans(self, mask: Mask, memory: Any, word: Value) -> Any:
        return self.matrix_load("ldmatrix4_trans", mask, memory, word)

    def matrix_load(self, name: str, mask: Mask, memory: Any, word: Value) -> Any:
        """The load first: it checks the bounds."""
        self.whole_warps(mask, name)
        found = getattr(Launch, f"do_{name}")(self, mask, memory, word)
        self.read(memory.shadow, *self.places(mask, word, 4))
        return found

    def do_cp_async16(
        self, mask: Mask, memory: Any, word: Value, source: Any, source_word: Value, nbytes: Value
    ) -> None:
        Launch.do_cp_async16(self, mask, memory, word, source, source_word, nbytes)  # type: ignore[attr-defined]
        lanes, blocks, words = self.places(mask, word, 4)
        self.write(memory.shadow, lanes, blocks, words, self.commits[lanes])
        self.counters["global_bytes"] += int(self.full(nbytes)[self.active(mask)].sum())

    def do_cp_commit(self, mask: Mask) -> None:
        self.commits += self.active(mask)
        if self.commits.max() + 1 >= self.waited.shape[1]:
            self.waited = np.concatenate([self.waited, np.full_like(self.waited, NEVER)], axis=1)

    def do_cp_wait(self, mask: Mask, pending: Value) -> None:
        """Groups older than the newest ``pending`` have landed, for this lane now, for others after the next barrier."""
        groups = np.arange(self.waited.shape[1])
        landed = self.active(mask)[:, None] & (groups < self.commits[:, None] - int(pending)) & (self.waited == NEVER)
        self.waited[landed] = self.epoch


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
    """A global array whose axes are checked and whose traffic is counted."""

    def load(self, launch: Any, mask: Mask, index: Any) -> Value:
        check_axes(launch, mask, self.shape, index, f"global array {self.name}")
        launch.counters["global_bytes"] += int(launch.active(mask).sum()) * self.dtype.itemsize
        return super().load(launch, mask, index)

    def store(self, launch: Any, mask: Mask, index: Any, value: Value) -> None:
        check_axes(launch, mask, self.shape, index, f"global array {self.name}")
        launch.counters["global_bytes"] += int(launch.active(mask).sum()) * self.dtype.itemsize
        super().store(launch, mask, index, value)


class CheckedShared(SharedArray):
    """A shared array with its shadow."""

    def __init__(self, plain: SharedArray, shadow: Shadow):
        super().__init__(plain.rows, tuple(map(int, plain.shape)))
        self.shadow = shadow

    def accesses(self, launch: CheckedLaunch, mask: Mask, index: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The 32-bit words that the active lanes touch."""
        check_axes(launch, mask, self.shape, index, "a shared array")
        element = launch.full(flat_index(self.shape, index))
        first = element * self.dtype.itemsize // 4
        return launch.places(mask, first, max(1, self.dtype.itemsize // 4))

    def load(self, launch: Any, mask: Mask, index: Any) -> Value:
        found = super().load(launch, mask, index)
        launch.read(self.shadow, *self.accesses(launch, mask, index))
        return found

    def store(self, launch: Any, mask: Mask, index: Any, value: Value) -> None:
        super().store(launch, mask, index, value)
        launch.write(self.shadow, *self.accesses(launch, mask, index), NEVER)
