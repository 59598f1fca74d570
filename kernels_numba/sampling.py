"""Greedy sampling: the token with the largest logit, ties to the lower id. Spec numerics §4."""

from __future__ import annotations

from typing import Any

from kernels_numba.machine import bits_float, cuda, device, float32, int32, kernel, lanewise, shfl_xor, uint32

THREADS = 1024
NOBODY = 0x7FFFFFFF
"""The id that loses every tie."""


def argmax(ids: Any, logits: Any, stream: Any = None) -> None:
    """ids[row] = the lowest id among the largest logits of the row; -1 where every logit is NaN, which never wins.

    ids: int32 [rows]; logits: float32 [rows, vocabulary].
    """
    argmax_kernel.at()[logits.shape[0], THREADS, stream](ids, logits)


@kernel
def argmax_kernel(ids, logits):
    """A block takes a row; thread t looks at ids t, t + 1024, ... ids: int32 [rows]; logits: float32 [rows,
    vocabulary].

    Launch: grid rows, 1024 threads.
    """
    values = cuda.shared.array(32, float32)  # [warp]
    names = cuda.shared.array(32, int32)  # [warp]
    thread = cuda.threadIdx.x
    lane, warp = thread % 32, thread // 32
    value, name = best_of_column(logits, cuda.blockIdx.x, thread)
    value, name = best_of_warp(value, name)
    if lane == 0:
        values[warp] = value
        names[warp] = name
    cuda.syncthreads()
    value, name = best_of_warp(values[lane], names[lane])
    if thread == 0:
        ids[cuda.blockIdx.x] = int32(-1) if name == NOBODY else name


@device
def best_of_warp(value, name):
    """The better of all lanes by exchanges: in every lane the same."""
    value, name = better(value, name, shfl_xor(value, 16), shfl_xor(name, 16))
    value, name = better(value, name, shfl_xor(value, 8), shfl_xor(name, 8))
    value, name = better(value, name, shfl_xor(value, 4), shfl_xor(name, 4))
    value, name = better(value, name, shfl_xor(value, 2), shfl_xor(name, 2))
    return better(value, name, shfl_xor(value, 1), shfl_xor(name, 1))


@lanewise
def best_of_column(logits, row, first):
    """The best of every 1024th logit of a row, from ``first``: (value, id); (-inf, NOBODY) if none is a number."""
    value, name = bits_float(uint32(0xFF800000)), int32(NOBODY)
    for i in range(first, logits.shape[1], THREADS):
        value, name = better(value, name, logits[row, i], int32(i))
    return value, name


@lanewise
def better(value, name, other_value, other_name):
    """The larger value with its id; of equal values the lower id; a NaN loses."""
    wins = other_value > value or (other_value == value and other_name < name)
    return other_value if wins else value, other_name if wins else name
