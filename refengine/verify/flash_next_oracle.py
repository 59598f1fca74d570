"""Float64 oracles of Flash Next's own kernels, each with the bound that its rounding points give. See oracles.py."""

from __future__ import annotations

import numpy as np

from .bounds import U
from .oracles import Array, Pair, rounded, sigmoid, sigmoid_error, wide


def of_streams(x: Array, streams: int) -> Array:
    """[rows, S·D] as [rows, S, D], a view."""
    return x.reshape(len(x), streams, -1)


# --- Hyper-connections ------------------------------------------------------------------------------------------------


def norm_streams(h: Array, gain: Array, streams: int, eps: float) -> Pair:
    """h: [rows, S·D]; gain: [S·D].

    The squares are exact; a square passes 8 additions in its lane, 5 exchanges and one for each part of 256, which the root
    halves; then come division, eps (half of each), root, inverse and two products.
    """
    h, gain = wide(h, gain)
    split = of_streams(h, streams)
    value = (split / np.sqrt((split * split).mean(-1, keepdims=True) + eps)).reshape(h.shape) * gain
    additions = 8 + 5 + -(-split.shape[-1] // 256)
    return rounded(value, (additions / 2 + 5) * U * np.abs(value))


def readout_gates(low: Array, streams: int, rank: int) -> tuple[Pair, Pair]:
    """(act, inject). low: [rows, R + S]. silu's slope is at most 1.1, a sigmoid's a quarter; doubling is exact."""
    (low,) = wide(low)
    value = low / streams
    value, error = rounded(value, U * np.abs(value))
    v, e = value[:, :rank], error[:, :rank]
    act = rounded(v * sigmoid(v), 1.1 * e + (sigmoid_error(v) + U) * np.abs(v * sigmoid(v)))
    v, e = value[:, rank:], error[:, rank:]
    gate, gate_error = rounded(sigmoid(v), e / 4 + sigmoid_error(v) * sigmoid(v))
    return act, (2 * gate, 2 * gate_error)


def mix_streams(up: Array, normed: Array, streams: int) -> Pair:
    """up, normed: [rows, S·D] -> [rows, D]. A term rounds as a sigmoid, a product and a bf16; then S sums and the division."""
    up, normed = (of_streams(a, streams) for a in wide(up, normed))
    gate, error = rounded(sigmoid(up), sigmoid_error(up) * sigmoid(up))
    term, error = rounded(gate * normed, error * np.abs(normed) + U * np.abs(gate * normed))
    sums = streams * U * np.abs(term).sum(axis=1)
    value = term.sum(axis=1) / streams
    return rounded(value, (error.sum(axis=1) + sums) / streams + U * np.abs(value))


def write_back(h: Array, branch: Array, inject: Array) -> Pair:
    """h: [rows, S·D]; branch: [rows, D]; inject: [rows, S]. The product rounds to float32 and bf16, so does the sum."""
    h, branch, inject = wide(h, branch, inject)
    term = branch[:, None] * inject[..., None]
    term, error = rounded(term, U * np.abs(term))
    value = of_streams(h, inject.shape[1]) + term
    value, bound = rounded(value, error + U * np.abs(value))
    return value.reshape(h.shape), bound.reshape(h.shape)


# --- The n-gram branch ------------------------------------------------------------------------------------------------


def signed_root(d: Array) -> Array:
    """±sqrt(|d|) by the sign of d, |d| at least 1e-6; 0 of 0. It never falls."""
    return np.sign(d) * np.sqrt(np.maximum(np.abs(d), 1e-6))


def ngram_gate(keys: Array, values: Array, h: Array, gains: tuple[Array, Array], eps: float) -> Pair:
    """keys, h: [W, S·D]; values: [W, D]; gains: of keys and h.

    A product of two norms rounds to float32 and bf16 and passes 8 additions in its lane, 5 exchanges and one for each part of
    256; the root's error is what its argument's makes of it, for it never falls.
    """
    (values,) = wide(values)
    streams = h.shape[1] // values.shape[1]
    (k, k_error), (q, q_error) = (
        tuple(of_streams(a, streams) for a in norm_streams(x, gain, streams, eps))
        for x, gain in zip((keys, h), gains, strict=True)
    )
    product = k * q
    error = k_error * np.abs(q) + q_error * (np.abs(k) + k_error)
    product, error = rounded(product, error + U * np.abs(product))
    additions = 8 + 5 + -(-values.shape[1] // 256)
    root = np.sqrt(values.shape[1])
    d = product.sum(-1) / root
    d, error = rounded(d, (error.sum(-1) + additions * U * np.abs(product).sum(-1)) / root + 2 * U * np.abs(d))
    g = signed_root(d)
    error = np.maximum(signed_root(d + error) - g, g - signed_root(d - error))
    g, error = rounded(g, error + U * np.abs(g))
    gate, error = rounded(sigmoid(g), error / 4 + sigmoid_error(g) * sigmoid(g))
    value = gate[..., None] * values[:, None]
    value, bound = rounded(value, error[..., None] * np.abs(values[:, None]) + U * np.abs(value))
    return value.reshape(h.shape), bound.reshape(h.shape)


def ngram_conv(h: Array, gated: Array, taps: Array, weight: Array) -> Pair:
    """h, gated: [W, C]; taps: [W, C, 4], a channel's inputs, the oldest first; weight: [C, 4].

    The products are exact, a product passes three additions, the sum rounds to bf16; silu's slope is at most 1.1; then two sums,
    each rounded to float32 and bf16.
    """
    h, gated, taps, weight = wide(h, gated, taps, weight)
    total, error = rounded((taps * weight).sum(-1), 3 * U * (np.abs(taps) * np.abs(weight)).sum(-1))
    act = total * sigmoid(total)
    act, error = rounded(act, 1.1 * error + (sigmoid_error(total) + U) * np.abs(act))
    added, error = rounded(gated + act, error + U * np.abs(gated + act))
    return rounded(h + added, error + U * np.abs(h + added))
