"""A GPU gives the CPU machine's bits where C and PTX leave room: conversions out of range, long shifts, narrow negation."""

from __future__ import annotations

import numpy as np
import pytest

from kernels_numba.machine import (
    bits_float,
    cuda,
    float32,
    int32,
    int64,
    kernel,
    lanewise,
    round_int,
    uint16,
    uint32,
    uint64,
)
from refengine.device import open_device

pytestmark = pytest.mark.gpu
THREADS = 32


@kernel
def convert_kernel(narrow, wide, words, integers, counts):
    """narrow: int32 [N, 5], wide: int64 [N, 8], written; words: uint32 [N], bits of floats; integers, counts: int64 [N]."""
    for first in range(0, words.shape[0], THREADS):
        i = first + cuda.threadIdx.x
        if i < words.shape[0]:
            x = bits_float(words[i])
            narrow[i, 0] = int32(x)
            narrow[i, 1] = int32(uint32(x))
            narrow[i, 2] = round_int(x)
            narrow[i, 3] = int32(uint16(integers[i]))
            narrow[i, 4] = int32(integers[i])
            wide[i, 0] = int64(x)
            wide[i, 1] = int64(uint64(x))
            wide[i, 2] = integers[i] << counts[i]
            wide[i, 3] = integers[i] >> counts[i]
            wide[i, 4] = int64(-int32(integers[i]))
            wide[i, 5] = int64(~uint32(integers[i]))
            wide[i, 6] = integers[i] * integers[i] + counts[i]
            wide[i, 7] = int64(halved(float32(integers[i]), words[i]))


@lanewise
def halved(x, word):
    """A conversion in a compiled function."""
    return int32(x * float32(0.5)) if word & 1 == 0 else int32(bits_float(word))


def values() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Floats at the edges of the integer types and beside them, as bits; integers; shift counts of 0 to 63 and beyond."""
    rng = np.random.default_rng(0)
    edges = np.array(
        [0.0, 0.5, 1, 1.5, 2.5, 127, 128, 255, 256, 32767, 65535, 65536, 1e-40, *(2.0**p for p in range(24, 66))]
    )
    near = np.concatenate([np.nextafter(edges.astype(np.float32), np.float32(d)) for d in (-np.inf, np.inf)])
    floats = np.concatenate([edges.astype(np.float32), near, np.array([np.inf, np.nan, 3e38], np.float32)])
    words = np.concatenate([floats, -floats]).view(np.uint32)
    words = np.concatenate([words, rng.integers(0, 2**32, 4000, dtype=np.uint32)])
    integers = rng.integers(-(2**63), 2**63 - 1, len(words), dtype=np.int64) >> rng.integers(0, 63, len(words))
    integers[:4] = -(2**63), 2**63 - 1, -(2**31), 2**31
    return words, integers, rng.integers(0, 64, len(words), dtype=np.int64)


def converted(device: str) -> tuple[np.ndarray, np.ndarray]:
    there = open_device(device)
    arrays = [there.put(a) for a in values()]
    narrow, wide = (
        there.put(np.zeros((len(arrays[0]), 5), np.int32)),
        there.put(np.zeros((len(arrays[0]), 8), np.int64)),
    )
    convert_kernel.at()[1, THREADS](narrow, wide, *arrays)
    return there.get(narrow), there.get(wide)


def test_conversions_and_integers():
    pytest.importorskip("cupy")
    for name, here, there in zip(("narrow", "wide"), converted("cpu"), converted("cuda"), strict=True):
        different = np.argwhere(here != there)
        shown = [(name, *map(int, at), hex(int(here[tuple(at)])), hex(int(there[tuple(at)]))) for at in different[:20]]
        assert not len(different), f"{len(different)} differ: {shown}"
