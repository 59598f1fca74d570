"""Gated hyper-connections: the residual is S streams, which a block reads mixed into one and writes back to all.

Spec flash-next §1. Flash Next has no other residual and no other norm around its blocks. A row of streams is bf16 [S·D],
stream after stream. A block with branch ``f`` (attention, DeltaNet or MoE) is

    normed = norm_streams(h)                            each stream by itself, its own gains
    low = normed · [down; inject]ᵀ                      ``matmul``
    act, inject = readout_gates(low)
    up = act · upᵀ                                      ``matmul``
    x = mix_streams(up, normed)                         what the branch reads
    h = write_back(h, f(x), inject)

After the last layer the same without ``inject`` gives the hidden state. Each kernel names its rounding points; a row's bits
depend on that row alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.machine import (
    KernelError,
    bf16_high,
    bf16_low,
    cuda,
    device,
    float32,
    int64,
    kernel,
    lanewise,
    pack_bf16,
    uint32,
)
from kernels_numba.norms import add_squares, add_words, inverse_rms, scaled, warp_sum
from kernels_numba.portable_math import sigmoid, silu
from kernels_numba.rounding import to_bf16

THREADS = 128
WARPS = THREADS // 32
PART_WORDS = 128
"""Words of a part, 256 elements: a sum over a stream is made of its parts' sums, added in order."""


def spread_streams(h: Any, x: Any, stream: Any = None) -> None:
    """Every stream of h = x. h: bf16 [rows, S·D]; x: bf16 [rows, D], D even."""
    check_streams("spread_streams", h, x)
    spread_kernel.at()[blocks(h), THREADS, stream](h, x)


def norm_streams(out: Any, h: Any, gain: Any, streams: int, eps: float, stream: Any = None) -> None:
    """out = bf16((h · inv) · gain), inv = 1 / sqrt(sum(h²) / D + eps) over each stream by itself; out may be h.

    out, h: bf16 [rows, S·D], D even; gain: float32 [S·D], effective (1 + w: the checkpoint's weights are centred).
    """
    rows, wide = h.shape
    if out.shape != h.shape or gain.shape != (wide,) or wide % (2 * streams):
        raise KernelError(
            f"norm_streams: out {out.shape}, h {h.shape}, gain {gain.shape}: wants [rows, S·D] twice and [S·D], S = {streams}"
        )
    words = wide // streams // 2
    bound = norm_streams_kernel.at(WORDS=words, PARTS=parts_of(words))
    bound[(rows, streams), THREADS, stream](out, h, gain, np.float32(eps))


def readout_gates(act: Any, inject: Any | None, low: Any, streams: int, stream: Any = None) -> None:
    """act = bf16(silu(v)) of the first R columns, inject = bf16(2 · bf16(sigmoid(v))) of the S after them; v = bf16(low / S).

    act: bf16 [rows, R], R even; inject: bf16 [rows, S], or None: low has no such columns; low: bf16 [rows, R + S] or [rows, R].
    """
    (rows, rank), gates = act.shape, 0 if inject is None else streams
    if low.shape != (rows, rank + gates) or rank % 2 or gates % 2 or (inject is not None and inject.shape[1] != gates):
        raise KernelError(
            f"readout_gates: low {low.shape}: wants [{rows}, {rank + gates}], even parts of R and S columns"
        )
    bound = readout_gates_kernel.at(S=streams, INJECT=inject is not None)
    bound[blocks(low), THREADS, stream](act, act if inject is None else inject, low)


