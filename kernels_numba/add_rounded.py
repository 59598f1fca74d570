"""The sum of two float32 matrices, rounded to bf16: one rounding to float32, one to bf16. Spec attention §6."""

from __future__ import annotations

from typing import Any

from kernels_numba.machine import cuda, int64, kernel, lanewise, pack_bf16

THREADS = 128


def add_rounded(out: Any, a: Any, b: Any, stream: Any = None) -> None:
    """out = bf16(a + b).

    out: bf16 [rows, D], D even; a, b: float32 [rows, D].
    """
    add_rounded_kernel.at()[-(-out.size // (2 * THREADS)), THREADS, stream](out, a, b)


@kernel
def add_rounded_kernel(out, a, b):
    """Spec attention §6 "joining". out: bf16 [rows, D]; a, b: float32 [rows, D]. One thread a pair of elements.

    Launch: grid rows·D / 256, 128 threads.
    """
    pair = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    row, word = pair // out.shape[1], pair % out.shape[1]
    if row < out.shape[0]:
        left, right = 2 * word, 2 * word + 1
        out[row, word] = rounded_sums(a[row, left], b[row, left], a[row, right], b[row, right])


@lanewise
def rounded_sums(a_low, b_low, a_high, b_high):
    """bf16 of two sums, the low one first."""
    return pack_bf16(a_low + b_low, a_high + b_high)
