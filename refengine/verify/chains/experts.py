"""What follows a mixer, in float64: SwiGLU, or a mixture of experts. Spec numerics §4, flash-next §2."""

from __future__ import annotations

from functools import partial

import numpy as np

from refengine.checkpoint import MlpWeights, MoeWeights
from refengine.registry import ModelSpec
from refengine.verify import moe_oracle, oracles
from refengine.verify.layer_bounds import Run, Take
from refengine.verify.oracles import Array

from .stages import project

EXPERTS = "experts"
"""The name of the choice: int [W, K], a row's experts; made from logits [W, E]."""


def feed_forward(w: MlpWeights | MoeWeights, spec: ModelSpec, x: Array, run: Run) -> Array:
    """[W, hidden] to [W, hidden]."""
    if isinstance(w, MlpWeights):
        return mlp(w, x, run)
    assert spec.experts is not None, f"{spec.name}: experts of a layout without any"
    return experts(w, spec.experts.picks, x, run)


def mlp(w: MlpWeights, x: Array, take: Take) -> Array:
    """SwiGLU."""
    gate_up = project(x, np.concatenate([w.gate_proj, w.up_proj]), take)
    return project(take(oracles.swiglu(gate_up)), w.down_proj, take)


def experts(w: MoeWeights, picks: int, x: Array, run: Run) -> Array:
    """The picked experts and the shared one, by their weights."""
    logits = run(oracles.matmul(x, np.concatenate([w.router, w.shared_gate]), bf16=False))
    picked = run.choose(EXPERTS, logits[:, :-1], partial(moe_oracle.picks, count=picks))
    slots = picked.reshape(-1)
    gate_up = run(moe_oracle.expert_matmul(np.repeat(x, picks, axis=0), w.gate_up, slots))
    y = run(moe_oracle.expert_matmul(run(oracles.swiglu(gate_up)), w.down, slots))
    shared, weights = mlp(w.shared, x, run), run(moe_oracle.route(logits, picked))
    return run(moe_oracle.combine(y.reshape(len(x), picks, -1), shared, weights))
