"""The Qwen 3.5 family in float64, dense or with experts: a layer, the head, the MTP head."""

from __future__ import annotations

import numpy as np

from refengine.checkpoint import AttentionWeights, GatedDeltaNetWeights, LayerWeights, ModelWeights, MtpWeights
from refengine.registry import ModelSpec
from refengine.verify import oracles
from refengine.verify.layer_bounds import Run, Take
from refengine.verify.oracles import Array

from .attention import attention
from .delta_net import delta_net
from .experts import feed_forward
from .stages import added


def layer(w: LayerWeights, spec: ModelSpec, h: Array, run: Run) -> Array:
    """The residual stream after a layer. h: [W, hidden], before it; rows are a sequence from position 0."""
    h = added(h, mixed(w.mixer, spec, run(oracles.rms_norm(h, w.input_norm, spec.norm_eps)), run), run)
    x = run(oracles.rms_norm(h, w.post_norm, spec.norm_eps))
    return added(h, feed_forward(w.mlp, spec, x, run), run)


def mixed(w: AttentionWeights | GatedDeltaNetWeights, spec: ModelSpec, x: Array, run: Run) -> Array:
    """What a layer mixes rows by: [W, hidden] to [W, hidden]."""
    return attention(w, spec, x, run) if isinstance(w, AttentionWeights) else delta_net(w, spec, x, run)


def head(w: ModelWeights, spec: ModelSpec, h: Array, take: Take) -> Array:
    """Logits [W, vocabulary] from the residual stream after the last layer."""
    x = take(oracles.rms_norm(h, w.final_norm, spec.norm_eps))
    return take(oracles.matmul(x, w.lm_head, bf16=False))


def mtp(
    w: MtpWeights, spec: ModelSpec, lm_head: Array, embedding: Array, hidden: Array, run: Run
) -> tuple[Array, Array]:
    """The MTP head: (logits [W, vocabulary], its own hidden state [W, hidden]).

    embedding: [W, hidden], of each row's next token; hidden: [W, hidden], the model's state after its final norm.
    """
    embedding = run(oracles.rms_norm(embedding, w.embedding_norm, spec.norm_eps))
    hidden = run(oracles.rms_norm(hidden, w.hidden_norm, spec.norm_eps))
    fc_embedding, fc_hidden = np.split(w.fc, 2, axis=1)
    parts = [run(oracles.matmul(x, fc, bf16=False)) for x, fc in ((embedding, fc_embedding), (hidden, fc_hidden))]
    h = layer(w.layer, spec, run(oracles.add_rounded(*parts)), run)
    x = run(oracles.rms_norm(h, w.final_norm, spec.norm_eps))
    return run(oracles.matmul(x, lm_head, bf16=False)), x
