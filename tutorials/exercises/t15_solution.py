"""Solutions of tutorial 15: measuring a small cost."""

import numpy as np


def abba_ratios(seconds: np.ndarray) -> np.ndarray:
    """The ratio of each round of A B B A."""
    a1, b1, b2, a2 = seconds.reshape(-1, 4).T
    return (b1 + b2) / (a1 + a2)


def bootstrap(ratios: np.ndarray, draws: np.ndarray) -> tuple[float, float, float]:
    """(low, middle, high): the median of ratios and its bootstrap interval."""
    medians = np.median(ratios[draws], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(np.median(ratios)), float(high)


def finding(a_b: tuple[float, float, float], a_a: tuple[float, float, float]) -> str:
    """What may be said of B: "slower", "faster" or "nothing"."""
    if a_b[0] > max(1, a_a[2]):
        return "slower"
    if a_b[2] < min(1, a_a[0]):
        return "faster"
    return "nothing"
