"""Exercises of tutorial 08: two paths round differently. Replace each ``raise NotImplementedError`` by your answer."""

from collections.abc import Callable, Sequence

import numpy as np


def fold_lanes(x: np.ndarray) -> np.float32:
    """The lanes' sums, added as ``head_sum`` adds them.

    x: float32 [lanes], a power of two of them. In the first round lane i and lane i + lanes / 2 add theirs, then those at half
    the distance, down to 1. Each sum is one float32 addition.
    """
    raise NotImplementedError


def path_of(mode: str, phase: str, on_pages: Sequence[bool]) -> str:
    """The kernels that every row of a pass takes: "prompt", "decode" or "scalar".

    mode: "tiles", "scalar-batch" or "scalar-decode". phase: "prompt" or "decode". on_pages: of each stream that has rows in the
    pass, whether it is on pages. "scalar-batch" changes both phases, "scalar-decode" decode passes only.
    """
    raise NotImplementedError


def changed_by_company(serve: Callable[[list[str]], list[np.ndarray]], names: Sequence[str]) -> list[str]:
    """The streams whose result has other bits together than alone, in order.

    serve: runs some streams in one pass and returns the result of each, an array. Serve all together once, and each alone once.
    Beware: +0 == -0, and a NaN is not equal to itself.
    """
    raise NotImplementedError
