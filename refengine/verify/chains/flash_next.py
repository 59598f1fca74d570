"""Flash Next in float64: hyper-connections, a layer, the head, the MTP head. Spec flash-next §1."""

from __future__ import annotations

import numpy as np

from refengine.checkpoint import FlashNextMtpWeights, FlashNextWeights, HyperLayerWeights, HyperWeights
from refengine.registry import ModelSpec
from refengine.verify import oracles
from refengine.verify.bounds import U
from refengine.verify.flash_next_oracle import norm_streams, of_streams, readout_gates, write_back
from refengine.verify.layer_bounds import Run, Take
from refengine.verify.oracles import Array, rounded, sigmoid, sigmoid_error

from .experts import feed_forward
from .ngrams import with_ngrams
from .qwen3_5 import mixed
from .stages import project


def layer(w: HyperLayerWeights, spec: ModelSpec, ids: Array, h: Array, run: Run) -> Array:
    """The residual streams after a layer. h: [W, S·D], before it; rows are a sequence of tokens ids [W] from position 0."""
    if w.ngrams is not None:
        h = with_ngrams(w.ngrams, spec, ids, h, run)
    x, inject = readout(w.mixer_readout, spec, h, run)
    h = run(write_back(h, mixed(w.mixer, spec, x, run), inject))
    x, inject = readout(w.mlp_readout, spec, h, run)
    return run(write_back(h, feed_forward(w.mlp, spec, x, run), inject))


def readout(w: HyperWeights, spec: ModelSpec, h: Array, take: Take) -> tuple[Array, Array]:
    """What a block reads of the streams, [W, D], and what its result counts in each, [W, S], or [W, 0] behind the last layer."""
    streams = h.shape[1] // spec.hidden
    n = take(norm_streams(h, w.norm, streams, spec.norm_eps))
    low = project(n, w.down if w.inject is None else np.concatenate([w.down, w.inject]), take)
    act, inject = (take(part) for part in readout_gates(low, streams, len(w.down)))
    return mixed_streams(project(act, w.up, take), n, streams, take), inject


def mixed_streams(up: Array, n: Array, streams: int, take: Take) -> Array:
    """The streams n [W, S·D] by their gates, as one row [W, D]. A row's sum rounds once a stream, and the division once."""
    gate = take(rounded(sigmoid(up), sigmoid_error(up) * sigmoid(up)))
    term = of_streams(take(rounded(gate * n, U * np.abs(gate * n))), streams)
    error = U * np.abs(term).sum(axis=1)
    value = term.sum(axis=1) / streams
    return take(rounded(value, error + U * np.abs(value)))


def head(w: FlashNextWeights, spec: ModelSpec, h: Array, take: Take) -> Array:
    """Logits [W, vocabulary] from the residual streams after the last layer."""
    return take(oracles.matmul(readout(w.readout, spec, h, take)[0], w.lm_head, bf16=False))


def mtp(
    w: FlashNextMtpWeights, spec: ModelSpec, lm_head: Array, embedding: Array, streams: Array, run: Run
) -> tuple[Array, Array]:
    """The MTP head: (logits [W, vocabulary], its own residual streams [W, S·D]).

    embedding: [W, D], of each row's next token; streams: [W, S·D], the model's after its last layer.
    """
    embedding = run(oracles.rms_norm(embedding, w.embedding_norm, spec.norm_eps))
    normed = run(oracles.rms_norm(streams, w.hidden_norm, spec.norm_eps)).reshape(len(streams), -1, spec.hidden)
    of_embedding = run(oracles.matmul(embedding, w.fc_embedding, bf16=False))
    of_hidden = run(oracles.matmul(normed.reshape(-1, spec.hidden), w.fc_hidden, bf16=False)).reshape(normed.shape)
    h = run(oracles.add_rounded(of_embedding[:, None], of_hidden)).reshape(streams.shape)
    h = layer(w.layer, spec, np.empty(0), h, run)
    x, _ = readout(w.readout, spec, h, run)
    return run(oracles.matmul(x, lm_head, bf16=False)), h
