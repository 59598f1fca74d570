"""Gated DeltaNet in float64, from a zero state."""

from __future__ import annotations

import numpy as np

from refengine.checkpoint import GatedDeltaNetWeights
from refengine.registry import ModelSpec
from refengine.verify import oracles
from refengine.verify.bounds import U
from refengine.verify.layer_bounds import Take
from refengine.verify.oracles import Array, Pair

from .stages import project


def delta_net(w: GatedDeltaNetWeights, spec: ModelSpec, x: Array, take: Take) -> Array:
    """[W, hidden] to [W, hidden]."""
    rows, gdn = len(x), spec.gated_delta_net
    mixed, z, b, a = (project(x, p, take) for p in (w.in_proj_qkv, w.in_proj_z, w.in_proj_b, w.in_proj_a))
    convolved = take(oracles.conv(np.zeros((3, gdn.conv_channels)), mixed, w.conv))
    edge, exactly = gdn.key_heads * 128, np.zeros((rows, gdn.key_heads * 128))
    q = take(oracles.unit_heads((convolved[:, :edge], exactly), np.sqrt(128.0)))
    k = take(oracles.unit_heads((convolved[:, edge : 2 * edge], exactly), 1.0))
    q, k, v = (part.reshape(rows, -1, 128) for part in (q, k, convolved[:, 2 * edge :]))
    g, beta = take(oracles.decay(a, w.a_log, w.dt_bias)), take(oracles.beta(b))
    key = [h * gdn.key_heads // gdn.value_heads for h in range(gdn.value_heads)]
    y = np.stack([take(delta_rule(q[:, i], k[:, i], v[:, h], g[:, h], beta[:, h])) for h, i in enumerate(key)], axis=1)
    gated = take(oracles.gated_norm(y, z.reshape(y.shape), w.norm, spec.norm_eps, gdn.gate == "silu"))
    return project(gated.reshape(rows, -1), w.out_proj, take)


def delta_rule(q: Array, k: Array, v: Array, g: Array, beta: Array) -> Pair:
    """y of one value head from a zero state, in closed form. q, k, v: [W, 128]; g, beta: [W].

    Row i adds k_i·u_i to the state, which has faded by decay[t, i] = g_{i+1} ··· g_t at row t. u is beta times what v
    has over the state's answer to k, the sum of the rows before. Errors as in oracles.delta_rule, with the norm of a
    state's row bounded by that of its parts.
    """
    faded = np.cumsum(np.log(g))
    decay = np.tril(np.exp(np.tril(faded[:, None] - faded)))
    u = np.linalg.solve(np.eye(len(g)) + np.tril(beta[:, None] * decay * (k @ k.T), -1), beta[:, None] * v)
    y = decay * (q @ k.T) @ u
    long, added = oracles.norm(k)[:, None], 3 * U * np.abs(u)
    parts = long * np.abs(u)
    after = decay @ parts
    before = after - parts
    mem_error = oracles.CHAIN_DEPTH * U * long * before
    e = decay @ (U * before + long * (beta[:, None] * mem_error + added) + U * after)
    return oracles.rounded(y, oracles.norm(q)[:, None] * (e + oracles.CHAIN_DEPTH * U * after))
