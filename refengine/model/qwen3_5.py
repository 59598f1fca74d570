"""The dense Qwen 3.5 family: Gated DeltaNet layers, every fourth full attention, SwiGLU. Spec numerics §4, attention §5.

A layer is h += mixer(norm(h)); h += mlp(norm(h)). The residual add happens in the next norm's kernel. Everything a row
computes is independent of its batch, so the bits of a row depend on its sequence and its phase alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from backends.arena import CacheShape
from backends.base import PROMPT, Backend, BackendError, Batch, Norms
from kernels_numba import delta_trees, gated_delta_net
from kernels_numba.activations import attention_gate, swiglu
from kernels_numba.embedding import embed
from kernels_numba.matmul import matmul
from kernels_numba.norms import add_rms_norm, rms_norm
from kernels_numba.rope_store import rope_table
from refengine.checkpoint import AttentionWeights, GatedDeltaNetWeights, LayerWeights, ModelWeights
from refengine.device import Device
from refengine.model.dims import check_dims
from refengine.registry import ModelSpec

BF16 = ml_dtypes.bfloat16
Tap = Callable[[int, Any], None]
"""Called with (layer, attention output bf16 [W, H, D]) after each full attention."""


def cache_shape(spec: ModelSpec, mtp: bool = False) -> CacheShape:
    """What a backend needs to know of the model. mtp: with the layers of its MTP head, if it has one."""
    attention, gdn = spec.attention, spec.gated_delta_net
    layers = spec.attention_layers + (spec.mtp_layers if mtp else ())
    return CacheShape(
        layers, spec.linear_layers, attention.heads, attention.kv_heads, attention.head_dim,
        gdn.value_heads, gdn.value_dim, gdn.key_dim, gdn.conv_channels, gdn.conv_width - 1,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class FullAttention:
    """qkv: bf16 [2·H·D + 2·HK·D, hidden], rows [H × (query | gate) | keys | values]; out: bf16 [hidden, H·D]."""

    qkv: Any
    out: Any
    norms: Norms


@dataclass(frozen=True, eq=False)
class DeltaNet:
    """mixed: bf16 [C + V + 2·HV, hidden], rows [q | k | v | z | b | a]; conv: bf16 [C, 4]; a_log, dt_bias: fp32 [HV];
    norm: fp32 [DV]; out: bf16 [hidden, V]."""

    mixed: Any
    conv: Any
    a_log: Any
    dt_bias: Any
    norm: Any
    out: Any


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's weights on the device; gate_up: bf16 [2·F, hidden], down: bf16 [hidden, F], norms: fp32 [hidden]."""

    input_norm: Any
    mixer: FullAttention | DeltaNet
    post_norm: Any
    gate_up: Any
    down: Any


