"""The moves of ``copy_pages`` that carry positions from one form of cache to another: what is adjacent on both sides is one.

A side is pages (or one window) that hold the same planes in the same order, a plane as [HK, ptok, width]. Rows that are kept
outside an arena are a side, too: one page whose planes follow one another. Spec attention §3, serving §4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels_numba.copy_pages import COLUMNS, ROWS, WIDTH


@dataclass(frozen=True, eq=False)
class Side:
    """Where the rows of a stream's positions lie, in units of the copy.

    starts: int64 [pages], of the pages in the order of their positions. planes: int64 [planes], where each starts in a page.
    ptok: positions a page.
    """

    starts: NDArray[np.int64]
    planes: NDArray[np.int64]
    ptok: int


@dataclass(frozen=True, eq=False)
class MovePlan:
    """moves: int64 [M, 6], as ``copy_pages`` takes them. rows, width: of the largest."""

    moves: NDArray[np.int64]
    rows: int
    width: int


def contiguous(planes: int, kv_heads: int, positions: int, width: int) -> Side:
    """Rows [planes, HK, positions, width], one after the other."""
    starts = np.arange(planes, dtype=np.int64) * (kv_heads * positions * width)
    return Side(np.zeros(1, np.int64), starts, positions)


def plan_moves(source: Side, target: Side, positions: int, kv_heads: int, width: int) -> MovePlan:
    """The moves of positions 0 .. positions - 1 of every plane. width: units of one KV head's row of a position.

    A move ends where a page of either side does; planes that follow one another at equal distance on both sides share it.
    """
    pieces = cut(positions, source.ptok, target.ptok)  # [pieces + 1]
    first, counts = pieces[:-1, None], np.diff(pieces)[:, None]
    joined, heights = stacks(source, target, kv_heads, width)
    moves = np.empty((len(counts), len(joined), COLUMNS), np.int64)
    for column, side in enumerate((source, target)):
        page, slot = np.divmod(first, side.ptok)
        moves[:, :, column] = side.starts[page] + side.planes[joined] + slot * width
        moves[:, :, 2 + column] = side.ptok * width
    moves[:, :, ROWS], moves[:, :, WIDTH] = heights, counts * width
    rows, longest = (int(moves[:, :, column].max(initial=0)) for column in (ROWS, WIDTH))
    return MovePlan(moves.reshape(-1, COLUMNS), rows, longest)


def cut(positions: int, *sizes: int) -> NDArray[np.int64]:
    """0, positions, and between them each multiple of any of the sizes: int64, ascending."""
    edges = [np.arange(0, positions, size, dtype=np.int64) for size in sizes if positions]
    return np.unique(np.concatenate([*edges, np.array([positions], np.int64)]))


def stacks(source: Side, target: Side, kv_heads: int, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(the planes at which a move begins, the rows that it takes): int64 [stacks] each."""
    begins = np.arange(len(source.planes)) == 0
    for side in (source, target):
        begins[1:] |= np.diff(side.planes) != kv_heads * side.ptok * width
    joined = np.flatnonzero(begins)
    return joined, np.diff(np.append(joined, len(begins))) * kv_heads
