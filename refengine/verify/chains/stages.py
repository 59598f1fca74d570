"""What the chains of all parts share: projections, the norm and rotation of heads."""

from __future__ import annotations

import numpy as np

from refengine.verify import oracles
from refengine.verify.bounds import U
from refengine.verify.layer_bounds import Take
from refengine.verify.oracles import Array, Pair


def project(x: Array, weight: Array, take: Take) -> Array:
    """A projection, rounded to bf16."""
    return take(oracles.matmul(x, weight, bf16=True))


def added(a: Array, b: Array, take: Take) -> Array:
    """bf16(a + b) in the residual stream."""
    return take(oracles.rounded(a + b, np.zeros(1)))


def normed_and_rotated(x: Array, gain: Array, eps: float, cos_sin: Array, take: Take) -> Array:
    """Queries or keys [W, heads, D] as attention takes them. cos_sin: float32 [W, 2, dims / 2]."""
    x = take(oracles.rms_norm(x.reshape(-1, x.shape[-1]), gain, eps)).reshape(x.shape)
    dims = 2 * cos_sin.shape[-1]
    return np.concatenate([take(rotated(x[..., :dims], cos_sin)), x[..., dims:]], axis=-1)


def rotated(x: Array, cos_sin: Array) -> Pair:
    """Pairs (j, j + dims/2) turned. The table's own rounding, a product and the sum: 3 U of what is added."""
    x, cos_sin = oracles.wide(x, cos_sin)
    (a, b), cos, sin = np.split(x, 2, axis=-1), cos_sin[:, None, 0], cos_sin[:, None, 1]
    value = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    size = np.concatenate([abs(a * cos) + abs(b * sin), abs(b * cos) + abs(a * sin)], axis=-1)
    return oracles.rounded(value, 3 * U * size)
