"""Paired timing finds a difference that is known, cancels what drifts, and does not find what is not there."""

from __future__ import annotations

import numpy as np
import pytest

from refengine.measure.paired import Interval, interval_of, ratios_of, rounds_of


class Machine:
    """A clock that only runs advance. drift: seconds that each run takes longer than the one before."""

    def __init__(self, drift: float = 0.0, noise: float = 0.0, seed: int = 0):
        self.now, self.runs, self.drift, self.noise = 0.0, "", drift, noise
        self.rng = np.random.default_rng(seed)

    def run(self, name: str, seconds: float) -> None:
        self.now += (seconds + self.drift * len(self.runs)) * (1 + self.noise * self.rng.standard_normal())
        self.runs += name

    def measure(self, rounds: int, a: float, b: float) -> np.ndarray:
        return rounds_of(lambda: self.run("A", a), lambda: self.run("B", b), rounds, lambda: self.now)


def test_the_order_is_abba():
    machine = Machine()
    assert machine.measure(3, 1.0, 2.0).tolist() == [[1.0, 2.0, 2.0, 1.0]] * 3
    assert machine.runs == "ABBAABBAABBA"


def test_a_steady_drift_cancels_in_every_round():
    assert ratios_of(Machine(drift=0.25).measure(8, 100.0, 100.0)).tolist() == [1.0] * 8


def test_a_ratio_is_of_b_by_a():
    assert ratios_of(np.array([[2.0, 3.0, 5.0, 2.0]])).tolist() == [2.0]


def test_equal_ratios_are_a_point():
    assert interval_of(np.full(9, 1.5)) == Interval(1.5, 1.5, 1.5)


def test_the_interval_is_that_of_order_statistics():
    """The median of 101 draws lies below the i-th of 101 as often as a binomial says: 2.5 % at 50 - 1.96 · sqrt(101) / 2."""
    found = interval_of(np.arange(101.0), resamples=20_000)
    assert found.middle == 50 and abs(found.low - 40.2) <= 0.8 and abs(found.high - 59.8) <= 0.8


def test_the_interval_is_repeated_by_its_seed():
    ratios = np.random.default_rng(0).normal(1, 0.1, 21)
    assert interval_of(ratios, 4, 20) == interval_of(ratios, 4, 20) != interval_of(ratios, 5, 20)


@pytest.mark.parametrize("true", [1.0, 1.003])
def test_about_19_of_20_intervals_hold_the_truth(true):
    found = [interval_of(ratios_of(Machine(0.001, 0.005, s).measure(40, 1.0, true)), s, 500) for s in range(200)]
    assert 0.9 <= np.mean([true in one for one in found]) <= 0.99


def test_it_reads_as_a_cost():
    assert str(Interval(0.999, 1.003, 1.0071)) == "+0.30% [-0.10%, +0.71%]"
