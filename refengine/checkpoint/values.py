"""Synthetic weights: for each tensor a seeded stream of integers, scaled; the same bits on every platform.

Only PCG64's raw words, integer differences and single float32 operations are used, no library function whose last bit
could differ. A value is mean + deviation · u, where u is the difference of two 16-bit integers, scaled to variance 1:
a triangle from -2.45 to 2.45.
"""

import hashlib
import math

import ml_dtypes
import numpy as np

from refengine.registry import ModelSpec, Tensor

VERSION = 2
"""Changes whenever any value changes; part of a cached checkpoint's key."""

_CHUNK = 1 << 20
_UNIT = math.sqrt(6) / 65536

# Standard deviation of the logits, which sets how clear the greedy choice is.
_LOGITS = 3.0
# Standard deviation of what all residual branches together add to the embedding's 1.
_BRANCHES = 1.5
# The same of the MTP head's layer: small, so that the head mostly carries the next token's embedding to lm_head, as the
# model's residual stream does, and some of its drafts are the model's choice.
_MTP_BRANCHES = 0.1
# The MTP head's matrices that carry the embedding.
_CARRYING = ("fc", "fc_embedding")
# The one that brings the model's state beside it, where it is a matrix of its own.
_BESIDE = "fc_hidden"
# Their standard deviation beside the ones that carry the embedding, times the root of their width.
_MTP_MIXING = 0.1
# Root mean square of the input of each output projection, for inputs of order one.
_BRANCH_INPUT = {"o_proj": 0.3, "out_proj": 0.6, "down_proj": 0.6, "experts_down": 0.6}
# (mean, deviation) of the tensors that are not projections. Query and key gains above 1 make attention selective;
# a_log and dt_bias spread the decay of the recurrent state from one step to thousands.
_VECTORS = {
    "q_norm": (0.5, 0.1),
    "k_norm": (0.5, 0.1),
    "norm": (1.0, 0.1),
    "conv": (0.0, 0.5),
    "a_log": (0.5, 1.0),
    "dt_bias": (-4.5, 1.0),
    "ngram_conv": (0.0, 0.5),
}


def synthetic(tensor: Tensor, spec: ModelSpec, seed: int) -> np.ndarray:
    """The values of one tensor, in its shape: bfloat16, which depend on seed, name and layout only, or the numbers of a hash."""
    if tensor.dtype == "I64":
        return np.array(getattr(spec.ngram_hash, tensor.role.removeprefix("ngram_")), np.int64)
    mean, deviation = distribution(tensor, spec)
    scale, shift = np.float32(deviation * _UNIT), np.float32(mean)
    words = _words(tensor.name, seed)
    out = np.empty(tensor.size, ml_dtypes.bfloat16)
    for start in range(0, tensor.size, _CHUNK):
        part = out[start : start + _CHUNK]
        halves = words.random_raw(-(-part.size // 2)).astype("<u8").view("<u2").astype(np.int32)
        part[:] = ((halves[0::2] - halves[1::2])[: part.size].astype(np.float32) * scale + shift).astype(out.dtype)
    out = out.reshape(tensor.shape)
    if tensor.role in _CARRYING:
        np.fill_diagonal(out, 1)
    return out


def distribution(tensor: Tensor, spec: ModelSpec) -> tuple[float, float]:
    """Mean and standard deviation of a tensor's values, chosen so that activations stay of order one.

    The diagonal of a matrix that carries the MTP head's embedding is ones instead.
    """
    if tensor.role in _VECTORS:
        return _VECTORS[tensor.role]
    if tensor.gain is not None:
        return 0.0, 0.1
    fan_in = math.sqrt(tensor.shape[-1])
    if tensor.role.startswith("ngram_table"):
        return 0.0, 1.0
    if tensor.role == "embed":
        return 0.0, _LOGITS / fan_in if spec.tied_head else 1.0
    if tensor.role == "lm_head":
        return 0.0, _LOGITS / fan_in
    if tensor.role in (*_CARRYING, _BESIDE):
        return 0.0, _MTP_MIXING / fan_in
    if tensor.role in _BRANCH_INPUT:
        total, layers = branches(tensor, spec)
        return 0.0, total / (math.sqrt(2 * layers) * _BRANCH_INPUT[tensor.role] * fan_in)
    return 0.0, 1 / fan_in


def branches(tensor: Tensor, spec: ModelSpec) -> tuple[float, int]:
    """(Standard deviation of what all residual branches together add, layers that share it): the model's or the head's."""
    return (_MTP_BRANCHES, spec.mtp.layers) if tensor.layer in spec.mtp_layers else (_BRANCHES, spec.layers)


def _words(name: str, seed: int) -> np.random.PCG64:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.PCG64(int.from_bytes(digest, "little"))
