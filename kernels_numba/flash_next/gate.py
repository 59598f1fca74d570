"""The output gate of sparse attention, one thread a pair of elements. Spec flash-next "fn_attn_gate".

One division, where activations.attention_gate rounds the sigmoid and then its product: neither gives the other's bits.
"""

from __future__ import annotations

from typing import Any

from kernels_numba.machine import bf16_high, bf16_low, cuda, float32, int64, kernel, lanewise, pack_bf16
from kernels_numba.portable_math import exp

THREADS = 128


def fn_attn_gate(out: Any, o: Any, qkv: Any, head_dim: int, stream: Any = None) -> None:
    """out = bf16(o / (1 + E(-gate))); out may be o.

    out, o: bf16 [rows, H·D] attention output; qkv: bf16 [rows, columns], a row starts with H times [D query | D gate].
    stream: of the GPU.
    """
    fn_attn_gate_kernel.at(D=head_dim)[-(-out.size // (2 * THREADS)), THREADS, stream](out, o, qkv)


@kernel
def fn_attn_gate_kernel(out, o, qkv, *, D):
    """Spec flash-next "fn_attn_gate": each operation rounds, in float32; then once to bf16.

    out, o: bf16 [rows, H·D]; qkv: bf16 [rows, columns], a row starts with H × [q | gate].
    Launch: grid rows·H·D / 256, 128 threads.
    """
    pair = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    row, word = pair // out.shape[1], pair % out.shape[1]
    if row < out.shape[0]:
        head, at = word // (D // 2), word % (D // 2)
        out[row, word] = gated_pair(o[row, word], qkv[row, head * D + D // 2 + at])


@lanewise
def gated_pair(o, gate):
    """bf16(o / (1 + E(-gate))) of a pair; a gate of -inf gives 0."""
    low = bf16_low(o) / (float32(1.0) + exp(-bf16_low(gate)))
    high = bf16_high(o) / (float32(1.0) + exp(-bf16_high(gate)))
    return pack_bf16(low, high)
