"""The walk of a drafted tree: every row once, each from the state after its parent, in at most 6 slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_numba.decode_plan import MOST_ROWS, chain_tables, tree_tables
from kernels_numba.streams import COLUMNS, FIRST, ROWS
from kernels_numba.tree_plan import FROM_LAST, FROM_STATE, NOWHERE, SAVED_SLOTS, TreeSchedule, plan_trees

BINARY = [(row - 1) // 2 for row in range(127)]
"""Of 127 rows no tree needs more slots."""


def windows(most: int = MOST_ROWS) -> st.SearchStrategy[list[int]]:
    """Parents of a window: random ones, and those of long branches and of bushes."""
    lengths = st.integers(0, most)
    anywhere = lengths.flatmap(lambda n: st.tuples(*(st.integers(-1, row - 1) for row in range(n))).map(list))
    near = lengths.flatmap(lambda n: st.tuples(*(st.integers(max(row - 3, -1), row - 1) for row in range(n))).map(list))
    return anywhere | near | st.builds(lambda n, k: [(row - 1) // k for row in range(n)], lengths, st.integers(1, 5))


def states_before(schedule: TreeSchedule, first: int, rows: int) -> dict[int, int]:
    """Row -> whose state it starts from, by doing what the visits say."""
    found, slots, last = {}, {}, None
    for row, source, slot in schedule.visits[first : first + rows].tolist():
        assert row not in found and (source != FROM_LAST or last is not None)
        found[row] = {FROM_STATE: -1, FROM_LAST: last}.get(source, slots.get(source))
        if slot != NOWHERE:
            slots[slot] = row
        last = row
    return found


@given(st.lists(windows(), max_size=4), st.integers(0, 3))
def test_each_row_starts_from_the_state_after_its_parent(parents: list[list[int]], gap: int) -> None:
    firsts = [gap * (s + 1) + sum(map(len, parents[:s])) for s in range(len(parents))]
    schedule = plan_trees(parents, firsts)
    assert schedule.saved <= SAVED_SLOTS and schedule.visits.dtype == np.int32
    for window, first in zip(parents, firsts, strict=True):
        assert states_before(schedule, first, len(window)) == dict(enumerate(window))


def test_a_chain_and_roots_need_no_slot() -> None:
    chain, roots = plan_trees([[-1, 0, 1]], [0]), plan_trees([[-1, -1, -1]], [0])
    assert chain.visits.tolist() == [[0, FROM_STATE, NOWHERE], [1, FROM_LAST, NOWHERE], [2, FROM_LAST, NOWHERE]]
    assert roots.visits.tolist() == [[row, FROM_STATE, NOWHERE] for row in range(3)]
    assert chain.saved == roots.saved == 0


def test_the_lowest_slot_is_taken_again_by_the_child_that_came_out_of_it() -> None:
    schedule = plan_trees([[-1, 0, 0, 2, 2]], [0])
    assert schedule.visits.tolist() == [[0, -1, 0], [1, -2, -1], [2, 0, 0], [3, -2, -1], [4, 0, -1]]
    assert schedule.saved == 1


@pytest.mark.parametrize("rows, slots", [(1, 0), (2, 0), (3, 1), (7, 2), (14, 2), (15, 3), (126, 5), (127, 6)])
def test_m_slots_need_a_tree_of_two_to_the_m_plus_one_rows(rows: int, slots: int) -> None:
    assert plan_trees([BINARY[:rows]], [0]).saved == slots


@given(windows())
def test_slots_double_the_rows(parents: list[int]) -> None:
    saved = plan_trees([parents], [0]).saved
    assert saved == 0 or len(parents) >= 2 ** (saved + 1) - 1


# --- Tables of attention ----------------------------------------------------------------------------------------------


def stream_table(*rows: int) -> np.ndarray:
    streams = np.zeros((len(rows), COLUMNS), np.int64)
    streams[:, ROWS], streams[:, FIRST] = rows, np.cumsum((0, *rows))[:-1]
    return streams


@given(st.lists(windows(), max_size=3))
def test_a_path_leads_from_a_root_to_the_row(parents: list[list[int]]) -> None:
    streams = stream_table(*map(len, parents))
    rows, paths, depths = tree_tables(streams, parents)
    for row in range(len(rows)):
        window, first = parents[rows[row]], int(streams[rows[row], FIRST])
        path = paths[row, : depths[row]].tolist()
        assert [-1, *path[:-1]] == [window[n] for n in path] and path[-1] == row - first
        assert (paths[row, depths[row] :] == -1).all()


@pytest.mark.parametrize("rows", [(), (1,), (3, 0, 128, 2)])
def test_a_tree_that_is_a_chain_has_the_tables_of_a_chain(rows: tuple[int, ...]) -> None:
    streams = stream_table(*rows)
    tree = tree_tables(streams, [list(range(-1, n - 1)) for n in rows])
    for found, wanted in zip(tree, chain_tables(streams), strict=True):
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted)


@pytest.mark.parametrize("parents", [[-1, 1], [-1, 2, 0], [-2], [0]])
def test_a_parent_that_is_not_an_earlier_row_is_refused(parents: list[int]) -> None:
    streams = stream_table(1, len(parents))
    with pytest.raises(ValueError, match=r"stream 1: row \d follows row .*: a parent is an earlier row of the window"):
        tree_tables(streams, [[-1], parents])
    with pytest.raises(ValueError, match="a parent is an earlier row"):
        plan_trees([[-1], parents], [0, 1])


def test_windows_that_are_too_long_and_parents_of_other_rows_are_refused() -> None:
    long = list(range(-1, 128))
    with pytest.raises(ValueError, match="a window of 129 rows: decode takes 128 at most"):
        plan_trees([long], [0])
    with pytest.raises(ValueError, match="a window of 129 rows"):
        tree_tables(stream_table(129), [long])
    for parents in ([[-1]], [[-1], [-1]], [[-1, 0], [], []]):
        with pytest.raises(ValueError, match="with an entry for each of its ROWS"):
            tree_tables(stream_table(2, 0), parents)
