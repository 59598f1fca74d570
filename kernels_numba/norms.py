"""RMSNorm over the rows of the residual stream, alone and after a residual add. Spec numerics §4.

A row is one block of 128 threads. Thread t owns the words (pairs of elements) t, t + 128, t + 256, ...; it adds its
squares in that order, the low element first, starting from zero. The 32 sums of a warp are added by exchanges at
distance 16, 8, 4, 2, 1, the four warps' as (w0 + w1) + (w2 + w3). A square of a bf16 is exact in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.machine import bf16_high, bf16_low, cuda, device, float32, kernel, lanewise, pack_bf16, shfl_xor
from kernels_numba.portable_math import rsqrt

THREADS = 128
"""Threads a row."""


def rms_norm(out: Any, x: Any, gain: Any, eps: float, stream: Any = None) -> None:
    """out = bf16((x · inv) · gain), inv = 1 / sqrt(sum(x²) / D + eps), row by row; out may be x.

    out, x: bf16 [rows, D]; gain: float32 [D], the effective gain (1 + w where the checkpoint's weights are centred).
    """
    rms_norm_kernel.at()[x.shape[0], THREADS, stream](out, x, gain, np.float32(eps))


def add_rms_norm(out: Any, h: Any, r: Any, gain: Any, eps: float, stream: Any = None) -> None:
    """h = bf16(h + r), in place; then out = rms_norm(h).

    out, h, r: bf16 [rows, D], out and h not the same array; gain: float32 [D], the effective gain.
    """
    add_rms_norm_kernel.at()[h.shape[0], THREADS, stream](out, h, r, gain, np.float32(eps))


@kernel
def rms_norm_kernel(out, x, gain, eps):
    """Spec numerics §4 "RMSNorm". out, x: bf16 [rows, D]; gain: float32 [D]; eps: float32.

    Launch: grid rows, 128 threads.
    """
    row = cuda.blockIdx.x
    squares = float32(0.0)
    for first in range(0, x.shape[1], THREADS):
        word = first + cuda.threadIdx.x
        if word < x.shape[1]:
            squares = add_squares(squares, x[row, word])
    store_normed(out, x, gain, row, block_sum(squares), eps)


@kernel
def add_rms_norm_kernel(out, h, r, gain, eps):
    """Spec numerics §4 "residual add", then "RMSNorm".

    out, h, r: bf16 [rows, D]; h is overwritten by the sum; gain: float32 [D]; eps: float32. Launch: grid rows, 128
    threads.
    """
    row = cuda.blockIdx.x
    squares = float32(0.0)
    for first in range(0, h.shape[1], THREADS):
        word = first + cuda.threadIdx.x
        if word < h.shape[1]:
            total = add_words(h[row, word], r[row, word])
            h[row, word] = total
            squares = add_squares(squares, total)
    store_normed(out, h, gain, row, block_sum(squares), eps)


@device
def store_normed(out, x, gain, row, squares, eps):
    """A row's norm, once its sum of squares is known; a thread reads the words that it added up."""
    inverse = inverse_rms(squares, x.shape[1] * 2, eps)
    for first in range(0, x.shape[1], THREADS):
        word = first + cuda.threadIdx.x
        if word < x.shape[1]:
            out[row, word] = scaled(x[row, word], inverse, gain[2 * word], gain[2 * word + 1])


@device
def block_sum(part):
    """The sum over a block of 128 threads: in every thread, the same bits."""
    sums = cuda.shared.array(4, float32)  # [warp]
    total = warp_sum(part)
    if cuda.threadIdx.x % 32 == 0:
        sums[cuda.threadIdx.x // 32] = total
    cuda.syncthreads()
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


@device
def warp_sum(part):
    """The sum over a warp by exchanges at distance 16, 8, 4, 2, 1: in every lane, the same bits."""
    total = part + shfl_xor(part, 16)
    total = total + shfl_xor(total, 8)
    total = total + shfl_xor(total, 4)
    total = total + shfl_xor(total, 2)
    return total + shfl_xor(total, 1)


@lanewise
def add_squares(total, word):
    """total + low² + high², left to right."""
    low, high = bf16_low(word), bf16_high(word)
    return (total + low * low) + high * high


@lanewise
def add_words(a, b):
    """The sums of two pairs of bf16, each rounded to bf16."""
    return pack_bf16(bf16_low(a) + bf16_low(b), bf16_high(a) + bf16_high(b))


@lanewise
def inverse_rms(squares, dims, eps):
    """1 / sqrt(squares / dims + eps)."""
    return rsqrt(squares / float32(dims) + eps)


@lanewise
def scaled(word, inverse, gain_low, gain_high):
    """bf16((x · inverse) · gain) of a pair."""
    return pack_bf16((bf16_low(word) * inverse) * gain_low, (bf16_high(word) * inverse) * gain_high)