class Decoder:
    """What a model of the family and its MTP head share: products, norms, and a decoder layer.

    rope: float32 [positions, 2, dims / 2] on the device.
    """

    def __init__(self, spec: ModelSpec, device: Device, rope: Any):
        self.spec, self.xp, self.rope = spec, device.xp, rope

    def decoder_layer(
        self, number: int, layer: Layer, h: Any, update: Any, backend: Backend, batch: Batch, tap: Tap | None = None
    ) -> Any:
        """One layer: h takes ``update``, then what the mixer adds, both in place; returns what the MLP adds.

        number: the layer's in the backend's caches.
        """
        x = self.normed(h, update, layer.input_norm)
        if isinstance(layer.mixer, FullAttention):
            update = self.attention(number, layer.mixer, x, backend, batch, tap)
        else:
            update = self.delta_net(number, layer.mixer, x, backend, batch)
        return self.mlp(layer, self.normed(h, update, layer.post_norm))

    def empty(self, *shape: int, dtype: Any = BF16) -> Any:
        return self.xp.empty(shape, dtype=dtype)

    def product(self, x: Any, weight: Any, dtype: Any = BF16) -> Any:
        """x · weightᵀ: bf16 [W, out features], or fp32."""
        out = self.empty(x.shape[0], weight.shape[0], dtype=dtype)
        matmul(out, x, weight)
        return out

    def normed(self, h: Any, update: Any, gain: Any) -> Any:
        """h += update, in place, where there is one; then RMSNorm."""
        out = self.empty(*h.shape)
        if update is None:
            rms_norm(out, h, gain, self.spec.norm_eps)
        else:
            add_rms_norm(out, h, update, gain, self.spec.norm_eps)
        return out

    def attention(self, number: int, w: FullAttention, x: Any, backend: Backend, batch: Batch, tap: Tap | None) -> Any:
        """Projections, norm and RoPE and the cache, attention, output gate, projection."""
        qkv = self.product(x, w.qkv)
        q = backend.store(number, qkv, w.norms, self.rope, batch)
        o = backend.attend(number, q, batch)
        if tap is not None:
            tap(number, o)
        gated = self.empty(x.shape[0], w.out.shape[1])
        attention_gate(gated, o.reshape(gated.shape), qkv, self.spec.attention.head_dim)
        return self.product(gated, w.out)

    def delta_net(self, number: int, w: DeltaNet, x: Any, backend: Backend, batch: Batch) -> Any:
        """Projection, convolution, gates, delta rule, gated norm, projection."""
        gdn = self.spec.gated_delta_net
        states, histories = backend.layer_states(number, batch)
        mixed = self.product(x, w.mixed)
        qkv = self.convolution(mixed, histories, w, batch)
        decay, beta = (self.empty(len(x), gdn.value_heads, dtype=np.float32) for _ in range(2))
        gated_delta_net.gates(decay, beta, mixed, w.a_log, w.dt_bias, gdn.key_heads)
        y = self.recurrence(states, qkv, decay, beta, batch)
        if batch.drafted:
            batch.linear[number] = mixed, qkv, decay, beta
        gated_delta_net.gated_norm(y, y, mixed, w.norm, self.spec.norm_eps, gdn.key_heads)
        return self.product(y, w.out)

    def convolution(self, mixed: Any, histories: Any, w: DeltaNet, batch: Batch) -> Any:
        """q, k and v of each row: bf16 [W, C]. The histories move on, unless the rows are drafts."""
        gdn, place = self.spec.gated_delta_net, (batch.owners, batch.streams[0], batch.runs)
        qkv = self.empty(len(mixed), gdn.conv_channels)
        if batch.drafted:
            lines = (batch.paths, batch.depths)
            gated_delta_net.conv_path(qkv, mixed, histories, w.conv, *place, *lines, gdn.key_heads)
        else:
            gated_delta_net.conv(qkv, mixed, histories, w.conv, *place, gdn.key_heads)
            gated_delta_net.commit_conv(histories, mixed, *place[1:], gdn.conv_channels)
        return qkv

    def recurrence(self, states: Any, qkv: Any, decay: Any, beta: Any, batch: Batch) -> Any:
        """The delta rule, bf16 [W, HV·DV]: chain for prompts, step for decode; the states move on, unless the rows are drafts."""
        gdn, place = self.spec.gated_delta_net, (batch.streams[0], batch.runs)
        y = self.empty(len(qkv), gdn.value_heads * gdn.value_dim)
        if batch.drafted:
            delta_trees.step_tree(y, states, qkv, decay, beta, *place, batch.schedule)
        elif batch.phase == PROMPT:
            gated_delta_net.chain(y, states, qkv, decay, beta, *place)
        else:
            gated_delta_net.step(y, states, qkv, decay, beta, *place, commit=True)
        return y

    def mlp(self, layer: Layer, x: Any) -> Any:
        """SwiGLU."""
        gate_up = self.product(x, layer.gate_up)
        out = self.empty(x.shape[0], layer.down.shape[1])
        swiglu(out, gate_up)
        return self.product(out, layer.down)


