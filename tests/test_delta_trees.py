"""Gated DeltaNet over drafted windows: a row of a tree has the bits of the row alone behind its committed ancestors.

A tree that is a chain equals the chain, streams together equal each alone, and what is accepted becomes the state that
its rows leave as a plain window.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from buffers import BF16, Output, assert_same_bits
from delta_data import HK, HV, C, Layer, Rows, delta_rows, layer, mixed_rows, table, weights
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mutants import mutate

from kernels_numba import delta_trees
from kernels_numba import gated_delta_net as gdn
from kernels_numba.decode_plan import tree_tables
from kernels_numba.machine import checked
from kernels_numba.tree_plan import plan_trees
from refengine.verify import oracles
from refengine.verify.bounds import worst_fraction

Parents = Sequence[Sequence[int]]
DRAWN = settings(
    max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
BINARY = [(row - 1) // 2 for row in range(127)]
TREES = [[-1, 0, 0, 1, 1, 2, 2, -1, 7, 4, 4, 9], [], [-1, 0, 1, 2], [-1, 0, 0]]
"""Windows of one launch: branches under branches and a second root, no rows, a chain, a fork."""


@st.composite
def windows(draw: st.DrawFn, most: int) -> list[int]:
    """Parents of a window: any, or near ones, which make long branches."""
    rows, reach = draw(st.integers(0, most)), draw(st.sampled_from([1, 2, 4, most]))
    return [draw(st.integers(max(row - reach, -1), row - 1)) for row in range(rows)]


def counts(parents: Parents) -> list[int]:
    return [len(window) for window in parents]


def paths_of(parents: Parents) -> list[list[int]]:
    """Rows of the launch from the root to each row, stream by stream."""
    edges, found = np.cumsum([0, *counts(parents)]).tolist(), []
    for first, window in zip(edges, parents, strict=False):
        paths: list[list[int]] = []
        for row, parent in enumerate(window):
            paths.append([*(paths[parent] if parent >= 0 else []), first + row])
        found += paths
    return found


def chosen(parents: Parents, kept: Sequence[int]) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """(last, kept, accepted rows of the launch) of each stream: the start of its deepest path, ``kept`` rows at most."""
    paths, edges = paths_of(parents), np.cumsum([0, *counts(parents)]).tolist()
    last = [max(range(a, b), key=lambda row: len(paths[row]), default=0) for a, b in pairwise(edges)]
    rows = [paths[row][:n] if window else [] for row, n, window in zip(last, kept, parents, strict=True)]
    return np.array(last, np.int32), np.array(counts(rows), np.int32), rows


def owners(parents: Parents) -> np.ndarray:
    """Stream of each row."""
    return np.repeat(np.arange(len(parents)), counts(parents))


# --- Step -------------------------------------------------------------------------------------------------------------


def walked(rows: Rows, at: Layer, parents: Parents, kernel=delta_trees.step_tree_kernel) -> np.ndarray:
    """y: bf16 [W, HV·128]; the states stay as they are."""
    y, before, streams = Output((len(rows.qkv), HV * 128)), at.copy(), table(*counts(parents))[0]
    schedule = plan_trees(parents, streams[:, 0].tolist())
    args = (rows.qkv, rows.decay, rows.beta, streams, at.runs, schedule.visits)
    kernel.at(HK=HK, HV=HV)[(len(parents), HV, 16), gdn.THREADS](y.array, at.state_words, *args)
    assert_same_bits(at.memory, before.memory)
    return y.checked()


def stepped(rows: Rows, at: Layer, *rows_of: int, commit: bool) -> np.ndarray:
    y = Output((len(rows.qkv), HV * 128))
    gdn.step(y.array, at.state_words, rows.qkv, rows.decay, rows.beta, table(*rows_of)[0], at.runs, commit)
    return y.checked()


def row_by_row(rows: Rows, before: Layer, parents: Parents) -> np.ndarray:
    """Each row alone, in a state of its own that its parent's row has left."""
    y, after = np.empty((len(rows.qkv), HV * 128), BF16), []
    for row, (path, owner) in enumerate(zip(paths_of(parents), owners(parents), strict=True)):
        at = after[path[-2]].copy() if len(path) > 1 else before.alone(owner)
        y[row] = stepped(rows.cut(row, row + 1), at, 1, commit=True)[0]
        after.append(at)
    return y


