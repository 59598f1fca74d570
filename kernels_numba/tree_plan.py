"""In which order a drafted tree is walked, so that a thread holds few states at once: decided on the host. Spec attention §5.5.

The walk is depth first. A row that has several children saves its state; the child that needs the most slots for its own
branches comes last, and takes the state out of its slot. So the smallest tree that needs m + 1 slots is a row above two
that need m each, and a tree that needs m has 2^(m + 1) - 1 rows or more: a window of 128 rows needs at most 6, whatever
its tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np

from kernels_numba.decode_plan import check_parents

SAVED_SLOTS = 6
"""Slots that every window of decode_plan.MOST_ROWS rows fits in."""
ROW = 0
"""Column of a visit: the window row."""
SOURCE = 1
"""Column of a visit: where the state before the row is, FROM_STATE, FROM_LAST or a slot."""
SAVE = 2
"""Column of a visit: the slot that takes the state after the row, or NOWHERE."""
FROM_STATE = -1
"""The stream's committed state."""
FROM_LAST = -2
"""The state that the visit before has left."""
NOWHERE = -1


@dataclass(frozen=True)
class TreeSchedule:
    """The walks of one launch.

    visits: int32 [W, 3]; the n-th visit of a stream stands at its FIRST + n. saved: slots in use at once, at most.
    """

    visits: Any
    saved: int

    def to(self, xp: Any) -> TreeSchedule:
        """The schedule with its array where kernels run; xp: numpy or cupy."""
        return replace(self, visits=xp.asarray(self.visits))


def plan_trees(parents: Sequence[Sequence[int]], firsts: Sequence[int]) -> TreeSchedule:
    """The schedule of a launch's windows.

    parents: of each stream, by window row, the row it follows, -1: the committed rows. firsts: each stream's first row in
    the launch. Raises ValueError for a parent that is not an earlier row, or a window of more than 128 rows.
    """
    check_parents(parents)
    windows = list(zip(parents, firsts, strict=True))
    visits = np.full((max((first + len(window) for window, first in windows), default=0), 3), NOWHERE, np.int32)
    for window, first in windows:
        visits[first : first + len(window)] = np.array(walk(window), np.int32).reshape(-1, 3)
    return TreeSchedule(visits, int(visits[:, SAVE].max(initial=NOWHERE)) + 1)


def walk(parents: Sequence[int]) -> list[tuple[int, int, int]]:
    """The visits of one window: (row, source, slot to save in); the lowest free slot is taken."""
    children, free = children_of(parents), list(range(SAVED_SLOTS))
    visits, pending = [], [(root, FROM_STATE, False) for root in reversed(children[-1])]
    while pending:
        row, source, is_last = pending.pop()
        if is_last:
            heappush(free, source)
        slot = heappop(free) if len(children[row]) > 1 else NOWHERE
        visits.append((row, source, slot))
        pending += reversed(visits_after(children[row], slot))
    return visits


def visits_after(children: Sequence[int], slot: int) -> list[tuple[int, int, bool]]:
    """(row, source, whether it is the last to read its slot) of a row's children in order; the first follows at once."""
    return [(row, slot if n else FROM_LAST, 0 < n == len(children) - 1) for n, row in enumerate(children)]


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """Children by row, then the roots; those that need the most slots come last."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    need = [0] * len(parents)
    for row in reversed(range(len(parents))):
        children[row].sort(key=lambda child: (need[child], child))
        need[row] = slots_needed([need[child] for child in children[row]])
        children[parents[row]].append(row)
    children[-1].sort()
    return children


def slots_needed(children: Sequence[int]) -> int:
    """Slots that a row's walk takes, from its children's, ascending: all but the last are walked beside its own."""
    return max(children[-1], 1 + children[-2]) if len(children) > 1 else sum(children)