def mix_streams(out: Any, up: Any, normed: Any, stream: Any = None) -> None:
    """out = bf16((sum over the streams in order of bf16(bf16(sigmoid(up)) · normed)) / S).

    out: bf16 [rows, D], D even; up, normed: bf16 [rows, S·D].
    """
    check_streams("mix_streams", normed, out)
    mix_kernel.at(S=normed.shape[1] // out.shape[1])[blocks(out), THREADS, stream](out, up, normed)


def write_back(h: Any, branch: Any, inject: Any, stream: Any = None) -> None:
    """h = bf16(h + bf16(branch · inject)), stream by stream, in place.

    h: bf16 [rows, S·D]; branch: bf16 [rows, D], D even; inject: bf16 [rows, S].
    """
    check_streams("write_back", h, branch)
    write_back_kernel.at()[blocks(h), THREADS, stream](h, branch, inject)


def check_streams(name: str, h: Any, x: Any) -> None:
    """Refuse a row of streams that is not a whole number of even-sized rows."""
    if h.shape[0] != x.shape[0] or x.shape[1] % 2 or h.shape[1] % x.shape[1]:
        raise KernelError(f"{name}: streams {h.shape}, a row {x.shape}: wants [rows, S·D] and [rows, D], D even")


def blocks(array: Any) -> int:
    """Blocks that take an array's pairs, one a thread."""
    return -(-array.size // (2 * THREADS))


def parts_of(words: int) -> int:
    """Parts of a stream of so many words."""
    return -(-words // PART_WORDS)


@kernel
def spread_kernel(h, x):
    """A thread copies a pair. h: bf16 [rows, S·D]; x: bf16 [rows, D]. Launch: grid rows·S·D / 256, 128 threads."""
    pair = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    row, word = pair // h.shape[1], pair % h.shape[1]
    if row < h.shape[0]:
        h[row, word] = x[row, word % x.shape[1]]


@kernel
def norm_streams_kernel(out, h, gain, eps, *, WORDS, PARTS):
    """A block takes a row's stream. Spec numerics §4 "RMSNorm".

    out, h: bf16 [rows, S·D]; gain: float32 [S·D]; eps: float32. Launch: grid (rows, S), 128 threads.
    """
    row, first = cuda.blockIdx.x, cuda.blockIdx.y * WORDS
    inverse = inverse_rms(squares_of_stream(h, row, first, WORDS=WORDS, PARTS=PARTS), WORDS * 2, eps)
    for start in range(0, WORDS, THREADS):
        at = start + cuda.threadIdx.x
        if at < WORDS:
            word = first + at
            out[row, word] = scaled(h[row, word], inverse, gain[2 * word], gain[2 * word + 1])


@device
def squares_of_stream(x, row, first, *, WORDS, PARTS):
    """The sum of the squares of WORDS words of a row, from ``first``: in every thread. A warp takes every fourth part."""
    sums = cuda.shared.array(PARTS, float32)  # [part]
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    for part in range(warp, PARTS, WARPS):
        total = warp_sum(squares_of_lane(x, row, first, part * PART_WORDS + lane, WORDS=WORDS))
        if lane == 0:
            sums[part] = total
    cuda.syncthreads()
    return sum_in_order(sums, PARTS=PARTS)


@lanewise
def squares_of_lane(x, row, first, at, *, WORDS):
    """The squares of four words of a part, 32 apart, from word ``at`` of the stream; nothing past its last."""
    total = float32(0.0)
    for i in range(PART_WORDS // 32):
        word = at + 32 * i
        total = add_squares(total, x[row, first + word] if word < WORDS else uint32(0))
    return total


@lanewise
def sum_in_order(sums, *, PARTS):
    """The parts' sums, the first part first."""
    total = sums[0]
    for part in range(1, PARTS):
        total = total + sums[part]
    return total


@kernel
def readout_gates_kernel(act, inject, low, *, S, INJECT):
    """A thread takes a pair. act: bf16 [rows, R]; inject: bf16 [rows, S], unused unless INJECT; low: bf16 [rows, R + S] or
    [rows, R].

    Launch: grid rows·columns / 256, 128 threads.
    """
    pair = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    row, word = pair // low.shape[1], pair % low.shape[1]
    if row < low.shape[0]:
        if word < act.shape[1]:
            act[row, word] = activated(low[row, word], S=S)
        elif INJECT:
            inject[row, word - act.shape[1]] = injected(low[row, word], S=S)


@lanewise
def activated(pair, *, S):
    """bf16(silu(bf16(v / S))) of a pair."""
    low, high = to_bf16(bf16_low(pair) / float32(S)), to_bf16(bf16_high(pair) / float32(S))
    return pack_bf16(silu(low), silu(high))


@lanewise
def injected(pair, *, S):
    """bf16(2 · bf16(sigmoid(bf16(v / S)))) of a pair."""
    low, high = to_bf16(bf16_low(pair) / float32(S)), to_bf16(bf16_high(pair) / float32(S))
    return pack_bf16(float32(2.0) * to_bf16(sigmoid(low)), float32(2.0) * to_bf16(sigmoid(high)))


@kernel
def mix_kernel(out, up, normed, *, S):
    """A thread takes a pair. out: bf16 [rows, D]; up, normed: bf16 [rows, S·D]. Launch: grid rows·D / 256, 128 threads."""
    pair = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    row, word = pair // out.shape[1], pair % out.shape[1]
    if row < out.shape[0]:
        out[row, word] = mixed_pair(up, normed, row, word, out.shape[1], S=S)


@lanewise
def mixed_pair(up, normed, row, word, stride, *, S):
    """The mean of a pair over the streams, each weighed and rounded, the first stream first."""
    low, high = float32(0.0), float32(0.0)
    for s in range(S):
        gate, value = up[row, s * stride + word], normed[row, s * stride + word]
        low = low + to_bf16(to_bf16(sigmoid(bf16_low(gate))) * bf16_low(value))
        high = high + to_bf16(to_bf16(sigmoid(bf16_high(gate))) * bf16_high(value))
    return pack_bf16(low / float32(S), high / float32(S))


@kernel
def write_back_kernel(h, branch, inject):
    """A thread takes a pair. h: bf16 [rows, S·D]; branch: bf16 [rows, D]; inject: bf16 [rows, S].

    Launch: grid rows·S·D / 256, 128 threads.
    """
    pair = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    row, word = pair // h.shape[1], pair % h.shape[1]
    if row < h.shape[0]:
        s = word // branch.shape[1]
        weight = half_of(inject[row, s // 2], s % 2)
        h[row, word] = add_words(h[row, word], weighed(branch[row, word % branch.shape[1]], weight))


@lanewise
def half_of(pair, half):
    """The low or the high half of a word, widened."""
    return bf16_high(pair) if half == 1 else bf16_low(pair)


@lanewise
def weighed(pair, weight):
    """bf16(v · weight) of a pair."""
    return pack_bf16(bf16_low(pair) * weight, bf16_high(pair) * weight)
