"""The n-gram branch: rows of a large table, chosen by a hash of the last tokens, gated and convolved into the streams.

Spec flash-next §3. One early layer of Flash Next adds it to its residual streams (hyper.py: S of them, C = S·D channels)
before it reads them:

    rows = ngram_rows(ids)                          16 heads: 8 of pairs, then 8 of triples of tokens
    e = embed(table, rows)                          a row of the launch is its heads' rows of the table, side by side
    keys, values = e · keyᵀ, e · valueᵀ             ``matmul``, [W, C] and [W, D]
    gated = ngram_gate(keys, values, h)
    normed = norm_streams(gated)
    h = ngram_conv(h, gated, normed)

What a stream keeps of the rows before is in its run (gated_delta_net.py): at the words where a run that starts at word 0 has them

    tokens       int32 [words]           [2]: id + 1 of the last two tokens, the older first, 0 where there is none
    tails        bf16 [2 · words]        [9, C]: the last rows of ``normed``, the oldest first

so that a new stream's run, zeros, has no tokens. By row of the launch (W rows of S streams), as there: rows int32 [W], streams
(kernels_numba/streams.py), runs int64. Windows are chains: no kernel here knows trees of drafts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.flash_next.hyper import PART_WORDS, WARPS, check_streams, parts_of, squares_of_stream, sum_in_order
from kernels_numba.machine import (
    KernelError,
    bf16_high,
    bf16_low,
    cuda,
    device,
    float32,
    fmax,
    int32,
    int64,
    kernel,
    lanewise,
    pack_bf16,
    sqrt,
    uint32,
    uint64,
)
from kernels_numba.norms import add_words, inverse_rms, scaled, warp_sum
from kernels_numba.portable_math import sigmoid, silu
from kernels_numba.rounding import to_bf16
from kernels_numba.streams import FIRST, ROWS

THREADS = 128
LONGEST = 3
"""Tokens of the longest n-gram; half of the heads are of pairs, half of triples."""
TAPS, DILATION = 4, LONGEST
"""Taps of the convolution, and how many rows apart they are."""
KEPT = (TAPS - 1) * DILATION
"""Rows that a stream keeps."""
LEAST = 1e-6
"""A dot product is taken as no smaller before its root."""


def ngram_rows(
    out: Any, ids: Any, tokens: Any, multipliers: Any, sizes: Any, offsets: Any, rows: Any, streams: Any, runs: Any,
    end: int, stream: Any = None,
) -> None:  # fmt: skip
    """Rows of the table for each row and head: offset + XOR of token · multiplier, the newest token first, modulo size.

    out: int32 [W, heads]; ids: int32 [W]; multipliers: uint64 [3]; sizes, offsets: uint64 [heads]; end: the id that ends a text:
    it stands for what a stream has no token for, and for all tokens before one. Products and offsets stay below 2^63 and 2^31
    (registry/ngrams.py). Changes no state. Raises KernelError for other shapes.
    """
    heads = out.shape[1]
    if sizes.shape != (heads,) or offsets.shape != (heads,) or multipliers.shape != (LONGEST,) or heads % 2:
        raise KernelError(
            f"ngram_rows: {heads} heads, sizes {sizes.shape}, offsets {offsets.shape}, multipliers {multipliers.shape}: wants an "
            f"even number of heads, a size and an offset each, {LONGEST} multipliers"
        )
    grid = -(-out.size // THREADS)
    given = ids, tokens, multipliers, sizes, offsets, rows, streams, runs
    ngram_rows_kernel.at()[grid, THREADS, stream](out, *given, np.int32(end))


def commit_tokens(tokens: Any, ids: Any, streams: Any, runs: Any, stream: Any = None) -> None:
    """A stream's tokens = the last two of [its tokens | its rows' ids]. ids: int32 [W]."""
    commit_tokens_kernel.at()[-(-streams.shape[0] // THREADS), THREADS, stream](tokens, ids, streams, runs)


def ngram_gate(
    out: Any, keys: Any, values: Any, h: Any, key_gain: Any, query_gain: Any, eps: float, stream: Any = None
) -> None:
    """out = bf16(bf16(sigmoid(g)) · value) for each stream, g = bf16(±sqrt(|d|)) by the sign of d, d = bf16(k · q / sqrt(D)).

    k and q are the RMS norms of keys and h, stream by stream, rounded to bf16 as are their products. |d| counts as 1e-6 at
    least, d = 0 gives 0.

    out, keys, h: bf16 [W, S·D]; values: bf16 [W, D], D even; key_gain, query_gain: float32 [S·D], effective. Raises KernelError
    unless h is a whole number of rows as wide as values.
    """
    check_streams("ngram_gate", h, values)
    rows, words = values.shape[0], values.shape[1] // 2
    bound = ngram_gate_kernel.at(WORDS=words, PARTS=parts_of(words))
    grid = rows, h.shape[1] // values.shape[1]
    bound[grid, THREADS, stream](out, keys, values, h, key_gain, query_gain, np.float32(eps))


def ngram_conv(
    h: Any, gated: Any, normed: Any, tails: Any, weight: Any, rows: Any, streams: Any, runs: Any, stream: Any = None
) -> None:
    """h = bf16(h + bf16(gated + bf16(silu(bf16(sum over taps))))), in place.

    A channel's taps are its values in ``normed`` 9, 6, 3 and 0 rows before.
    h, gated, normed: bf16 [W, C]; weight: bf16 [C, 4], the oldest tap first. Changes no state.
    """
    grid = -(-h.size // (2 * THREADS))
    ngram_conv_kernel.at()[grid, THREADS, stream](h, gated, normed, tails, weight, rows, streams, runs)


def commit_tails(tails: Any, normed: Any, streams: Any, runs: Any, stream: Any = None) -> None:
    """A stream's tail = the last nine rows of [its tail | its rows of normed]. normed: bf16 [W, C]."""
    grid = streams.shape[0], -(-normed.shape[1] // (2 * THREADS))
    commit_tails_kernel.at()[grid, THREADS, stream](tails, normed, streams, runs)


# --- The hash ---------------------------------------------------------------------------------------------------------


@kernel
def ngram_rows_kernel(out, ids, tokens, multipliers, sizes, offsets, rows, streams, runs, end):
    """A thread takes a row's head. Spec flash-next §3.

    out: int32 [W, heads]; ids: int32 [W]; tokens: int32 [words]; multipliers: uint64 [3]; sizes, offsets: uint64 [heads];
    rows: int32 [W]; streams: int64 [S, columns]; runs: int64 [S]; end: int32. Launch: grid W·heads / 128, 128 threads.
    """
    place = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    row, head = place // out.shape[1], place % out.shape[1]
    if row < out.shape[0]:
        owner = rows[row]
        # The tokens before; behind an end there is nothing but ends.
        first, run = streams[owner, FIRST], runs[owner]
        last = token_at(ids, tokens, run, first, row - first - 1, end)
        before = end if last == end else token_at(ids, tokens, run, first, row - first - 2, end)
        # Their hash: of two for the first half of the heads, of three for the others.
        mixed = pair_hash(ids[row], last, multipliers)
        if head >= out.shape[1] // 2:
            mixed = mixed ^ (uint64(before) * multipliers[2])
        out[row, head] = int32(offsets[head] + mixed % sizes[head])


@lanewise
def pair_hash(token, last, multipliers):
    """token · m0 XOR last · m1, uint64."""
    return (uint64(token) * multipliers[0]) ^ (uint64(last) * multipliers[1])


@lanewise
def token_at(ids, tokens, run, first, index, end):
    """Token ``index`` of a stream's rows, or, negative, of what it keeps, whose newest is -1; ``end`` where there is none."""
    found = ids[first + index] if index >= 0 else int32(tokens[run + (LONGEST - 1) + index] - 1)
    return end if found < 0 else found


@kernel
def commit_tokens_kernel(tokens, ids, streams, runs):
    """A thread takes a stream that has rows, and reads before it writes.

    tokens: int32 [words]; ids: int32 [W]; streams: int64 [S, columns]; runs: int64 [S].

    Launch: grid S / 128, 128 threads.
    """
    owner = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    if owner < streams.shape[0]:
        first, count, run = streams[owner, FIRST], streams[owner, ROWS], runs[owner]
        if count > 0:
            older = token_at(ids, tokens, run, first, count - 2, int32(-1))
            tokens[run] = int32(older + 1)
            tokens[run + 1] = int32(ids[first + count - 1] + 1)


# --- The gate ---------------------------------------------------------------------------------------------------------


@kernel
def ngram_gate_kernel(out, keys, values, h, key_gain, query_gain, eps, *, WORDS, PARTS):
    """A block takes a row's stream; sums are made of parts as in hyper.py. Spec flash-next §3.

    out, keys, h: bf16 [W, S·D]; values: bf16 [W, D]; key_gain, query_gain: float32 [S·D]; eps: float32. Launch: grid (W, S),
    128 threads.
    """
    row, first = cuda.blockIdx.x, cuda.blockIdx.y * WORDS
    key_inverse = inverse_rms(squares_of_stream(keys, row, first, WORDS=WORDS, PARTS=PARTS), WORDS * 2, eps)
    query_inverse = inverse_rms(squares_of_stream(h, row, first, WORDS=WORDS, PARTS=PARTS), WORDS * 2, eps)
    # The dot product of the norms.
    sums = cuda.shared.array(PARTS, float32)  # [part]
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    for part in range(warp, PARTS, WARPS):
        at = part * PART_WORDS + lane
        total = warp_sum(
            dot_of_lane(
                keys, h, key_gain, query_gain, key_inverse, query_inverse, row, first, at, WORDS=WORDS
            )
        )  # fmt: skip
        if lane == 0:
            sums[part] = total
    cuda.syncthreads()
    # The gate, and what it leaves of the values.
    gate = gate_of(sum_in_order(sums, PARTS=PARTS), WORDS * 2)
    for start in range(0, WORDS, THREADS):
        word = start + cuda.threadIdx.x
        if word < WORDS:
            out[row, first + word] = times(values[row, word], gate)


@lanewise
def dot_of_lane(keys, h, key_gain, query_gain, key_inverse, query_inverse, row, first, at, *, WORDS):
    """The products of four words of a part, 32 apart, from word ``at`` of the stream, each rounded to bf16."""
    total = float32(0.0)
    for i in range(PART_WORDS // 32):
        if at + 32 * i < WORDS:
            word = first + at + 32 * i
            k = scaled(keys[row, word], key_inverse, key_gain[2 * word], key_gain[2 * word + 1])
            q = scaled(h[row, word], query_inverse, query_gain[2 * word], query_gain[2 * word + 1])
            total = total + to_bf16(bf16_low(k) * bf16_low(q))
            total = total + to_bf16(bf16_high(k) * bf16_high(q))
    return total


@lanewise
def gate_of(dot, dims):
    """bf16(sigmoid(bf16(±sqrt(|d|)))) with d = bf16(dot / sqrt(dims)); a NaN stays one."""
    d = to_bf16(dot / sqrt(float32(dims)))
    root = sqrt(fmax(fmax(d, -d), float32(LEAST)))
    signed = root if d > float32(0.0) else (-root if d < float32(0.0) else d)
    return to_bf16(sigmoid(to_bf16(signed)))


@lanewise
def times(pair, factor):
    """bf16(v · factor) of a pair."""
    return pack_bf16(bf16_low(pair) * factor, bf16_high(pair) * factor)


# --- The convolution --------------------------------------------------------------------------------------------------


@kernel
def ngram_conv_kernel(h, gated, normed, tails, weight, rows, streams, runs):
    """A thread takes a pair of a row's channels. Spec flash-next §3.

    h, gated, normed: bf16 [W, C]; tails: bf16 [2 · words]; weight: bf16 [C, 4]; rows: int32 [W]; streams: int64 [S, columns];
    runs: int64 [S]. Launch: grid W·C / 256, 128 threads.
    """
    pair = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    row, word = pair // h.shape[1], pair % h.shape[1]
    if row < h.shape[0]:
        owner = rows[row]
        added = branch_pair(gated[row, word], normed, tails, weight, runs[owner], streams[owner, FIRST], row, word)
        h[row, word] = add_words(h[row, word], added)


@lanewise
def branch_pair(gated, normed, tails, weight, run, first, row, word):
    """bf16(gated + bf16(silu(bf16(sum over taps)))) of two neighbouring channels; the oldest tap is added first."""
    even, odd = float32(0.0), float32(0.0)
    for t in range(TAPS):
        x = input_word(normed, tails, run, first, row - first - (TAPS - 1 - t) * DILATION, word)
        even = even + bf16_low(x) * tap(weight, 2 * word, t)
        odd = odd + bf16_high(x) * tap(weight, 2 * word + 1, t)
    return add_words(gated, pack_bf16(silu(to_bf16(even)), silu(to_bf16(odd))))


@lanewise
def input_word(normed, tails, run, first, index, word):
    """Two channels of row ``index`` of a stream, or, negative, of its tail, whose newest row is -1."""
    return normed[first + index, word] if index >= 0 else tails[run + (index + KEPT) * normed.shape[1] + word]


@lanewise
def tap(weight, channel, t):
    """weight[channel, t], widened."""
    pair = weight[channel, t // 2]
    return bf16_high(pair) if t % 2 == 1 else bf16_low(pair)


@kernel
def commit_tails_kernel(tails, normed, streams, runs):
    """A thread takes two channels of a stream: it reads all nine rows before it writes one.

    tails: bf16 [2 · words]; normed: bf16 [W, C]; streams: int64 [S, columns]; runs: int64 [S]. Launch: grid (S, C / 256), 128
    threads.
    """
    owner, word = cuda.blockIdx.x, cuda.blockIdx.y * THREADS + cuda.threadIdx.x
    if word < normed.shape[1]:
        kept = cuda.local.array(KEPT, uint32)  # [row]
        load_tail(kept, normed, tails, runs[owner], streams[owner, FIRST], streams[owner, ROWS], word)
        store_tail(tails, kept, runs[owner] + word, normed.shape[1])


@lanewise
def load_tail(kept, normed, tails, run, first, count, word):
    """The pairs of the last nine rows of [tail | rows]."""
    for i in range(KEPT):
        kept[i] = input_word(normed, tails, run, first, count - KEPT + i, word)


@device
def store_tail(tails, kept, at, stride):
    """The pairs back, from word ``at`` of the first row on."""
    for i in range(KEPT):
        tails[at + i * stride] = kept[i]
