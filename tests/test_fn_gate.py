"""The gate of sparse attention divides once: within one step of the other gate in bf16, and not its bits."""

from __future__ import annotations

import numpy as np
from buffers import BF16, bits, normal

from kernels_numba.activations import attention_gate
from kernels_numba.flash_next.gate import fn_attn_gate


def test_the_gate_divides_once_and_is_not_the_sigmoids_product():
    rng = np.random.default_rng(0)
    o, qkv = normal(rng, 64, 24 * 256), normal(rng, 64, 24 * 512)
    divided, multiplied = np.zeros_like(o), np.zeros_like(o)
    fn_attn_gate(divided, o, qkv, 256)
    attention_gate(multiplied, o, qkv, 256)
    apart = np.abs(bits(divided).astype(np.int64) - bits(multiplied))
    assert apart.max() == 1 and np.count_nonzero(apart) < o.size / 1000


def test_a_gate_far_off_gives_zero_or_all():
    o, qkv = np.ones((1, 64), BF16), np.zeros((1, 128), BF16)
    qkv[0, 64:68] = -np.inf, -200, 200, np.inf
    fn_attn_gate(o, o, qkv, 64)
    assert o[0, :4].tolist() == [0, 0, 1, 1] and o[0, 4] == 0.5