@DRAWN
@given(st.lists(windows(24), min_size=1, max_size=3), st.integers(0, 99))
@example([BINARY], 0)
@example([[-1] * 128], 0)
@example([list(range(-1, 127)), [-1, 0, 0]], 0)
def test_a_row_of_a_tree_equals_the_row_alone_behind_its_ancestors(parents: Parents, seed: int) -> None:
    rows, at = delta_rows(sum(counts(parents)), seed), layer(len(parents), seed)
    assert_same_bits(walked(rows, at, parents), row_by_row(rows, at, parents))


@DRAWN
@given(windows(128), st.integers(0, 99))
def test_trees_of_up_to_128_rows(parents: list[int], seed: int) -> None:
    rows, at = delta_rows(len(parents), seed), layer(1, seed)
    assert_same_bits(walked(rows, at, [parents]), row_by_row(rows, at, [parents]))


@pytest.mark.parametrize("lengths", [(1,), (16,), (5, 0, 9)])
def test_a_tree_that_is_a_chain_equals_the_chain(lengths: tuple[int, ...]) -> None:
    rows, at = delta_rows(sum(lengths)), layer(len(lengths))
    chain = [list(range(-1, n - 1)) for n in lengths]
    assert_same_bits(walked(rows, at, chain), stepped(rows, at, *lengths, commit=False))


def test_trees_of_streams_together_equal_each_alone() -> None:
    rows, at = delta_rows(sum(counts(TREES))), layer(len(TREES))
    together, edges = walked(rows, at, TREES), np.cumsum([0, *counts(TREES)])
    for s, (first, stop) in enumerate(pairwise(edges)):
        if TREES[s]:
            assert_same_bits(walked(rows.cut(first, stop), at.stream(s), [TREES[s]]), together[first:stop])


def test_a_tree_passes_checked_mode() -> None:
    parents = [[-1, 0, 0, 2, 2], [], [-1, -1]]
    rows, at = delta_rows(7), layer(3)
    with checked():
        found = walked(rows, at, parents)
    assert_same_bits(found, walked(rows, at, parents))


def test_every_path_of_a_tree_lies_within_the_bound() -> None:
    parents = TREES[0]
    rows, at = delta_rows(len(parents)), layer(1)
    found, (q, k, v) = walked(rows, at, [parents]).reshape(-1, HV, 128), rows.heads()
    for path in paths_of([parents]):
        given_rows = (q[path], k[path], v[path], rows.decay[path], rows.beta[path])
        (value, bound), _ = oracles.delta_rule(at.states[at.slots[0]], *given_rows, oracles.STEP_DEPTH)
        assert worst_fraction(found[path[-1]], value[-1], bound[-1]) <= 1


@pytest.mark.parametrize(
    "old, new",
    [
        ("first + visits[first + i, ROW]", "first + i"),
        ("        if slot != NOWHERE:\n", "        if slot > 0:\n"),
        ("saved[slot, r, i] = s[r, i]", "saved[0, r, i] = s[r, i]"),
        ("        elif source >= 0:\n", "        elif source > 0:\n"),
        ("s[r, i] = saved[slot, r, i]", "s[r, i] = saved[slot, 1 - r, i]"),
    ],
    ids=["rows in the window's order", "slot 0 not saved", "every branch saved in slot 0", "slot 0 not taken", "rows"],
)
def test_red_when_a_walk_is_wrong(old: str, new: str) -> None:
    rows, at = delta_rows(sum(counts(TREES))), layer(len(TREES))
    found = walked(rows, at, TREES, mutate(delta_trees.step_tree_kernel, old, new))
    assert (found.view(np.uint16) != walked(rows, at, TREES).view(np.uint16)).any()


def test_the_host_function_launches_the_walk() -> None:
    rows, at, y = delta_rows(sum(counts(TREES))), layer(len(TREES)), Output((sum(counts(TREES)), HV * 128))
    streams = table(*counts(TREES))[0]
    schedule = plan_trees(TREES, streams[:, 0].tolist()).to(np)
    delta_trees.step_tree(y.array, at.state_words, rows.qkv, rows.decay, rows.beta, streams, at.runs, schedule)
    assert_same_bits(y.checked(), walked(rows, at, TREES))


