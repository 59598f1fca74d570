"""How far a whole layer may be from float64, derived from its rounding points. Spec numerics §4 and §5.

A layer is a chain (verify/chains) of the stages that oracles.py describes: each has its exact value and r, the most that its
rounding points can do to an element. To first order, an output's error is e = Σ a·d over the elements of all stages, where d
is what an element's roundings did, |d| <= r, and a is how far the output follows that element. Adding up |a|·r would
let signs conspire along every sum of the layer, and allow so much that faults pass. So d is taken as probabilistic
rounding error analysis takes it (Higham and Mary, SIAM J. Sci. Comput. 41, 2019): independent, with mean zero. Then,
whatever the distributions, P(|e| > t) <= 2·exp(-t²/2σ²) with σ² = Σ (a·r)² (Hoeffding's inequality).

σ² is found by running the chain: with every element moved by +r or -r at random, the square of what an output moves has
mean σ². Its mean over DRAWS runs, S², may be below σ². With DRAWS·S²/σ² as χ² with DRAWS degrees of freedom (sums of
signs spread no wider), the mean of 2·exp(-(k·S)²/2σ²) is 2·(1 + k²/DRAWS)^(-DRAWS/2). ``reach`` is the k at which
that, added up over a layer's outputs, is FAILURE. The bound of an output is k·S, times SECOND_ORDER.

One error has no mean of zero: a step of a tensor core truncates its sum toward zero, by at most 2^-23 of it. Over the
K/16 steps of a sum that is K·2^-27, against 2^-8 of the rounding that follows: 0.3 % at K = 1536. SECOND_ORDER covers
it.

A choice, an expert or a block of keys, is no stage: all runs of a chain make the same ones, and choices.py holds those
against the scores that they were made from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from .bounds import SECOND_ORDER
from .oracles import Array, Pair

DRAWS = 32
FAILURE = 1e-6
"""At most the probability that a correct layer has an output outside its bound."""

Take = Callable[[Pair], Array]
"""What a stage passes on, given its exact value and r."""


class Run:
    """One run of a chain: a Take that also makes the chain's choices.

    chosen: by name; what is not given is chosen by the run. scores: by name, what each choice was made from.
    """

    def __init__(self, take: Take, chosen: Mapping[str, Array]):
        self.take, self.chosen = take, dict(chosen)
        self.scores: dict[str, Array] = {}

    def __call__(self, stage: Pair) -> Array:
        return self.take(stage)

    def choose(self, name: str, scores: Array, own: Callable[[Array], Array]) -> Array:
        """The choice of that name, made by ``own`` from the scores where none was given."""
        self.scores[name] = scores
        if name not in self.chosen:
            self.chosen[name] = own(scores)
        return self.chosen[name]


Chain = Callable[[Run], Array]
"""A computation, by what its stages pass on and by its choices."""


@dataclass(frozen=True, eq=False)
class Bounded:
    """A chain's outputs: exact values, and S, both float64 of one shape."""

    value: Array
    spread: Array

    @property
    def bound(self) -> Array:
        """The largest error of each output."""
        return SECOND_ORDER * reach(self.spread.size) * self.spread

    def mean_square(self, found: Array) -> float:
        """The mean of (e / S)² over all outputs: about 1 at most, since e² has a mean of at most σ². Roundings
        that are uniform, of values of any size, give 0.18. A NaN gives NaN."""
        return float((((found.astype(np.float64) - self.value) / self.spread) ** 2).mean())


@dataclass(frozen=True, eq=False)
class BoundedChain(Bounded):
    """With the choices of all its runs, and the scores that they were made from."""

    chosen: Mapping[str, Array] = field(default_factory=dict)
    scores: Mapping[str, Bounded] = field(default_factory=dict)


def bounded(chain: Chain, chosen: Mapping[str, Array] | None = None) -> BoundedChain:
    """Run a chain exactly, then DRAWS times moved, with the choices given or else those of the exact run."""
    first = Run(exact, chosen or {})
    value = chain(first)
    squares = np.zeros_like(value)
    score_squares = {name: np.zeros_like(scores) for name, scores in first.scores.items()}
    for seed in range(DRAWS):
        run = Run(moved(seed), first.chosen)
        squares += (chain(run) - value) ** 2
        for name, scores in run.scores.items():
            score_squares[name] += (scores - first.scores[name]) ** 2
    bounds = {name: Bounded(first.scores[name], np.sqrt(s / DRAWS)) for name, s in score_squares.items()}
    return BoundedChain(value, np.sqrt(squares / DRAWS), first.chosen, bounds)


def reach(outputs: int) -> float:
    """k: how many S an output may be off; 2·outputs·(1 + k²/DRAWS)^(-DRAWS/2) = FAILURE."""
    return float(np.sqrt(DRAWS * ((2 * outputs / FAILURE) ** (2 / DRAWS) - 1)))


def exact(stage: Pair) -> Array:
    """The stage's value as it is."""
    return stage[0]


def moved(seed: int) -> Take:
    """Each element up or down by all of its r, at random."""
    rng = np.random.default_rng(seed)

    def take(stage: Pair) -> Array:
        value, r = stage
        return value + np.where(rng.integers(0, 2, value.shape, dtype=np.int8), r, -r)

    return take
