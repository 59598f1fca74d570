"""Tests of tutorial 15's exercises."""

import numpy as np

from refengine.lab.exercises import expect, expect_close
from refengine.measure.paired import interval_of, ratios_of


def test_ratios_by_hand(answers):
    """1. abba_ratios: two rounds"""
    seconds = np.array([100.0, 101, 102, 103, 100, 150, 150, 100])
    expect_close("abba_ratios of two rounds", answers.abba_ratios(seconds), np.array([1.0, 1.5]), 1e-12)


def test_ratios_of_many_rounds(answers):
    """1. abba_ratios: as the engine has them"""
    seconds = np.random.default_rng(0).uniform(0.9, 1.1, (50, 4))
    expect_close("abba_ratios of 50 rounds", answers.abba_ratios(seconds.ravel()), ratios_of(seconds), 1e-12)


def test_bootstrap_by_hand(answers):
    """2. bootstrap: four draws of three"""
    ratios, draws = np.array([3.0, 1.0, 2.0]), np.array([[0, 0, 0], [1, 1, 2], [0, 1, 2], [2, 2, 0]])
    found = np.array(answers.bootstrap(ratios, draws))  # medians 3, 1, 2, 2
    expect_close("bootstrap([3, 1, 2], draws)", found, np.array([1.075, 2.0, 2.925]), 1e-12)


def test_bootstrap_of_many(answers):
    """2. bootstrap: as the engine does it"""
    rng = np.random.default_rng(1)
    ratios = rng.normal(1.003, 0.01, 40)
    draws = np.random.default_rng(9).integers(0, 40, (500, 40))
    wanted = interval_of(ratios, seed=9, resamples=500)
    found = np.array(answers.bootstrap(ratios, draws))
    expect_close("bootstrap of 40 ratios", found, np.array([wanted.low, wanted.middle, wanted.high]), 1e-12)


def test_finding(answers):
    """3. finding: slower, faster"""
    quiet = (0.999, 1.0, 1.001)
    expect("finding((1.002, 1.003, 1.004), (0.999, 1, 1.001))", answers.finding((1.002, 1.003, 1.004), quiet), "slower")
    expect("finding((0.990, 0.995, 0.998), (0.999, 1, 1.001))", answers.finding((0.990, 0.995, 0.998), quiet), "faster")


def test_no_finding(answers):
    """3. finding: what may not be said"""
    quiet, loud, biased = (0.999, 1.0, 1.001), (0.99, 1.0, 1.01), (1.003, 1.004, 1.005)
    cases = (
        ("the interval holds 1", (0.998, 1.003, 1.008), quiet),
        ("it lies inside of A/A", (1.002, 1.003, 1.004), loud),
        ("it overlaps A/A", (1.004, 1.006, 1.008), biased),
        ("A/A says 0.4 % of nothing, A/B says no more than 0.1 %", (1.0005, 1.001, 1.0015), biased),
    )
    for what, a_b, a_a in cases:
        expect(f"finding({a_b}, {a_a}), where {what},", answers.finding(a_b, a_a), "nothing")
