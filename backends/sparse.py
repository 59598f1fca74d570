"""Sparse attention of a pass: its rows stored, the blocks that they complete pooled; then slices of rows score blocks, choose,
and attend. Spec flash-next.

All rows of a pass lie in the cache before one attends, in prompts and windows alike, so both phases take these kernels. A row
sees what its length says, so how a pass is sliced shows in no bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from backends.batch import Batch, Norms
from kernels_numba.flash_next.attention import attend_listed, sparse_attention
from kernels_numba.flash_next.pages import BLOCK
from kernels_numba.flash_next.pool import fn_qsa_pool
from kernels_numba.flash_next.prep import fn_attn_prep
from kernels_numba.flash_next.scores import fn_qsa_scores
from kernels_numba.flash_next.sparse_plan import SparsePlan, plan_sparse
from kernels_numba.streams import COMMITTED, FIRST, ROWS

if TYPE_CHECKING:
    from backends.base import Backend

ROWS_A_SLICE = 256
"""Rows whose scores are held at once."""


@dataclass(frozen=True, eq=False)
class SparseNorms(Norms):
    """Also those of index queries and of pooled index keys: effective gains float32 [DI]."""

    index_q: Any
    index_k: Any


@dataclass(frozen=True, eq=False)
class Slice:
    """Rows ``first`` .. ``stop`` - 1 of a pass, with launches of their own.

    streams: int64 [L, S, 13], the stream tables of these rows as a pass of their own. blocks: complete ones of the row that has
    most. dense: rows that read all their keys.
    """

    first: int
    stop: int
    streams: Any
    blocks: int
    dense: int
    plan: SparsePlan

    @property
    def is_sparse(self) -> bool:
        """Whether some row chooses its blocks."""
        return self.blocks > self.plan.budget


@dataclass(frozen=True, eq=False)
class SparsePass:
    """How the attention of a pass is cut."""

    slices: tuple[Slice, ...]

    @property
    def scratch_size(self) -> int:
        """float32 elements that each slice may need as scratch."""
        return max((one.plan.scratch_size for one in self.slices), default=0)

    @property
    def dense_rows(self) -> int:
        """Rows that read all their keys."""
        return sum(one.dense for one in self.slices)

    def to(self, xp: Any) -> SparsePass:
        """The same with its tables as arrays of xp."""
        return SparsePass(tuple(replace(one, streams=xp.asarray(one.streams)) for one in self.slices))


# --- Planning -----------------------------------------------------------------------------------------------------------


def plan_sparse_pass(backend: Backend, table: NDArray[np.int64]) -> SparsePass:
    """Cut a pass. table: int64 [S, 13], the stream table on the host."""
    rows = int(table[:, ROWS].sum())
    starts = range(0, rows, ROWS_A_SLICE)
    return SparsePass(tuple(plan_slice(backend, table, first, min(first + ROWS_A_SLICE, rows)) for first in starts))


def plan_slice(backend: Backend, table: NDArray[np.int64], first: int, stop: int) -> Slice:
    """The rows from ``first`` to ``stop`` of a pass."""
    shape, own = backend.shape, table_of_rows(table, first, stop)
    plan = plan_sparse(own, shape.heads, shape.kv_heads, shape.head_dim, shape.index_budget)
    blocks = int((own[:, COMMITTED] + own[:, ROWS]).max() // BLOCK)
    dense = np.clip(BLOCK * (shape.index_budget + 1) - 1 - own[:, COMMITTED], 0, own[:, ROWS])
    return Slice(first, stop, backend.layer_tables(own), blocks, int(dense.sum()), plan)


def table_of_rows(table: NDArray[np.int64], first: int, stop: int) -> NDArray[np.int64]:
    """The stream table of some rows as a pass of their own, to which the rows before are committed."""
    own = table.copy()
    low = np.clip(table[:, FIRST], first, stop)
    high = np.clip(table[:, FIRST] + table[:, ROWS], first, stop)
    own[:, FIRST], own[:, ROWS] = low - first, high - low
    own[:, COMMITTED] = np.where(high > low, table[:, COMMITTED] + low - table[:, FIRST], 0)
    return own


# --- Launching ----------------------------------------------------------------------------------------------------------


def store(
    backend: Backend, layer: int, projection: Any, norms: SparseNorms, rope: Any, batch: Batch
) -> tuple[Any, Any]:
    """(q, index_q) of the rows; keys, values and raw index keys go to the cache, and the blocks that they complete are pooled."""
    shape, arena, pages, streams = (
        backend.shape,
        backend.arena.words,
        backend.pages,
        backend.layer_streams(layer, batch),
    )
    q = backend.xp.empty((batch.rows, shape.heads, shape.head_dim), dtype=projection.dtype)
    index_q = backend.xp.empty((batch.rows, shape.index_heads, shape.index_dim), dtype=projection.dtype)
    gains = norms.q, norms.k, norms.index_q
    fn_attn_prep(
        q, index_q, projection, arena, pages, streams, batch.owners, *gains, rope, norms.eps, shape.kv_heads, backend.layout,
        backend.sizes.kv,
    )  # fmt: skip
    most = int(batch.table[:, ROWS].max(initial=0))
    fn_qsa_pool(arena, pages, streams, most, norms.index_k, rope, norms.eps, backend.layout)
    return q, index_q


def attend(backend: Backend, layer: int, q: Any, index_q: Any, batch: Batch) -> Any:
    """Attention of the rows, slice by slice; q and the result: bf16 [W, H, D], index_q: bf16 [W, IH, DI]."""
    out = backend.xp.empty(q.shape, dtype=q.dtype)
    place = backend.shape.attention_layers.index(layer)
    for one in batch.plan.slices:
        rows = slice(one.first, one.stop)
        attend_slice(backend, out[rows], q[rows], index_q[rows], one, one.streams[place], batch.owners[rows], batch)
    return out


def attend_slice(
    backend: Backend, out: Any, q: Any, index_q: Any, one: Slice, streams: Any, owners: Any, batch: Batch
) -> None:
    """A slice's rows: scored and chosen from where some row is sparse."""
    xp, cache = backend.xp, (backend.arena.words, backend.pages, streams, owners)
    listed = xp.empty(one.plan.lists, dtype=np.int32)
    scale, kv = np.float32(backend.shape.head_dim**-0.5), backend.sizes.kv
    if one.is_sparse:
        scores = xp.empty((len(q), one.blocks), dtype=np.float32)
        fn_qsa_scores(scores, index_q, *cache, backend.layout)
        sparse_attention(out, q, scores, *cache, scale, listed, batch.scratch, one.plan, backend.layout, kv)
    else:
        attend_listed(out, q, *cache, scale, listed, batch.scratch, one.plan, backend.layout, kv)