# --- Replay -----------------------------------------------------------------------------------------------------------


def replayed(rows: Rows, before: Layer, parents: Parents, kept: Sequence[int], run=delta_trees.replay) -> Layer:
    """The states after the accepted rows."""
    at, streams = before.copy(), table(*counts(parents))[0]
    _, paths, _ = tree_tables(streams, parents)
    last, most, _ = chosen(parents, kept)
    run(at.state_words, rows.qkv, rows.decay, rows.beta, streams, at.runs, paths, last, most)
    return at.checked(before)


def committed(rows: Rows, before: Layer, accepted: list[list[int]]) -> Layer:
    """The states after the accepted rows as a plain window."""
    at, order = before.copy(), np.array([row for path in accepted for row in path], int)
    window = Rows(rows.qkv[order], rows.decay[order], rows.beta[order])
    stepped(window, at, *map(len, accepted), commit=True)
    return at


@DRAWN
@given(
    st.lists(st.tuples(windows(40), st.integers(0, 20)), min_size=1, max_size=3).filter(lambda d: any(w for w, _ in d)),
    st.integers(0, 99),
)
@example([(window, n) for window, n in zip(TREES, (4, 0, 4, 0), strict=True)], 0)
@example([(list(range(-1, 127)), 128)], 0)
def test_a_replay_equals_the_accepted_rows_as_a_window(drawn: list[tuple[list[int], int]], seed: int) -> None:
    parents, kept = [window for window, _ in drawn], [n for _, n in drawn]
    rows, before = delta_rows(sum(counts(parents)), seed), layer(len(parents), seed)
    found = replayed(rows, before, parents, kept)
    assert_same_bits(found.states, committed(rows, before, chosen(parents, kept)[2]).states)


def test_a_row_that_follows_a_replay_has_the_bits_of_the_row_in_the_tree() -> None:
    parents = [TREES[0]]
    rows, before = delta_rows(len(parents[0])), layer(1)
    drafted, path = walked(rows, before, parents), paths_of(parents)[10]
    at = replayed(rows, before, parents, [len(path) - 1])
    assert_same_bits(stepped(rows.cut(10, 11), at, 1, commit=False)[0], drafted[10])


def test_a_replay_of_no_rows_changes_nothing() -> None:
    rows, before = delta_rows(sum(counts(TREES))), layer(len(TREES))
    found = replayed(rows, before, TREES, [0] * len(TREES))
    assert_same_bits(found.states, before.states)


def test_a_replay_passes_checked_mode() -> None:
    rows, before = delta_rows(4), layer(2)
    with checked():
        found = replayed(rows, before, [[-1, 0, 0], [-1]], [2, 0])
    assert_same_bits(found.states, replayed(rows, before, [[-1, 0, 0], [-1]], [2, 0]).states)


@pytest.mark.parametrize(
    "old, new",
    [
        ("for i in range(n):", "for i in range(n - 1):"),
        ("paths[last[owner], i]", "paths[last[owner] - 1, i]"),
        ("streams[owner, FIRST] + paths", "paths"),
        ("mem0, mem1, beta[row, head])\n        store", "mem0, mem0, beta[row, head])\n        store"),
    ],
    ids=["a row too few", "another path", "rows of the launch's start", "the memory of one value for two"],
)
def test_red_when_a_replay_is_wrong(old: str, new: str) -> None:
    rows, before = delta_rows(sum(counts(TREES))), layer(len(TREES))
    mutant = mutate(delta_trees.replay_kernel, old, new)

    def run(states: np.ndarray, *given_arrays: np.ndarray) -> None:
        mutant.at(HK=HK, HV=HV)[(len(TREES), HV, 16), gdn.THREADS](states, *given_arrays)

    found, kept = replayed(rows, before, TREES, [4, 0, 4, 2], run), [4, 0, 4, 2]
    wanted = replayed(rows, before, TREES, kept)
    assert (found.states[before.slots] != wanted.states[before.slots]).any()


# --- Convolution ------------------------------------------------------------------------------------------------------


