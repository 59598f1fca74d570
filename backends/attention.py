"""Which attention kernels a pass takes, and how they are launched. Spec serving §0, attention §1, §2.

The phase picks the kernels: prompts take prompt_attention, windows take decode_attention. ``Sizes.attention`` can send passes
that hold a stream on pages to the scalar path instead; its bits are others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.batch import PROMPT, Batch
from backends.sparse import SparsePass, plan_sparse_pass
from backends.stream import SCALAR_BATCH, TILES
from kernels_numba.decode_attention import decode_attention
from kernels_numba.decode_plan import DecodePlan, plan_decode
from kernels_numba.decode_scalar import scalar_attention
from kernels_numba.prompt_attention import heads_per_block, launch_shape, prompt_attention
from kernels_numba.scalar_plan import ScalarPlan, plan_scalar
from kernels_numba.streams import ROWS, TABLE

if TYPE_CHECKING:
    from backends.base import Backend


def takes_scalar(attention: str, phase: str, table: np.ndarray) -> bool:
    """Whether every row of a pass takes the scalar path. table: int64 [S, 13], the stream table."""
    holds_pages = bool(((table[:, TABLE] >= 0) & (table[:, ROWS] > 0)).any())
    return attention != TILES and holds_pages and (phase != PROMPT or attention == SCALAR_BATCH)


def plan_pass(backend: Backend, phase: str, table: np.ndarray) -> DecodePlan | ScalarPlan | SparsePass | None:
    """How the attention of a pass is cut; None: prompt_attention, which needs no plan."""
    if backend.shape.index_dim:
        return plan_sparse_pass(backend, table)
    heads = backend.shape.heads, backend.shape.kv_heads, backend.shape.head_dim
    if takes_scalar(backend.sizes.attention, phase, table):
        return plan_scalar(table, *heads, own="cache" if phase == PROMPT else "record")
    return None if phase == PROMPT else plan_decode(table, *heads)


def attend(backend: Backend, layer: int, q: Any, batch: Batch) -> Any:
    """Attention of the batch's rows; q and the result: bf16 [W, H, D]."""
    out = backend.xp.empty(q.shape, dtype=q.dtype)
    place = (backend.arena.words, backend.pages, backend.layer_streams(layer, batch))
    scale = np.float32(backend.shape.head_dim**-0.5)
    if batch.plan is None:
        attend_prompts(backend, out, q, place, scale, batch)
        return out
    record = (None, None) if batch.phase == PROMPT else backend.record(layer, batch)
    rows = (batch.owners, batch.paths, batch.depths, *record)
    launch: Callable[..., None] = scalar_attention if isinstance(batch.plan, ScalarPlan) else decode_attention
    launch(out, q, *place, *rows, scale, batch.scratch, batch.plan, backend.layout, backend.sizes.kv)
    return out


def attend_prompts(backend: Backend, out: Any, q: Any, place: tuple, scale: np.float32, batch: Batch) -> None:
    """One launch a stream."""
    shape, kv = backend.shape, backend.sizes.kv
    per_block = heads_per_block(shape.heads // shape.kv_heads)
    bound = prompt_attention.at(D=shape.head_dim, HPC=per_block, layout=backend.layout, kv=kv)
    for number, rows in enumerate(batch.table[:, ROWS]):
        grid, threads, shared = launch_shape(int(rows), shape.heads, shape.kv_heads, shape.head_dim, kv)
        bound[grid, threads, None, shared](out, q, *place, number, shape.heads, shape.kv_heads, scale)
