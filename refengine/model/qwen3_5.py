"""The Qwen 3.5 family: Gated DeltaNet layers, every fourth full attention, SwiGLU or experts. Spec numerics §4, attention §5.

A layer is h += mixer(norm(h)); h += mlp(norm(h)). The residual add happens in the next norm's kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from backends.base import Backend, Batch
from kernels_numba.embedding import embed
from kernels_numba.norms import add_rms_norm, rms_norm
from kernels_numba.rope_store import rope_table
from refengine.checkpoint import LayerWeights, ModelWeights
from refengine.device import Device
from refengine.model.blocks import Blocks
from refengine.model.dims import check_dims
from refengine.model.model import Model, Tap
from refengine.model.upload import DeltaNet, FullAttention, Mlp, Moe, upload_mixer, upload_mlp
from refengine.registry import ModelSpec


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's weights on the device; norms: fp32 [hidden]."""

    input_norm: Any
    mixer: FullAttention | DeltaNet
    post_norm: Any
    mlp: Mlp | Moe


class Decoder(Blocks):
    """What a model of the family and its MTP head share: a norm that adds, and a decoder layer."""

    def decoder_layer(
        self, number: int, layer: Layer, h: Any, update: Any, backend: Backend, batch: Batch, tap: Tap | None = None
    ) -> Any:
        """One layer: h takes ``update``, then what the mixer adds, both in place; returns what the MLP adds.

        number: the layer's in the backend's caches.
        """
        x = self.normed(h, update, layer.input_norm)
        update = self.mixed(number, layer.mixer, x, backend, batch, tap)
        return self.mlp(layer.mlp, self.normed(h, update, layer.post_norm))

    def normed(self, h: Any, update: Any, gain: Any) -> Any:
        """h += update, in place, where there is one; then RMSNorm."""
        out = self.empty(*h.shape)
        if update is None:
            rms_norm(out, h, gain, self.spec.norm_eps)
        else:
            add_rms_norm(out, h, update, gain, self.spec.norm_eps)
        return out


class Qwen35(Decoder, Model):
    """A model of the family on a device. positions: how far the rotary table goes.

    Raises UserError for a layout that the kernels cannot run.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, device: Device, positions: int):
        check_dims(spec)
        super().__init__(spec, device, device.put(rope_table(positions, spec.rope.dims, spec.rope.theta)))
        self.embedding, self.head = device.put(weights.embed), device.put(weights.lm_head)
        self.final_norm = device.put(weights.final_norm)
        self.layers = [upload(layer, spec, device) for layer in weights.layers]

    def hidden(self, ids: Any, backend: Backend, batch: Batch, tap: Tap | None = None) -> Any:
        """``forward`` up to the final norm: bf16 [W, hidden]."""
        h = self.empty(len(ids), self.spec.hidden)
        embed(h, self.embedding, ids)
        update = None
        for number in range(len(self.layers)):
            update = self.layer_update(number, h, update, backend, batch, tap)
        return self.normed(h, update, self.final_norm)

    def layer_update(
        self, number: int, h: Any, update: Any, backend: Backend, batch: Batch, tap: Tap | None = None
    ) -> Any:
        """``decoder_layer`` of one of the model's layers."""
        return self.decoder_layer(number, self.layers[number], h, update, backend, batch, tap)

    def logits(self, hidden: Any, rows: Any) -> Any:
        return self.product(self.xp.ascontiguousarray(hidden[rows]), self.head, np.float32)


def upload(layer: LayerWeights, spec: ModelSpec, device: Device) -> Layer:
    """A layer's weights on the device."""
    return Layer(
        device.put(layer.input_norm),
        upload_mixer(layer.mixer, spec, device),
        device.put(layer.post_norm),
        upload_mlp(layer.mlp, spec, device),
    )
