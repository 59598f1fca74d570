"""A model that can be guessed: generated weights with smaller residual branches, so that the next token mostly follows from
the one before it. For checks that need many drafts accepted; generated weights as they are take few.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from refengine.checkpoint import AttentionWeights, LayerWeights, ModelWeights

BRANCHES = 2.0**-2
"""What a branch adds, beside what it did: a power of two, so that nothing rounds."""


def predictable(weights: ModelWeights, branches: float = BRANCHES) -> ModelWeights:
    """The weights with every branch's output projection times ``branches``."""
    return replace(weights, layers=tuple(quieter(layer, branches) for layer in weights.layers))


def quieter(layer: LayerWeights, branches: float) -> LayerWeights:
    """A layer that adds less to the residual stream."""
    mixer = layer.mixer
    if isinstance(mixer, AttentionWeights):
        mixer = replace(mixer, o_proj=scaled(mixer.o_proj, branches))
    else:
        mixer = replace(mixer, out_proj=scaled(mixer.out_proj, branches))
    return replace(layer, mixer=mixer, mlp=replace(layer.mlp, down_proj=scaled(layer.mlp.down_proj, branches)))


def scaled(weight: np.ndarray, factor: float) -> np.ndarray:
    """A bf16 matrix times a power of two."""
    return (weight.astype(np.float32) * np.float32(factor)).astype(ml_dtypes.bfloat16)
