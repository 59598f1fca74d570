"""A table of 2-D copies moves each unit that it names and no other, whatever the shapes, the pitches and the unit."""

from __future__ import annotations

import numpy as np
import pytest
from buffers import Output, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import mutate

from kernels_numba import copy_pages as copying
from kernels_numba.copy_pages import COLUMNS, ROWS, UNITS, WIDTH, copy_pages, copy_pages_kernel
from kernels_numba.machine import checked
from kernels_numba.move_plan import Side, contiguous, plan_moves

DRAWN = settings(max_examples=40, deadline=None, derandomize=True, database=None)
BLOCKS = [(1, 1), (9, 5), (4, 32), (7, 33), (2, 700)]
"""(rows, width) of moves: fewer and more than a block's warps, a warp's lanes, and its turns."""


def table(blocks=BLOCKS, gap: int = 3) -> np.ndarray:
    """Disjoint moves, one behind the other on both sides, the pitches unlike."""
    out, source, target = np.zeros((len(blocks), COLUMNS), np.int64), 1, 2
    for n, (rows, width) in enumerate(blocks):
        out[n] = source, target, width + 2, width + gap, rows, width
        source, target = source + rows * (width + 2), target + rows * (width + gap)
    return out


def by_numpy(target: np.ndarray, source: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """What the moves make of a copy of the target, row by row."""
    out = target.copy()
    for here, there, pitch, to_pitch, rows, width in moves.tolist():
        for row in range(rows):
            out[there + row * to_pitch :][:width] = source[here + row * pitch :][:width]
    return out


def drawn(unit: str, size: int = 4000) -> np.ndarray:
    dtype = UNITS[unit][0]
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max, size, dtype)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("spare", [0, 40])
def test_each_unit_of_the_table_moves_and_no_other(unit, spare):
    """spare: what the caller says of the largest move is too much."""
    source, target, moves = drawn(unit), drawn(unit)[::-1].copy(), table()
    wanted = by_numpy(target, source, moves)
    with checked():
        copy_pages(target, source, moves, 9 + spare, 700 + spare, unit)
    assert_same_bits(target, wanted)


def test_moves_inside_one_array():
    memory = drawn("word")
    moves = table([(5, 40), (3, 7)])
    moves[:, 1] += 2000
    wanted = by_numpy(memory, memory, moves)
    copy_pages(memory, memory, moves, 5, 40)
    assert_same_bits(memory, wanted)


@pytest.mark.parametrize("rows, width", [(0, 4), (4, 0)])
def test_nothing_to_move_launches_nothing(rows, width):
    target = np.zeros(4, np.uint32)
    copy_pages(target, np.ones(4, np.uint32), np.array([[0, 0, 1, 1, rows, width]], np.int64), rows, width)
    copy_pages(target, np.ones(4, np.uint32), np.zeros((0, COLUMNS), np.int64), 4, 4)
    assert not target.any()


def test_a_row_longer_than_the_grid_may_be():
    """Control of MOST_PIECES: with two pieces of a row, lanes take more turns and every unit is still copied."""
    source, moves = drawn("word", 3000), np.array([[0, 0, 0, 0, 1, 3000]], np.int64)
    out = Output((3000,), np.uint32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "MOST_PIECES", 2)
        copy_pages(out.array, source, moves, 1, 3000)
    assert_same_bits(out.checked(), source)


def test_offsets_have_64_bits():
    """Rows 2^33 units apart would meet in 32 bits: the array has no such unit, and the machine says which was asked for."""
    moves = np.array([[0, 0, 2**33, 0, 2, 1]], np.int64)
    with pytest.raises(Exception, match=str(2**33)):
        copy_pages(np.zeros(4, np.uint32), np.zeros(4, np.uint32), moves, 2, 1)


def test_a_fault_in_the_kernel_shows():
    """Red: the test above tells a kernel that reads at the target's pitch."""
    source, target, moves = drawn("word"), drawn("word")[::-1].copy(), table()
    old = "moves[move, SOURCE] + row * moves[move, SOURCE_PITCH]"
    wrong = mutate(copy_pages_kernel, old, old.replace("SOURCE_PITCH", "TARGET_PITCH"))
    wanted = by_numpy(target, source, moves)
    wrong.at(unit=UNITS["word"][1])[(len(moves), 3, 3), 128](target, source, moves)
    assert (target != wanted).any()


# --- The plan ---------------------------------------------------------------------------------------------------------


def side(ptok: int, pages: int, planes: int, kv_heads: int, width: int, gap: int) -> Side:
    """Pages in falling order, ``gap`` units before each plane."""
    plane = kv_heads * ptok * width + gap
    starts = np.arange(pages, dtype=np.int64)[::-1] * (planes * plane)
    return Side(starts, np.arange(planes, dtype=np.int64) * plane + gap, ptok)


def units_of(where: Side, positions: int, planes: int, kv_heads: int, width: int) -> list[int]:
    """The unit of every (plane, head, position, unit), in order."""
    return [
        int(where.starts[p // where.ptok] + where.planes[plane]) + (head * where.ptok + p % where.ptok) * width + unit
        for plane in range(planes)
        for head in range(kv_heads)
        for p in range(positions)
        for unit in range(width)
    ]


@DRAWN
@given(
    st.integers(0, 40),
    st.integers(1, 17),
    st.integers(1, 17),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from([0, 5]),
)
def test_a_plan_names_each_unit_once(positions, first, second, planes, kv_heads, gap):
    """Between pages of any two sizes, neighbouring planes or not: as a list of pairs, it is the addresses of both sides."""
    width = 2
    sides = [side(size, -(-positions // size), planes, kv_heads, width, gap) for size in (first, second)]
    plan = plan_moves(*sides, positions, kv_heads, width)
    pairs = [
        (here + row * pitch + unit, there + row * to_pitch + unit)
        for here, there, pitch, to_pitch, rows, length in plan.moves.tolist()
        for row in range(rows)
        for unit in range(length)
    ]
    wanted = zip(*(units_of(where, positions, planes, kv_heads, width) for where in sides), strict=True)
    assert sorted(pairs) == sorted(wanted)
    assert (plan.rows, plan.width) == tuple(int(plan.moves[:, n].max(initial=0)) for n in (ROWS, WIDTH))


def test_a_page_whose_planes_are_neighbours_is_one_move():
    pages, kept = side(16, 3, 6, 2, 32, 0), contiguous(6, 2, 40, 32)
    assert plan_moves(pages, kept, 40, 2, 32).moves[:, ROWS:].tolist() == [[12, 512], [12, 512], [12, 256]]
    apart = side(16, 3, 6, 2, 32, 4)
    assert len(plan_moves(apart, kept, 40, 2, 32).moves) == len(plan_moves(kept, apart, 40, 2, 32).moves) == 18
