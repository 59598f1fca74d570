"""Weights on the device, projections of the same input joined: rows of a product do not meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from backends.base import Norms, SparseNorms
from refengine.checkpoint import AttentionWeights, GatedDeltaNetWeights, MlpWeights, MoeWeights
from refengine.device import Device
from refengine.registry import ModelSpec


@dataclass(frozen=True, eq=False)
class FullAttention:
    """projections: bf16 [2·H·D + 2·HK·D, hidden], rows [H × (query | gate) | keys | values], and of sparse attention IH index
    queries and an index key of DI rows each; out: bf16 [hidden, H·D]; norms: SparseNorms of sparse attention."""

    projections: Any
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
class Mlp:
    """gate_up: bf16 [2·F, hidden], down: bf16 [hidden, F]."""

    gate_up: Any
    down: Any


@dataclass(frozen=True, eq=False)
class Moe:
    """router: bf16 [E + 1, hidden], the shared expert's gate last; gate_up: bf16 [E, 2·F, hidden], down: bf16 [E, hidden, F];
    picks: experts a row; shared: the expert of every row."""

    router: Any
    gate_up: Any
    down: Any
    picks: int
    shared: Mlp


def joined(device: Device, *matrices: np.ndarray) -> Any:
    """Matrices of one input width, one below the other."""
    return device.put(np.concatenate(matrices))


def upload_mixer(
    w: AttentionWeights | GatedDeltaNetWeights, spec: ModelSpec, device: Device
) -> FullAttention | DeltaNet:
    if isinstance(w, GatedDeltaNetWeights):
        mixed = joined(device, w.in_proj_qkv, w.in_proj_z, w.in_proj_b, w.in_proj_a)
        return DeltaNet(mixed, *map(device.put, (w.conv, w.a_log, w.dt_bias, w.norm, w.out_proj)))
    projections, norms = (
        [w.q_proj, w.k_proj, w.v_proj],
        Norms(device.put(w.q_norm), device.put(w.k_norm), spec.norm_eps),
    )
    if w.indexer is not None:
        projections.append(w.indexer.qk_proj)
        norms = SparseNorms(norms.q, norms.k, norms.eps, device.put(w.indexer.q_norm), device.put(w.indexer.k_norm))
    return FullAttention(joined(device, *projections), device.put(w.o_proj), norms)


def upload_mlp(w: MlpWeights | MoeWeights, spec: ModelSpec, device: Device) -> Mlp | Moe:
    if isinstance(w, MlpWeights):
        return swiglu(w, device)
    assert spec.experts is not None, "weights of experts come with their layout"
    router = joined(device, w.router, w.shared_gate)
    return Moe(router, device.put(w.gate_up), device.put(w.down), spec.experts.picks, swiglu(w.shared, device))


def swiglu(w: MlpWeights, device: Device) -> Mlp:
    return Mlp(joined(device, w.gate_proj, w.up_proj), device.put(w.down_proj))