def convolved(mixed: np.ndarray, at: Layer, parents: Parents, kernel=gdn.conv_path_kernel) -> np.ndarray:
    out, streams = Output((len(mixed), C)), table(*counts(parents))[0]
    rows, paths, depths = tree_tables(streams, parents)
    args = (mixed, at.history_words, weights().taps, rows, streams, at.runs, paths, depths)
    kernel.at(HK=HK, HV=HV)[(len(mixed), 2), gdn.THREADS](out.array, *args)
    return out.checked()


def plain(mixed: np.ndarray, at: Layer, *rows_of: int) -> np.ndarray:
    out, (streams, rows) = Output((len(mixed), C)), table(*rows_of)
    gdn.conv(out.array, mixed, at.history_words, weights().taps, rows, streams, at.runs, HK)
    return out.checked()


def kept_history(mixed: np.ndarray, before: Layer, parents: Parents, kept: Sequence[int]) -> Layer:
    at, streams = before.copy(), table(*counts(parents))[0]
    last, most, _ = chosen(parents, kept)
    gdn.commit_conv_path(at.history_words, mixed, streams, at.runs, tree_tables(streams, parents)[1], last, most, C)
    return at.checked(before)


@DRAWN
@given(st.lists(windows(24), min_size=1, max_size=3), st.integers(0, 99))
@example([BINARY, TREES[0]], 0)
def test_a_convolved_row_of_a_tree_equals_the_row_alone_behind_its_ancestors(parents: Parents, seed: int) -> None:
    mixed, at = mixed_rows(sum(counts(parents)), seed), layer(len(parents), seed)
    found = convolved(mixed, at, parents)
    for row, (path, owner) in enumerate(zip(paths_of(parents), owners(parents), strict=True)):
        alone = at.alone(owner)
        gdn.commit_conv(alone.history_words, mixed[path[:-1]], table(len(path) - 1)[0], alone.runs, C)
        assert_same_bits(plain(mixed[row : row + 1], alone, 1)[0], found[row])


@pytest.mark.parametrize("lengths", [(1,), (7,), (5, 0, 2, 1)])
def test_a_convolution_along_a_chain_equals_the_chains(lengths: tuple[int, ...]) -> None:
    mixed, at = mixed_rows(sum(lengths)), layer(len(lengths))
    chain = [list(range(-1, n - 1)) for n in lengths]
    assert_same_bits(convolved(mixed, at, chain), plain(mixed, at, *lengths))


def test_the_host_function_launches_the_convolution() -> None:
    mixed, at, out = mixed_rows(sum(counts(TREES))), layer(len(TREES)), Output((sum(counts(TREES)), C))
    streams = table(*counts(TREES))[0]
    rows, paths, depths = tree_tables(streams, TREES)
    gdn.conv_path(out.array, mixed, at.history_words, weights().taps, rows, streams, at.runs, paths, depths, HK)
    assert_same_bits(out.checked(), convolved(mixed, at, TREES))


@pytest.mark.parametrize("kept", [(0, 0, 0, 0), (1, 0, 2, 0), (5, 0, 4, 2)])
def test_a_committed_path_leaves_its_last_three_rows(kept: tuple[int, ...]) -> None:
    mixed, before = mixed_rows(sum(counts(TREES))), layer(len(TREES))
    at = kept_history(mixed, before, TREES, kept)
    for slot, path in zip(at.slots, chosen(TREES, kept)[2], strict=True):
        assert_same_bits(at.histories[slot], np.concatenate([before.histories[slot], mixed[path, :C]])[-3:])


@pytest.mark.parametrize(
    "old, new",
    [
        ("first + paths[row, index] if", "first + index if"),
        ("before_on_path(paths, row, streams[owner, FIRST],", "before_on_path(paths, row, int64(0),"),
        ("path_source(paths, row, first, index - 1)", "path_source(paths, row, first, index - 2)"),
    ],
    ids=["the window's order", "rows of the launch's start", "the row before the row left out"],
)
def test_red_when_taps_are_off_the_path(old: str, new: str) -> None:
    mixed, at = mixed_rows(sum(counts(TREES))), layer(len(TREES))
    found = convolved(mixed, at, TREES, mutate(gdn.conv_path_kernel, old, new))
    assert (found.view(np.uint16) != convolved(mixed, at, TREES).view(np.uint16)).any()
