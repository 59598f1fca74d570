"""The weights of a layer's parts under the engine's names, in the form the kernels take.

Matrices stay as the checkpoint has them: bfloat16, row-major [out features, in features]. Norm weights become the
factor that the norm multiplies by, in float32; the few per-head numbers become float32 too.
"""

from dataclasses import dataclass

import numpy as np

from refengine.checkpoint.reader import Checkpoint
from refengine.registry import FULL_ATTENTION


@dataclass(frozen=True, eq=False)
class IndexerWeights:
    """The indexer of sparse attention, IH query heads and one key head of DI dims.

    qk_proj [(IH + 1)·DI, hidden] bf16: index queries, then the index key. q_norm, k_norm [DI] fp32: gains of the RMSNorm
    over each index query, and over a block's pooled key, applied before RoPE.
    """

    qk_proj: np.ndarray
    q_norm: np.ndarray
    k_norm: np.ndarray


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """Full attention with H query heads, HK KV heads and head_dim D.

    q_proj [H·2·D, hidden] bf16: for each head, D rows that make its query, then D rows that make its gate.
    k_proj, v_proj [HK·D, hidden] bf16. o_proj [hidden, H·D] bf16, fed with attention · sigmoid(gate).
    q_norm, k_norm [D] fp32: gains of the RMSNorm over each head's query and key, applied before RoPE. indexer: of sparse
    attention.
    """

    q_proj: np.ndarray
    k_proj: np.ndarray
    v_proj: np.ndarray
    o_proj: np.ndarray
    q_norm: np.ndarray
    k_norm: np.ndarray
    indexer: IndexerWeights | None = None


@dataclass(frozen=True, eq=False)
class GatedDeltaNetWeights:
    """Gated DeltaNet with K key heads and V value heads of key_dim DK and value_dim DV; C = 2·K·DK + V·DV channels.

    in_proj_qkv [C, hidden] bf16: query heads, then key heads, then value heads. in_proj_z [V·DV, hidden] bf16: the
    output gate. in_proj_a, in_proj_b [V, hidden] bf16: decay and update strength of each value head.
    conv [C, conv_width] bf16: one causal filter a channel, oldest tap first, followed by silu; no bias.
    a_log, dt_bias [V] fp32: the state decays by exp(g), g = -exp(a_log) · softplus(a + dt_bias); beta = sigmoid(b).
    norm [DV] fp32: gain of the RMSNorm over each value head's output, before the gate of z multiplies it.
    out_proj [hidden, V·DV] bf16.
    """

    in_proj_qkv: np.ndarray
    in_proj_z: np.ndarray
    in_proj_a: np.ndarray
    in_proj_b: np.ndarray
    conv: np.ndarray
    a_log: np.ndarray
    dt_bias: np.ndarray
    norm: np.ndarray
    out_proj: np.ndarray


@dataclass(frozen=True, eq=False)
class MlpWeights:
    """SwiGLU, down_proj · (silu(gate_proj · x) · (up_proj · x)).

    gate_proj, up_proj [width, hidden] bf16; down_proj [hidden, width] bf16.
    """

    gate_proj: np.ndarray
    up_proj: np.ndarray
    down_proj: np.ndarray


@dataclass(frozen=True, eq=False)
class MoeWeights:
    """E experts and one that every token takes: the sum of router-weighted SwiGLUs, and the shared one times its own gate.

    router [E, hidden], shared_gate [1, hidden] bf16: logits. gate_up [E, 2·F, hidden] bf16: of each expert the rows of gate_proj,
    then those of up_proj; down [E, hidden, F] bf16. shared: the expert of every token.
    """

    router: np.ndarray
    shared_gate: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray
    shared: MlpWeights


def load_mixer(checkpoint: Checkpoint, layer: int, kind: str) -> AttentionWeights | GatedDeltaNetWeights:
    """What a layer of that kind mixes rows by."""
    return _attention(checkpoint, layer) if kind == FULL_ATTENTION else _gated_delta_net(checkpoint, layer)


def load_mlp(checkpoint: Checkpoint, layer: int) -> MlpWeights | MoeWeights:
    """A layer's MLP, or its experts."""
    shared = MlpWeights(**_matrices(checkpoint, layer, "gate_proj", "up_proj", "down_proj"))
    if checkpoint.spec.experts is None:
        return shared
    return MoeWeights(
        **_matrices(checkpoint, layer, "router", "shared_gate"),
        gate_up=checkpoint.by_role("experts_gate_up", layer),
        down=checkpoint.by_role("experts_down", layer),
        shared=shared,
    )


def gain(checkpoint: Checkpoint, role: str, layer: int | None = None) -> np.ndarray:
    """The factor a norm multiplies by, float32: 1 + w where the family stores w centred, else w."""
    weight = checkpoint.by_role(role, layer).astype(np.float32)
    return np.float32(1) + weight if checkpoint.tensors[role, layer].gain == "one_plus" else weight


def _attention(checkpoint: Checkpoint, layer: int) -> AttentionWeights:
    return AttentionWeights(
        **_matrices(checkpoint, layer, "q_proj", "k_proj", "v_proj", "o_proj"),
        q_norm=gain(checkpoint, "q_norm", layer),
        k_norm=gain(checkpoint, "k_norm", layer),
        indexer=None if checkpoint.spec.indexer is None else _indexer(checkpoint, layer),
    )


def _indexer(checkpoint: Checkpoint, layer: int) -> IndexerWeights:
    return IndexerWeights(
        checkpoint.by_role("index_qk_proj", layer),
        gain(checkpoint, "index_q_norm", layer),
        gain(checkpoint, "index_k_norm", layer),
    )


def _gated_delta_net(checkpoint: Checkpoint, layer: int) -> GatedDeltaNetWeights:
    return GatedDeltaNetWeights(
        **_matrices(checkpoint, layer, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"),
        conv=np.ascontiguousarray(checkpoint.by_role("conv", layer)[:, 0, :]),
        a_log=checkpoint.by_role("a_log", layer).astype(np.float32),
        dt_bias=checkpoint.by_role("dt_bias", layer).astype(np.float32),
        norm=gain(checkpoint, "norm", layer),
    )


def _matrices(checkpoint: Checkpoint, layer: int, *roles: str) -> dict[str, np.ndarray]:
    return {role: checkpoint.by_role(role, layer) for role in roles}
