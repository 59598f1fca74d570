"""A model that can be guessed: generated weights with smaller residual branches, so that the next token mostly follows from
the one before it. For checks that need many drafts accepted; generated weights as they are take few.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from refengine.checkpoint import (
    AttentionWeights,
    FlashNextWeights,
    GatedDeltaNetWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
)

BRANCHES = 2.0**-2
"""What a branch adds, beside what it did: a power of two, so that nothing rounds."""


Weights = TypeVar("Weights", bound=ModelWeights | FlashNextWeights)
Part = AttentionWeights | GatedDeltaNetWeights | MlpWeights | MoeWeights


def predictable(weights: Weights, branches: float = BRANCHES) -> Weights:
    """The weights with every branch's output projection times ``branches``."""
    layers: Any = [
        replace(one, mixer=quieter(one.mixer, branches), mlp=quieter(one.mlp, branches))  # type: ignore[arg-type]
        for one in weights.layers
    ]
    return replace(weights, layers=tuple(layers))  # type: ignore[arg-type]


def quieter(part: Part, branches: float) -> Part:
    """A part of a layer that adds less to the residual."""
    if isinstance(part, AttentionWeights):
        return replace(part, o_proj=scaled(part.o_proj, branches))
    if isinstance(part, GatedDeltaNetWeights):
        return replace(part, out_proj=scaled(part.out_proj, branches))
    if isinstance(part, MlpWeights):
        return replace(part, down_proj=scaled(part.down_proj, branches))
    shared = replace(part.shared, down_proj=scaled(part.shared.down_proj, branches))
    return replace(part, down=scaled(part.down, branches), shared=shared)


def scaled(weight: np.ndarray, factor: float) -> np.ndarray:
    """A bf16 matrix times a power of two."""
    return (weight.astype(np.float32) * np.float32(factor)).astype(ml_dtypes.bfloat16)
