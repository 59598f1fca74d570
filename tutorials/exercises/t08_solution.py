"""Solutions of tutorial 08: two paths round differently."""

from collections.abc import Callable, Sequence

import numpy as np


def fold_lanes(x: np.ndarray) -> np.float32:
    """The lanes' sums, added as ``head_sum`` adds them."""
    while len(x) > 1:
        half = len(x) // 2
        x = x[:half] + x[half:]
    return x[0]


def path_of(mode: str, phase: str, on_pages: Sequence[bool]) -> str:
    """The kernels that every row of a pass takes: "prompt", "decode" or "scalar"."""
    sends = {"tiles": (), "scalar-batch": ("prompt", "decode"), "scalar-decode": ("decode",)}[mode]
    return "scalar" if any(on_pages) and phase in sends else phase


def changed_by_company(serve: Callable[[list[str]], list[np.ndarray]], names: Sequence[str]) -> list[str]:
    """The streams whose result has other bits together than alone, in order."""
    together = serve(list(names))
    return [name for name, found in zip(names, together) if found.tobytes() != serve([name])[0].tobytes()]
