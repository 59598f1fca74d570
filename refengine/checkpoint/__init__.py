"""Checkpoints in the Hugging Face layout: opened and checked, read into weights, and made from a seed."""

from refengine.checkpoint.config import spec_of_folder
from refengine.checkpoint.make import cached_checkpoint, make_checkpoint, open_cached
from refengine.checkpoint.reader import Checkpoint, open_checkpoint
from refengine.checkpoint.weights import (
    AttentionWeights,
    GatedDeltaNetWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MtpWeights,
    load_mtp,
    load_weights,
)

__all__ = [
    "AttentionWeights",
    "Checkpoint",
    "GatedDeltaNetWeights",
    "LayerWeights",
    "MlpWeights",
    "ModelWeights",
    "MtpWeights",
    "cached_checkpoint",
    "load_mtp",
    "load_weights",
    "make_checkpoint",
    "open_cached",
    "open_checkpoint",
    "spec_of_folder",
]
