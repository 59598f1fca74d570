"""The engine held against the public implementation: each layer on the oracle's own input, and the whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np

from backends.base import Backend, Sizes, backend_class
from refengine.checkpoint import FlashNextWeights, ModelWeights, load_weights, open_checkpoint
from refengine.device import open_device
from refengine.model import Model, cache_shape, open_model
from refengine.verify.bounds import worst_fraction
from refengine.verify.chains import flash_next, qwen3_5
from refengine.verify.choices import Choices, first_of, other_rows, same, unexplained
from refengine.verify.forced import forced_head, forced_layer, forced_logits
from refengine.verify.layer_bounds import BoundedChain, Chain, bounded
from refengine.verify.oracle_cases import PROMPT_PASSES, TOKENS, Case, Oracle

BF16 = ml_dtypes.bfloat16
Weights = ModelWeights | FlashNextWeights


@dataclass(frozen=True, eq=False)
class Found:
    """What the engine makes of each layer's input, then of the head's, and the choices it makes there."""

    parts: list[np.ndarray]
    choices: list[Choices]


@dataclass(frozen=True, eq=False)
class Held:
    """A case, its weights, and what the oracle made of it."""

    case: Case
    weights: Weights
    oracle: Oracle

    @cached_property
    def inputs(self) -> np.ndarray:
        """What each layer gets, and what follows the last: bf16 [layers + 1, W, the residual's width]."""
        streams = self.case.spec.stream_width // self.case.spec.hidden
        embedded = np.tile(self.weights.embed[self.case.ids], streams)
        return np.concatenate([embedded[None], self.oracle.layers.astype(BF16)])

    @cached_property
    def chains(self) -> list[Chain]:
        """Of each layer, then of the head."""
        spec, w, h = self.case.spec, self.weights, self.inputs.astype(np.float64)
        if isinstance(w, ModelWeights):
            layers = [partial(qwen3_5.layer, one, spec, x) for one, x in zip(w.layers, h, strict=False)]
            return [*layers, partial(qwen3_5.head, w, spec, h[-1])]
        ids = self.case.ids
        mixed = [partial(flash_next.layer, one, spec, ids, x) for one, x in zip(w.layers, h, strict=False)]
        return [*mixed, partial(flash_next.head, w, spec, h[-1])]

    @cached_property
    def bounds(self) -> list[BoundedChain]:
        """Of each layer, then of the head, with the oracle's choices."""
        return [bounded(chain, self.oracle.choices(number)) for number, chain in enumerate(self.chains)]

    def model(self, weights: Weights | None = None) -> Model:
        """The engine's model, with other weights if given."""
        return open_model(self.case.spec, weights or self.weights, open_device("cpu"), TOKENS)

    def changed(self, number: int, change: Callable[[Any], Any]) -> Model:
        """The model with one layer's weights changed."""
        weights: Any = self.weights
        layers = [change(w) if n == number else w for n, w in enumerate(weights.layers)]
        return self.model(replace(weights, layers=tuple(layers)))

    def backend(self) -> Backend:
        """Small pages in random order."""
        sizes = Sizes(TOKENS, page_size=16, shuffle=1, spare_pages=2)
        return backend_class("paged")(cache_shape(self.case.spec), sizes)

    def found(self, model: Model) -> Found:
        """What the engine makes of the oracle's inputs: each layer, then the head."""
        parts = [self.found_of(model, number) for number in range(len(self.inputs))]
        return Found([out for out, _ in parts], [chosen for _, chosen in parts])

    def found_of(self, model: Model, number: int) -> tuple[np.ndarray, Choices]:
        """Of one layer; behind the last, of the head."""
        if number == self.case.spec.layers:
            return forced_head(model, self.inputs[-1]), {}
        return forced_layer(model, number, self.backend(), self.case.ids, self.inputs[number], PROMPT_PASSES)

    @cached_property
    def forced_bounds(self) -> dict[tuple[int, bytes], BoundedChain]:
        """Of layers with other choices than the oracle's, once made."""
        return {}

    def bound_of(self, number: int, chosen: Choices) -> BoundedChain:
        """A layer's bounds with the engine's choices."""
        if same(chosen, self.bounds[number].chosen):
            return self.bounds[number]
        key = number, b"".join(chosen[name].tobytes() for name in sorted(chosen))
        if key not in self.forced_bounds:
            self.forced_bounds[key] = bounded(self.chains[number], chosen)
        return self.forced_bounds[key]

    def fractions(self, found: Found, oracle: Oracle | None = None) -> list[float]:
        """The worst |found - oracle| / bound of each layer and the head, against this oracle or another run of it; or what the
        engine's choices exceed theirs by. A row that chose otherwise than the oracle is held against float64."""
        parts = enumerate(zip(found.parts, found.choices, strict=True))
        return [self.fraction(number, *one, oracle) for number, one in parts]

    def fraction(self, number: int, found: np.ndarray, chosen: Choices, oracle: Oracle | None = None) -> float:
        """That of a layer or, behind the last, the head. A layer whose first choice is unexplained is not computed with it."""
        oracle, own, spec = oracle or self.oracle, self.bounds[number], self.case.spec
        if (excess := unexplained(first_of(chosen), own.scores, spec)) > 1:
            return excess
        forced, others = self.bound_of(number, chosen), other_rows(chosen, oracle.choices(number))
        reference = oracle.parts[number]
        reference = np.where(others[:, None], forced.value, reference) if others.any() else reference
        return max(unexplained(chosen, forced.scores, spec), worst_fraction(found, reference, forced.bound))

    def layer_fraction(self, model: Model, number: int) -> float:
        """``fraction`` of a layer as this model makes it; -1 is the head."""
        number %= len(self.inputs)
        return self.fraction(number, *self.found_of(model, number))

    def mean_squares(self, found: Found) -> list[float]:
        """Of each layer and the head: Bounded.mean_square."""
        parts = zip(found.parts, found.choices, strict=True)
        return [self.bound_of(number, chosen).mean_square(one) for number, (one, chosen) in enumerate(parts)]

    def rows_of_other_choices(self, found: Found) -> list[int]:
        """Of each layer and the head: how many rows the engine chose otherwise for than the oracle."""
        return [int(other_rows(chosen, b.chosen).sum()) for chosen, b in zip(found.choices, self.bounds, strict=True)]

    def oracle_fractions(self, oracle: Oracle) -> list[float]:
        """The worst |oracle - float64| / bound of each layer and the head, or what the oracle's choices exceed theirs by."""
        return [
            max(worst_fraction(part, b.value, b.bound), unexplained(b.chosen, b.scores, self.case.spec))
            for part, b in zip(oracle.parts, self.bounds, strict=True)
        ]

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
    def middle_ratio(self) -> float:
        """The ratio at the middle position. Where a model chooses, a run that takes another of two equal experts is far off from
        there on, by chance; the middle does not see that."""
        return float(np.median(self.row_ratios))

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
