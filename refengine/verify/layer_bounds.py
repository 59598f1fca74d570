"""How far a whole layer may be from float64, derived from its rounding points. Spec numerics §4 and §5.

A layer is a chain of the stages that oracles.py describes: each has its exact value and r, the most that its rounding
points can do to an element. To first order, an output's error is e = Σ a·d over the elements of all stages, where d
is what an element's roundings did, |d| <= r, and a is how far the output follows that element. Adding up |a|·r would
let signs conspire along every sum of the layer, and allow so much that faults pass. So d is taken as probabilistic
rounding error analysis takes it (Higham and Mary, SIAM J. Sci. Comput. 41, 2019): independent, with mean zero. Then,
whatever the distributions, P(|e| > t) <= 2·exp(-t²/2σ²) with σ² = Σ (a·r)² (Hoeffding's inequality).

σ² is found by running the chain: with every element moved by +r or -r at random, the square of what an output moves has
mean σ². Its mean over DRAWS runs, S², may be below σ². With DRAWS·S²/σ² as χ² with DRAWS degrees of freedom (sums of
signs spread no wider), the mean of 2·exp(-(k·S)²/2σ²) is 2·(1 + k²/DRAWS)^(-DRAWS/2). ``reach`` is the k at which
that, added up over a layer's outputs, is FAILURE. The bound of an output is k·S, times SECOND_ORDER.

One error has no mean of zero: a step of a tensor core truncates its sum toward zero, by at most 2^-23 of it. Over the
K/16 steps of a sum that is K·2^-27, against 2^-8 of the rounding that follows: 0.3 % at K = 1536. SECOND_ORDER covers
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kernels_numba.rope_store import rope_table
from refengine.checkpoint import AttentionWeights, GatedDeltaNetWeights, LayerWeights, ModelWeights, MtpWeights
from refengine.registry import ModelSpec

from . import oracles
from .bounds import EXP2, EXP_DEPTH, SECOND_ORDER, U, decode_fold
from .oracles import Array, Pair

DRAWS = 32
FAILURE = 1e-6
"""At most the probability that a correct layer has an output outside its bound."""

Take = Callable[[Pair], Array]
"""What a stage passes on, given its exact value and r."""
Chain = Callable[[Take], Array]
"""A computation, by what its stages pass on."""


# --- The bound ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Bounded:
    """A chain's outputs: exact values, and S, both float64 of one shape."""

    value: Array
    spread: Array

    @property
    def bound(self) -> Array:
        """The largest error of each output."""
        return SECOND_ORDER * reach(self.spread.size) * self.spread

    def mean_square(self, found: Array) -> float:
        """The mean of (e / S)² over all outputs: about 1 at most, since e² has a mean of at most σ². Roundings
        that are uniform, of values of any size, give 0.18. A NaN gives NaN."""
        return float((((found.astype(np.float64) - self.value) / self.spread) ** 2).mean())


def bounded(chain: Chain) -> Bounded:
    """Run a chain exactly, then DRAWS times moved."""
    value = chain(exact)
    squares = np.zeros_like(value)
    for seed in range(DRAWS):
        squares += (chain(moved(seed)) - value) ** 2
    return Bounded(value, np.sqrt(squares / DRAWS))


def reach(outputs: int) -> float:
    """k: how many S an output may be off; 2·outputs·(1 + k²/DRAWS)^(-DRAWS/2) = FAILURE."""
    return float(np.sqrt(DRAWS * ((2 * outputs / FAILURE) ** (2 / DRAWS) - 1)))


def exact(stage: Pair) -> Array:
    """The stage's value as it is."""
    return stage[0]


def moved(seed: int) -> Take:
    """Each element up or down by all of its r, at random."""
    rng = np.random.default_rng(seed)

    def take(stage: Pair) -> Array:
        value, r = stage
        return value + np.where(rng.integers(0, 2, value.shape, dtype=np.int8), r, -r)

    return take


# --- The chains -----------------------------------------------------------------------------------------------------


def layer(w: LayerWeights, spec: ModelSpec, h: Array, take: Take) -> Array:
    """The residual stream after a layer. h: [W, hidden], before it; rows are a sequence from position 0."""
    x = take(oracles.rms_norm(h, w.input_norm, spec.norm_eps))
    update = (
        attention(w.mixer, spec, x, take)
        if isinstance(w.mixer, AttentionWeights)
        else delta_net(w.mixer, spec, x, take)
    )
    h = take(oracles.rounded(h + update, np.zeros(1)))
    x = take(oracles.rms_norm(h, w.post_norm, spec.norm_eps))
    gate_up = project(x, np.concatenate([w.mlp.gate_proj, w.mlp.up_proj]), take)
    update = project(take(oracles.swiglu(gate_up)), w.mlp.down_proj, take)
    return take(oracles.rounded(h + update, np.zeros(1)))


