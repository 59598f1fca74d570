"""The weights of Flash Next under the engine's names, in the form the kernels take. Spec flash-next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from refengine.checkpoint.parts import (
    AttentionWeights,
    GatedDeltaNetWeights,
    MlpWeights,
    MoeWeights,
    gain,
    load_mixer,
    load_mlp,
)
from refengine.checkpoint.reader import Checkpoint
from refengine.registry import FULL_ATTENTION, ModelSpec, Ngrams


@dataclass(frozen=True, eq=False)
class HyperWeights:
    """How a block reads the S residual streams, C = S·hidden elements, and writes them: a product of rank R.

    norm [C] fp32: gains of the RMSNorm over each stream. down [R, C], up [C, R] bf16: what each stream's elements count.
    inject [S, C] bf16: what the block's result counts in each stream; None behind the last layer, which writes none.
    """

    norm: np.ndarray
    down: np.ndarray
    up: np.ndarray
    inject: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class NgramWeights:
    """The n-gram branch: rows of a table by a hash of the last tokens, gated by the streams, convolved and added to them.

    table [rows, width / heads] bf16. multipliers [3], sizes, offsets [heads] uint64: of the hash. key [C, width], value [hidden,
    width] bf16. key_norm, query_norm, conv_norm [C] fp32: gains. conv [C, 4] bf16: a causal filter a channel, oldest tap first.
    """

    table: np.ndarray
    multipliers: np.ndarray
    sizes: np.ndarray
    offsets: np.ndarray
    key: np.ndarray
    value: np.ndarray
    key_norm: np.ndarray
    query_norm: np.ndarray
    conv_norm: np.ndarray
    conv: np.ndarray


@dataclass(frozen=True, eq=False)
class HyperLayerWeights:
    """A layer: the n-gram branch where it has one, then a mixer and an MLP, each between a readout and a write-back."""

    mixer_readout: HyperWeights
    mixer: AttentionWeights | GatedDeltaNetWeights
    mlp_readout: HyperWeights
    mlp: MlpWeights | MoeWeights
    ngrams: NgramWeights | None = None


@dataclass(frozen=True, eq=False)
class FlashNextWeights:
    """The whole model: embed [vocabulary, hidden] bf16, layers, the readout behind the last one, lm_head like embed."""

    embed: np.ndarray
    layers: tuple[HyperLayerWeights, ...]
    readout: HyperWeights
    lm_head: np.ndarray


@dataclass(frozen=True, eq=False)
class FlashNextMtpWeights:
    """The MTP head: stream s starts as fc_embedding · norm(embedding of the next token) + fc_hidden · norm(streams)[s]; a layer,
    a readout of its own, the model's lm_head.

    fc_embedding, fc_hidden [hidden, hidden] bf16. embedding_norm [hidden], hidden_norm [C] fp32; the latter norm is over all C.
    """

    fc_embedding: np.ndarray
    fc_hidden: np.ndarray
    embedding_norm: np.ndarray
    hidden_norm: np.ndarray
    layer: HyperLayerWeights
    readout: HyperWeights


def load_weights(checkpoint: Checkpoint, spec: ModelSpec, layers: Iterable[int]) -> FlashNextWeights:
    """Read every tensor of a checkpoint that was opened with `spec`; layers: their numbers in order."""
    return FlashNextWeights(
        embed=checkpoint.by_role("embed"),
        layers=tuple(_layer(checkpoint, layer, spec.layer_types[layer], spec.ngrams) for layer in layers),
        readout=_hyper(checkpoint, "mixer"),
        lm_head=checkpoint.by_role("lm_head"),
    )


def load_mtp(checkpoint: Checkpoint, layer: int) -> FlashNextMtpWeights:
    """Read the MTP head; layer: the number of its own."""
    return FlashNextMtpWeights(
        fc_embedding=checkpoint.by_role("fc_embedding"),
        fc_hidden=checkpoint.by_role("fc_hidden"),
        embedding_norm=gain(checkpoint, "embedding_norm"),
        hidden_norm=gain(checkpoint, "hidden_norm"),
        layer=_layer(checkpoint, layer, FULL_ATTENTION, None),
        readout=_hyper(checkpoint, "mtp_mixer"),
    )


def _layer(checkpoint: Checkpoint, layer: int, kind: str, ngrams: Ngrams | None) -> HyperLayerWeights:
    return HyperLayerWeights(
        mixer_readout=_hyper(checkpoint, "attn_hc", layer),
        mixer=load_mixer(checkpoint, layer, kind),
        mlp_readout=_hyper(checkpoint, "mlp_hc", layer),
        mlp=load_mlp(checkpoint, layer),
        ngrams=_ngrams(checkpoint, ngrams) if ngrams is not None and ngrams.layer == layer else None,
    )


def _hyper(checkpoint: Checkpoint, block: str, layer: int | None = None) -> HyperWeights:
    """A block's readout; with a layer, its write-back too."""
    return HyperWeights(
        norm=gain(checkpoint, f"{block}_norm", layer),
        down=checkpoint.by_role(f"{block}_down", layer),
        up=checkpoint.by_role(f"{block}_up", layer),
        inject=None if layer is None else checkpoint.by_role(f"{block}_inject", layer),
    )


def _ngrams(checkpoint: Checkpoint, ngrams: Ngrams) -> NgramWeights:
    layer = ngrams.layer
    numbers = {
        name: checkpoint.by_role(f"ngram_{name}", layer).astype(np.uint64)
        for name in ("multipliers", "sizes", "offsets")
    }
    return NgramWeights(
        table=_ngram_table(checkpoint, ngrams),
        **numbers,
        key=checkpoint.by_role("ngram_key", layer),
        value=checkpoint.by_role("ngram_value", layer),
        key_norm=gain(checkpoint, "ngram_key_norm", layer),
        query_norm=gain(checkpoint, "ngram_query_norm", layer),
        conv_norm=gain(checkpoint, "ngram_conv_norm", layer),
        conv=np.ascontiguousarray(checkpoint.by_role("ngram_conv", layer)[:, 0, :]),
    )


def _ngram_table(checkpoint: Checkpoint, ngrams: Ngrams) -> np.ndarray:
    """Its parts in order, one in memory beside it at a time: it is a large part of the model."""
    rows, width = checkpoint.tensors["ngram_table_0", ngrams.layer].shape
    table = np.empty((ngrams.parts, rows, width), ml_dtypes.bfloat16)
    for part in range(ngrams.parts):
        table[part] = checkpoint.by_role(f"ngram_table_{part}", ngrams.layer)
    return table.reshape(-1, width)
