"""The delta rule over drafted windows: a step through each stream's tree, and the replay of the rows it accepts.

Spec attention §5.5; the arrays are those of gated_delta_net.py. The step changes no state: a thread holds those of the
branch points it comes back to, in slots that tree_plan.py hands out. The replay runs the accepted rows once more and
writes the state back. Both give the bits of ``gated_delta_net.step`` for the same rows as a chain, and so of each row
alone.
"""

from __future__ import annotations

from typing import Any

from kernels_numba.gated_delta_net import (
    HEAD,
    THREADS,
    add_outer4,
    decay_and_read,
    key_heads,
    load_pair_of_rows,
    state_word,
    step_row,
    store_pair_of_rows,
    words_of,
)
from kernels_numba.machine import bf16_high, bf16_low, cuda, float32, int64, kernel, lanewise
from kernels_numba.norms import warp_sum
from kernels_numba.streams import FIRST, ROWS
from kernels_numba.tree_plan import FROM_STATE, NOWHERE, ROW, SAVE, SAVED_SLOTS, SOURCE, TreeSchedule


def step_tree(
    y: Any, states: Any, qkv: Any, decay: Any, beta: Any, streams: Any, runs: Any, schedule: TreeSchedule,
    stream: Any = None,
) -> None:  # fmt: skip
    """The delta rule of drafted windows: each row from the state after its parent. Changes no state.

    y: bf16 [W, HV·128], written. schedule: of the windows' parents, where the kernel runs.
    """
    value_heads = decay.shape[1]
    bound = step_tree_kernel.at(HK=key_heads(qkv, decay), HV=value_heads)
    grid = (streams.shape[0], value_heads, HEAD // 8)
    bound[grid, THREADS, stream](y, states, qkv, decay, beta, streams, runs, schedule.visits)


def replay(
    states: Any, qkv: Any, decay: Any, beta: Any, streams: Any, runs: Any, paths: Any, last: Any, kept: Any,
    stream: Any = None,
) -> None:  # fmt: skip
    """Advance each stream's state by the rows it accepts: paths[last[s], 0 .. kept[s] - 1]; kept[s] = 0: as it was.

    paths: int32 [W, 128]; last: int32 [S], rows of the launch; kept: int32 [S].
    """
    value_heads = decay.shape[1]
    bound = replay_kernel.at(HK=key_heads(qkv, decay), HV=value_heads)
    grid = (streams.shape[0], value_heads, HEAD // 8)
    bound[grid, THREADS, stream](states, qkv, decay, beta, streams, runs, paths, last, kept)


# --- Step through a tree ----------------------------------------------------------------------------------------------


@kernel
def step_tree_kernel(y, states, qkv, decay, beta, streams, runs, visits, *, HK, HV):
    """A warp takes two value rows of a head, as in step_kernel, and walks its stream's visits. Spec attention §5.2, §5.5.

    y: bf16 [W, HV·128]; states: float32 [words]; qkv: bf16 [W, C]; decay, beta: float32 [W, HV];
    streams: int64 [S, 13]; runs: int64 [S]; visits: int32 [W, 3]. Launch: grid (S, HV, 16), 128 threads.
    """
    owner, head = cuda.blockIdx.x, cuda.blockIdx.y
    lane = cuda.threadIdx.x % 32
    value = cuda.blockIdx.z * 8 + cuda.threadIdx.x // 32 * 2  # first value index of the warp
    query_word, key_word, value_word = words_of(head, lane, value, HK=HK, HV=HV)
    at = state_word(runs[owner], head, value) + lane * 4
    s = cuda.local.array((2, 4), float32)  # [value row, key index]
    saved = cuda.local.array((SAVED_SLOTS, 2, 4), float32)  # [slot, value row, key index]
    first = streams[owner, FIRST]
    for i in range(streams[owner, ROWS]):
        row, source, slot = first + visits[first + i, ROW], visits[first + i, SOURCE], visits[first + i, SAVE]
        # the state after the row's parent: the committed one, a saved one, or still in s
        if source == FROM_STATE:
            load_pair_of_rows(s, states, at)
        elif source >= 0:
            take_saved(s, saved, source)
        step_row(y, s, qkv, row, head, value, query_word, key_word, value_word, decay[row, head], beta[row, head])
        # kept for the row's other children
        if slot != NOWHERE:
            save(saved, s, slot)


@lanewise
def take_saved(s, saved, slot):
    """s = a saved state."""
    for r in range(2):
        for i in range(4):
            s[r, i] = saved[slot, r, i]


@lanewise
def save(saved, s, slot):
    """take_saved the other way."""
    for r in range(2):
        for i in range(4):
            saved[slot, r, i] = s[r, i]


# --- Replay -----------------------------------------------------------------------------------------------------------


@kernel
def replay_kernel(states, qkv, decay, beta, streams, runs, paths, last, kept, *, HK, HV):
    """A warp takes two value rows of a head, as in step_kernel; no row has an output. Spec attention §5.2, §5.5.

    states: float32 [words]; qkv: bf16 [W, C]; decay, beta: float32 [W, HV]; streams: int64 [S, 13]; runs: int64 [S];
    last, kept: int32 [S]; paths: int32 [W, 128]. Launch: grid (S, HV, 16), 128 threads.
    """
    owner, head = cuda.blockIdx.x, cuda.blockIdx.y
    lane = cuda.threadIdx.x % 32
    value = cuda.blockIdx.z * 8 + cuda.threadIdx.x // 32 * 2  # first value index of the warp
    _, key_word, value_word = words_of(head, lane, value, HK=HK, HV=HV)
    at = state_word(runs[owner], head, value) + lane * 4
    n = int64(kept[owner])
    if n > 0:
        s = cuda.local.array((2, 4), float32)  # [value row, key index]
        load_pair_of_rows(s, states, at)
        for i in range(n):
            row = streams[owner, FIRST] + paths[last[owner], i]
            # s = s·g; mem = sum s·k
            part0, part1 = decay_and_read(s, qkv, row, key_word, decay[row, head])
            mem0, mem1 = warp_sum(part0), warp_sum(part1)
            # dlt = (v - mem)·beta; s = s + k·dlt
            update(s, qkv, row, key_word, value_word, mem0, mem1, beta[row, head])
        store_pair_of_rows(states, s, at)


@lanewise
def update(s, qkv, row, key_word, value_word, mem0, mem1, b):
    """s = s + k·((v - mem)·beta) for both rows."""
    v = qkv[row, value_word]
    low, high = qkv[row, key_word], qkv[row, key_word + 1]
    add_outer4(s[0], low, high, (bf16_low(v) - mem0) * b)
    add_outer4(s[1], low, high, (bf16_high(v) - mem1) * b)
