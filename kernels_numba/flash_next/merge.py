"""Partials of sparse attention into rows: a fold in order of the chunks. Spec flash-next "fn_attn_merge"."""

from __future__ import annotations

from typing import Any

from kernels_numba.decode_attention import empty, fold_partial
from kernels_numba.decode_plan import CHUNK
from kernels_numba.flash_next.select import keys_before, list_length
from kernels_numba.machine import cuda, float32, int64, kernel, pack_bf16


def fn_attn_merge(
    out: Any, po: Any, pm: Any, pl: Any, streams: Any, rows: Any, budget: int, stream: Any = None
) -> None:  # fmt: skip
    """The partials of every row of a launch into the row. fn_attn_merge_kernel documents the arrays. stream: of the GPU."""
    count, heads, dims = out.shape
    fn_attn_merge_kernel.at()[(count, heads), dims // 2, stream](out, po, pm, pl, streams, rows, budget)


@kernel
def fn_attn_merge_kernel(out, po, pm, pl, streams, rows, budget):
    """Spec flash-next "fn_attn_merge", FOLD of spec attention §2: chunk by chunk onto an empty row; out = bf16(o / l).

    A chunk that saw no key (l = 0) leaves the row as it is. Slots past a row's list are not read.

    out: bf16 [R, H, D], written. po: float32 [slots, R, H, D], pm, pl: float32 [slots, R, H]. streams: int64 [S, columns].
    rows: int32 [R], row -> stream. budget: int64, as fn_qsa_select.

    Launch: grid (R, H), D/2 threads, two columns each.
    """
    state = cuda.local.array(4, float32)  # [m, l, two columns of o]
    row, head, thread = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y), int64(cuda.threadIdx.x)
    keys = list_length(keys_before(streams, rows, row), budget)
    empty(state)
    for slot in range((keys + CHUNK - 1) // CHUNK):
        fold_partial(state, po, pm, pl, slot, row, head, 2 * thread)
    out[row, head, thread] = pack_bf16(state[2] / state[1], state[3] / state[1])
