"""The weights of the Qwen 3.5 family, dense or with experts, and of its MTP head; those of Flash Next are in flash_next.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from refengine.checkpoint import flash_next
from refengine.checkpoint.flash_next import FlashNextMtpWeights, FlashNextWeights
from refengine.checkpoint.parts import (
    AttentionWeights,
    GatedDeltaNetWeights,
    MlpWeights,
    MoeWeights,
    gain,
    load_mixer,
    load_mlp,
)
from refengine.checkpoint.progress import progress
from refengine.checkpoint.reader import Checkpoint
from refengine.registry import FULL_ATTENTION, ModelSpec


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """A layer: h += mixer(norm(h) · input_norm); h += mlp(norm(h) · post_norm). Both gains [hidden] fp32."""

    input_norm: np.ndarray
    mixer: AttentionWeights | GatedDeltaNetWeights
    post_norm: np.ndarray
    mlp: MlpWeights | MoeWeights


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


def load_weights(checkpoint: Checkpoint, spec: ModelSpec) -> ModelWeights | FlashNextWeights:
    """Read every tensor of a checkpoint that was opened with `spec`."""
    layers = progress(range(spec.layers), f"loading {spec.name}")
    if spec.hyper is not None:
        return flash_next.load_weights(checkpoint, spec, layers)
    embed = checkpoint.by_role("embed")
    return ModelWeights(
        embed=embed,
        layers=tuple(_layer(checkpoint, layer, spec.layer_types[layer]) for layer in layers),
        final_norm=gain(checkpoint, "final_norm"),
        lm_head=embed if spec.tied_head else checkpoint.by_role("lm_head"),
    )


def load_mtp(checkpoint: Checkpoint, spec: ModelSpec) -> MtpWeights | FlashNextMtpWeights:
    """Read the MTP head of a checkpoint that was opened with `spec`.

    Raises UserError if the layout has no head, or the checkpoint lacks a tensor of it or has it in another shape or type.
    """
    checkpoint.check_mtp()
    (layer,) = spec.mtp_layers
    if spec.hyper is not None:
        return flash_next.load_mtp(checkpoint, layer)
    return MtpWeights(
        fc=checkpoint.by_role("fc"),
        embedding_norm=gain(checkpoint, "embedding_norm"),
        hidden_norm=gain(checkpoint, "hidden_norm"),
        layer=_layer(checkpoint, layer, FULL_ATTENTION),
        final_norm=gain(checkpoint, "mtp_norm"),
    )


def _layer(checkpoint: Checkpoint, layer: int, kind: str) -> LayerWeights:
    return LayerWeights(
        input_norm=gain(checkpoint, "input_norm", layer),
        mixer=load_mixer(checkpoint, layer, kind),
        post_norm=gain(checkpoint, "post_norm", layer),
        mlp=load_mlp(checkpoint, layer),
    )
