"""Flash Next: Gated DeltaNet layers, every fourth sparse attention, experts; a residual of streams, n-grams in one layer. Spec
flash-next.

A layer reads its streams mixed into one row, and writes what a block makes of it back to all, twice: h += inject ·
mixer(read(h)); h += inject · experts(read(h)).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from backends.base import Backend, Batch
from kernels_numba.embedding import embed
from kernels_numba.flash_next import hyper, ngram
from kernels_numba.rope_store import rope_table
from refengine.checkpoint import FlashNextWeights, HyperLayerWeights, HyperWeights, NgramWeights
from refengine.device import Device
from refengine.model.blocks import Blocks
from refengine.model.dims import check_dims
from refengine.model.model import NGRAMS, Model, Tap
from refengine.model.upload import DeltaNet, FullAttention, Mlp, Moe, joined, upload_mixer, upload_mlp
from refengine.registry import ModelSpec


@dataclass(frozen=True, eq=False)
class Readout:
    """How a block reads the streams, C elements, and writes them. norm: fp32 [C]; low: bf16 [R + S, C], rows [read | inject],
    or [R, C] where nothing is written; up: bf16 [C, R]."""

    norm: Any
    low: Any
    up: Any
    writes: bool


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer's weights on the device. ngrams: of the layer that has the branch, as the checkpoint has them."""

    mixer_readout: Readout
    mixer: FullAttention | DeltaNet
    mlp_readout: Readout
    mlp: Mlp | Moe
    ngrams: NgramWeights | None


class HyperDecoder(Blocks):
    """What the model and its MTP head share: readout, write-back, and a layer. h: bf16 [W, C], the streams of each row."""

    def hyper_layer(
        self, number: int, layer: Layer, h: Any, backend: Backend, batch: Batch, tap: Tap | None = None
    ) -> None:
        """One layer, in place, but for its n-gram branch. number: the layer's in the backend's caches."""
        x, inject = self.readout(layer.mixer_readout, h)
        hyper.write_back(h, self.mixed(number, layer.mixer, x, backend, batch, tap), inject)
        x, inject = self.readout(layer.mlp_readout, h)
        hyper.write_back(h, self.mlp(layer.mlp, x), inject)

    def readout(self, w: Readout, h: Any) -> tuple[Any, Any]:
        """(x bf16 [W, hidden], what a block reads; inject bf16 [W, S], what its result counts in each stream, or None)."""
        streams, (rank,) = self.spec.hyper.streams, w.up.shape[1:]  # type: ignore[union-attr]
        normed = self.empty(*h.shape)
        hyper.norm_streams(normed, h, w.norm, streams, self.spec.norm_eps)
        act, inject = self.empty(len(h), rank), self.empty(len(h), streams) if w.writes else None
        hyper.readout_gates(act, inject, self.product(normed, w.low), streams)
        x = self.empty(len(h), self.spec.hidden)
        hyper.mix_streams(x, self.product(act, w.up), normed)
        return x, inject


