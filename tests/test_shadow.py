"""The bookkeeping of checked mode keeps a word's last accesses; it finds what a list of all accesses would."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kernels_numba.machine.shadow import NEVER, Copies, Finding, Order, Shadow

BLOCKS, THREADS, WORDS = 2, 64, 3
LANES = BLOCKS * THREADS
EVENTS, ODDS = ["read", "write", "copy", "wait", "syncthreads", "syncwarp"], [0.25, 0.05, 0.05, 0.15, 0.3, 0.2]


class Everything:
    """All that happened: which lanes met and when; accesses (when, what, lane, word, a copy's group); waits for groups."""

    def __init__(self):
        self.meetings: list[tuple[int, range]] = []
        self.accesses: list[tuple[int, str, int, int, int]] = []
        self.waits: dict[tuple[int, int], int] = {}
        self.now = 0

    def meet(self, lanes: range) -> None:
        self.now += 1
        self.meetings.append((self.now, lanes))

    def wait(self, lanes: range, groups: int) -> None:
        self.now += 1
        for lane in lanes:
            for group in range(groups):
                self.waits.setdefault((lane, group), self.now)

    def access(self, what: str, lanes: np.ndarray, words: np.ndarray, group: int) -> bool:
        """One statement's accesses, noted unless they break a rule; whether they do."""
        self.now += 1
        if any(self.clash(what, int(t), int(w)) for t, w in zip(lanes, words)):
            return True
        self.accesses += [(self.now, what, int(t), int(w), group) for t, w in zip(lanes, words)]
        return False

    def clash(self, what: str, lane: int, word: int) -> bool:
        """Whether an access now breaks a rule against any one before."""
        before = [a for a in self.accesses if a[2] // THREADS == lane // THREADS and a[3] == word]
        for when, did, other, _, group in before:
            if group != NEVER:
                if (other, group) not in self.waits:
                    return True
                when = self.waits[other, group]
            if "write" in (what, did) and other != lane and not self.ordered(when, other, lane):
                return True
        return False

    def ordered(self, when: int, first: int, second: int) -> bool:
        """Whether two lanes have met since."""
        return any(when < met and first in lanes and second in lanes for met, lanes in self.meetings)


class Watched:
    """Random events, told to the bookkeeping under test and to the list of everything."""

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        self.order, self.copies, self.all = Order(LANES, THREADS), Copies(LANES), Everything()
        self.shadow = Shadow(self.order, self.copies, BLOCKS, 4 * WORDS, 4)
        for word in range(WORDS):
            assert not self.access("write", np.array([0, THREADS]), np.full(2, word), NEVER)

    def step(self) -> tuple[str, bool | None]:
        """One event, and of an access whether it is a finding; then neither side has noted it."""
        event = str(self.random.choice(EVENTS, p=ODDS))
        return event, getattr(self, event)()

    def access(self, what: str, lanes: np.ndarray, words: np.ndarray, group: int) -> bool:
        wrong = self.all.access(what, lanes, words, group)
        access = self.shadow.access(lanes, words, 1, 4)
        try:
            if what == "read":
                self.shadow.note_read(access)
            else:
                self.shadow.note_write(access, group)
        except Finding as finding:
            assert wrong, finding
            return True
        assert not wrong
        return False

    def read(self) -> bool:
        """Up to four lanes, most of them neighbours."""
        near, far = self.random.integers(LANES, size=2)
        lanes = np.unique(near ^ self.random.integers(4, size=3))
        lanes = np.unique(np.append(lanes, far)) if self.random.random() < 0.2 else lanes
        return self.access("read", lanes, self.random.integers(WORDS, size=len(lanes)), NEVER)

    def write(self, group: int = NEVER) -> bool:
        lanes = self.random.integers(LANES, size=1)
        return self.access("write", lanes, self.random.integers(WORDS, size=1), group)

    def copy(self) -> bool:
        """A copy by one lane; all lanes commit, so that groups have the same number everywhere."""
        found = self.write(int(self.copies.commits[0]))
        self.copies.commit(np.ones(LANES, np.bool_))
        return found

    def wait(self) -> None:
        """A warp waits for all its copies, or for all but the newest."""
        lanes, pending = self.warp_lanes(), int(self.random.integers(2))
        self.all.wait(lanes, int(self.copies.commits[0]) - pending)
        self.copies.wait(np.isin(np.arange(LANES), lanes), pending, self.order.number())

    def syncthreads(self) -> None:
        block = int(self.random.integers(BLOCKS))
        self.all.meet(range(block * THREADS, (block + 1) * THREADS))
        self.order.syncthreads(np.arange(BLOCKS) == block)

    def syncwarp(self) -> None:
        lanes = self.warp_lanes()
        self.all.meet(lanes)
        self.order.syncwarp(np.arange(LANES // 32) == lanes.start // 32)

    def warp_lanes(self) -> range:
        first = 32 * int(self.random.integers(LANES // 32))
        return range(first, first + 32)


def test_it_finds_what_a_list_of_all_accesses_finds():
    """Sound and faulty accesses of each sort, many of each."""
    seen = Counter[tuple[str, bool | None]]()
    for seed in range(20):
        watched = Watched(seed)
        seen.update(watched.step() for _ in range(250))
    assert min(seen[event, wrong] for event in ("read", "write", "copy") for wrong in (False, True)) > 30, seen


def test_another_type_makes_its_units_smaller():
    """What was known of a word is known of its bytes."""
    order = Order(64, 64)
    shadow = Shadow(order, Copies(64), 1, 12, 8)
    assert (shadow.unit, shadow.units) == (4, 3)
    shadow.note_write(shadow.access(np.array([7]), np.array([1]), 1, 4))
    shadow.refine(1)
    assert (shadow.unit, shadow.units) == (1, 12)
    assert shadow.writer.tolist() == [-1] * 4 + [7] * 4 + [-1] * 4
    shadow.note_read(shadow.access(np.array([7]), np.array([3]), 1, 2))
    with pytest.raises(Finding, match="element 8 of shared memory that nothing has written"):
        shadow.note_read(shadow.access(np.array([7]), np.array([8]), 1, 1))
