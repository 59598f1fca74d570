"""A float32 rounded to bf16 and widened again, for values that stay in registers."""

from __future__ import annotations

from kernels_numba.machine import bf16_low, float32, lanewise, pack_bf16


@lanewise
def to_bf16(x):
    """The bf16 nearest to x, ties to even, as float32; a NaN becomes a NaN."""
    return bf16_low(pack_bf16(x, float32(0.0)))
