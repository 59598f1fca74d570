"""Exercises of tutorial 15: measuring a small cost. Replace each ``raise NotImplementedError`` by your answer."""

import numpy as np


def abba_ratios(seconds: np.ndarray) -> np.ndarray:
    """The ratio of each round of A B B A.

    seconds: float64 [4 · rounds], of all runs in the order in which they ran: A B B A A B B A ... Returns float64 [rounds]: what
    B took by what A took.
    """
    raise NotImplementedError


def bootstrap(ratios: np.ndarray, draws: np.ndarray) -> tuple[float, float, float]:
    """(low, middle, high): the median of ratios and its bootstrap interval.

    ratios: float64 [n]. draws: int64 [resamples, n], each row n indices of ratios. The interval goes from the 2.5th to the 97.5th
    percentile of the rows' medians, as np.quantile has them.
    """
    raise NotImplementedError


def finding(a_b: tuple[float, float, float], a_a: tuple[float, float, float]) -> str:
    """What may be said of B: "slower", "faster" or "nothing".

    a_b, a_a: (low, middle, high) of a ratio. B is slower if the whole interval of A/B lies above 1 and above all of A/A's; faster
    if it lies below both.
    """
    raise NotImplementedError
