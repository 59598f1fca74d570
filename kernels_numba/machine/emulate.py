"""The instructions of the dialect on lanes: one flat axis of N lanes, blocks end to end, warps of 32.

``active``: bool [N], the lanes that take part; results of other lanes are zero. An operand is a lane array [N] or a
NumPy scalar, the same for every lane. ``rows``: [blocks, words], shared memory, a row for the N / blocks lanes of a
block. Every access is inside its array and aligned, or a LaneError names the first active lane of which that is not so,
and nothing has been written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint32

from .exact_mma import HOPPER, Accumulation, mma_warps
from .lanes import to_integer
from .scalars import ufunc

Lanes = Any
"""A lane array [N] or a NumPy scalar."""

OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, "cache": True}
PIECE = 4
"""Words of an aligned 16-byte piece."""


class LaneError(Exception):
    """An access that is not inside its array, or not aligned.

    lane: which lane of the launch. size: elements of ``what``. width: elements a piece; a piece starts at a multiple.
    """

    def __init__(self, lane: int, index: int, size: int, what: str, width: int = 1):
        last = f" to {index + width - 1}" if width > 1 else ""
        outside = f"index {index}{last} is outside {what} of {size}"
        super().__init__(f"index {index} of {what} is not a multiple of {width}" if index % width else outside)
        self.lane, self.index, self.size, self.what = lane, index, size, what


# --- Arithmetic and bits: operands are lane arrays or scalars; scalars give a scalar ---------------------------------

sqrt = np.sqrt


def fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """a · b + c, rounded once."""
    return ufunc("fma")(a, b, c)


def fmax(a: Lanes, b: Lanes) -> Lanes:
    """The larger; a NaN gives way to a number, -0 to +0."""
    return ufunc("fmax")(a, b)


def fmin(a: Lanes, b: Lanes) -> Lanes:
    """The smaller; a NaN gives way to a number, +0 to -0."""
    return ufunc("fmin")(a, b)


def pack_bf16(low: Lanes, high: Lanes) -> Lanes:
    """Two values as bf16 in one word, nearest even; a NaN becomes 0x7FFF."""
    return ufunc("pack_bf16")(low, high)


def round_int(x: Lanes) -> Lanes:
    """The nearest int32, ties to even; beyond int32 its nearest end, NaN 0."""
    return to_integer(np.rint(x), INT32)


def float_bits(x: Lanes) -> Lanes:
    """float32 as uint32, bit by bit."""
    return x.view(np.uint32)


def bits_float(bits: Lanes) -> Lanes:
    """uint32 as float32, bit by bit."""
    return bits.view(np.float32)


def bf16_low(word: Lanes) -> Lanes:
    """The low half of a word of two bf16, widened."""
    return np.left_shift(word, np.uint32(16)).view(np.float32)


def bf16_high(word: Lanes) -> Lanes:
    """The high half of a word of two bf16, widened."""
    return np.bitwise_and(word, np.uint32(0xFFFF0000)).view(np.float32)


# --- Operands --------------------------------------------------------------------------------------------------------

UINT32, INT32, INT64, FLOAT32 = (np.dtype(t) for t in (np.uint32, np.int32, np.int64, np.float32))
BITS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
"""The type that data of an element size moves as, so that one compiled helper serves all types of that size."""


def lanes(value: Lanes, size: int, dtype: np.dtype) -> np.ndarray:
    """The operand as a contiguous lane array [size] of this type."""
    if value.__class__ is np.ndarray and value.dtype is dtype and value.ndim and value.flags.carray:
        return value
    return np.array(np.broadcast_to(np.asarray(value, dtype), size))


def as_bits(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers."""
    return array.view(BITS[array.dtype.itemsize])


# --- Memory: a row a block; a global array is one row for all --------------------------------------------------------


@njit(**OPTIONS)
def _outside(active, index, size, width):
    """The first active lane whose piece of ``width`` elements is not aligned or not within 0 .. size - 1; else -1."""
    for t in range(active.size):
        if active[t] and (index[t] < 0 or index[t] > size - width or index[t] % width):
            return t
    return -1


@njit(**OPTIONS)
def _gather(active, rows, index, out):
    """out = rows[block, index] of each lane; returns the first lane that is outside, or -1."""
    threads = active.size // rows.shape[0]
    size = rows.shape[1]
    for block in range(rows.shape[0]):
        for t in range(block * threads, (block + 1) * threads):
            if not active[t]:
                out[t] = 0
            elif 0 <= index[t] < size:
                out[t] = rows[block, index[t]]
            else:
                return t
    return -1


