"""Copies of page runs: a table of 2-D copies inside an arena, between two, or between an arena and contiguous rows.

A move is a block of ``rows`` rows of ``width`` neighbouring units, its rows a pitch apart on either side. A unit is a word, or
a byte: the exponents of an fp8 cache start at any byte. Moves of one launch may differ in everything; they write disjoint
units and read none that another writes, so nothing depends on their order. Spec serving §4, attention §3.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.machine import cuda, int64, kernel, uint8, uint32

SOURCE, TARGET, SOURCE_PITCH, TARGET_PITCH, ROWS, WIDTH = range(6)
"""Columns of a table of moves: offsets of the first unit and pitches from row to row, in units; rows; units a row."""
COLUMNS = 6
UNITS: dict[str, tuple[Any, Any]] = {"word": (np.uint32, uint32), "byte": (np.uint8, uint8)}
"""NumPy's type and the kernel's, by the unit's name."""
THREADS = 128
WARPS = 4
LANES = 32
PER_LANE = 8
"""Units of a row that a lane copies, where the grid may be large enough."""
MOST_PIECES = 65535


def copy_pages(
    target: Any, source: Any, moves: Any, rows: int, width: int, unit: str = "word", stream: Any = None
) -> None:
    """Do the moves: target[...] = source[...], unit by unit. target may be source: the moves are disjoint then.

    target, source: C-contiguous, seen as words (uint32) or bytes. moves: int64 [M, 6]. rows, width: of the largest move, or
    more. unit: "word" or "byte". stream: of the GPU.
    """
    if not len(moves) or not rows or not width:
        return
    seen, dtype = UNITS[unit]
    pieces = min(-(-width // (LANES * PER_LANE)), MOST_PIECES)
    bound = copy_pages_kernel.at(unit=dtype)
    bound[(len(moves), -(-rows // WARPS), pieces), THREADS, stream](
        target.reshape(-1).view(seen), source.reshape(-1).view(seen), moves
    )


@kernel
def copy_pages_kernel(target, source, moves, *, unit):
    """A warp copies one row of a move, or, of a long row, every gridDim.z-th run of 32 units.

    target: unit [target units], written; source: unit [source units]; moves: int64 [M, 6]. Launch: grid (M, ceil(most rows /
    4), pieces of a row), 128 threads.
    """
    move = int64(cuda.blockIdx.x)
    # The warp's row of the move.
    row = int64(cuda.blockIdx.y) * WARPS + int64(cuda.threadIdx.x) // LANES
    if row < moves[move, ROWS]:
        # Where the row starts on either side: 64 bits, an arena may have more than 2^32 bytes.
        from_unit = moves[move, SOURCE] + row * moves[move, SOURCE_PITCH]
        to_unit = moves[move, TARGET] + row * moves[move, TARGET_PITCH]
        # Neighbouring lanes copy neighbouring units, so that a warp's 32 lie together.
        for first in range(int64(cuda.blockIdx.z) * LANES, moves[move, WIDTH], int64(cuda.gridDim.z) * LANES):
            column = first + int64(cuda.threadIdx.x) % LANES
            if column < moves[move, WIDTH]:
                target[to_unit + column] = unit(source[from_unit + column])
