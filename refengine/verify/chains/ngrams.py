"""The n-gram branch in float64: rows of its table, their gate, the convolution. Spec flash-next §3."""

from __future__ import annotations

from functools import reduce
from operator import xor

import numpy as np

from refengine.checkpoint import NgramWeights
from refengine.registry import ModelSpec
from refengine.verify.bounds import U
from refengine.verify.flash_next_oracle import norm_streams, of_streams, signed_root
from refengine.verify.layer_bounds import Take
from refengine.verify.oracles import Array, rounded, sigmoid, sigmoid_error

from .stages import added, project


def with_ngrams(w: NgramWeights, spec: ModelSpec, ids: Array, h: Array, take: Take) -> Array:
    """The residual streams [W, S·D] with the branch of a sequence's tokens ids [W]."""
    table = w.table[table_rows(w, ids, spec.ngrams.end)].reshape(len(ids), -1)  # type: ignore[union-attr]
    gated = gated_values(w, spec, project(table, w.key, take), project(table, w.value, take), h, take)
    z = take(norm_streams(gated, w.conv_norm, h.shape[1] // spec.hidden, spec.norm_eps))
    taps = past_rows(z, w.conv.shape[1], len(w.multipliers))
    total = take(rounded((taps * w.conv).sum(-1), 3 * U * (np.abs(taps) * np.abs(w.conv.astype(np.float64))).sum(-1)))
    act = total * sigmoid(total)
    act = take(rounded(act, (sigmoid_error(total) + U) * np.abs(act)))
    return added(h, added(gated, act, take), take)


def table_rows(w: NgramWeights, ids: Array, end: int) -> Array:
    """int64 [W, heads]: the rows of the table that each row of a sequence reads, in whole numbers without a limit."""
    longest, heads = len(w.multipliers), len(w.sizes)
    tokens = [shifted(ids, back, end) for back in range(longest)]
    terms = [[token * int(m) for token in row] for row, m in zip(tokens, w.multipliers, strict=True)]
    rows = np.empty((len(ids), heads), np.int64)
    for head, (size, offset) in enumerate(zip(w.sizes, w.offsets, strict=True)):
        length = 2 + head * (longest - 1) // heads
        for row in range(len(ids)):
            rows[row, head] = int(offset) + reduce(xor, (terms[n][row] for n in range(length))) % int(size)
    return rows


def shifted(ids: Array, back: int, end: int) -> list[int]:
    """The token so many before each; the end token before the first one and before an end token that lies between."""
    found = []
    for row in range(len(ids)):
        own = [int(t) for t in ids[max(row - back, 0) : row]]
        found.append(end if row < back or end in own else int(ids[row - back]))
    return found


def gated_values(w: NgramWeights, spec: ModelSpec, k: Array, v: Array, h: Array, take: Take) -> Array:
    """The values [W, D], for each stream times its gate: [W, S·D]. k, h: [W, S·D].

    A product of two norms passes 8 additions in its lane, 5 exchanges and one for each part of 256.
    """
    streams, hidden = h.shape[1] // spec.hidden, spec.hidden
    normed = [take(norm_streams(x, gain, streams, spec.norm_eps)) for x, gain in ((k, w.key_norm), (h, w.query_norm))]
    product = normed[0] * normed[1]
    product = of_streams(take(rounded(product, U * np.abs(product))), streams)
    root, additions = np.sqrt(hidden), 8 + 5 + -(-hidden // 256)
    d = product.sum(-1) / root
    d = take(rounded(d, additions * U * np.abs(product).sum(-1) / root + 2 * U * np.abs(d)))
    g = signed_root(d)
    g = take(rounded(g, U * np.abs(g)))
    gate = take(rounded(sigmoid(g), sigmoid_error(g) * sigmoid(g)))
    value = gate[..., None] * v[:, None]
    return take(rounded(value, U * np.abs(value))).reshape(h.shape)


def past_rows(z: Array, width: int, apart: int) -> Array:
    """[W, C, width]: of each row of z [W, C] those ``apart`` rows apart before it, the oldest first, itself the last."""
    padded = np.concatenate([np.zeros(((width - 1) * apart, z.shape[1])), z])
    return np.stack([padded[n * apart : n * apart + len(z)] for n in range(width)], axis=-1)
