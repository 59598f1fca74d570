"""The weights of a model under the engine's names, in the form the kernels take.

Matrices stay as the checkpoint has them: bfloat16, row-major [out features, in features]. Norm weights become the
factor that the norm multiplies by, in float32; the few per-head numbers become float32 too.
"""

from dataclasses import dataclass

import numpy as np

from refengine.checkpoint.progress import progress
from refengine.checkpoint.reader import Checkpoint
from refengine.registry import FULL_ATTENTION, ModelSpec


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """Full attention with H query heads, HK KV heads and head_dim D.

    q_proj [H·2·D, hidden] bf16: for each head, D rows that make its query, then D rows that make its gate.
    k_proj, v_proj [HK·D, hidden] bf16. o_proj [hidden, H·D] bf16, fed with attention · sigmoid(gate).
    q_norm, k_norm [D] fp32: gains of the RMSNorm over each head's query and key, applied before RoPE.
    """

    q_proj: np.ndarray
    k_proj: np.ndarray
    v_proj: np.ndarray
    o_proj: np.ndarray
    q_norm: np.ndarray
    k_norm: np.ndarray


@dataclass(frozen=True, eq=False)
class GatedDeltaNetWeights:
    """Gated DeltaNet with K key heads and V value heads of key_dim DK and value_dim DV; C = 2·K·DK + V·DV channels.

    in_proj_qkv [C, hidden] bf16: query heads, then key heads, then value heads. in_proj_z [V·DV, hidden] bf16: the
    output gate. in_proj_a, in_proj_b [V, hidden] bf16: decay and update strength of each value head.
    conv [C, conv_width] bf16: one causal filter a channel, oldest tap first, followed by silu; no bias.
    a_log, dt_bias [V] fp32: the state decays by exp(g), g = -exp(a_log) · softplus(a + dt_bias); beta = sigmoid(b).
    norm [DV] fp32: gain of the RMSNorm over each value head's output, before the gate silu(z) multiplies it.
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
class LayerWeights:
    """A layer: h += mixer(norm(h) · input_norm); h += mlp(norm(h) · post_norm). Both gains [hidden] fp32."""

    input_norm: np.ndarray
    mixer: AttentionWeights | GatedDeltaNetWeights
    post_norm: np.ndarray
    mlp: MlpWeights


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """The whole model: embed [vocabulary, hidden] bf16, layers, final_norm [hidden] fp32, lm_head like embed.

    With a tied head, lm_head is embed, the same array.
    """

    embed: np.ndarray
    layers: tuple[LayerWeights, ...]
    final_norm: np.ndarray
    lm_head: np.ndarray


@dataclass(frozen=True, eq=False)
class MtpWeights:
    """The MTP head: x = fc · [norm(embedding of the next token) | norm(hidden)], a layer, a norm; then the model's lm_head.

    fc [hidden, 2·hidden] bf16: columns of the embedding, then of the hidden state. embedding_norm, hidden_norm,
    final_norm [hidden] fp32.
    """

    fc: np.ndarray
    embedding_norm: np.ndarray
    hidden_norm: np.ndarray
    layer: LayerWeights
    final_norm: np.ndarray


def load_weights(checkpoint: Checkpoint, spec: ModelSpec) -> ModelWeights:
    """Read every tensor of a checkpoint that was opened with `spec`."""
    embed = checkpoint.by_role("embed")
    layers = progress(range(spec.layers), f"loading {spec.name}")
    return ModelWeights(
        embed=embed,
        layers=tuple(_layer(checkpoint, layer, spec.layer_types[layer]) for layer in layers),
        final_norm=_gain(checkpoint, "final_norm"),
        lm_head=embed if spec.tied_head else checkpoint.by_role("lm_head"),
    )


def load_mtp(checkpoint: Checkpoint, spec: ModelSpec) -> MtpWeights:
    """Read the MTP head of a checkpoint that was opened with `spec`.

    Raises UserError if the layout has no head, or the checkpoint lacks a tensor of it or has it in another shape or type.
    """
    checkpoint.check_mtp()
    (layer,) = spec.mtp_layers
    return MtpWeights(
        fc=checkpoint.by_role("fc"),
        embedding_norm=_gain(checkpoint, "embedding_norm"),
        hidden_norm=_gain(checkpoint, "hidden_norm"),
        layer=_layer(checkpoint, layer, FULL_ATTENTION),
        final_norm=_gain(checkpoint, "mtp_norm"),
    )


def _layer(checkpoint: Checkpoint, layer: int, kind: str) -> LayerWeights:
    return LayerWeights(
        input_norm=_gain(checkpoint, "input_norm", layer),
        mixer=_attention(checkpoint, layer) if kind == FULL_ATTENTION else _gated_delta_net(checkpoint, layer),
        post_norm=_gain(checkpoint, "post_norm", layer),
        mlp=MlpWeights(**_matrices(checkpoint, layer, "gate_proj", "up_proj", "down_proj")),
    )


def _attention(checkpoint: Checkpoint, layer: int) -> AttentionWeights:
    return AttentionWeights(
        **_matrices(checkpoint, layer, "q_proj", "k_proj", "v_proj", "o_proj"),
        q_norm=_gain(checkpoint, "q_norm", layer),
        k_norm=_gain(checkpoint, "k_norm", layer),
    )


def _gated_delta_net(checkpoint: Checkpoint, layer: int) -> GatedDeltaNetWeights:
    return GatedDeltaNetWeights(
        **_matrices(checkpoint, layer, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"),
        conv=np.ascontiguousarray(checkpoint.by_role("conv", layer)[:, 0, :]),
        a_log=checkpoint.by_role("a_log", layer).astype(np.float32),
        dt_bias=checkpoint.by_role("dt_bias", layer).astype(np.float32),
        norm=_gain(checkpoint, "norm", layer),
    )


def _matrices(checkpoint: Checkpoint, layer: int, *roles: str) -> dict[str, np.ndarray]:
    return {role: checkpoint.by_role(role, layer) for role in roles}


def _gain(checkpoint: Checkpoint, role: str, layer: int | None = None) -> np.ndarray:
    """The factor a norm multiplies by, float32: 1 + w where the family stores w centred, else w."""
    weight = checkpoint.by_role(role, layer).astype(np.float32)
    return np.float32(1) + weight if checkpoint.tensors[role, layer].gain == "one_plus" else weight
