"""The multi-token-prediction head of the Qwen 3.5 family: from a position's hidden state and the token that follows, the
token after that. Spec attention §6.

Row t takes the embedding of token t + 1 and the model's hidden state at t, after the model's final norm, and gives logits
for token t + 2. Its keys and values are slot t of one more attention layer of the backend's caches, so a pass is a pass of
the model's own batch, and ``backend.finish`` commits it with the model's layers. To draft further, the head's own hidden
state takes the place of the model's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backends.base import Backend, Batch
from kernels_numba.add_rounded import add_rounded
from kernels_numba.embedding import embed
from refengine.checkpoint import MtpWeights
from refengine.device import Device
from refengine.model.model import Head, Model
from refengine.model.qwen3_5 import Decoder, upload
from refengine.registry import ModelSpec


class MtpHead(Decoder, Head):
    """The head of a model, with the model's embedding, lm_head and rotary table."""

    def __init__(self, spec: ModelSpec, weights: MtpWeights, model: Model, device: Device):
        super().__init__(spec, device, model.rope)
        self.embedding, self.lm_head = model.embedding, model.head
        (self.number,) = spec.mtp_layers
        fc_embedding, fc_hidden = np.split(weights.fc, 2, axis=1)
        self.fc_embedding, self.fc_hidden = (device.put(np.ascontiguousarray(fc)) for fc in (fc_embedding, fc_hidden))
        self.embedding_norm, self.hidden_norm = device.put(weights.embedding_norm), device.put(weights.hidden_norm)
        self.layer = upload(weights.layer, spec, device)
        self.final_norm = device.put(weights.final_norm)

    def forward(self, ids_next: Any, hidden: Any, backend: Backend, batch: Batch, rows: Any) -> tuple[Any, Any]:
        h = self.joined(ids_next, hidden)
        update = self.decoder_layer(self.number, self.layer, h, None, backend, batch)
        wanted = self.xp.ascontiguousarray(self.normed(h, update, self.final_norm)[rows])
        return self.product(wanted, self.lm_head, np.float32), wanted

    def joined(self, ids_next: Any, hidden: Any) -> Any:
        """bf16(fc_embedding · norm(embedding) + fc_hidden · norm(hidden)): each product float32, one rounding; [W, hidden]."""
        embedding = self.empty(*hidden.shape)
        embed(embedding, self.embedding, ids_next)
        of_embedding = self.product(self.normed(embedding, None, self.embedding_norm), self.fc_embedding, np.float32)
        of_hidden = self.product(self.normed(hidden, None, self.hidden_norm), self.fc_hidden, np.float32)
        out = self.empty(*hidden.shape)
        add_rounded(out, of_embedding, of_hidden)
        return out
