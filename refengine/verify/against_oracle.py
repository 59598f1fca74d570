"""The engine held against the public implementation: each layer on the oracle's own input, and the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np

from backends.base import Backend, Sizes, backend_class
from refengine.checkpoint import ModelWeights, load_weights, open_checkpoint
from refengine.device import open_device
from refengine.model import Qwen35, cache_shape
from refengine.verify import layer_bounds
from refengine.verify.bounds import worst_fraction
from refengine.verify.forced import forced_head, forced_layers, forced_logits
from refengine.verify.layer_bounds import Bounded
from refengine.verify.oracle_cases import PROMPT_PASSES, TOKENS, Case, Oracle

BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True, eq=False)
class Held:
    """A case, its weights, and what the oracle made of it."""

    case: Case
    weights: ModelWeights
    oracle: Oracle

    @cached_property
    def inputs(self) -> np.ndarray:
        """What each layer gets, and the final norm: bf16 [layers + 1, W, hidden]."""
        return np.concatenate([self.weights.embed[self.case.ids][None], self.oracle.layers.astype(BF16)])

    @cached_property
    def bounds(self) -> list[Bounded]:
        """Of each layer, then of the head."""
        spec, h = self.case.spec, self.inputs.astype(np.float64)
        chains = [partial(layer_bounds.layer, w, spec, x) for w, x in zip(self.weights.layers, h, strict=False)]
        return [
            layer_bounds.bounded(chain) for chain in (*chains, partial(layer_bounds.head, self.weights, spec, h[-1]))
        ]

    def model(self, weights: ModelWeights | None = None) -> Qwen35:
        """The engine's model, with other weights if given."""
        return Qwen35(self.case.spec, weights or self.weights, open_device("cpu"), TOKENS)

    def backend(self) -> Backend:
        """Small pages in random order."""
        sizes = Sizes(TOKENS, page_size=16, shuffle=1, spare_pages=2)
        return backend_class("paged")(cache_shape(self.case.spec), sizes)

    def layers(self, model: Qwen35) -> list[np.ndarray]:
        """What the engine makes of the oracle's inputs: each layer, then the head."""
        outputs = forced_layers(model, self.backend(), self.inputs[:-1], PROMPT_PASSES)
        return [*outputs, forced_head(model, self.inputs[-1])]

    def fractions(self, found: list[np.ndarray], oracle: Oracle | None = None) -> list[float]:
        """The worst |found - oracle| / bound of each layer and the head, against this oracle or another run of it."""
        parts = zip(found, (oracle or self.oracle).parts, self.bounds, strict=True)
        return [worst_fraction(one, reference, bounded.bound) for one, reference, bounded in parts]

    def logits(self) -> np.ndarray:
        """The whole engine: prompt passes, then decode."""
        return forced_logits(self.model(), self.backend(), self.case.ids, PROMPT_PASSES)


def hold(case: Case, oracle: Oracle) -> Held:
    """Make the case's weights."""
    with TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(case.checkpoint(Path(folder)), case.spec)
        return Held(case, load_weights(checkpoint, case.spec), oracle)


# --- The whole model ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Errors:
    """Of the engine and of the oracle's bf16 run, against its float32 run: float64 [W, vocabulary]."""

    ours: np.ndarray
    bf16: np.ndarray

    @property
    def ratio(self) -> float:
        """Our error over that of bf16, as norms over all logits."""
        return float(np.linalg.norm(self.ours) / np.linalg.norm(self.bf16))

    @property
    def row_ratios(self) -> np.ndarray:
        """The same at each position: [W]."""
        return np.linalg.norm(self.ours, axis=1) / np.linalg.norm(self.bf16, axis=1)


def errors(found: np.ndarray, oracle: Oracle) -> Errors:
    """found: the engine's logits, float32 [W, vocabulary]."""
    exact = oracle.logits.astype(np.float64)
    return Errors(found - exact, oracle.bf16_logits - exact)


def margins(logits: np.ndarray) -> np.ndarray:
    """How far the largest logit of each row is above the next: [W]."""
    ordered = np.partition(logits, -2, axis=1)
    return ordered[:, -1] - ordered[:, -2]
