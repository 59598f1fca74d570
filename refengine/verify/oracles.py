"""Float64 oracles of the kernels outside attention, each with the bound that its rounding points give.

An oracle returns (value, bound), float64, elementwise: a kernel that rounds where spec numerics §4 says, in any order
of its sums that has the stated depth, lies within the bound. One rounding errs by at most U (float32) or B (bf16)
times the result. Bounds are of first order, times SECOND_ORDER.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import fp8_oracle
from .bounds import EXP2, MMA_STEP, SECOND_ORDER, U

Array = NDArray[Any]
Pair = tuple[Array, Array]
"""(value, bound)."""

B = 2.0**-8
"""Half a spacing of bf16 (8 significant bits) next to a power of two."""
TINY = 2.0**-126
"""What a float32 that leaves the normal range may lose."""
L2_EPS = 1e-6


def within(value: Array, error: Array) -> Pair:
    """A float32 result whose error is at most ``error``."""
    return value, SECOND_ORDER * error + TINY


def rounded(value: Array, error: Array) -> Pair:
    """A bf16 result, rounded once from a float32 whose error is at most ``error``."""
    return within(value, error + B * (np.abs(value) + error))


def copied(value: Array) -> Pair:
    """bf16 values that nothing may change: no two differ by less than 2^-133."""
    (value,) = wide(value)
    return value, np.full(value.shape, 2.0**-134)


def through_fp8(value: Array, bound: Array) -> Pair:
    """Rows [..., D] as an fp8 cache gives them back: half a step of 2^-3, or of the least code at the row's exponent."""
    value, bound = wide(value, bound)
    _, e = np.frexp((np.abs(value) + bound).max(axis=-1, keepdims=True) / 448)
    least = np.ldexp(2.0**-10, np.maximum(e, fp8_oracle.LEAST))
    return value, bound + np.maximum((np.abs(value) + bound) * 2.0**-4, least)


def wide(*arrays: Array) -> tuple[Array, ...]:
    return tuple(np.asarray(a).astype(np.float64) for a in arrays)


# --- Elementary functions and their relative errors ----------------------------------------------------------------


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def sigmoid_error(x: Array) -> Array:
    return EXP2 + (np.abs(x) + 2.0) * 1.5 * U


def exp_error(x: Array) -> Array:
    return EXP2 + np.abs(x) * 1.5 * U


def softplus(x: Array) -> Array:
    return np.logaddexp(0.0, x)


def softplus_error(x: Array) -> Array:
    """Absolute; where softplus is taken as x, beyond 20, it is off by e^-20 at most."""
    return 2.0**-22 * np.maximum(1.0, np.abs(x))


# --- Dense layers --------------------------------------------------------------------------------------------------