@njit(**OPTIONS)
def _scatter(active, rows, index, values):
    """rows[block, index] = values of each lane, unless one is outside; returns the first such lane, or -1."""
    bad = _outside(active, index, rows.shape[1], 1)
    if bad < 0:
        threads = active.size // rows.shape[0]
        for block in range(rows.shape[0]):
            for t in range(block * threads, (block + 1) * threads):
                if active[t]:
                    rows[block, index[t]] = values[t]
    return bad


def _load(active: np.ndarray, rows: np.ndarray, index: Lanes, what: str) -> np.ndarray:
    index = lanes(index, active.size, INT64)
    out = np.empty(active.size, rows.dtype)
    lane = _gather(active, as_bits(rows), index, as_bits(out))
    if lane >= 0:
        raise LaneError(lane, int(index[lane]), rows.shape[1], what)
    return out


def _store(active: np.ndarray, rows: np.ndarray, index: Lanes, values: Lanes, what: str) -> None:
    index = lanes(index, active.size, INT64)
    lane = _scatter(active, as_bits(rows), index, as_bits(lanes(values, active.size, rows.dtype)))
    if lane >= 0:
        raise LaneError(lane, int(index[lane]), rows.shape[1], what)


def load_global(active: np.ndarray, flat: np.ndarray, index: Lanes) -> np.ndarray:
    """flat[index] of each lane. flat: 1-D, of any type."""
    return _load(active, flat[None], index, "a global array")


def store_global(active: np.ndarray, flat: np.ndarray, index: Lanes, values: Lanes) -> None:
    """flat[index] = values of each lane; of several lanes at one index the last stays."""
    _store(active, flat[None], index, values, "a global array")


def load_shared(active: np.ndarray, rows: np.ndarray, index: Lanes) -> np.ndarray:
    """rows[block, index] of each lane."""
    return _load(active, rows, index, "shared memory")


def store_shared(active: np.ndarray, rows: np.ndarray, index: Lanes, values: Lanes) -> None:
    """rows[block, index] = values of each lane; of several lanes of a block at one index the last stays."""
    _store(active, rows, index, values, "shared memory")


