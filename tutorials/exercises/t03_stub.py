"""Exercises of tutorial 03: the prompt kernel, tile by tile. Replace each ``raise NotImplementedError`` by your answer."""

import numpy as np

TILE, ITEM = 64, 32


def item_rows(item: int) -> tuple[str, int, int]:
    """("K" or "V", first position, last position) of a block's item, counted from 0.

    A tile is four items of 32 rows, in this order: K of its lower 32 positions, K of the upper ones, V of the lower, V of the
    upper. Tiles follow one another from position 0.
    """
    raise NotImplementedError


def fold(m: float, l: float, o: np.ndarray, s: np.ndarray, v: np.ndarray) -> tuple[float, float, np.ndarray]:  # noqa: E741
    """(m, l, o) after one more tile.

    m: the largest score so far, -inf before the first tile. l: sum of exp(score - m). o: [D], sum of exp(score - m) · value.
    s: [n], the tile's scores, -inf where a key is masked. v: [n, D], its values, all finite. A tile with nothing but masked keys
    leaves (m, l, o) as they are. No NaN may come out: -inf - -inf is one.
    """
    raise NotImplementedError


def attend(q: np.ndarray, fetch, position: int) -> np.ndarray:
    """Attention of the row at a position to keys 0 .. position, tile by tile.

    q: [D]. fetch(tile): (k, v), each [64, D], of positions 64 · tile and on; what lies past the text is zeros. Scores are
    q · k / sqrt(D). Fetch each tile that has a key for the row, in order, once, and no other. Returns [D].
    """
    raise NotImplementedError
