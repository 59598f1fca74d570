"""Sparse rows list their best blocks, of equal scores the lower, then the tail: what a stable sort gives, whoever else is in
the launch. Dense rows list nothing.
"""

from __future__ import annotations

import numpy as np
import pytest
from mutants import mutate

from kernels_numba.flash_next import select
from kernels_numba.flash_next.select import THREADS, fn_qsa_select, list_width
from kernels_numba.machine import checked
from kernels_numba.streams import COLUMNS, COMMITTED, FIRST
from refengine.verify.selection_oracle import listed_keys

EMPTY = -7
"""What the table holds where nothing is written."""


def lists(scores: np.ndarray, ends: list[int], budget: int, kernel=select.fn_qsa_select_kernel) -> list[list[int]]:
    """What each row lists; a row's scores are a row of ``scores``, each row a stream of its own."""
    count = len(ends)
    listed = np.full((count, list_width(budget)), EMPTY, np.int32)
    streams = np.zeros((count, COLUMNS), np.int64)
    streams[:, FIRST], streams[:, COMMITTED] = np.arange(count), np.array(ends) - 1
    kernel.at()[count, THREADS](listed, scores, streams, np.arange(count, dtype=np.int32), budget)
    return [row[row != EMPTY].tolist() for row in listed]


def wanted(scores: np.ndarray, ends: list[int], budget: int) -> list[list[int]]:
    return [listed_keys(s, end, budget).tolist() if end // 4 > budget else [] for s, end in zip(scores, ends)]


@pytest.mark.parametrize("budget, ends", [(8, [31, 35, 36, 39, 4097]), (512, [2051, 2052, 2055, 9000])])
@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_the_best_blocks_by_a_stable_sort(budget, ends, levels):
    scores = np.random.default_rng(levels).integers(0, levels, (len(ends), max(ends) // 4)).astype(np.float32)
    assert lists(scores, ends, budget) == wanted(scores, ends, budget)


def test_sparse_from_one_block_past_the_budget_on():
    found = lists(np.zeros((3, 600), np.float32), [2051, 2052, 2055], 512)
    assert found[0] == [] and found[1] == list(range(2048))
    assert found[2] == [*range(2048), 2052, 2053, 2054]


def test_all_scores_zero_take_the_lowest_blocks():
    assert lists(np.zeros((1, 25), np.float32), [101], 8) == [[*range(32), 100]]


def test_ties_across_the_cut_go_to_the_lower_blocks():
    scores = np.full((1, 3000), 2, np.float32)
    scores[0, [2999, 1500]] = 3
    assert lists(scores, [12_000], 5) == [[*range(12), *range(6000, 6004), *range(11_996, 12_000)]]


def test_the_rows_own_block_is_a_block_like_any_other():
    scores = np.arange(20, 0, -1, np.int32).astype(np.float32)[None]
    assert lists(scores, [80], 8) == [list(range(32))]


def test_a_block_that_a_later_row_completes_is_not_seen():
    scores = np.full((4, 12), 1, np.float32)
    scores[:, 11] = 9
    listed = np.full((4, list_width(8)), EMPTY, np.int32)
    streams = np.zeros((1, COLUMNS), np.int64)
    streams[0, COMMITTED] = 44
    fn_qsa_select(listed, scores, streams, np.zeros(4, np.int32), 8)
    assert [48 - 4 in row for row in listed[:, :32].tolist()] == [False, False, False, True]


@pytest.mark.parametrize("worst", [np.nan, -np.inf])
def test_what_is_no_score_is_taken_last(worst):
    scores = np.full((2, 30), worst, np.float32)
    scores[0, ::3], scores[1, 29] = -5, -5
    found = lists(scores, [120, 120], 8)
    assert found[0] == [4 * b + i for b in range(0, 24, 3) for i in range(4)]
    assert found[1] == [*range(28), *range(116, 120)]


def test_checked_mode_has_nothing_to_say():
    scores = np.random.default_rng(0).standard_normal((3, 2300), np.float32)
    with checked():
        assert lists(scores, [33, 44, 9200], 8) == wanted(scores, [33, 44, 9200], 8)


@pytest.mark.parametrize("budget, columns, says", [(0, 40, "budget 0: 1 or more"), (8, 35, "35 columns: 36 for")])
def test_what_cannot_be_listed_is_refused(budget, columns, says):
    streams, rows = np.zeros((1, COLUMNS), np.int64), np.zeros(1, np.int32)
    with pytest.raises(ValueError, match=says):
        fn_qsa_select(np.zeros((1, columns), np.int32), np.zeros((1, 9), np.float32), streams, rows, budget)


def test_red_when_ties_go_to_the_higher_block():
    old, new = "equal < spare)", "equal >= all_of_them // TIED - spare)"
    mutant = mutate(select.fn_qsa_select_kernel, old, new)
    scores = np.zeros((1, 25), np.float32)
    assert lists(scores, [101], 8, mutant) != wanted(scores, [101], 8)
