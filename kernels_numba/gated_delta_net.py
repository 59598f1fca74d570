"""Gated DeltaNet: causal convolution, gates, the delta rule (decode step and prompt chain) and the gated output norm.

Spec attention §5; heads are 128 wide, value head h uses key head h // (HV / HK). What a stream keeps of the rows before
is its *run*: words anywhere in an arena, in which each layer has its part, a state and a history. Kernels take the arena
from two words on, those where a run that starts at word 0 has the layer's state and history:

    states       float32 [words]                 state [HV, 128, 128]: runs[s] + (head·128 + value)·128 + key
    histories    bf16 [2 · words]                history [3, C]: its word runs[s] + row·C/2 + channel/2; the last rows of
                                                 the convolution's input, oldest first
    runs         int64 [S]                       stream -> word at which its run starts

C = (2·HK + HV)·128 channels in the order [q | k | v]. A new stream's run holds zeros. By row of the launch (W rows of S
streams):

    mixed        bf16 [W, C + HV·128 + 2·HV]     the input projection, a row is [q | k | v | z | b | a]
    qkv          bf16 [W, C]                     what the convolution makes of its first channels
    decay, beta  float32 [W, HV]
    y            bf16 [W, HV·128]
    rows         int32 [W]                       row -> stream
    streams      int64 [S, 13]                   kernels_numba/streams.py; ROWS = 0: takes no part, keeps its run
    paths        int32 [W, 128]                  of drafted windows: path entry -> window row, root first, the row last
    depths       int32 [W]                       entries of a row's path
    last, kept   int32 [S]                       the row of the launch whose path is accepted, and how much of it

A drafted window is a tree of rows, a chain at its simplest; it changes no state. Of a window, ``conv_path`` takes the
place of ``conv``, ``commit_conv_path`` of ``commit_conv``, and delta_trees.py has the delta rule. A row has the bits
that it has alone once the rows before it on its path are committed.
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
    fma,
    int64,
    kernel,
    lanewise,
    pack_bf16,
    shfl_xor,
    sqrt,
)
from kernels_numba.norms import inverse_rms, warp_sum
from kernels_numba.portable_math import exp, rsqrt, sigmoid, silu, softplus
from kernels_numba.streams import FIRST, ROWS

HEAD = 128
"""Width of a key and of a value head."""
WORDS = HEAD // 2
TAPS = 4
"""Width of the convolution; a stream keeps TAPS - 1 rows."""
NORM_EPS = 1e-6
THREADS = 128


def conv(
    qkv: Any,
    mixed: Any,
    histories: Any,
    weight: Any,
    rows: Any,
    streams: Any,
    runs: Any,
    key_heads: int,
    stream: Any = None,
) -> None:
    """The convolution with silu over [q | k | v], then q and k normed by head. Changes no state.

    qkv: bf16 [W, C], written; weight: bf16 [C, 4], oldest tap first; the others as the module says.
    """
    heads = qkv.shape[1] // HEAD
    bound = conv_kernel.at(HK=key_heads, HV=heads - 2 * key_heads)
    bound[(qkv.shape[0], -(-heads // 4)), THREADS, stream](qkv, mixed, histories, weight, rows, streams, runs)


def conv_path(
    qkv: Any, mixed: Any, histories: Any, weight: Any, rows: Any, streams: Any, runs: Any, paths: Any, depths: Any,
    key_heads: int, stream: Any = None,
) -> None:  # fmt: skip
    """``conv`` of drafted windows: the taps of a row lie on its own path, then in the stream's history.

    paths: int32 [W, 128], depths: int32 [W], as decode_plan.tree_tables makes them. A window that is a chain gets the
    bits of ``conv``.
    """
    heads = qkv.shape[1] // HEAD
    bound = conv_path_kernel.at(HK=key_heads, HV=heads - 2 * key_heads)
    grid = (qkv.shape[0], -(-heads // 4))
    bound[grid, THREADS, stream](qkv, mixed, histories, weight, rows, streams, runs, paths, depths)


def commit_conv(histories: Any, mixed: Any, streams: Any, runs: Any, channels: int, stream: Any = None) -> None:
    """A stream's history = the last three rows of [its history | the stream's ROWS rows of mixed]. channels: C."""
    bound = commit_conv_kernel.at(C=channels)
    bound[(streams.shape[0], history_blocks(channels)), THREADS, stream](histories, mixed, streams, runs)


def commit_conv_path(
    histories: Any, mixed: Any, streams: Any, runs: Any, paths: Any, last: Any, kept: Any, channels: int,
    stream: Any = None,
) -> None:  # fmt: skip
    """A stream's history = the last three rows of [its history | the stream's accepted rows, in the path's order].

    The accepted rows are paths[last[s], 0 .. kept[s] - 1]; kept[s] = 0 changes nothing. channels: C.
    """
    bound = commit_conv_path_kernel.at(C=channels)
    grid = (streams.shape[0], history_blocks(channels))
    bound[grid, THREADS, stream](histories, mixed, streams, runs, paths, last, kept)


def history_blocks(channels: int) -> int:
    """Blocks that take a history's channels, two a thread."""
    return -(-channels // (2 * THREADS))


def gates(decay: Any, beta: Any, mixed: Any, a_log: Any, dt_bias: Any, key_heads: int, stream: Any = None) -> None:
    """decay = exp(-exp(a_log) · softplus(a + dt_bias)), beta = sigmoid(b).

    decay, beta: float32 [W, HV], written; a_log, dt_bias: float32 [HV].
    """
    bound = gates_kernel.at(HK=key_heads, HV=decay.shape[1])
    bound[-(-decay.size // THREADS), THREADS, stream](decay, beta, mixed, a_log, dt_bias)


def step(
    y: Any, states: Any, qkv: Any, decay: Any, beta: Any, streams: Any, runs: Any, commit: bool, stream: Any = None
) -> None:
    """The delta rule as decode computes it: a stream's rows in order; its state is written back if ``commit``.

    y: bf16 [W, HV·128], written.
    """
    value_heads = decay.shape[1]
    bound = step_kernel.at(HK=key_heads(qkv, decay), HV=value_heads, COMMIT=commit)
    grid = (streams.shape[0], value_heads, HEAD // 8)
    bound[grid, THREADS, stream](y, states, qkv, decay, beta, streams, runs)


def chain(y: Any, states: Any, qkv: Any, decay: Any, beta: Any, streams: Any, runs: Any, stream: Any = None) -> None:
    """The delta rule as prompts compute it: a stream's rows in order, any number; its state is written back.

    y: bf16 [W, HV·128], written. A row's bits do not depend on how a prompt is cut into launches.
    """
    value_heads = decay.shape[1]
    bound = chain_kernel.at(HK=key_heads(qkv, decay), HV=value_heads)
    grid = (streams.shape[0], value_heads)
    bound[grid, 2 * HEAD, stream](y, states, qkv, decay, beta, streams, runs)


def gated_norm(
    out: Any, y: Any, mixed: Any, gain: Any, eps: float, key_heads: int, gate: str = "silu", stream: Any = None
) -> None:
    """out = bf16(gate(z) · ((y · inv) · gain)) by value head, inv = 1 / sqrt(sum(y²) / 128 + eps); out may be y.

    out, y: bf16 [W, HV·128]; gain: float32 [128]; gate: "silu" (qwen3_5) or "sigmoid" (qwen4_exp).
    """
    if gate not in ("silu", "sigmoid"):
        raise KernelError(f"gated_norm: gate {gate!r}: silu or sigmoid")
    value_heads = y.shape[1] // HEAD
    bound = gated_norm_kernel.at(HK=key_heads, HV=value_heads, GATE=gate)
    bound[(y.shape[0], -(-value_heads // 4)), THREADS, stream](out, y, mixed, gain, np.float32(eps))


def key_heads(qkv: Any, decay: Any) -> int:
    """HK from the channels and HV."""
    return (qkv.shape[1] // HEAD - decay.shape[1]) // 2


# --- Convolution -----------------------------------------------------------------------------------------------------


@kernel
def conv_kernel(qkv, mixed, histories, weight, rows, streams, runs, *, HK, HV):
    """A warp takes one row's head of 128 channels, a lane four channels. Spec attention §5.1.

    qkv: bf16 [W, C]; mixed: bf16 [W, columns]; histories: bf16 [2 · words]; weight: bf16 [C, 4]; rows: int32 [W];
    streams: int64 [S, 13]; runs: int64 [S]. Launch: grid (W, heads / 4), 128 threads.
    """
    row = cuda.blockIdx.x
    head = cuda.blockIdx.y * 4 + cuda.threadIdx.x // 32  # of [q heads | k heads | v heads]
    if head < 2 * HK + HV:
        owner = rows[row]
        first = streams[owner, FIRST]
        oldest, middle, newest = before_in_chain(first, row - first)
        conv_head(
            qkv, mixed, histories, weight, runs[owner], oldest, middle, newest, row, head, HK=HK, C=(2 * HK + HV) * HEAD
        )


@kernel
def conv_path_kernel(qkv, mixed, histories, weight, rows, streams, runs, paths, depths, *, HK, HV):
    """As conv_kernel, with the taps of a row on its own path. Spec attention §5.1, §5.5.

    qkv: bf16 [W, C]; mixed: bf16 [W, columns]; histories: bf16 [2 · words]; weight: bf16 [C, 4]; rows, depths:
    int32 [W]; streams: int64 [S, 13]; runs: int64 [S]; paths: int32 [W, 128]. Launch: grid (W, heads / 4), 128
    threads.
    """
    row = cuda.blockIdx.x
    head = cuda.blockIdx.y * 4 + cuda.threadIdx.x // 32  # of [q heads | k heads | v heads]
    if head < 2 * HK + HV:
        owner = rows[row]
        oldest, middle, newest = before_on_path(paths, row, streams[owner, FIRST], int64(depths[row]) - 1)
        conv_head(
            qkv, mixed, histories, weight, runs[owner], oldest, middle, newest, row, head, HK=HK, C=(2 * HK + HV) * HEAD
        )


@device
def conv_head(qkv, mixed, histories, weight, run, oldest, middle, newest, row, head, *, HK, C):
    """One row's head by a warp; run: its stream's; oldest, middle, newest: sources of the three rows before it."""
    lane = cuda.threadIdx.x % 32
    word = head * WORDS + lane * 2
    c0, c1 = conv_pair(mixed, histories, weight, run, oldest, middle, newest, row, word, C=C)
    c2, c3 = conv_pair(mixed, histories, weight, run, oldest, middle, newest, row, word + 1, C=C)
    squares = warp_sum(((c0 * c0 + c1 * c1) + c2 * c2) + c3 * c3)
    inverse, divisor = head_scale(squares, head, HK=HK)
    qkv[row, word] = pack_bf16(c0 * inverse / divisor, c1 * inverse / divisor)
    qkv[row, word + 1] = pack_bf16(c2 * inverse / divisor, c3 * inverse / divisor)


@lanewise
def before_in_chain(first, index):
    """The sources of the three rows before row ``index`` of a stream, oldest first."""
    return chain_source(first, index - 3), chain_source(first, index - 2), chain_source(first, index - 1)


@lanewise
def before_on_path(paths, row, first, index):
    """The sources of the three rows before entry ``index`` of a row's path, oldest first."""
    oldest, middle = path_source(paths, row, first, index - 3), path_source(paths, row, first, index - 2)
    return oldest, middle, path_source(paths, row, first, index - 1)


@lanewise
def chain_source(first, index):
    """The source of row ``index`` of a stream: a row of the launch, or, negative, of the history, whose newest is -1."""
    return first + index if index >= 0 else index


@lanewise
def path_source(paths, row, first, index):
    """The same of entry ``index`` of a row's path."""
    return first + paths[row, index] if index >= 0 else index


@lanewise
def conv_pair(mixed, histories, weight, run, oldest, middle, newest, row, word, *, C):
    """bf16(silu(sum over taps)) of two neighbouring channels, widened; the oldest tap is added first."""
    even, odd = float32(0.0), float32(0.0)
    even, odd = add_tap(even, odd, weight, word, 0, input_word(mixed, histories, run, oldest, word, C=C))
    even, odd = add_tap(even, odd, weight, word, 1, input_word(mixed, histories, run, middle, word, C=C))
    even, odd = add_tap(even, odd, weight, word, 2, input_word(mixed, histories, run, newest, word, C=C))
    even, odd = add_tap(even, odd, weight, word, 3, mixed[row, word])
    pair = pack_bf16(silu(even), silu(odd))
    return bf16_low(pair), bf16_high(pair)


@lanewise
def add_tap(even, odd, weight, word, j, pair):
    """even + input · weight and odd + input · weight, of tap j; product and sum rounded."""
    return even + bf16_low(pair) * tap(weight, 2 * word, j), odd + bf16_high(pair) * tap(weight, 2 * word + 1, j)


@lanewise
def input_word(mixed, histories, run, source, word, *, C):
    """Two channels of the convolution's input at a source, see chain_source."""
    return mixed[source, word] if source >= 0 else histories[run + (source + (TAPS - 1)) * (C // 2) + word]


@lanewise
def tap(weight, channel, j):
    """weight[channel, j], widened."""
    pair = weight[channel, j // 2]
    return bf16_high(pair) if j % 2 == 1 else bf16_low(pair)


@lanewise
def head_scale(squares, head, *, HK):
    """(factor, divisor) of a head: (r, sqrt(128)) of q, (r, 1) of k, (1, 1) of v, where r = 1/sqrt(squares + eps)."""
    inverse = rsqrt(squares + float32(NORM_EPS)) if head < 2 * HK else float32(1.0)
    return inverse, sqrt(float32(HEAD)) if head < HK else float32(1.0)


@kernel
def commit_conv_kernel(histories, mixed, streams, runs, *, C):
    """A thread takes two channels of a stream: it reads all three rows before it writes one.

    histories: bf16 [2 · words]; mixed: bf16 [W, columns]; streams: int64 [S, 13]; runs: int64 [S].
    Launch: grid (S, C / 256), 128 threads.
    """
    owner = cuda.blockIdx.x
    word = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
    if word < C // 2:
        oldest, middle, newest = before_in_chain(streams[owner, FIRST], streams[owner, ROWS])
        shift_history(histories, mixed, runs[owner], oldest, middle, newest, word, C=C)


@kernel
def commit_conv_path_kernel(histories, mixed, streams, runs, paths, last, kept, *, C):
    """As commit_conv_kernel, of the rows that were accepted: the first ``kept`` of the path of row ``last``. Spec
    attention §5.5.

    histories: bf16 [2 · words]; mixed: bf16 [W, columns]; streams: int64 [S, 13]; runs: int64 [S]; paths: int32 [W, 128];
    last, kept: int32 [S]. Launch: grid (S, C / 256), 128 threads.
    """
    owner = cuda.blockIdx.x
    word = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
    n = int64(kept[owner])
    if n > 0 and word < C // 2:
        oldest, middle, newest = before_on_path(paths, last[owner], streams[owner, FIRST], n)
        shift_history(histories, mixed, runs[owner], oldest, middle, newest, word, C=C)


@device
def shift_history(histories, mixed, run, oldest, middle, newest, word, *, C):
    """Two channels of a history become those of three input rows; all are read before one is written."""
    pair0 = input_word(mixed, histories, run, oldest, word, C=C)
    pair1 = input_word(mixed, histories, run, middle, word, C=C)
    pair2 = input_word(mixed, histories, run, newest, word, C=C)
    histories[run + word] = pair0
    histories[run + C // 2 + word] = pair1
    histories[run + 2 * (C // 2) + word] = pair2


# --- Gates -----------------------------------------------------------------------------------------------------------


@kernel
def gates_kernel(decay, beta, mixed, a_log, dt_bias, *, HK, HV):
    """A thread takes one row's value head. Spec attention §5.1.

    decay, beta: float32 [W, HV]; mixed: bf16 [W, columns]; a_log, dt_bias: float32 [HV].
    Launch: grid W·HV / 128, 128 threads.
    """
    place = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    row, head = place // HV, place % HV
    if row < decay.shape[0]:
        at = (2 * HK + 2 * HV) * HEAD + head  # b of this head, then HV further on its a
        decay[row, head] = decay_of(element(mixed, row, at + HV), a_log[head], dt_bias[head])
        beta[row, head] = sigmoid(element(mixed, row, at))


@lanewise
def decay_of(a, a_log, dt_bias):
    """exp(-exp(a_log) · softplus(a + dt_bias))."""
    return exp(-exp(a_log) * softplus(a + dt_bias))


@lanewise
def element(matrix, row, column):
    """One element of a bf16 matrix, widened."""
    pair = matrix[row, column // 2]
    return bf16_high(pair) if column % 2 == 1 else bf16_low(pair)


# --- Decode step -----------------------------------------------------------------------------------------------------


@kernel
def step_kernel(y, states, qkv, decay, beta, streams, runs, *, HK, HV, COMMIT):
    """A warp takes two value rows of a head, lane l the key indices 4l .. 4l + 3 of both. Spec attention §5.2.

    y: bf16 [W, HV·128]; states: float32 [words]; qkv: bf16 [W, C]; decay, beta: float32 [W, HV];
    streams: int64 [S, 13]; runs: int64 [S]. Launch: grid (S, HV, 16), 128 threads.
    """
    owner, head = cuda.blockIdx.x, cuda.blockIdx.y
    lane = cuda.threadIdx.x % 32
    value = cuda.blockIdx.z * 8 + cuda.threadIdx.x // 32 * 2  # first value index of the warp
    query_word, key_word, value_word = words_of(head, lane, value, HK=HK, HV=HV)
    at = state_word(runs[owner], head, value) + lane * 4
    s = cuda.local.array((2, 4), float32)  # [value row, key index]
    load_pair_of_rows(s, states, at)
    first = streams[owner, FIRST]
    for i in range(streams[owner, ROWS]):
        row = first + i
        step_row(y, s, qkv, row, head, value, query_word, key_word, value_word, decay[row, head], beta[row, head])
    if COMMIT:
        store_pair_of_rows(states, s, at)


@lanewise
def words_of(head, lane, value, *, HK, HV):
    """(query_word, key_word, value_word): where in a row of qkv a lane's four query and key elements and its warp's two
    values start.
    """
    query_word = head // (HV // HK) * WORDS + lane * 2
    return query_word, query_word + HK * WORDS, (2 * HK + head) * WORDS + value // 2


@device
def step_row(y, s, qkv, row, head, value, query_word, key_word, value_word, g, b):
    """One row by a warp: the state s (float32 [2, 4] a lane) before it becomes the state after it, y is written."""
    # s = s·g; mem = sum s·k
    part0, part1 = decay_and_read(s, qkv, row, key_word, g)
    mem0, mem1 = warp_sum(part0), warp_sum(part1)
    # dlt = (v - mem)·beta; s = s + k·dlt; y = sum s·q
    part0, part1 = update_and_read(s, qkv, row, query_word, key_word, value_word, mem0, mem1, b)
    out0, out1 = warp_sum(part0), warp_sum(part1)
    if cuda.threadIdx.x % 32 == 0:
        y[row, head * WORDS + value // 2] = pack_bf16(out0, out1)


@lanewise
def state_word(run, head, value):
    """The word of ``states`` at which a value row starts."""
    return run + (int64(head) * HEAD + value) * HEAD


@lanewise
def load_pair_of_rows(s, states, at):
    """Four elements of two neighbouring rows, from word ``at`` of the first on."""
    for r in range(2):
        for i in range(4):
            s[r, i] = states[at + r * HEAD + i]


@device
def store_pair_of_rows(states, s, at):
    """load_pair_of_rows the other way."""
    for r in range(2):
        for i in range(4):
            states[at + r * HEAD + i] = s[r, i]


@lanewise
def dot4(s, low, high):
    """((s0·x0 + s1·x1) + s2·x2) + s3·x3 with x the four bf16 of two words; each operation rounded."""
    return ((s[0] * bf16_low(low) + s[1] * bf16_high(low)) + s[2] * bf16_low(high)) + s[3] * bf16_high(high)


@lanewise
def decay_and_read(s, qkv, row, key_word, g):
    """s = s·g; this lane's share of s·k for both rows."""
    low, high = qkv[row, key_word], qkv[row, key_word + 1]
    for r in range(2):
        for i in range(4):
            s[r, i] = s[r, i] * g
    return dot4(s[0], low, high), dot4(s[1], low, high)


@lanewise
def update_and_read(s, qkv, row, query_word, key_word, value_word, mem0, mem1, b):
    """s = s + k·((v - mem)·beta); this lane's share of s·q for both rows."""
    v = qkv[row, value_word]
    low, high = qkv[row, key_word], qkv[row, key_word + 1]
    add_outer4(s[0], low, high, (bf16_low(v) - mem0) * b)
    add_outer4(s[1], low, high, (bf16_high(v) - mem1) * b)
    low, high = qkv[row, query_word], qkv[row, query_word + 1]
    return dot4(s[0], low, high), dot4(s[1], low, high)


@lanewise
def add_outer4(s, low, high, delta):
    """s = s + k·delta for four key indices, product and sum rounded."""
    s[0] = s[0] + bf16_low(low) * delta
    s[1] = s[1] + bf16_high(low) * delta
    s[2] = s[2] + bf16_low(high) * delta
    s[3] = s[3] + bf16_high(high) * delta


# --- Prompt chain ----------------------------------------------------------------------------------------------------


@kernel
def chain_kernel(y, states, qkv, decay, beta, streams, runs, *, HK, HV):
    """A block takes a head, two threads a value row: thread ``half`` the keys 8j + 4·half + 0 .. 3. Spec attention §5.3.

    y: bf16 [W, HV·128]; states: float32 [words]; qkv: bf16 [W, C]; decay, beta: float32 [W, HV];
    streams: int64 [S, 13]; runs: int64 [S]. Launch: grid (S, HV), 256 threads.
    """
    owner, head = cuda.blockIdx.x, cuda.blockIdx.y
    value, half = cuda.threadIdx.x // 2, cuda.threadIdx.x % 2
    query_word = head // (HV // HK) * WORDS + half * 2
    key_word = query_word + HK * WORDS
    value_at = (2 * HK + head) * HEAD + value
    at = state_word(runs[owner], head, value) + half * 4
    s = cuda.local.array(64, float32)  # [(j, i)], key index 8j + 4·half + i
    load_half_row(s, states, at)
    first = streams[owner, FIRST]
    for i in range(streams[owner, ROWS]):
        row = first + i
        # s = s·g; mem = sum s·k, four chains over j
        part = chain_read(s, qkv, row, key_word, decay[row, head])
        mem = part + shfl_xor(part, 1)
        # dlt = (v - mem)·beta; s = fma(k, dlt, s); y = sum s·q, four chains over j
        delta = (element(qkv, row, value_at) - mem) * beta[row, head]
        part = chain_update(s, qkv, row, query_word, key_word, delta)
        out = part + shfl_xor(part, 1)
        neighbour = shfl_xor(out, 2)
        if cuda.threadIdx.x % 4 == 0:
            y[row, head * WORDS + value // 2] = pack_bf16(out, neighbour)
    for j in range(16):
        for i in range(4):
            states[at + 8 * j + i] = s[4 * j + i]


@lanewise
def load_half_row(s, states, at):
    """Every other four elements of a row of the state, from word ``at`` on."""
    for j in range(16):
        for i in range(4):
            s[4 * j + i] = states[at + 8 * j + i]


@lanewise
def chain_read(s, qkv, row, key_word, g):
    """s = s·g; this thread's half of s·k: m[i] = fma(s, k, m[i]) over j, then (m0 + m1) + (m2 + m3)."""
    m0, m1, m2, m3 = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
    for j in range(16):
        low, high = qkv[row, key_word + 4 * j], qkv[row, key_word + 4 * j + 1]
        s0, s1, s2, s3 = s[4 * j] * g, s[4 * j + 1] * g, s[4 * j + 2] * g, s[4 * j + 3] * g
        s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3] = s0, s1, s2, s3
        m0, m1 = fma(s0, bf16_low(low), m0), fma(s1, bf16_high(low), m1)
        m2, m3 = fma(s2, bf16_low(high), m2), fma(s3, bf16_high(high), m3)
    return (m0 + m1) + (m2 + m3)


@lanewise
def chain_update(s, qkv, row, query_word, key_word, delta):
    """s = fma(k, delta, s); this thread's half of s·q, in the order of chain_read."""
    o0, o1, o2, o3 = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
    for j in range(16):
        low, high = qkv[row, key_word + 4 * j], qkv[row, key_word + 4 * j + 1]
        s0, s1 = fma(bf16_low(low), delta, s[4 * j]), fma(bf16_high(low), delta, s[4 * j + 1])
        s2, s3 = fma(bf16_low(high), delta, s[4 * j + 2]), fma(bf16_high(high), delta, s[4 * j + 3])
        s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3] = s0, s1, s2, s3
        low, high = qkv[row, query_word + 4 * j], qkv[row, query_word + 4 * j + 1]
        o0, o1 = fma(s0, bf16_low(low), o0), fma(s1, bf16_high(low), o1)
        o2, o3 = fma(s2, bf16_low(high), o2), fma(s3, bf16_high(high), o3)
    return (o0 + o1) + (o2 + o3)


# --- Gated output norm -----------------------------------------------------------------------------------------------


@kernel
def gated_norm_kernel(out, y, mixed, gain, eps, *, HK, HV, GATE):
    """A warp takes one row's value head, a lane four elements. Spec attention §5.4.

    out, y: bf16 [W, HV·128]; mixed: bf16 [W, columns]; gain: float32 [128]; eps: float32.
    Launch: grid (W, HV / 4), 128 threads.
    """
    row = cuda.blockIdx.x
    lane = cuda.threadIdx.x % 32
    head = cuda.blockIdx.y * 4 + cuda.threadIdx.x // 32
    if head < HV:
        word = head * WORDS + lane * 2
        gate_word = (2 * HK + HV) * WORDS + word
        low, high = y[row, word], y[row, word + 1]
        inverse = inverse_rms(warp_sum(squares4(low, high)), HEAD, eps)
        out[row, word] = gated_pair(low, mixed[row, gate_word], inverse, gain[lane * 4], gain[lane * 4 + 1], GATE=GATE)
        out[row, word + 1] = gated_pair(
            high, mixed[row, gate_word + 1], inverse, gain[lane * 4 + 2], gain[lane * 4 + 3], GATE=GATE
        )


@lanewise
def squares4(low, high):
    """The sum of the squares of four bf16, left to right."""
    y0, y1, y2, y3 = bf16_low(low), bf16_high(low), bf16_low(high), bf16_high(high)
    return ((y0 * y0 + y1 * y1) + y2 * y2) + y3 * y3


@lanewise
def gated_pair(y, z, inverse, gain_low, gain_high, *, GATE):
    """bf16(gate(z) · ((y · inverse) · gain)) of a pair."""
    low = gate_of(bf16_low(z), GATE=GATE) * ((bf16_low(y) * inverse) * gain_low)
    high = gate_of(bf16_high(z), GATE=GATE) * ((bf16_high(y) * inverse) * gain_high)
    return pack_bf16(low, high)


@lanewise
def gate_of(z, *, GATE):
    """silu or sigmoid."""
    return silu(z) if GATE == "silu" else sigmoid(z)
