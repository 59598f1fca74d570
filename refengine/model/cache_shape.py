"""What a backend needs to know of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from backends.arena import CacheShape
from refengine.registry import ModelSpec


def cache_shape(spec: ModelSpec, mtp: bool = False) -> CacheShape:
    """The shape of a model's caches. mtp: with the layers of its MTP head, if it has one."""
    attention, gdn = spec.attention, spec.gated_delta_net
    layers = spec.attention_layers + (spec.mtp_layers if mtp else ())
    shape = CacheShape(
        layers, spec.linear_layers, attention.heads, attention.kv_heads, attention.head_dim,
        gdn.value_heads, gdn.value_dim, gdn.key_dim, gdn.conv_channels, gdn.conv_width - 1,
    )  # fmt: skip
    return replace(shape, **indexer_sizes(spec), **ngram_sizes(spec))


def indexer_sizes(spec: ModelSpec) -> dict[str, Any]:
    """Of the sparse indexer, if the model has one."""
    if (i := spec.indexer) is None:
        return {}
    return {
        "index_dim": i.head_dim,
        "index_ratio": i.block,
        "index_heads": i.heads,
        "index_budget": i.budget // i.block,
    }


def ngram_sizes(spec: ModelSpec) -> dict[str, Any]:
    """Of the n-gram branch, if the model has one."""
    if (n := spec.ngrams) is None:
        return {}
    return {"ngram_tokens": n.size - 1, "ngram_rows": n.kept_rows, "ngram_channels": spec.stream_width}