class FlashNext(HyperDecoder, Model):
    """A model of the family on a device. positions: how far the rotary table goes.

    Raises UserError for a layout that the kernels cannot run.
    """

    def __init__(self, spec: ModelSpec, weights: FlashNextWeights, device: Device, positions: int):
        check_dims(spec)
        super().__init__(spec, device, device.put(rope_table(positions, spec.rope.dims, spec.rope.theta)))
        self.embedding, self.head = device.put(weights.embed), device.put(weights.lm_head)
        self.last_readout = upload_readout(weights.readout, device)
        self.layers = [upload(layer, spec, device) for layer in weights.layers]

    def hidden(self, ids: Any, backend: Backend, batch: Batch, tap: Tap | None = None) -> Any:
        """``forward`` up to the last layer's streams: bf16 [W, C]."""
        h = self.spread(ids)
        for number in range(len(self.layers)):
            self.layer(number, ids, h, backend, batch, tap)
        return h

    def spread(self, ids: Any) -> Any:
        """The streams before the first layer: each is the token's embedding, bf16 [W, C]."""
        x, h = self.empty(len(ids), self.spec.hidden), self.empty(len(ids), self.spec.stream_width)
        embed(x, self.embedding, ids)
        hyper.spread_streams(h, x)
        return h

    def layer(self, number: int, ids: Any, h: Any, backend: Backend, batch: Batch, tap: Tap | None = None) -> None:
        """One of the model's layers, in place."""
        layer = self.layers[number]
        if layer.ngrams is not None:
            self.add_ngrams(layer.ngrams, ids, h, backend, batch)
        self.hyper_layer(number, layer, h, backend, batch, tap)

    def logits(self, hidden: Any, rows: Any) -> Any:
        x, _ = self.readout(self.last_readout, self.xp.ascontiguousarray(hidden[rows]))
        return self.product(x, self.head, np.float32)

    # --- N-grams --------------------------------------------------------------------------------------------------------

    def add_ngrams(self, w: NgramWeights, ids: Any, h: Any, backend: Backend, batch: Batch) -> None:
        """h takes the n-gram branch, in place. Its tokens and rows move on, unless the rows are drafts."""
        tokens, tails = backend.ngram_states(batch)
        place = (batch.owners, batch.streams[0], batch.runs)
        found = self.table_rows(w, ids, tokens, batch)
        gated, normed = self.empty(*h.shape), self.empty(*h.shape)
        products = self.product(found, w.key), self.product(found, w.value)
        ngram.ngram_gate(gated, *products, h, w.key_norm, w.query_norm, self.spec.norm_eps)
        hyper.norm_streams(normed, gated, w.conv_norm, self.spec.hyper.streams, self.spec.norm_eps)  # type: ignore[union-attr]
        ngram.ngram_conv(h, gated, normed, tails, w.conv, *place)
        commit = partial(commit_ngrams, tokens, tails, ids, normed, batch.runs)
        if batch.drafted:
            batch.held[NGRAMS] = lambda kept: commit(kept.streams)
        else:
            commit(batch.streams[0])

    def table_rows(self, w: NgramWeights, ids: Any, tokens: Any, batch: Batch) -> Any:
        """The rows of the table that each row's heads choose, side by side: bf16 [W, width]."""
        heads = len(w.sizes)
        chosen = self.empty(len(ids), heads, dtype=np.int32)
        ngram.ngram_rows(
            chosen, ids, tokens, w.multipliers, w.sizes, w.offsets, batch.owners, batch.streams[0], batch.runs,
            self.spec.ngrams.end,  # type: ignore[union-attr]
        )  # fmt: skip
        out = self.empty(len(ids) * heads, w.table.shape[1])
        embed(out, w.table, chosen.reshape(-1))
        return out.reshape(len(ids), w.key.shape[1])


def commit_ngrams(tokens: Any, tails: Any, ids: Any, normed: Any, runs: Any, streams: Any) -> None:
    """A stream's last tokens and rows, as many as its row of the stream table says, become those it keeps."""
    ngram.commit_tokens(tokens, ids, streams, runs)
    ngram.commit_tails(tails, normed, streams, runs)


# --- Weights on the device ----------------------------------------------------------------------------------------------


def upload(layer: HyperLayerWeights, spec: ModelSpec, device: Device) -> Layer:
    """A layer's weights on the device."""
    return Layer(
        upload_readout(layer.mixer_readout, device),
        upload_mixer(layer.mixer, spec, device),
        upload_readout(layer.mlp_readout, device),
        upload_mlp(layer.mlp, spec, device),
        None if layer.ngrams is None else NgramWeights(*(device.put(a) for a in vars(layer.ngrams).values())),
    )


def upload_readout(w: HyperWeights, device: Device) -> Readout:
    low = device.put(w.down) if w.inject is None else joined(device, w.down, w.inject)
    return Readout(device.put(w.norm), low, device.put(w.up), w.inject is not None)
