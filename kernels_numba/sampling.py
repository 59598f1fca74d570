"""The next token of a row: greedy, or drawn from what temperature, top-k and top-p leave. Spec numerics §6.

A draw is the largest of logit / temperature + noise, with Gumbel noise that seed, position and token decide: each token
has its softmax probability, and the one that is drawn does not depend on the batch.
"""

from __future__ import annotations

from typing import Any

from kernels_numba.machine import (
    bits_float,
    cuda,
    device,
    float32,
    float_bits,
    int32,
    kernel,
    lanewise,
    shfl_xor,
    uint32,
)
from kernels_numba.norms import warp_sum
from kernels_numba.philox import gumbel
from kernels_numba.portable_math import exp_to_one

THREADS = 1024
NOBODY = 0x7FFFFFFF
"""The id that loses every tie."""
SIGN = 0x80000000
MINUS_INFINITY = 0xFF800000


def argmax(ids: Any, logits: Any, stream: Any = None) -> None:
    """ids[row] = the lowest id among the largest logits of the row; -1 where every logit is NaN, which never wins.

    ids: int32 [rows]; logits: float32 [rows, vocabulary].
    """
    argmax_kernel.at()[logits.shape[0], THREADS, stream](ids, logits)


def sample(
    ids: Any,
    logits: Any,
    seeds: Any,
    positions: Any,
    temperatures: Any,
    top_ks: Any,
    top_ps: Any,
    stream: Any = None,
) -> None:
    """ids[row] = a token drawn by the row's own parameters; those of the other rows and its place do not matter.

    ids: int32 [rows]; logits: float32 [rows, vocabulary], at most 2^24 wide. Each of [rows]: seeds uint64; positions
    int64, the drawn token's in its stream, from 0; temperatures float32, 0 gives argmax's id, others are above 0 and
    finite; top_ks int32, 0 keeps all; top_ps float32, 0 to 1, 1 keeps all.

    Top-k keeps the k largest logits and those equal to the k-th. Of these, top-p keeps the fewest of the largest whose
    probability reaches p, one at least, and those equal to the last of them. NaN and -inf are never drawn; a row that
    draws and has nothing else gives -1. Tokens at +inf leave no chance to others, and have equal ones. Raises ValueError
    unless there is one of each parameter for every row.
    """
    parameters = seeds, positions, temperatures, top_ks, top_ps
    if any(len(p) != logits.shape[0] for p in parameters):
        raise ValueError(
            f"sample: {[len(p) for p in parameters]} parameters for {logits.shape[0]} rows: one of each a row"
        )
    sample_kernel.at()[logits.shape[0], THREADS, stream](ids, logits, *parameters)


@kernel
def argmax_kernel(ids, logits):
    """A block takes a row; thread t looks at ids t, t + 1024, ... ids: int32 [rows]; logits: float32 [rows,
    vocabulary].

    Launch: grid rows, 1024 threads.
    """
    thread = cuda.threadIdx.x
    value, name = best_of_column(logits, cuda.blockIdx.x, thread)
    value, name = best_of_block(value, name)
    if thread == 0:
        ids[cuda.blockIdx.x] = id_or_none(name)


@kernel
def sample_kernel(ids, logits, seeds, positions, temperatures, top_ks, top_ps):
    """A block takes a row; thread t looks at ids t, t + 1024, ... ids: int32 [rows]; logits: float32 [rows,
    vocabulary]; seeds: uint64 [rows]; positions: int64 [rows]; temperatures, top_ps: float32 [rows]; top_ks: int32
    [rows].

    Launch: grid rows, 1024 threads.
    """
    row, thread = cuda.blockIdx.x, cuda.threadIdx.x
    # Greedy: the best logit, which the draw measures the others against.
    value, name = best_of_column(logits, row, thread)
    best, name = best_of_block(value, name)
    temperature = temperatures[row]
    if temperature > float32(0.0):
        # A token takes part if its rank is at least this; rank 0 never does.
        floor = uint32(1)
        # Top-k first,
        if top_ks[row] > 0:
            floor = floor_of_top_k(logits, row, thread, top_ks[row])
        # then top-p over what top-k keeps.
        if top_ps[row] < float32(1.0):
            floor = floor_of_top_p(logits, row, thread, floor, best, temperature, top_ps[row])
        # The draw.
        value, name = draw_of_column(logits, row, thread, floor, best, temperature, seeds[row], positions[row])
        value, name = best_of_block(value, name)
    if thread == 0:
        ids[row] = id_or_none(name)


# --- Which tokens take part -------------------------------------------------------------------------------------------


@device
def floor_of_top_k(logits, row, thread, k):
    """The largest rank, at least 1, that k or more tokens reach: uint32, in every thread.

    Bit by bit from the top; counts are whole numbers below 2^24, exact in float32.
    """
    floor = uint32(0)
    for bit in range(32):
        higher = with_bit(floor, bit)
        reached = block_sum(count_of_column(logits, row, thread, higher))
        if reached >= float32(k):
            floor = higher
    return larger(floor, uint32(1))


