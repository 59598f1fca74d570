"""Noise is Philox4x32-10's, by published vectors; uniform numbers are exact and inside (0, 1); Gumbel noise is within its
bound of float64, and keyed by seed, position and token alone.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from mutants import module_from

from kernels_numba import philox
from kernels_numba.machine import checked, cuda, int32, int64, kernel
from refengine.verify.sampling_oracle import noise_numbers
from refengine.verify.sampling_oracle import philox as philox_exactly

THREADS = 256
VECTORS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""(counter, key, words) of Random123's kat_vectors, philox4x32 of 10 rounds."""
COUNTERS, KEYS, WORDS = (np.array(column, np.uint32) for column in zip(*VECTORS))


@kernel
def words_kernel(out, counters, keys, *, function):
    """out, counters: uint32 [n, 4]; keys: uint32 [n, 2]."""
    i = cuda.threadIdx.x
    if i < out.shape[0]:
        w0, w1, w2, w3 = function(
            counters[i, 0], counters[i, 1], counters[i, 2], counters[i, 3], keys[i, 0], keys[i, 1]
        )
        out[i, 0] = w0
        out[i, 1] = w1
        out[i, 2] = w2
        out[i, 3] = w3


def words_of(counters, keys, function=philox.philox):
    out = np.zeros_like(counters)
    words_kernel.at(function=function)[1, THREADS](out, counters, keys)
    return out


@kernel
def uniform_kernel(out, words):
    """float32 [n] of uint32 [n]."""
    i = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    if i < out.shape[0]:
        out[i] = philox.uniform(words[i])


def uniform_of(words):
    out = np.zeros(len(words), np.float32)
    uniform_kernel.at()[-(-len(words) // THREADS), THREADS](out, words)
    return out


@kernel
def gumbel_kernel(out, seeds, positions):
    """out: float32 [rows, tokens]; seeds: uint64 [rows]; positions: int64 [rows]."""
    row, token = cuda.blockIdx.x, cuda.blockIdx.y * THREADS + cuda.threadIdx.x
    if token < out.shape[1]:
        out[row, token] = philox.gumbel(seeds[row], positions[row], int32(token))


def gumbel_of(keys, tokens):
    """Noise of each (seed, position): float32 [keys, tokens]."""
    seeds, positions = (np.array(column, kind) for column, kind in zip(zip(*keys), (np.uint64, np.int64)))
    out = np.zeros((len(keys), tokens), np.float32)
    gumbel_kernel.at()[(len(keys), -(-tokens // THREADS)), THREADS](out, seeds, positions)
    return out


def test_philox_gives_the_published_vectors():
    np.testing.assert_array_equal(words_of(COUNTERS, KEYS), WORDS)
    with checked():
        np.testing.assert_array_equal(words_of(COUNTERS, KEYS), WORDS)


def test_the_oracle_gives_the_published_vectors():
    np.testing.assert_array_equal([philox_exactly(c, k) for c, k in zip(COUNTERS, KEYS)], WORDS)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ROUNDS = 10", "ROUNDS = 9"),
        ("high_word(second) ^ c1 ^ k0", "high_word(first) ^ c1 ^ k0"),
        ("0x9E3779B9", "0x9E3779B1"),
        ("k1 + uint32(WEYL_1)", "k1"),
    ],
    ids=["a round too few", "the other product", "another constant", "half the key stays"],
)
def test_red_when_philox_is_another(old, new):
    source = inspect.getsource(philox).replace("from .", "from kernels_numba.")
    assert source.count(old) == 1
    mutant = module_from(source.replace(old, new), "kernels_numba.philox")
    assert not (words_of(COUNTERS, KEYS, mutant.philox) == WORDS).all()


def test_uniform_numbers_are_the_odd_multiples_exactly():
    """Every one of the 2^23, from words whose unused bits are all set."""
    n = np.arange(2**23, dtype=np.uint32)
    found = uniform_of(n << np.uint32(9) | np.uint32(511))
    np.testing.assert_array_equal(found.astype(np.float64), (2.0 * n + 1) * 2.0**-24)
    assert found.min() > 0 and found.max() < 1


KEYED = [(0, 0), (1, 0), (0, 1), (2**32, 0), (0, 2**32), (2**64 - 1, 2**62 + 3)]
"""(seed, position): each word of both differs somewhere."""


def test_gumbel_noise_is_within_its_bound():
    for (seed, position), found in zip(KEYED, gumbel_of(KEYED, 30_000)):
        exact = -np.log(-np.log(noise_numbers(seed, position, 30_000) * 2.0**-24))
        assert (np.abs(found - exact) <= 1.02 * 2.0**-22 * (1 + np.abs(exact))).all()


def test_every_word_of_the_key_changes_the_noise():
    noise = gumbel_of(KEYED, 1000)
    assert len({row.tobytes() for row in noise}) == len(KEYED)
    assert (np.abs(np.corrcoef(noise)[np.triu_indices(len(KEYED), 1)]) < 0.12).all()


def test_noise_is_gumbel():
    """Mean and variance, within five standard errors (variance of the square: kurtosis 5.4)."""
    noise = gumbel_of([(seed, 5) for seed in range(20)], 10_000).astype(np.float64)
    variance = np.pi**2 / 6
    assert abs(noise.mean() - np.euler_gamma) < 5 * np.sqrt(variance / noise.size)
    assert abs(noise.var() / variance - 1) < 5 * np.sqrt(4.4 / noise.size)
