"""The discrete choices of a layer, experts and keys: seen as the engine makes them, and held against float64.

Where two scores are closer than their roundings, float64 does not say which is taken. So a chain takes the engine's choices as
they are, and they are right if roundings explain them: no score that a row left exceeds one that it took by more than both may
be off. Any other choice is a fault, and so is one of another form: not as many experts, half a block, no tail. A row's choices
show in its own output alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from kernels_numba.flash_next.pages import BLOCK
from kernels_numba.machine.modes import watched
from refengine.registry import ModelSpec

from .chains.experts import EXPERTS
from .chains.indexer import KEYS
from .key_choice import row_list
from .layer_bounds import Bounded
from .oracles import Array

Choices = Mapping[str, Array]
"""experts: int [W, K], the picks of each row. keys: bool [W, N], what each row of a sequence reads."""


# --- As the engine makes them -----------------------------------------------------------------------------------------


@contextmanager
def choices_of(rows: int) -> Iterator[dict[str, Array]]:
    """What the launches inside choose, complete at the end: of one stream of ``rows`` rows, each row once."""
    parts: dict[str, list[Array]] = {}

    def see(kernel: str, args: dict[str, Any]) -> None:
        if kernel == "route_kernel":
            parts.setdefault(EXPERTS, []).append(args["experts"].copy())
        elif kernel == "fn_attn_chunks_kernel":
            parts.setdefault(KEYS, []).append(keys_read(args, rows))

    found: dict[str, Array] = {}
    with watched(see):
        yield found
    found |= {name: np.concatenate(arrays) for name, arrays in parts.items()}


def keys_read(args: Mapping[str, Any], rows: int) -> Array:
    """bool [R, rows]: the keys that each row of a launch of fn_attn_chunks reads. A key past the sequence makes a row empty."""
    read = np.zeros((len(args["rows"]), rows), bool)
    for row in range(len(read)):
        keys = row_list(args, row)
        if ((keys >= 0) & (keys < rows)).all():
            read[row, keys] = True
    return read


# --- Held against float64 ---------------------------------------------------------------------------------------------


def unexplained(choices: Choices, scores: Mapping[str, Bounded], spec: ModelSpec) -> float:
    """The worst of all choices, made from these scores: at most 1 if roundings explain them, inf if one has another form."""
    rules = {EXPERTS: experts_taken, KEYS: blocks_taken}
    return max((overlooked(scores[name], *rules[name](choices[name], spec)) for name in choices), default=0.0)


def overlooked(scores: Bounded, taken: Array | None, left: Array) -> float:
    """The most by which a score that a row left exceeds one it took, as a part of what both may be off. taken, left: bool [W,
    N]; inf where nothing was taken as it must be, or a score is no number."""
    if taken is None:
        return float("inf")
    worst, bound = 0.0, scores.bound
    for row in range(len(taken)):
        above, below = left[row], taken[row]
        excess = scores.value[row, above][:, None] - scores.value[row, below]
        noise = bound[row, above][:, None] + bound[row, below]
        with np.errstate(divide="ignore"):  # exact scores are off by nothing
            parts = np.divide(excess, noise, out=np.zeros_like(excess), where=~(excess <= 0))
        worst = max(worst, float(np.nan_to_num(parts, nan=np.inf, posinf=np.inf).max(initial=0.0)))
    return worst


def experts_taken(picks: Array, spec: ModelSpec) -> tuple[Array | None, Array]:
    """(bool [W, E], the experts of each row, None unless each has so many different ones; those it left)."""
    count = spec.experts.count  # type: ignore[union-attr]
    taken = (picks[..., None] == np.arange(count)).any(axis=1)
    well_formed = picks.shape[1] == spec.experts.picks and (taken.sum(axis=1) == picks.shape[1]).all()  # type: ignore[union-attr]
    return taken if well_formed else None, ~taken


def blocks_taken(seen: Array, spec: ModelSpec) -> tuple[Array | None, Array]:
    """(bool [W, blocks], the complete blocks that each sparse row reads, None unless every row reads whole blocks, as many as it
    has to, and its tail; those it left)."""
    rows, budget = len(seen), spec.indexer.budget // BLOCK  # type: ignore[union-attr]
    taken = np.zeros((rows, rows // BLOCK), bool)
    left = np.zeros_like(taken)
    well_formed = True
    for row, complete in enumerate((np.arange(rows) + 1) // BLOCK):
        blocks = seen[row, : BLOCK * complete].reshape(-1, BLOCK)
        own = blocks.all(axis=1)
        rest = np.arange(BLOCK * complete, rows) <= row
        well_formed &= bool((own == blocks.any(axis=1)).all() and own.sum() == min(complete, budget))
        well_formed &= bool((seen[row, BLOCK * complete :] == rest).all())
        if complete > budget:
            taken[row, :complete], left[row, :complete] = own, ~own
    return taken if well_formed else None, left


def first_of(choices: Choices) -> Choices:
    """The choice that a layer makes first: its scores depend on no other."""
    return {
        name: choices[name] for name in (KEYS, EXPERTS) if name in choices and (name == KEYS or KEYS not in choices)
    }


def other_rows(a: Choices, b: Choices) -> Array:
    """bool [W]: the rows for which two sets of choices differ; experts by name, in whatever order. bool [0] without choices."""
    if not a:
        return np.zeros(0, bool)
    return np.logical_or.reduce([rows_apart(a[name], b[name], ordered=name != EXPERTS) for name in a])


def rows_apart(a: Array, b: Array, ordered: bool) -> Array:
    """bool [W]: the rows that differ, if need be in more than their order; all where the rows are not as long."""
    if a.shape != b.shape:
        return np.ones(len(a), bool)
    return (a != b if ordered else np.sort(a) != np.sort(b)).any(axis=1)


def same(a: Choices, b: Choices) -> bool:
    """Whether two sets of choices are one."""
    return not other_rows(a, b).any()
