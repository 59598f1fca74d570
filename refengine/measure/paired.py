"""Two things timed against each other, A and B: rounds of A B B A, the ratio of each round, and how sure their median is.

Whatever changes slowly while the rounds run, the clock of the machine, its heat, its company, meets both alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
ORDER = "ABBA"
"""Of the runs of a round: what grows steadily while it lasts adds the same to both."""


@dataclass(frozen=True)
class Interval:
    """Where a ratio lies: of 20 such intervals about 19 hold the true one."""

    low: float
    middle: float
    high: float

    def __contains__(self, ratio: object) -> bool:
        return isinstance(ratio, (int, float)) and self.low <= ratio <= self.high

    def __str__(self) -> str:
        """As a cost in percent."""
        return f"{self.middle - 1:+.2%} [{self.low - 1:+.2%}, {self.high - 1:+.2%}]"


def rounds_of(
    a: Callable[[], Any], b: Callable[[], Any], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> Array:
    """Seconds of each run, in the order in which they ran: float64 [rounds, 4].

    Neither a nor b may return before its work is done. Run both once before, so that nothing is compiled here.
    """
    runs = [a if arm == "A" else b for arm in ORDER]
    return np.array([[seconds_of(run, clock) for run in runs] for _ in range(rounds)])


def seconds_of(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    run()
    return clock() - began


def ratios_of(seconds: Array) -> Array:
    """B's seconds by A's, round by round: float64 [rounds]. seconds: of ``rounds_of``."""
    in_a = np.array([arm == "A" for arm in ORDER])
    return seconds[:, ~in_a].sum(axis=1) / seconds[:, in_a].sum(axis=1)


def interval_of(ratios: Array, seed: int = 0, resamples: int = 2000, level: float = 0.95) -> Interval:
    """The median of ratios that do not depend on one another, with its bootstrap interval.

    The ratios are drawn anew from themselves, as many as there are, ``resamples`` times; the middle ``level`` of the medians is
    the interval.
    """
    drawn = np.random.default_rng(seed).integers(0, len(ratios), (resamples, len(ratios)))
    medians = np.median(ratios[drawn], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(np.median(ratios)), float(high))
