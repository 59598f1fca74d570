"""The blocks that layers are made of, over a backend: attention, Gated DeltaNet, SwiGLU, experts. Spec numerics §4, attention §5.

Everything a row computes is independent of its batch, so the bits of a row depend on its sequence and its phase alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from backends.base import PROMPT, Backend, Batch, SparseNorms
from backends.batch import Path
from kernels_numba import delta_trees, gated_delta_net, moe
from kernels_numba.activations import attention_gate, swiglu
from kernels_numba.flash_next.gate import fn_attn_gate
from kernels_numba.matmul import matmul
from refengine.device import Device
from refengine.model.model import Tap
from refengine.model.upload import DeltaNet, FullAttention, Mlp, Moe
from refengine.registry import ModelSpec

BF16 = ml_dtypes.bfloat16


class Blocks:
    """Blocks of a model. rope: float32 [positions, 2, dims / 2] on the device. Rows x are bf16 [W, hidden]."""

    def __init__(self, spec: ModelSpec, device: Device, rope: Any):
        self.spec, self.xp, self.rope = spec, device.xp, rope

    def empty(self, *shape: int, dtype: Any = BF16) -> Any:
        return self.xp.empty(shape, dtype=dtype)

    def product(self, x: Any, weight: Any, dtype: Any = BF16) -> Any:
        """x · weightᵀ: bf16 [W, out features], or fp32."""
        out = self.empty(x.shape[0], weight.shape[0], dtype=dtype)
        matmul(out, x, weight)
        return out

    def mixed(
        self, number: int, w: FullAttention | DeltaNet, x: Any, backend: Backend, batch: Batch, tap: Tap | None
    ) -> Any:
        """What a layer's mixer makes of its rows. number: the layer's in the backend's caches."""
        if isinstance(w, FullAttention):
            return self.attention(number, w, x, backend, batch, tap)
        return self.delta_net(number, w, x, backend, batch)

    # --- Attention ------------------------------------------------------------------------------------------------------

    def attention(self, number: int, w: FullAttention, x: Any, backend: Backend, batch: Batch, tap: Tap | None) -> Any:
        """Projections, norm and RoPE and the cache, attention, output gate, projection."""
        projected = self.product(x, w.projections)
        if isinstance(w.norms, SparseNorms):
            q, index_q = backend.store_sparse(number, projected, w.norms, self.rope, batch)
            o, gate = backend.attend_sparse(number, q, index_q, batch), fn_attn_gate
        else:
            q = backend.store(number, projected, w.norms, self.rope, batch)
            o, gate = backend.attend(number, q, batch), attention_gate
        if tap is not None:
            tap(number, o)
        gated = self.empty(x.shape[0], w.out.shape[1])
        gate(gated, o.reshape(gated.shape), projected, self.spec.attention.head_dim)
        return self.product(gated, w.out)

    # --- Gated DeltaNet -------------------------------------------------------------------------------------------------

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
            batch.held[number] = partial(self.replay, batch, states, histories, mixed, qkv, decay, beta)
        gated_delta_net.gated_norm(y, y, mixed, w.norm, self.spec.norm_eps, gdn.key_heads, gdn.gate)
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

    def replay(
        self, batch: Batch, states: Any, histories: Any, mixed: Any, qkv: Any, decay: Any, beta: Any, kept: Path
    ) -> None:
        """States and histories of a drafted pass take the rows that are kept."""
        place = (batch.streams[0], batch.runs, batch.paths, kept.last, kept.count)
        delta_trees.replay(states, qkv, decay, beta, *place)
        gated_delta_net.commit_conv_path(histories, mixed, *place, self.spec.gated_delta_net.conv_channels)

    # --- MLPs -----------------------------------------------------------------------------------------------------------

    def mlp(self, w: Mlp | Moe, x: Any) -> Any:
        """SwiGLU, of one width or of experts."""
        return self.experts(w, x) if isinstance(w, Moe) else self.swiglu(w, x)

    def swiglu(self, w: Mlp, x: Any) -> Any:
        """down · swiglu(gate_up · x)."""
        gate_up = self.product(x, w.gate_up)
        out = self.empty(x.shape[0], w.down.shape[1])
        swiglu(out, gate_up)
        return self.product(out, w.down)

    def experts(self, w: Moe, x: Any) -> Any:
        """Each row's picks and the expert of every row, weighted. Spec flash-next §2."""
        rows, (count, _, width), picks = len(x), w.down.shape, w.picks
        experts, weights = self.empty(rows, picks, dtype=np.int32), self.empty(rows, picks + 1, dtype=np.float32)
        moe.route(experts, weights, self.product(x, w.router, np.float32))
        order = self.empty(rows * picks, dtype=np.int32)
        tiles = self.empty(moe.tile_count(len(order), count), moe.TILE_COLUMNS, dtype=np.int32)
        moe.group(order, tiles, experts, count)
        gate_up, act, y = (self.empty(len(order), n) for n in (2 * width, width, x.shape[1]))
        moe.expert_matmul(gate_up, x, w.gate_up, order, tiles)
        swiglu(act, gate_up)
        moe.expert_matmul(y, act, w.down, order, tiles)
        out = self.empty(*x.shape)
        moe.combine(out, y, self.swiglu(w.shared, x), weights)
        return out