class Qwen35(Decoder):
    """A model of the family on a device. positions: how far the rotary table goes.

    Raises UserError for a layout that the kernels cannot run.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, device: Device, positions: int):
        check_dims(spec)
        super().__init__(spec, device, device.put(rope_table(positions, spec.rope.dims, spec.rope.theta)))
        self.embedding, self.head = device.put(weights.embed), device.put(weights.lm_head)
        self.final_norm = device.put(weights.final_norm)
        self.layers = [upload(layer, spec, device) for layer in weights.layers]

    def forward(self, ids: Any, backend: Backend, batch: Batch, rows: Any, tap: Tap | None = None) -> Any:
        """One pass over the batch's rows. Writes keys, values and recurrent states; ``finish`` commits them.

        ids: int32 [W]. rows: int [n], the rows whose logits are wanted. Returns float32 [n, vocabulary].
        """
        return self.logits(self.hidden(ids, backend, batch, tap), rows)

    def hidden(self, ids: Any, backend: Backend, batch: Batch, tap: Tap | None = None) -> Any:
        """``forward`` up to the final norm, bf16 [W, hidden]: what ``logits`` takes, and an MTP head beside it."""
        h = self.empty(len(ids), self.spec.hidden)
        embed(h, self.embedding, ids)
        update = None
        for number in range(len(self.layers)):
            update = self.layer_update(number, h, update, backend, batch, tap)
        return self.normed(h, update, self.final_norm)

    def finish(self, backend: Backend, batch: Batch, accepted: Sequence[int] | None = None) -> None:
        """Commit a pass. accepted: of a drafted one, as ``backend.finish`` takes it; the recurrent states take those rows now.

        Raises BackendError as ``backend.finish`` does, and for drafts that have not been through ``forward``, before anything
        has changed.
        """
        if batch.drafted and set(batch.linear) != set(self.spec.linear_layers):
            raise BackendError("drafts: have not been through the model; run forward before finish")
        last, kept = map(self.xp.asarray, batch.ends(backend.kept_rows(batch, accepted)))
        place = (batch.streams[0], batch.runs, batch.paths, last, kept)
        for number, (mixed, qkv, decay, beta) in batch.linear.items():
            states, histories = backend.layer_states(number, batch)
            delta_trees.replay(states, qkv, decay, beta, *place)
            gated_delta_net.commit_conv_path(histories, mixed, *place, self.spec.gated_delta_net.conv_channels)
        batch.linear.clear()
        backend.finish(batch, accepted)

    def layer_update(
        self, number: int, h: Any, update: Any, backend: Backend, batch: Batch, tap: Tap | None = None
    ) -> Any:
        """``decoder_layer`` of one of the model's layers."""
        return self.decoder_layer(number, self.layers[number], h, update, backend, batch, tap)

    def logits(self, hidden: Any, rows: Any) -> Any:
        """The logits of ``rows`` of what ``hidden`` gives: float32 [n, vocabulary]."""
        return self.product(self.xp.ascontiguousarray(hidden[rows]), self.head, np.float32)


def upload(layer: LayerWeights, spec: ModelSpec, device: Device) -> Layer:
    """A layer's weights on the device, projections of the same input joined (rows of a product do not meet)."""
    w = layer.mixer
    return Layer(
        device.put(layer.input_norm),
        full_attention(w, spec, device) if isinstance(w, AttentionWeights) else delta_net(w, device),
        device.put(layer.post_norm),
        joined(device, layer.mlp.gate_proj, layer.mlp.up_proj),
        device.put(layer.mlp.down_proj),
    )


def joined(device: Device, *matrices: np.ndarray) -> Any:
    """Matrices of one input width, one below the other."""
    return device.put(np.concatenate(matrices))


def full_attention(w: AttentionWeights, spec: ModelSpec, device: Device) -> FullAttention:
    norms = Norms(device.put(w.q_norm), device.put(w.k_norm), spec.norm_eps)
    return FullAttention(joined(device, w.q_proj, w.k_proj, w.v_proj), device.put(w.o_proj), norms)


def delta_net(w: GatedDeltaNetWeights, device: Device) -> DeltaNet:
    mixed = joined(device, w.in_proj_qkv, w.in_proj_z, w.in_proj_b, w.in_proj_a)
    return DeltaNet(mixed, *map(device.put, (w.conv, w.a_log, w.dt_bias, w.norm, w.out_proj)))
