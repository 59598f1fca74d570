"""How far a kernel may be from float64: each bound derived from the kernel's rounding points. Spec numerics §5.

First-order terms are added up and multiplied by SECOND_ORDER. U = 2^-24 is the error of one float32 rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .attention_oracle import Attended, Float64

U = 2.0**-24
BF16 = 2.0**-8
"""Relative error of one rounding to bf16, nearest even: half a unit in the last of 8 bits, at most."""
EXP2 = 2.0**-22
"""Relative error of exp2 (kernels_numba/portable_math.py)."""
EXP_DEPTH = 2.25 * U
"""Relative error of E(x - y) an absolute unit of x - y: the difference rounds (U), and so does its product with log2
e, itself a rounded constant (1.25 U)."""
MMA_STEP = 17 * 2.0**-25 + 2.0**-23
"""Error of one mma step, as a part of the sum of magnitudes that it adds: 17 terms truncated at 2^-25 of the largest,
then the sum truncated to float32 (spec numerics §2)."""
SECOND_ORDER = 1.02
"""The first-order terms stay below 1 %: their products are covered."""
UNDERFLOW = 2.0**-100
"""Absolute: weights below 2^-126 are 0."""


@dataclass(frozen=True)
class FoldShape:
    """What values lose on their way through an attention kernel.

    score: error of a score, as a part of Σ|q·k|. weight: relative error of a weight as it meets its value. values: error
    of an output's products and sums, as a part of Σ p·|v|. rescalings: factors E(...) that a weight may meet.
    sum_roundings: float32 roundings of the denominator.
    """

    score: float
    weight: float
    values: float
    rescalings: int
    sum_roundings: int


def prompt_fold(keys: int, D: int) -> FoldShape:
    """prompt_attention over ``keys`` keys: T tiles of 64. A weight is one E, then up to T - 1 alphas.

    A denominator rounds 6 times in a tile's rowsum, then once a tile; an output takes 4 mma steps a tile.
    """
    tiles = -(-keys // 64)
    return FoldShape(D // 16 * MMA_STEP, BF16, 4 * tiles * MMA_STEP, tiles, 6 + tiles)


def decode_fold(keys: int, D: int) -> FoldShape:
    """decode over ``keys`` keys: 8 tiles a chunk, 4 chunks a group, the groups in order; each fold rescales and
    rounds twice.

    A denominator rounds 7 times in a tile's rowsum (3 in the thread, 2 in the quad, 2 across warps).
    """
    folds = 8 + 4 + -(-keys // 2048)
    return FoldShape(D // 16 * MMA_STEP, BF16, 4 * 8 * MMA_STEP, folds, 7 + 2 * folds)


def scalar_fold(keys: int, D: int) -> FoldShape:
    """The scalar path over ``keys`` keys: the folds of decode, in float32 alone.

    A score is a chain of D fma, a tile's output one of 64, its weights float32: each fma rounds once. A denominator rounds 7
    times in a tile's rowsum (3 in the lane, 4 across lanes).
    """
    tree = decode_fold(keys, D)
    return FoldShape(D * U, 0.0, 64 * U, tree.rescalings, 7 + 2 * tree.rescalings)


def sparse_fold(keys: int, D: int) -> FoldShape:
    """fn_attn_chunks and fn_attn_merge over lists of ``keys`` keys: tiles as decode's, 8 a chunk, then the chunks in order."""
    folds = 8 + -(-keys // 512)
    return FoldShape(D // 16 * MMA_STEP, BF16, 4 * 8 * MMA_STEP, folds, 7 + 2 * folds)


def attention(exact: Attended, shape: FoldShape) -> Float64:
    """The largest error of each output element [W, H, D].

    A weight: its score's chain and the rounding after ``scale``; the depth of its E's, which add up to m - s whatever
    the way there; EXP2 for each E. These hit numerator and denominator. Numerator: P as it meets a value, its own
    chain, one rounding a rescaling (two in decode). Denominator: its sums. Then the division, then bf16 of the result.
    """
    size = np.abs(exact.out)
    weights = exact.scores * (shape.score + U) + exact.depth * EXP_DEPTH
    weights += (exact.reach + size) * shape.rescalings * EXP2
    numerator = exact.reach * (shape.weight + shape.values + 2 * shape.rescalings * U)
    denominator = size * (shape.sum_roundings + 1) * U
    return SECOND_ORDER * (weights + numerator + denominator + BF16 * size) + UNDERFLOW


def prompt_attention(exact: Attended, D: int) -> Float64:
    """Bound of prompt_attention."""
    return attention(exact, prompt_fold(exact.keys, D))


def decode_attention(exact: Attended, D: int) -> Float64:
    """Bound of decode_rows, decode_partial and decode_merge together."""
    return attention(exact, decode_fold(exact.keys, D))


def scalar_attention(exact: Attended, D: int) -> Float64:
    """Bound of decode_scalar and decode_merge together."""
    return attention(exact, scalar_fold(exact.keys, D))


def sparse_attention(exact: Attended, D: int) -> Float64:
    """Bound of fn_attn_chunks and fn_attn_merge together."""
    return attention(exact, sparse_fold(exact.keys, D))


def worst_fraction(found: NDArray, exact: Float64, bound: Float64) -> float:
    """The largest |found - exact| / bound; inf when a found value is not finite. A test passes at 1 or less."""
    with np.errstate(invalid="ignore"):  # a signalling NaN of bf16
        finite = np.isfinite(found).all()
    if not finite:
        return float("inf")
    return float((np.abs(np.asarray(found).astype(np.float64) - exact) / bound).max(initial=0.0))
