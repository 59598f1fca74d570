"""The multi-token-prediction head of Flash Next: a layer of sparse attention and experts over streams of its own. Spec flash-next
§5.

Row t takes the embedding of token t + 1 and the model's streams at t, behind the last layer, and gives logits for token t + 2.
Its keys, values and index keys are slot t of one more attention layer of the backend's caches, as in mtp.py. To draft further,
the head's own streams take the place of the model's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backends.base import Backend, Batch
from kernels_numba.add_rounded import add_rounded
from kernels_numba.embedding import embed
from kernels_numba.flash_next import hyper
from kernels_numba.norms import rms_norm
from refengine.checkpoint import FlashNextMtpWeights
from refengine.device import Device
from refengine.model.flash_next import HyperDecoder, upload, upload_readout
from refengine.model.model import Head, Model
from refengine.registry import ModelSpec


class FlashNextHead(HyperDecoder, Head):
    """The head of a model, with the model's embedding, lm_head and rotary table."""

    def __init__(self, spec: ModelSpec, weights: FlashNextMtpWeights, model: Model, device: Device):
        super().__init__(spec, device, model.rope)
        self.embedding, self.lm_head = model.embedding, model.head
        (self.number,) = spec.mtp_layers
        self.fc_embedding, self.fc_hidden = device.put(weights.fc_embedding), device.put(weights.fc_hidden)
        self.embedding_norm, self.hidden_norm = device.put(weights.embedding_norm), device.put(weights.hidden_norm)
        self.layer = upload(weights.layer, spec, device)
        self.last_readout = upload_readout(weights.readout, device)

    def forward(self, ids_next: Any, hidden: Any, backend: Backend, batch: Batch, rows: Any) -> tuple[Any, Any]:
        h = self.joined(ids_next, hidden)
        self.hyper_layer(self.number, self.layer, h, backend, batch)
        wanted = self.xp.ascontiguousarray(h[rows])
        x, _ = self.readout(self.last_readout, wanted)
        return self.product(x, self.lm_head, np.float32), wanted

    def joined(self, ids_next: Any, hidden: Any) -> Any:
        """Stream s: bf16(fc_embedding · norm(embedding) + fc_hidden · norm(streams)[s]), the products float32; [W, C].

        The norm of the streams is one over all C elements.
        """
        streams, dims = self.spec.hyper.streams, self.spec.hidden  # type: ignore[union-attr]
        embedding, normed = self.empty(len(hidden), dims), self.empty(*hidden.shape)
        embed(embedding, self.embedding, ids_next)
        rms_norm(embedding, embedding, self.embedding_norm, self.spec.norm_eps)
        hyper.norm_streams(normed, hidden, self.hidden_norm, 1, self.spec.norm_eps)
        of_embedding = self.product(embedding, self.fc_embedding, np.float32)
        of_hidden = self.product(normed.reshape(-1, dims), self.fc_hidden, np.float32)
        out = self.empty(*of_hidden.shape)
        add_rounded(out, self.xp.repeat(of_embedding, streams, axis=0), of_hidden)
        return out.reshape(hidden.shape)
