"""Tests of tutorial 13's exercises."""

import numpy as np

from kernels_numba.flash_next.select import fn_qsa_select, list_width
from kernels_numba.streams import COLUMNS, COMMITTED
from refengine.lab.exercises import expect


def test_keys_read_at_the_switch(answers):
    """1. keys_read: around the switch from dense to sparse"""
    for position, wanted in ((0, 1), (2047, 2048), (2050, 2051), (2051, 2048), (2052, 2049), (262_143, 2048)):
        expect(f"keys_read({position}, 512)", answers.keys_read(position, 512), wanted)


def test_keys_read_of_a_small_budget(answers):
    """1. keys_read: a budget of one block"""
    expect(
        "keys_read of 0 .. 12", [answers.keys_read(p, 1) for p in range(13)], [1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5]
    )


def test_cut_by_hand(answers):
    """2. cut: the tutorial's example"""
    scores = np.array([0, 1, 1, 3], np.float32)
    for budget, wanted in ((1, 3.0), (2, 1.0), (3, 1.0), (4, 0.0)):
        expect(f"cut([0, 1, 1, 3], {budget})", float(answers.cut(scores, budget)), wanted)


def test_cut_of_equal_scores(answers):
    """2. cut: all scores zero"""
    expect("cut([0, 0, 0, 0, 0], 2)", float(answers.cut(np.zeros(5, np.float32), 2)), 0.0)


def test_taken_by_hand(answers):
    """3. taken: the tutorial's example"""
    scores = np.array([0, 1, 1, 3], np.float32)
    expect("taken([0, 1, 1, 3], 1.0, 2)", answers.taken(scores, 1.0, 2), [1, 3])
    expect("taken([0, 1, 1, 3], 1.0, 3)", answers.taken(scores, 1.0, 3), [1, 2, 3])


def test_taken_of_equal_scores(answers):
    """3. taken: all scores zero"""
    expect("taken([0, 0, 0, 0, 0], 0.0, 2)", answers.taken(np.zeros(5, np.float32), 0.0, 2), [0, 1])


def test_together_they_are_the_kernel(answers):
    """3. cut and taken: random scores with many ties, against the real kernel"""
    rng = np.random.default_rng(1)
    blocks, budget = np.arange(30, 46), 20
    scores = np.maximum(rng.integers(-3, 4, (len(blocks), 45)), 0).astype(np.float32)
    streams, rows = np.zeros((len(blocks), COLUMNS), np.int64), np.arange(len(blocks), dtype=np.int32)
    streams[:, 0], streams[:, COMMITTED] = rows, 4 * blocks - 1
    listed = np.full((len(blocks), list_width(budget)), -1, np.int32)
    fn_qsa_select(listed, scores, streams, rows, budget)
    for row, complete in enumerate(blocks.tolist()):
        own = scores[row, :complete]
        found = answers.taken(own, answers.cut(own, budget), budget)
        expect(f"taken(scores of {complete} blocks, their cut, {budget})", found, (listed[row, :80:4] // 4).tolist())
