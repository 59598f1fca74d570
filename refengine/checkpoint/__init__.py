"""Checkpoints in the Hugging Face layout: opened and checked, read into weights, and made from a seed."""

from refengine.checkpoint.config import spec_of_folder
from refengine.checkpoint.flash_next import (
    FlashNextMtpWeights,
    FlashNextWeights,
    HyperLayerWeights,
    HyperWeights,
    NgramWeights,
)
from refengine.checkpoint.make import cached_checkpoint, make_checkpoint, open_cached
from refengine.checkpoint.parts import (
    AttentionWeights,
    GatedDeltaNetWeights,
    IndexerWeights,
    MlpWeights,
    MoeWeights,
)
from refengine.checkpoint.reader import Checkpoint, open_checkpoint
from refengine.checkpoint.weights import (
    LayerWeights,
    ModelWeights,
    MtpWeights,
    load_mtp,
    load_weights,
)

__all__ = [
    "AttentionWeights",
    "Checkpoint",
    "FlashNextMtpWeights",
    "FlashNextWeights",
    "GatedDeltaNetWeights",
    "HyperLayerWeights",
    "HyperWeights",
    "IndexerWeights",
    "LayerWeights",
    "MlpWeights",
    "ModelWeights",
    "MoeWeights",
    "MtpWeights",
    "NgramWeights",
    "cached_checkpoint",
    "load_mtp",
    "load_weights",
    "make_checkpoint",
    "open_cached",
    "open_checkpoint",
    "spec_of_folder",
]