def head(w: ModelWeights, spec: ModelSpec, h: Array, take: Take) -> Array:
    """Logits [W, vocabulary] from the residual stream after the last layer."""
    x = take(oracles.rms_norm(h, w.final_norm, spec.norm_eps))
    return take(oracles.matmul(x, w.lm_head, bf16=False))


def mtp(
    w: MtpWeights, spec: ModelSpec, lm_head: Array, embedding: Array, hidden: Array, take: Take
) -> tuple[Array, Array]:
    """The MTP head: (logits [W, vocabulary], its own hidden state [W, hidden]).

    embedding: [W, hidden], of each row's next token; hidden: [W, hidden], the model's state after its final norm.
    """
    embedding = take(oracles.rms_norm(embedding, w.embedding_norm, spec.norm_eps))
    hidden = take(oracles.rms_norm(hidden, w.hidden_norm, spec.norm_eps))
    fc_embedding, fc_hidden = np.split(w.fc, 2, axis=1)
    parts = [take(oracles.matmul(x, fc, bf16=False)) for x, fc in ((embedding, fc_embedding), (hidden, fc_hidden))]
    h = layer(w.layer, spec, take(oracles.add_rounded(*parts)), take)
    x = take(oracles.rms_norm(h, w.final_norm, spec.norm_eps))
    return take(oracles.matmul(x, lm_head, bf16=False)), x


def project(x: Array, weight: Array, take: Take) -> Array:
    """A projection, rounded to bf16."""
    return take(oracles.matmul(x, weight, bf16=True))


def attention(w: AttentionWeights, spec: ModelSpec, x: Array, take: Take) -> Array:
    """Full attention with output gate: [W, hidden] to [W, hidden]."""
    rows, (H, HK, D) = len(x), (spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim)
    q_gate = project(x, w.q_proj, take).reshape(rows, H, 2, D)
    k, v = (project(x, p, take).reshape(rows, HK, D) for p in (w.k_proj, w.v_proj))
    cos_sin = rope_table(rows, spec.rope.dims, spec.rope.theta)
    q = normed_and_rotated(q_gate[:, :, 0], w.q_norm, spec.norm_eps, cos_sin, take)
    k = normed_and_rotated(k, w.k_norm, spec.norm_eps, cos_sin, take)
    o = np.stack([attend(q[:, h], k[:, h * HK // H], v[:, h * HK // H], take) for h in range(H)], axis=1)
    return project(take(oracles.attention_gate(o, q_gate[:, :, 1])).reshape(rows, H * D), w.o_proj, take)


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


def attend(q: Array, k: Array, v: Array, take: Take) -> Array:
    """Causal attention of one head; q, k, v: [W, D]. The weight is rounded to bf16 above the division only.

    The float32 errors are those of bounds.attention, with the folds of decode: up to 512 keys a prompt has no more.
    """
    fold, scale, causal = decode_fold(len(q), q.shape[1]), q.shape[1] ** -0.5, np.tri(len(q), dtype=bool)
    error = (fold.score + U) * scale * (np.abs(q) @ np.abs(k).T)
    s = take(oracles.within(q @ k.T * scale, error))
    below = np.where(causal, np.where(causal, s, -np.inf).max(axis=1, keepdims=True) - s, np.inf)
    weight = np.exp(-below)
    p = take(oracles.rounded(weight, weight * (fold.rescalings * EXP2 + np.where(causal, below, 0) * EXP_DEPTH)))
    total = weight.sum(axis=1, keepdims=True)
    out, size = p @ v / total, p @ np.abs(v) / total
    error = size * (fold.values + 2 * fold.rescalings * U) + np.abs(out) * (fold.sum_roundings + 1) * U
    return take(oracles.rounded(out, error))


def delta_net(w: GatedDeltaNetWeights, spec: ModelSpec, x: Array, take: Take) -> Array:
    """Gated DeltaNet from a zero state: [W, hidden] to [W, hidden]."""
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
    gated = take(oracles.gated_norm(y, z.reshape(y.shape), w.norm, spec.norm_eps))
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
