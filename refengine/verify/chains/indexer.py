"""The indexer of sparse attention in float64: pooled keys, scores, and the keys that a row sees. Spec flash-next."""

from __future__ import annotations

from functools import partial

import numpy as np

from kernels_numba.rope_store import rope_table
from refengine.checkpoint import IndexerWeights
from refengine.registry import ModelSpec
from refengine.verify import oracles
from refengine.verify.bounds import U
from refengine.verify.layer_bounds import Run
from refengine.verify.oracles import Array, Pair
from refengine.verify.selection_oracle import BLOCK, listed_keys

from .stages import normed_and_rotated, project

KEYS = "keys"
"""The name of the choice: bool [W, W], the keys that a row sees; made from scores [W, blocks]."""


def seen_keys(w: IndexerWeights, spec: ModelSpec, x: Array, run: Run) -> Array:
    """bool [W, W]: the keys that each row of x [W, hidden] sees."""
    assert spec.indexer is not None, f"{spec.name}: index weights of a layout without an indexer"
    rows, heads, dims = len(x), spec.indexer.heads, spec.indexer.head_dim
    projected = project(x, w.qk_proj, run)
    cos_sin = rope_table(rows, spec.rope.dims, spec.rope.theta)
    q = projected[:, : heads * dims].reshape(rows, heads, dims)
    q = normed_and_rotated(q, w.q_norm, spec.norm_eps, cos_sin, run)
    blocks = run(block_means(projected[:, heads * dims :]))[:, None]
    first = np.arange(len(blocks)) * BLOCK
    pooled = normed_and_rotated(blocks, w.k_norm, spec.norm_eps, cos_sin[first], run)[:, 0]
    scores = run(oracles.index_scores(q, pooled))
    return run.choose(KEYS, scores, partial(best_keys, budget=spec.indexer.budget // BLOCK))


def block_means(raw: Array) -> Pair:
    """The mean of each complete block's raw keys [W, DI]: [blocks, DI]. Three sums round, the division is exact."""
    blocks = raw[: len(raw) // BLOCK * BLOCK].reshape(-1, BLOCK, raw.shape[1])
    return oracles.rounded(blocks.mean(axis=1), 3 * U * np.abs(blocks).mean(axis=1))


def best_keys(scores: Array, budget: int) -> Array:
    """What rows 0, 1, ... of a sequence see by these scores, which have a column for each complete block: bool [W, W]."""
    seen = np.zeros((len(scores), len(scores)), bool)
    for row in range(len(scores)):
        seen[row, listed_keys(scores[row], row + 1, budget)] = True
    return seen
