"""Tests of tutorial 03's exercises."""

import numpy as np

from kernels_numba.prompt_attention import ITEM, TILE
from refengine.lab.exercises import expect, expect_close
from refengine.verify.attention_oracle import prompt_attention


def test_items_of_the_first_tile(answers):
    """1. item_rows: the first tile"""
    for item, wanted in enumerate([("K", 0, 31), ("K", 32, 63), ("V", 0, 31), ("V", 32, 63)]):
        expect(f"item_rows({item})", answers.item_rows(item), wanted)


def test_items_of_later_tiles(answers):
    """1. item_rows: later tiles"""
    for tile in (1, 7):
        for part in range(4):
            first = tile * TILE + part % 2 * ITEM
            wanted = ("K" if part < 2 else "V", first, first + ITEM - 1)
            expect(f"item_rows({4 * tile + part})", answers.item_rows(4 * tile + part), wanted)


def test_fold_by_hand(answers):
    """2. fold: the tutorial's example"""
    m, total, o = answers.fold(-np.inf, 0.0, np.zeros(1), np.log([1.0, 2.0]), np.array([[4.0], [8.0]]))
    expect_close("(m, l, o) after tile 0", np.array([m, total, *o]), np.array([np.log(2), 1.5, 10]), 1e-12)
    m, total, o = answers.fold(m, total, o, np.log([4.0, 1.0]), np.array([[2.0], [16.0]]))
    expect_close("(m, l, o) after tile 1", np.array([m, total, *o]), np.array([np.log(4), 2, 11]), 1e-12)


def test_fold_keeps_the_larger_maximum(answers):
    """2. fold: a tile whose scores are all smaller than before"""
    m, total, o = answers.fold(np.log(4), 2.0, np.array([11.0]), np.log([1.0, 2.0]), np.array([[4.0], [8.0]]))
    found = np.array([m, total, *o])
    expect_close("(m, l, o) after a tile of small scores", found, np.array([np.log(4), 2.75, 16]), 1e-12)


def test_fold_of_masked_keys(answers):
    """2. fold: keys that are masked, and a tile of nothing else"""
    inf, values = np.inf, np.array([[3.0], [100.0]])
    m, total, o = answers.fold(-inf, 0.0, np.zeros(1), np.array([0.0, -inf]), values)
    expect_close("(m, l, o) with key 1 masked", np.array([m, total, *o]), np.array([0.0, 1, 3]), 1e-12)
    m, total, o = answers.fold(-inf, 0.0, np.zeros(1), np.array([-inf, 0.0]), values)
    expect_close("(m, l, o) with key 0 masked", np.array([m, total, *o]), np.array([0.0, 1, 100]), 1e-12)
    for before in ((0.0, 1.0, 3.0), (-inf, 0.0, 0.0)):
        m, total, o = answers.fold(before[0], before[1], np.array([before[2]]), np.array([-inf, -inf]), values)
        expect("(m, l, o) after a masked tile", (float(m), float(total), float(o[0])), before)


def recorded(k, v, fetched):
    """A fetch that notes what is asked for. k, v: [N, D]."""

    def fetch(tile):
        fetched.append(int(tile))
        part = np.zeros((2, TILE, k.shape[1]))
        rows = slice(TILE * tile, min(TILE * (tile + 1), len(k)))
        part[:, : max(0, rows.stop - rows.start)] = k[rows], v[rows]
        return part

    return fetch


def test_attend_is_attention(answers):
    """3. attend: rows of a text of 150 tokens"""
    q, k, v = np.random.default_rng(0).standard_normal((3, 150, 1, 8)) * 3
    wanted = prompt_attention(q, k, v, committed=0, scale=8**-0.5).out
    for row in (0, 63, 64, 127, 128, 149):
        found = answers.attend(q[row, 0], recorded(k[:, 0], v[:, 0], []), row)
        expect_close(f"attend of row {row}", found, wanted[row, 0], 1e-12)


def test_attend_of_large_scores(answers):
    """3. attend: rows of 16 numbers, scores of thousands"""
    q, k, v = np.random.default_rng(2).standard_normal((3, 100, 1, 16))
    for size in (1, 1000):
        wanted = prompt_attention(size * q, k, v, committed=0, scale=1 / 4).out
        for row in (0, 64, 99):
            found = answers.attend(size * q[row, 0], recorded(k[:, 0], v[:, 0], []), row)
            expect_close(f"attend of row {row}", found, wanted[row, 0], 1e-9)


def test_attend_fetches_no_more(answers):
    """3. attend: the tiles that it fetches"""
    k, v = np.random.default_rng(1).standard_normal((2, 300, 8))
    for row, wanted in ((0, [0]), (63, [0]), (64, [0, 1]), (200, [0, 1, 2, 3])):
        fetched = []
        answers.attend(np.ones(8), recorded(k, v, fetched), row)
        expect(f"the tiles that row {row} fetches", fetched, wanted)