def matmul(x: Array, weight: Array, bf16: bool) -> Pair:
    """x: [tokens, K], weight: [features, K].

    No term and no partial sum exceeds S = sum |x||w|, so each of the K/16 mma steps errs by at most MMA_STEP · S.
    """
    x, weight = wide(x, weight)
    error = (x.shape[1] // 16) * MMA_STEP * (np.abs(x) @ np.abs(weight).T)
    return rounded(x @ weight.T, error) if bf16 else within(x @ weight.T, error)


def add_rounded(a: Array, b: Array) -> Pair:
    """bf16(a + b), elementwise: the sum rounds to float32, then to bf16."""
    a, b = wide(a, b)
    return rounded(a + b, U * np.abs(a + b))


def rms_norm(x: Array, gain: Array, eps: float) -> Pair:
    """x: [rows, D], gain: [D].

    The squares are exact; a square passes n = 2·ceil(D/256) + 7 additions, which the root halves; then come division,
    eps (half of each), root, inverse and two products.
    """
    x, gain = wide(x, gain)
    value = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain
    additions = 2 * -(-x.shape[1] // 256) + 7
    return rounded(value, (additions / 2 + 5) * U * np.abs(value))


def rotated_heads(x: Array, gain: Array, cos_sin: Array, eps: float) -> Pair:
    """Heads normed, rounded to bf16, their first dims rotated. x: [W, heads, D], gain: [D], cos_sin: [W, 2, R/2].

    A square passes D/32 additions in its lane and 5 exchanges; the rest of the norm as rms_norm. A rotation carries the
    errors of both elements of a pair through cos and sin, and rounds a product and the sum.
    """
    x, gain, cos_sin = wide(x, gain, cos_sin)
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain
    normed, error = rounded(normed, ((x.shape[-1] // 32 + 5) / 2 + 5) * U * np.abs(normed))
    half, cos, sin = cos_sin.shape[-1], cos_sin[:, None, 0], cos_sin[:, None, 1]
    (a, b), (a_error, b_error) = ((part[..., :half], part[..., half : 2 * half]) for part in (normed, error))
    turned = [(a, b, -sin, a_error, b_error), (b, a, sin, b_error, a_error)]
    value = np.concatenate([own * cos + other * turn for own, other, turn, _, _ in turned], axis=-1)
    carried = [
        (own_error + 2 * U * np.abs(own)) * np.abs(cos) + (other_error + 2 * U * np.abs(other)) * np.abs(sin)
        for own, other, _, own_error, other_error in turned
    ]
    value, bound = rounded(value, np.concatenate(carried, axis=-1))
    rest = 2 * half
    return np.concatenate([value, normed[..., rest:]], axis=-1), np.concatenate([bound, error[..., rest:]], axis=-1)


def index_scores(query: Array, keys: Array) -> Pair:
    """Sum over heads of max(q · P, 0), divided by the root of the dims. query: [W, IH, DI], keys: [blocks, DI] -> [W, blocks].

    A product passes 7 roundings in its lane and the exchanges of DI/8 lanes, then one for each head after the first; the
    division and its root round once each. max moves no error further.
    """
    query, keys = wide(query, keys)
    heads, dims = query.shape[1:]
    dots, sizes = np.einsum("whd,bd->whb", query, keys), np.einsum("whd,bd->whb", np.abs(query), np.abs(keys))
    value = np.maximum(dots, 0).sum(axis=1) / np.sqrt(dims)
    error = (7 + np.log2(dims // 8)) * U * sizes.sum(axis=1) / np.sqrt(dims)
    return within(value, error + (heads - 1 + 2) * U * value)


def swiglu(gate_up: Array) -> Pair:
    """gate_up: [rows, 2·F] -> [rows, F]. The sigmoid's error and two products."""
    gate, up = np.split(wide(gate_up)[0], 2, axis=1)
    value = gate * sigmoid(gate) * up
    return rounded(value, (sigmoid_error(gate) + 2 * U) * np.abs(value))


def attention_gate(o: Array, gate: Array) -> Pair:
    """Elementwise. The sigmoid's error and one product."""
    o, gate = wide(o, gate)
    value = o * sigmoid(gate)
    return rounded(value, (sigmoid_error(gate) + U) * np.abs(value))


def divided_gate(o: Array, gate: Array) -> Pair:
    """fn_attn_gate, elementwise. The sigmoid's error, whose division divides o."""
    o, gate = wide(o, gate)
    value = o * sigmoid(gate)
    return rounded(value, sigmoid_error(gate) * np.abs(value))


# --- Gated DeltaNet ------------------------------------------------------------------------------------------------


def conv(history: Array, mixed: Array, weight: Array) -> Pair:
    """bf16(silu(causal convolution)). history: [3, C], mixed: [W, C], weight: [C, 4] -> [W, C].

    The products are exact, a product passes three additions; silu's slope is at most 1.1.
    """
    history, mixed, weight = wide(history, mixed, weight)
    rows = np.concatenate([history, mixed])
    taps = np.stack([rows[j : j + len(mixed)] for j in range(4)], axis=-1)  # [W, C, 4]
    total = (taps * weight).sum(-1)
    value = total * sigmoid(total)
    error = 1.1 * 3 * U * (np.abs(taps) * np.abs(weight)).sum(-1)
    return rounded(value, error + (sigmoid_error(total) + U) * np.abs(value))


def unit_heads(convolved: Pair, divisor: float) -> Pair:
    """bf16(c · r / divisor) by head of 128, r = 1/sqrt(sum c² + 1e-6); convolved: [W, heads·128].

    With d the error of c, r errs by at most |d| · r of itself. The 8 additions of squares, halved, eps, root,
    inverse, the divisor's own rounding and two more operations stay under 10 U.
    """
    c, d = (a.reshape(len(a), a.shape[1] // 128, 128) for a in convolved)
    r = 1.0 / np.sqrt((c * c).sum(-1, keepdims=True) + L2_EPS)
    value = c * r / divisor
    spread = np.sqrt((d * d).sum(-1, keepdims=True)) * r
    value, bound = rounded(value, d * r / divisor + np.abs(value) * (spread * (1 + spread) + 10 * U))
    return value.reshape(convolved[0].shape), bound.reshape(convolved[0].shape)


def conv_qkv(history: Array, mixed: Array, weight: Array, key_heads: int) -> Pair:
    """What the convolution kernel writes: [q | k] normed by head, v as convolved. Shapes as ``conv``."""
    value, bound = conv(history, mixed, weight)
    edge = key_heads * 128
    parts = [
        unit_heads((value[:, :edge], bound[:, :edge]), np.sqrt(128.0)),
        unit_heads((value[:, edge : 2 * edge], bound[:, edge : 2 * edge]), 1.0),
        (value[:, 2 * edge :], bound[:, 2 * edge :]),
    ]
    return np.concatenate([p[0] for p in parts], axis=1), np.concatenate([p[1] for p in parts], axis=1)


def decay(a: Array, a_log: Array, dt_bias: Array) -> Pair:
    """exp(-exp(a_log) · softplus(a + dt_bias)). a: [W, HV]; a_log, dt_bias: [HV]."""
    a, a_log, dt_bias = wide(a, a_log, dt_bias)
    t = a + dt_bias
    rate, soft = np.exp(a_log), softplus(t)
    power = rate * soft
    error = rate * (U * np.abs(t) + softplus_error(t)) + power * (exp_error(a_log) + U)
    value = np.exp(-power)
    return within(value, value * (np.expm1(error) + exp_error(power)))


def beta(b: Array) -> Pair:
    """sigmoid(b)."""
    (b,) = wide(b)
    return within(sigmoid(b), sigmoid_error(b) * sigmoid(b))


STEP_DEPTH = 9
"""Roundings a product passes in a sum of the decode step: its own, 3 additions in the lane, 5 exchanges."""
CHAIN_DEPTH = 19
"""Of the prompt chain: 16 fmas, 2 additions, 1 exchange."""


def delta_rule(state: Array, q: Array, k: Array, v: Array, g: Array, b: Array, depth: int) -> tuple[Pair, Pair]:
    """One stream's rows in order: (y, state), y rounded to bf16.

    state: [HV, 128, 128] (value, key); q, k: [W, HK, 128]; v: [W, HV, 128]; g, b: [W, HV]; depth: STEP_DEPTH or
    CHAIN_DEPTH.

    e bounds the 2-norm of a state row's error. A step maps an error through g·(I - beta·k·kT), whose norm is at most
    g, and adds its roundings: the decay, mem's sum, delta, the product and the sum of the update.
    """
    s, q, k, v, g, b = wide(state, q, k, v, g, b)
    group = v.shape[1] // k.shape[1]
    q, k = np.repeat(q, group, axis=1), np.repeat(k, group, axis=1)
    e = np.zeros(s.shape[:2])
    y, y_error = np.empty_like(v), np.empty_like(v)
    for t in range(len(v)):
        s = s * g[t, :, None, None]
        e = e * g[t, :, None] + U * norm(s)
        mem, mem_error = dot(s, k[t], depth)
        delta = (v[t] - mem) * b[t, :, None]
        delta_error = b[t, :, None] * mem_error + 2 * U * np.abs(delta)
        s = s + delta[..., None] * k[t][:, None]
        long = norm(k[t])[:, None]
        e = e + long * (delta_error + U * np.abs(delta)) + U * norm(s)
        y[t], sum_error = dot(s, q[t], depth)
        y_error[t] = norm(q[t])[:, None] * e + sum_error
    return rounded(y, y_error), within(s, np.broadcast_to(e[..., None], s.shape))


def norm(x: Array) -> Array:
    return np.sqrt((x * x).sum(-1))


def dot(s: Array, x: Array, depth: int) -> Pair:
    """s: [HV, 128, 128], x: [HV, 128]: their sums over the key index and what ``depth`` roundings leave."""
    return np.einsum("hvk,hk->hv", s, x), depth * U * np.einsum("hvk,hk->hv", np.abs(s), np.abs(x))


def gated_norm(y: Array, z: Array, gain: Array, eps: float, silu: bool = True) -> Pair:
    """gate(z) · y · inv · gain by head. y, z: [W, HV, 128]; gain: [128].

    The 8 additions of exact squares, halved, division and eps (half each), root, inverse and two products: 9 U; then
    the gate.
    """
    y, z, gain = wide(y, z, gain)
    gate = z * sigmoid(z) if silu else sigmoid(z)
    value = gate * (y / np.sqrt((y * y).mean(-1, keepdims=True) + eps) * gain)
    return rounded(value, (sigmoid_error(z) + 11 * U) * np.abs(value))
