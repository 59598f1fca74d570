"""Float64 oracles of mixture of experts, each with the bound that its rounding points give. See oracles.py."""

from __future__ import annotations

import numpy as np

from .bounds import U
from .oracles import Array, B, Pair, exp_error, matmul, rounded, sigmoid, sigmoid_error, wide


def picks(logits: Array, count: int) -> Array:
    """The ``count`` largest logits of each row, ties to the lower one; a NaN is never picked, 0 where none is left."""
    low = np.isnan(logits)
    order = np.lexsort((np.broadcast_to(np.arange(logits.shape[1]), logits.shape), -np.where(low, 0, logits), low))
    picked = order[:, :count]
    return np.where(np.take_along_axis(low, picked, axis=1), 0, picked).astype(np.int32)


def route(logits: Array, experts: Array) -> Pair:
    """What a row's picks count, and the last logit's gate. logits: [rows, E + 1]; experts: [rows, K] -> [rows, K + 1].

    A part is an exponential of a rounded difference; the sum rounds K times, the division once, then bf16. The gate's logit is
    rounded to bf16 first; a sigmoid's slope is at most a quarter.
    """
    (logits,) = wide(logits)
    chosen = np.take_along_axis(logits, experts, axis=1)
    depth = chosen - chosen[:, :1]
    part = np.exp(depth)
    off = exp_error(depth) + U * np.abs(depth)
    total = part.sum(axis=1, keepdims=True)
    spread = (off * part).sum(axis=1, keepdims=True) / total + experts.shape[1] * U
    value = part / total
    weights = rounded(value, value * (off + spread + U))
    gate = logits[:, -1:]
    shared = rounded(sigmoid(gate), sigmoid_error(gate) * sigmoid(gate) + B * np.abs(gate) / 4)
    return np.concatenate([weights[0], shared[0]], axis=1), np.concatenate([weights[1], shared[1]], axis=1)


def expert_matmul(x: Array, weight: Array, experts: Array) -> Pair:
    """x: [slots, K], a row a slot; weight: [E, features, K]; experts: [slots]."""
    value = np.zeros((len(x), weight.shape[1]))
    bound = np.zeros_like(value)
    for expert in np.unique(experts):
        own = experts == expert
        value[own], bound[own] = matmul(x[own], weight[expert], bf16=True)
    return value, bound


def combine(y: Array, shared: Array, weights: Array) -> Pair:
    """y: [rows, K, D]; shared: [rows, D]; weights: [rows, K + 1]. A term rounds once, and once in each sum after it."""
    y, shared, weights = wide(y, shared, weights)
    terms = np.concatenate([y, shared[:, None]], axis=1) * weights[..., None]
    return rounded(terms.sum(axis=1), (terms.shape[1] + 1) * U * np.abs(terms).sum(axis=1))
