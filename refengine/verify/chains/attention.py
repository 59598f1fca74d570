"""Attention with output gate in float64: full, or of the keys that an indexer chose."""

from __future__ import annotations

import numpy as np

from kernels_numba.rope_store import rope_table
from refengine.checkpoint import AttentionWeights
from refengine.registry import ModelSpec
from refengine.verify import oracles
from refengine.verify.bounds import EXP2, EXP_DEPTH, U, decode_fold
from refengine.verify.layer_bounds import Run, Take
from refengine.verify.oracles import Array

from .indexer import seen_keys
from .stages import normed_and_rotated, project


def attention(w: AttentionWeights, spec: ModelSpec, x: Array, run: Run) -> Array:
    """[W, hidden] to [W, hidden]; rows are a sequence from position 0."""
    rows, (H, HK, D) = len(x), (spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim)
    q_gate = project(x, w.q_proj, run).reshape(rows, H, 2, D)
    k, v = (project(x, p, run).reshape(rows, HK, D) for p in (w.k_proj, w.v_proj))
    cos_sin = rope_table(rows, spec.rope.dims, spec.rope.theta)
    q = normed_and_rotated(q_gate[:, :, 0], w.q_norm, spec.norm_eps, cos_sin, run)
    k = normed_and_rotated(k, w.k_norm, spec.norm_eps, cos_sin, run)
    seen = np.tri(rows, dtype=bool) if w.indexer is None else seen_keys(w.indexer, spec, x, run)
    o = np.stack([attend(q[:, h], k[:, h * HK // H], v[:, h * HK // H], seen, run) for h in range(H)], axis=1)
    return project(run(oracles.attention_gate(o, q_gate[:, :, 1])).reshape(rows, H * D), w.o_proj, run)


def attend(q: Array, k: Array, v: Array, seen: Array, take: Take) -> Array:
    """Attention of one head; q, k, v: [W, D]; seen: bool [W, W]. The weight is rounded to bf16 above the division only.

    The float32 errors are those of bounds.attention, with the folds of decode: up to 512 keys no path has more.
    """
    fold, scale = decode_fold(len(q), q.shape[1]), q.shape[1] ** -0.5
    error = (fold.score + U) * scale * (np.abs(q) @ np.abs(k).T)
    s = take(oracles.within(q @ k.T * scale, error))
    below = np.where(seen, np.where(seen, s, -np.inf).max(axis=1, keepdims=True) - s, np.inf)
    weight = np.exp(-below)
    p = take(oracles.rounded(weight, weight * (fold.rescalings * EXP2 + np.where(seen, below, 0) * EXP_DEPTH)))
    total = weight.sum(axis=1, keepdims=True)
    out, size = p @ v / total, p @ np.abs(v) / total
    error = size * (fold.values + 2 * fold.rescalings * U) + np.abs(out) * (fold.sum_roundings + 1) * U
    return take(oracles.rounded(out, error))
