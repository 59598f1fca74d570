"""Model layouts: one YAML file each, read strictly into a frozen ModelSpec."""

from refengine.registry.loader import available, load_model
from refengine.registry.parts import (
    Attention,
    Experts,
    GatedDeltaNet,
    Hyper,
    Indexer,
    Mlp,
    Mtp,
    Ngrams,
    Rope,
    Tensor,
    Tokens,
)
from refengine.registry.rules import check_spec
from refengine.registry.spec import FULL_ATTENTION, LINEAR_ATTENTION, ModelSpec

__all__ = [
    "FULL_ATTENTION",
    "LINEAR_ATTENTION",
    "Attention",
    "Experts",
    "GatedDeltaNet",
    "Hyper",
    "Indexer",
    "Mlp",
    "ModelSpec",
    "Mtp",
    "Ngrams",
    "Rope",
    "Tensor",
    "Tokens",
    "available",
    "check_spec",
    "load_model",
]