@njit(**OPTIONS)
def _copy(active, rows, word, source, source_word, nbytes):
    """16 bytes a lane; returns which check failed (0: none, 1: nbytes, 2: word, 3: source_word) and for which lane."""
    threads, size = active.size // rows.shape[0], rows.shape[1]
    for t in range(active.size):
        if active[t]:
            if nbytes[t] != 0 and nbytes[t] != 16:
                return 1, t
            if word[t] < 0 or word[t] > size - PIECE or word[t] % PIECE:
                return 2, t
            if nbytes[t] and (source_word[t] < 0 or source_word[t] > source.size - PIECE or source_word[t] % PIECE):
                return 3, t
    for t in range(active.size):
        if active[t]:
            for i in range(PIECE):
                rows[t // threads, word[t] + i] = source[source_word[t] + i] if nbytes[t] else uint32(0)
    return 0, -1


def cp_async16(
    active: np.ndarray, rows: np.ndarray, word: Lanes, source: np.ndarray, source_word: Lanes, nbytes: Lanes
) -> None:
    """The copy, at once. rows: uint32 [blocks, words]; source: uint32 [words]; nbytes: 16, or 0 to fill with zeros."""
    word, source_word = lanes(word, active.size, INT64), lanes(source_word, active.size, INT64)
    nbytes = lanes(nbytes, active.size, INT32)
    failed, lane = _copy(active, rows, word, source, source_word, nbytes)
    if failed == 1:
        raise LaneError(lane, int(nbytes[lane]), 2, "cp_async16's byte counts, 0 and 16: a set")
    if failed == 2:
        raise LaneError(lane, int(word[lane]), rows.shape[1], "shared memory", PIECE)
    if failed == 3:
        raise LaneError(lane, int(source_word[lane]), source.size, "a global array", PIECE)


# --- Tiles of a warp -------------------------------------------------------------------------------------------------


@njit(**OPTIONS)
def _put_rows(tiles, out, base):
    """Row r of tile m is lanes 4r .. 4r + 3 of result m, a word each."""
    for lane in range(32):
        m, first = lane >> 3, base + 4 * (lane & 7)
        for i in range(PIECE):
            out[m, first + i] = tiles[lane, i]


@njit(**OPTIONS)
def _put_columns(tiles, out, base):
    """Rows 2q and 2q + 1 of tile m, two columns to a word, become lanes 4g + q of result m, g the column."""
    for m in range(4):
        for q in range(4):
            for i in range(PIECE):
                low, high = tiles[8 * m + 2 * q, i], tiles[8 * m + 2 * q + 1, i]
                lane = base + 8 * i + q
                out[m, lane] = (low & uint32(0xFFFF)) | (high << uint32(16))
                out[m, lane + 4] = (low >> uint32(16)) | (high & uint32(0xFFFF0000))


@njit(**OPTIONS)
def _ldmatrix(active, rows, word, transposed, out):
    """Four tiles a warp into out [4, N]; a row that an inactive lane would give is zero. Returns as ``_gather``."""
    bad = _outside(active, word, rows.shape[1], PIECE)
    if bad >= 0:
        return bad
    threads = active.size // rows.shape[0]
    tiles = np.empty((32, PIECE), np.uint32)  # [tile and row, word]
    for base in range(0, active.size, 32):
        memory = rows[base // threads]
        for lane in range(32):
            first = word[base + lane]
            for i in range(PIECE):
                tiles[lane, i] = memory[first + i] if active[base + lane] else uint32(0)
        if transposed:
            _put_columns(tiles, out, base)
        else:
            _put_rows(tiles, out, base)
    return -1


def _tiles(active: np.ndarray, rows: np.ndarray, word: Lanes, transposed: bool) -> list[np.ndarray]:
    word = lanes(word, active.size, INT64)
    out = np.empty((4, active.size), np.uint32)
    lane = _ldmatrix(active, rows, word, transposed, out)
    if lane >= 0:
        raise LaneError(lane, int(word[lane]), rows.shape[1], "shared memory", PIECE)
    return list(out)


def ldmatrix4(active: np.ndarray, rows: np.ndarray, word: Lanes) -> list[np.ndarray]:
    """Four 8 × 8 tiles of bf16 a warp. rows: uint32 [blocks, words]."""
    return _tiles(active, rows, word, False)


def ldmatrix4_trans(active: np.ndarray, rows: np.ndarray, word: Lanes) -> list[np.ndarray]:
    """Four 8 × 8 tiles of bf16 a warp, each transposed. rows: uint32 [blocks, words]."""
    return _tiles(active, rows, word, True)


def mma(active: np.ndarray, *operands: Lanes, rule: Accumulation = HOPPER) -> list[np.ndarray]:
    """A · B + C for each warp: float32 [N], four times. operands: a0..a3, b0, b1 of uint32, c0..c3 of float32."""
    fragments = [lanes(x, active.size, UINT32 if i < 6 else FLOAT32) for i, x in enumerate(operands)]
    return mma_lanes(active, *fragments, rule=rule)


def mma_lanes(active: np.ndarray, *fragments: np.ndarray, rule: Accumulation = HOPPER) -> list[np.ndarray]:
    """As mma, for operands that are lane arrays of their types already."""
    out = np.empty((4, active.size), np.uint32)
    mma_warps(rule.fraction_bits, rule.group, active, *fragments, out)
    return list(out.view(FLOAT32))


# --- Lanes of a warp -------------------------------------------------------------------------------------------------


@njit(**OPTIONS)
def _shuffle(active, value, lane, out):
    for t in range(active.size):
        out[t] = value[(t & ~31) | (lane[t] & 31)] if active[t] else 0


@njit(**OPTIONS)
def _exchange(active, value, lane_mask, out):
    for t in range(active.size):
        out[t] = value[t ^ lane_mask] if active[t] else 0


def shfl_xor(active: np.ndarray, value: Lanes, lane_mask: int) -> np.ndarray:
    """The value of lane (own lane XOR lane_mask)."""
    value = lanes(value, active.size, value.dtype)
    out = np.empty_like(value)
    _exchange(active, as_bits(value), lane_mask & 31, as_bits(out))
    return out


def shfl(active: np.ndarray, value: Lanes, lane: Lanes) -> np.ndarray:
    """The value of the given lane (modulo 32) of the warp."""
    value = lanes(value, active.size, value.dtype)
    out = np.empty_like(value)
    _shuffle(active, as_bits(value), lanes(lane, active.size, INT32), as_bits(out))
    return out
