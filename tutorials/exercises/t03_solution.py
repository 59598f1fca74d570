"""Solutions of tutorial 03: the prompt kernel, tile by tile."""

import numpy as np

TILE, ITEM = 64, 32


def item_rows(item: int) -> tuple[str, int, int]:
    """("K" or "V", first position, last position) of a block's item, counted from 0."""
    tile, part = divmod(item, 4)
    first = TILE * tile + ITEM * (part % 2)
    return "KV"[part // 2], first, first + ITEM - 1


def fold(m: float, l: float, o: np.ndarray, s: np.ndarray, v: np.ndarray) -> tuple[float, float, np.ndarray]:  # noqa: E741
    """(m, l, o) after one more tile."""
    if s.max() == -np.inf:
        return m, l, o
    new = max(m, s.max())
    alpha = np.exp(m - new)
    p = np.exp(s - new)
    return new, l * alpha + p.sum(), o * alpha + p @ v


def attend(q: np.ndarray, fetch, position: int) -> np.ndarray:
    """Attention of the row at a position to keys 0 .. position, tile by tile."""
    state = -np.inf, 0.0, np.zeros(len(q))
    for tile in range(position // TILE + 1):
        k, v = fetch(tile)
        visible = TILE * tile + np.arange(TILE) <= position
        state = fold(*state, np.where(visible, k @ q / np.sqrt(len(q)), -np.inf), v)
    return state[2] / state[1]