@device
def floor_of_top_p(logits, row, thread, floor, best, temperature, p):
    """The largest rank, from ``floor`` to the best token's, whose reachers weigh p of all that ``floor`` lets take part.

    Bit by bit from the top. A sum's order is fixed by position, and rounding is monotone: a higher rank never weighs more.
    """
    wanted = p * block_sum(weight_of_column(logits, row, thread, floor, best, temperature))
    found = uint32(0)
    for bit in range(32):
        higher = with_bit(found, bit)
        at_least = larger(floor, higher)
        reached = block_sum(weight_of_column(logits, row, thread, at_least, best, temperature))
        if reached >= wanted:
            found = higher
    return larger(floor, smaller(found, rank(best)))


@lanewise
def count_of_column(logits, row, first, floor):
    """How many of every 1024th logit of a row, from ``first``, have at least this rank: float32."""
    count = float32(0.0)
    for i in range(first, logits.shape[1], THREADS):
        count = count + (float32(1.0) if rank(logits[row, i]) >= floor else float32(0.0))
    return count


@lanewise
def weight_of_column(logits, row, first, floor, best, temperature):
    """The sum of e^scaled over those of every 1024th logit of a row, from ``first``, that have at least this rank."""
    weight = float32(0.0)
    for i in range(first, logits.shape[1], THREADS):
        logit = logits[row, i]
        if rank(logit) >= floor:
            weight = weight + exp_to_one(scaled(logit, best, temperature))
    return weight


@lanewise
def rank(x):
    """An order of floats as uint32: a larger float has a larger rank, zeros of both signs one; 0 for NaN and -inf."""
    bits = float_bits(x + float32(0.0))
    ordered = uint32(~bits) if bits >= uint32(SIGN) else uint32(bits | uint32(SIGN))
    return ordered if x > bits_float(uint32(MINUS_INFINITY)) else uint32(0)


@lanewise
def scaled(logit, best, temperature):
    """(logit - best) / temperature, two roundings: at most 0; 0 for the best, be it infinite."""
    return float32(0.0) if logit == best else (logit - best) / temperature


@lanewise
def with_bit(floor, bit):
    """The floor with a bit set, counted from the top."""
    return uint32(floor | uint32(uint32(SIGN) >> uint32(bit)))


@lanewise
def larger(a, b):
    return a if a > b else b


@lanewise
def smaller(a, b):
    return a if a < b else b


@device
def block_sum(part):
    """The sum over a block of 1024 threads, by warps and then over the warps: in every thread, the same bits."""
    sums = cuda.shared.array(32, float32)  # [warp]
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    total = warp_sum(part)
    if lane == 0:
        sums[warp] = total
    cuda.syncthreads()
    total = warp_sum(sums[lane])
    # The next turn of a loop writes what other warps may still read.
    cuda.syncthreads()
    return total


# --- The best of them -------------------------------------------------------------------------------------------------


@lanewise
def draw_of_column(logits, row, first, floor, best, temperature, seed, position):
    """The best of every 1024th token of a row, from ``first``, that has at least this rank: (scaled logit + noise, id);
    (-inf, NOBODY) if none has."""
    value, name = bits_float(uint32(MINUS_INFINITY)), int32(NOBODY)
    for i in range(first, logits.shape[1], THREADS):
        logit = logits[row, i]
        if rank(logit) >= floor:
            score = scaled(logit, best, temperature) + gumbel(seed, position, int32(i))
            value, name = better(value, name, score, int32(i))
    return value, name


@lanewise
def best_of_column(logits, row, first):
    """The best of every 1024th logit of a row, from ``first``: (value, id); (-inf, NOBODY) if none is a number."""
    value, name = bits_float(uint32(MINUS_INFINITY)), int32(NOBODY)
    for i in range(first, logits.shape[1], THREADS):
        value, name = better(value, name, logits[row, i], int32(i))
    return value, name


@device
def best_of_block(value, name):
    """The better of all threads: in every thread the same."""
    values = cuda.shared.array(32, float32)  # [warp]
    names = cuda.shared.array(32, int32)  # [warp]
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    value, name = best_of_warp(value, name)
    if lane == 0:
        values[warp] = value
        names[warp] = name
    cuda.syncthreads()
    return best_of_warp(values[lane], names[lane])


@device
def best_of_warp(value, name):
    """The better of all lanes by exchanges: in every lane the same."""
    value, name = better(value, name, shfl_xor(value, 16), shfl_xor(name, 16))
    value, name = better(value, name, shfl_xor(value, 8), shfl_xor(name, 8))
    value, name = better(value, name, shfl_xor(value, 4), shfl_xor(name, 4))
    value, name = better(value, name, shfl_xor(value, 2), shfl_xor(name, 2))
    return better(value, name, shfl_xor(value, 1), shfl_xor(name, 1))


@lanewise
def better(value, name, other_value, other_name):
    """The larger value with its id; of equal values the lower id; a NaN loses."""
    wins = other_value > value or (other_value == value and other_name < name)
    return other_value if wins else value, other_name if wins else name


@lanewise
def id_or_none(name):
    """The id, -1 for what loses every tie."""
    return int32(-1) if name == NOBODY else name
