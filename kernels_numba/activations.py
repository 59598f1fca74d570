"""Gates: SwiGLU of the MLP and the output gate of full attention, one thread a pair of elements. Spec numerics §4."""

from __future__ import annotations

from typing import Any

from kernels_numba.machine import bf16_high, bf16_low, cuda, int64, kernel, lanewise, pack_bf16
from kernels_numba.portable_math import sigmoid, silu

THREADS = 128


def swiglu(out: Any, gate_up: Any, stream: Any = None) -> None:
    """out = bf16((g · sigmoid(g)) · u).

    out: bf16 [rows, F]; gate_up: bf16 [rows, 2·F], a row is [g | u].
    """
    swiglu_kernel.at()[-(-out.size // (2 * THREADS)), THREADS, stream](out, gate_up)


def attention_gate(out: Any, o: Any, qkv: Any, head_dim: int, stream: Any = None) -> None:
    """out = bf16(o · sigmoid(gate)); out may be o.

    out, o: bf16 [rows, H·D] attention output; qkv: bf16 [rows, columns], a row starts with H times [D query | D
    gate].
    """
    attention_gate_kernel.at(D=head_dim)[-(-out.size // (2 * THREADS)), THREADS, stream](out, o, qkv)


@kernel
def swiglu_kernel(out, gate_up):
    """Spec numerics §4 "SwiGLU". out: bf16 [rows, F]; gate_up: bf16 [rows, 2·F].

    Launch: grid rows·F / 256, 128 threads.
    """
    pair = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    row, word = pair // out.shape[1], pair % out.shape[1]
    if row < out.shape[0]:
        out[row, word] = swiglu_pair(gate_up[row, word], gate_up[row, out.shape[1] + word])


@kernel
def attention_gate_kernel(out, o, qkv, *, D):
    """Spec numerics §4 "output gate".

    out, o: bf16 [rows, H·D]; qkv: bf16 [rows, columns], a row starts with H × [q | gate].
    Launch: grid rows·H·D / 256, 128 threads.
    """
    pair = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    row, word = pair // out.shape[1], pair % out.shape[1]
    if row < out.shape[0]:
        head, at = word // (D // 2), word % (D // 2)
        out[row, word] = gated_pair(o[row, word], qkv[row, head * D + D // 2 + at])


@lanewise
def swiglu_pair(gate, up):
    """bf16((g · sigmoid(g)) · u) of a pair."""
    return pack_bf16(silu(bf16_low(gate)) * bf16_low(up), silu(bf16_high(gate)) * bf16_high(up))


@lanewise
def gated_pair(o, gate):
    """bf16(o · sigmoid(gate)) of a pair."""
    return pack_bf16(bf16_low(o) * sigmoid(bf16_low(gate)), bf16_high(o) * sigmoid(bf16_high(gate)))
