"""Matrix product on tensor cores: ``out[token, feature] = x[token, :] · weight[feature, :]``.

One float32 chain an output element, over K in mma steps of 16 ascending, starting from zero (spec numerics §4): its
bits depend on its row of x and its row of the weight, never on the other tokens of the launch. Output features stand
on the M side of the mma and tokens on the N side, so that one token costs one column of eight.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels_numba.machine import KernelError, cuda, device, float32, kernel, lanewise, mma, pack_bf16, shfl_xor, uint32

K_STEP = 16
"""Elements of K an mma step."""
BLOCK_FEATURES = 64
"""Features a block: 16 for each of its 4 warps."""
NARROW_TOKENS = 32
"""Up to this many tokens a warp takes 8 of them, beyond it 64."""


def matmul(out: Any, x: Any, weight: Any, stream: Any = None) -> None:
    """out[tokens, features] = x · weightᵀ, one float32 chain an element, K ascending in steps of 16.

    x: bf16 [tokens, K], weight: bf16 [features, K], K a multiple of 16. out [tokens, features]: float32, the sums as
    they are, or bf16, rounded once, then features is even. Raises KernelError for other shapes and types.
    """
    check(out, x, weight)
    (tokens, _), features = x.shape, weight.shape[0]
    tiles, slab = (1, 8) if tokens <= NARROW_TOKENS else (8, 4)
    grid = (-(-features // BLOCK_FEATURES), -(-tokens // (8 * tiles)))
    bound = matmul_kernel.at(TILES=tiles, SLAB=slab, ROUNDED=out.dtype != np.float32)
    bound[grid, 128, stream](out, x, weight)


def check(out: Any, x: Any, weight: Any) -> None:
    """Refuse shapes and types that the kernel does not have."""
    (tokens, k), (features, weight_k) = x.shape, weight.shape
    if k != weight_k or k % K_STEP:
        raise KernelError(f"matmul: x {x.shape} · weight {weight.shape}: both need one K, a multiple of {K_STEP}")
    if out.shape != (tokens, features):
        raise KernelError(f"matmul: out has shape {out.shape}: x and weight give {(tokens, features)}")
    if x.dtype.name != "bfloat16" or weight.dtype.name != "bfloat16" or out.dtype.name not in ("bfloat16", "float32"):
        raise KernelError(f"matmul: {x.dtype} · {weight.dtype} -> {out.dtype}: takes bf16, gives bf16 or float32")
    if out.dtype.name == "bfloat16" and features % 2:
        raise KernelError(f"matmul: {features} features in bfloat16: an odd count needs a float32 output")


@kernel
def matmul_kernel(out, x, weight, *, TILES, SLAB, ROUNDED):
    """A warp takes 16 features × 8·TILES tokens. Spec numerics §4 "projections" and "lm_head".

    out: bf16 [tokens, features] if ROUNDED, else float32 [tokens, features]; x: bf16 [tokens, K]; weight: bf16
    [features, K]. SLAB: mma steps whose operands are loaded together.
    Launch: grid (features / 64, tokens / (8·TILES)), 128 threads.
    """
    lane = cuda.threadIdx.x % 32
    feature = cuda.blockIdx.x * 64 + cuda.threadIdx.x // 32 * 16 + lane // 4  # this lane's features: this and + 8
    token = cuda.blockIdx.y * (8 * TILES)  # first token of the block
    a = cuda.local.array((SLAB, 4), uint32)  # [step, a0..a3]
    b = cuda.local.array((TILES, SLAB, 2), uint32)  # [tile, step, b0..b1]
    c = cuda.local.array((TILES, 4), float32)  # [tile, c0..c3]
    for n in range(TILES):
        for i in range(4):
            c[n, i] = float32(0.0)
    for step in range(0, weight.shape[1] // 8, SLAB):
        load_fragments(a, b, x, weight, token + lane // 4, feature, step * 8 + lane % 4, TILES=TILES, SLAB=SLAB)
        for n in range(TILES):
            c0, c1, c2, c3 = c[n, 0], c[n, 1], c[n, 2], c[n, 3]
            for s in range(SLAB):
                c0, c1, c2, c3 = mma(a[s, 0], a[s, 1], a[s, 2], a[s, 3], b[n, s, 0], b[n, s, 1], c0, c1, c2, c3)
            c[n, 0], c[n, 1], c[n, 2], c[n, 3] = c0, c1, c2, c3
    for n in range(TILES):
        if ROUNDED:
            store_rounded(out, token + 8 * n, feature, lane, c[n, 0], c[n, 1])
            store_rounded(out, token + 8 * n, feature + 8, lane, c[n, 2], c[n, 3])
        else:
            store_sums(out, token + 8 * n + lane % 4 * 2, feature, c[n, 0], c[n, 1])
            store_sums(out, token + 8 * n + lane % 4 * 2, feature + 8, c[n, 2], c[n, 3])


@lanewise
def load_fragments(a, b, x, weight, token, feature, word, *, TILES, SLAB):
    """The mma operands of SLAB steps, from this lane's first word of K; zeros past the end of a matrix.

    A step of zeros leaves a sum as it is, so the last slab may pass the end of K.
    """
    for s in range(SLAB):
        at = word + 8 * s
        a[s, 0] = word_or_zero(weight, feature, at)
        a[s, 1] = word_or_zero(weight, feature + 8, at)
        a[s, 2] = word_or_zero(weight, feature, at + 4)
        a[s, 3] = word_or_zero(weight, feature + 8, at + 4)
        for n in range(TILES):
            b[n, s, 0] = word_or_zero(x, token + 8 * n, at)
            b[n, s, 1] = word_or_zero(x, token + 8 * n, at + 4)


@lanewise
def word_or_zero(matrix, row, word):
    """Two neighbours of a row of a bf16 matrix; zeros outside it."""
    return matrix[row, word] if row < matrix.shape[0] and word < matrix.shape[1] else uint32(0)


@device
def store_rounded(out, token, feature, lane, first, second):
    """A lane's sums of two tokens for one feature, as bf16 words: a word pairs the features of lanes 4 apart.

    first, second: of tokens token + 2q and the next, q = lane % 4. The even feature's lane stores the first token,
    the odd one's the second.
    """
    odd = feature % 2 == 1
    got = shfl_xor(first if odd else second, 4)
    row = token + lane % 4 * 2 + feature % 2
    if row < out.shape[0] and feature < out.shape[1] * 2:
        out[row, feature // 2] = pack_bf16(got if odd else first, second if odd else got)


@device
def store_sums(out, token, feature, first, second):
    """A lane's sums of two tokens for one feature, as they are."""
    if feature < out.shape[1]:
        if token < out.shape[0]:
            out[token, feature] = first
        if token + 1 < out.shape[0]:
            out[token + 1, feature] = second
