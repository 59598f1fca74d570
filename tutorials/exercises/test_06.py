"""Tests of tutorial 06's exercises."""

import numpy as np

from kernels_numba.decode_plan import plan_decode
from kernels_numba.streams import COLUMNS, COMMITTED, ROWS
from refengine.lab.exercises import expect, expect_close
from refengine.verify.attention_oracle import attend


def planned(committed, rows):
    """(groups, slots) as the engine's plan has them."""
    stream = np.zeros((1, COLUMNS), np.int64)
    stream[0, COMMITTED], stream[0, ROWS] = committed, rows
    plan = plan_decode(stream, 4, 1, 64)
    return int(plan.groups[0]), plan.slots[0]


def test_slots_of_the_tutorial(answers):
    """1. slots: the tutorial's table"""
    for committed, rows, wanted in (
        (700, 1, (0, 2)),
        (10_000, 1, (0, 20)),
        (10_000, 16, (4, 8)),
        (131_072, 1, (64, 65)),
    ):
        expect(f"slots({committed}, {rows})", answers.slots(committed, rows), wanted)


def test_slots_as_the_plan(answers):
    """1. slots: at the edges of chunks and groups, as the engine's plan"""
    for committed in (0, 1, 511, 512, 1022, 2047, 2048, 8191, 8192, 131_071):
        for rows in (0, 1, 2, 15, 16, 32, 64, 128):
            expect(f"slots({committed}, {rows})", answers.slots(committed, rows), planned(committed, rows))


def test_fold_by_hand(answers):
    """2. fold: the tutorial's example"""
    A, B = (np.log(2), 1.5, np.array([10.0])), (np.log(4), 1.25, np.array([6.0]))
    for one, other in ((A, B), (B, A)):
        m, total, o = answers.fold(one, other)
        expect_close("(m, l, o) of both", np.array([m, total, *o]), np.array([np.log(4), 2, 11]), 1e-12)


def test_fold_of_empty_parts(answers):
    """2. fold: empty parts"""
    empty, part = (-np.inf, 0.0, np.zeros(2)), (-3.0, 1.5, np.array([1.0, 2.0]))
    for one, other, wanted in ((empty, part, part), (part, empty, part), (empty, empty, empty)):
        m, total, o = answers.fold(one, other)
        what = f"(m, l, o) of parts with l = {one[1]} and {other[1]}"
        expect(what, [float(m), float(total), *o.tolist()], [*wanted[:2], *wanted[2].tolist()])


def written(tree):
    """The calls of fold that made a tree, as one would type them; a tree is a name or (part, other)."""
    return f"{tree}" if not isinstance(tree, tuple) else f"fold({written(tree[0])}, {written(tree[1])})"


def plain(tree):
    """A tree without folds into nothing."""
    if not isinstance(tree, tuple):
        return tree
    part, other = map(plain, tree)
    return other if part == "empty" else (part, other)


def engine_tree(count):
    """The tree of so many chunks, made the long way: four to a group."""
    row = "empty"
    for first in range(0, count, 4):
        group = "empty"
        for number in range(first, min(first + 4, count)):
            group = (group, f"c{number}")
        row = (row, group)
    return row


def expect_order(answers, count):
    """merge of so many chunks folds in the order of the tree; folds into nothing more or less do not matter."""
    wanted = engine_tree(count)
    found = answers.merge([f"c{n}" for n in range(count)], lambda part, other: (part, other), "empty")
    right = plain(found) == plain(wanted)
    expect(f"merge of {count} chunk{'s' * (count != 1)}", written(found), written(found if right else wanted))


def test_merge_has_the_order_of_the_tree(answers):
    """3. merge: the order in which it folds"""
    first, second = ((("c0", "c1"), "c2"), "c3"), ((("c4", "c5"), "c6"), "c7")
    trees = {1: "c0", 4: first, 6: (first, ("c4", "c5")), 9: ((first, second), "c8")}
    for count, tree in trees.items():
        assert plain(engine_tree(count)) == tree
        expect_order(answers, count)


def test_merge_of_many_groups(answers):
    """3. merge: many groups, one after the other; and no chunks"""
    for count in (21, 0):
        expect_order(answers, count)


def test_zero_values_are_no_empty_part(answers):
    """2. fold: a part whose values are zero counts"""
    zero, part = (0.0, 1.0, np.zeros(1)), (0.0, 1.0, np.array([4.0]))
    for one, other in ((zero, part), (part, zero)):
        m, total, o = answers.fold(one, other)
        expect_close("(m, l, o) of both", np.array([m, total, *o]), np.array([0.0, 2, 4]), 1e-12)


def test_merge_is_attention(answers):
    """3. merge: with your fold, a row of 3,000 keys"""
    q, k, v = (np.random.default_rng(n).standard_normal((count, 1, 8)) for n, count in enumerate((1, 3000, 3000)))
    scores, chunks = k[:, 0] @ q[0, 0] * 8**-0.5, []
    for first in range(0, 3000, 512):
        part = slice(first, first + 512)
        p = np.exp(scores[part] - scores[part].max())
        chunks.append((scores[part].max(), p.sum(), p @ v[part, 0]))
    _, total, o = answers.merge(chunks, answers.fold, (-np.inf, 0.0, np.zeros(8)))
    wanted = attend(q, k, v, np.ones((1, 3000), bool), 8**-0.5).out[0, 0]
    expect_close("o / l of the row", o / total, wanted, 1e-12)
