"""Sparse attention of a launch: its rows' keys chosen, attended to in chunks, the chunks folded. Spec flash-next."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.flash_next.chunks import fn_attn_chunks
from kernels_numba.flash_next.merge import fn_attn_merge
from kernels_numba.flash_next.select import fn_qsa_select
from kernels_numba.flash_next.sparse_plan import SparsePlan


def sparse_attention(
    out: Any, q: Any, scores: Any, arena: Any, pages: Any, streams: Any, rows: Any, scale: np.float32, listed: Any,
    scratch: Any, plan: SparsePlan, layout: Any, kv: str = "bf16", ahead: bool = False, stream: Any = None,
) -> None:  # fmt: skip
    """Attention of every row of a launch to the keys that its scores choose, or to all keys while they are few.

    The kernels document the arrays. All keys lie in the cache, those of the launch's rows too. listed: int32 [plan.lists] and
    scratch: float32 [at least plan.scratch_size], hold nothing before or after. Raises ValueError as attend_listed, which
    documents the rest.
    """
    fn_qsa_select(listed, scores, streams, rows, plan.budget, stream)
    attend_listed(out, q, arena, pages, streams, rows, scale, listed, scratch, plan, layout, kv, ahead, stream)


def attend_listed(
    out: Any, q: Any, arena: Any, pages: Any, streams: Any, rows: Any, scale: np.float32, listed: Any, scratch: Any,
    plan: SparsePlan, layout: Any, kv: str = "bf16", ahead: bool = False, stream: Any = None,
) -> None:  # fmt: skip
    """As sparse_attention, to the keys of given lists.

    listed: as fn_qsa_select leaves it. plan: of these streams. kv: "bf16" or "fp8", what the cache's rows are made of. ahead:
    whether keys are brought a tile ahead; the bits are the same. stream: of the GPU. Raises ValueError when scratch or listed
    is too small, or out has another shape than the plan.
    """
    if tuple(out.shape) != (plan.rows, plan.heads, plan.D):
        raise ValueError(f"out {tuple(out.shape)}: the plan is for {(plan.rows, plan.heads, plan.D)}")
    if listed.shape[0] < plan.rows or listed.shape[1] < plan.lists[1]:
        raise ValueError(f"listed {tuple(listed.shape)}: the plan needs {plan.lists}")
    partials = plan.carve(scratch)
    fn_attn_chunks(
        *partials, q, arena, pages, streams, rows, listed, plan.budget, scale, plan.kv_heads, layout, kv, ahead, stream
    )
    fn_attn_merge(out, *partials, streams, rows, plan.budget, stream)
