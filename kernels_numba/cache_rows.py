"""A row of the cache as a warp holds it, stored as bf16 or as fp8; and pieces of fp8 rows widened. Spec attention §3, §4.

Lane l of the warp has words l · D/64 .. of the row's D/2 words of two bf16: ``words``, uint32 [D/64].
"""

from __future__ import annotations

from kernels_numba.fp8 import exponent_of, magnitude, narrow_pair, power, widen_pair
from kernels_numba.machine import cuda, device, int32, int64, lanewise, shfl_xor, uint8, uint32


@device
def store_cached(arena, exponents, words, start, plane, exponent_plane, row, *, D, kv):
    """Row ``row`` of a plane of the page at word ``start``. exponents: the arena as uint8."""
    lane = int64(cuda.threadIdx.x) % 32
    if kv == "fp8":
        e = row_exponent(words, D=D)
        store_codes(arena, words, start + plane + row * (D // 4), lane, power(-e), D=D)
        if lane == 0:
            exponents[4 * (start + exponent_plane) + row] = uint8(e & 255)
    else:
        target = start + plane + row * (D // 2) + lane * (D // 64)
        for i in range(D // 64):
            arena[target + i] = words[i]


@device
def store_codes(arena, words, target, lane, scale, *, D):
    """The row's codes, four in a word; at D = 64 two lanes share one."""
    if D == 64:
        codes = uint32(narrow_pair(words[0], scale))
        other = shfl_xor(codes, 1)
        if lane % 2 == 0:
            arena[target + lane // 2] = codes | other << uint32(16)
    else:
        for i in range(D // 128):
            arena[target + lane * (D // 128) + i] = narrow_four(words[2 * i], words[2 * i + 1], scale)


@device
def through_fp8(words, *, D):
    """The row as an fp8 cache gives it back."""
    e = row_exponent(words, D=D)
    scale = power(-e)
    for i in range(D // 64):
        words[i] = widen_pair(narrow_pair(words[i], scale), e)


@device
def widen_piece(memory, low, high, source, e):
    """16 codes from word ``source`` of shared memory as bf16: 8 to the piece at word ``low``, 8 to the one at ``high``."""
    for n in range(2):
        codes, more = int64(memory[source + n]), int64(memory[source + 2 + n])
        memory[low + 2 * n] = widen_pair(codes, e)
        memory[low + 2 * n + 1] = widen_pair(codes >> 16, e)
        memory[high + 2 * n] = widen_pair(more, e)
        memory[high + 2 * n + 1] = widen_pair(more >> 16, e)


@device
def row_exponent(words, *, D):
    """The row's exponent, int64, in every lane."""
    largest = lane_magnitude(words, D=D)
    largest = max(largest, shfl_xor(largest, 16))
    largest = max(largest, shfl_xor(largest, 8))
    largest = max(largest, shfl_xor(largest, 4))
    largest = max(largest, shfl_xor(largest, 2))
    return exponent_of(int64(max(largest, shfl_xor(largest, 1))))


@lanewise
def lane_magnitude(words, *, D):
    """The largest magnitude of this lane's part, int32."""
    largest = int64(0)
    for i in range(D // 64):
        largest = max(largest, magnitude(words[i]))
    return int32(largest)


@lanewise
def narrow_four(low, high, scale):
    """The codes of two words in one."""
    return uint32(narrow_pair(low, scale) | narrow_pair(high, scale) << 16)
