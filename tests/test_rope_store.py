"""A row's query, key and value have the bits of the written formula, and land at the row's position and nowhere else.

The same for every form of cache and every cut of the prompt; what decode puts in its window record, and keep then
moves into the cache, is what a prompt pass would have stored.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pytest
from buffers import Output
from mutants import module_from
from paging import BF16, Cache, StreamRows, build_cache, p256_or

from backends.layout import Layout, paged, paged_p256, window
from kernels_numba import rope_store as module
from kernels_numba.decode_plan import chain_tables, row_streams
from kernels_numba.keep import keep
from kernels_numba.machine import checked
from kernels_numba.rope_store import rope_record, rope_store, rope_table

LAYOUTS = [(window, 0), (paged, 1), (paged, 16), (paged, 48), (paged_p256, 256)]
HEADS, KV_HEADS = 6, 2
EPS = np.float32(1e-6)
LENGTH = 300


@dataclass(frozen=True)
class Layer:
    """Projection rows by position. qkv: bf16 [N, (2·H + 2·HK)·D]; gains: float32 [D]; cos_sin: see rope_table."""

    D: int
    qkv: np.ndarray
    q_gain: np.ndarray
    k_gain: np.ndarray
    cos_sin: np.ndarray

    def part(self, first: int, heads: int, stride: int = 1) -> np.ndarray:
        """[N, heads, D]: every stride-th block of D columns from the first on."""
        blocks = self.qkv.reshape(len(self.qkv), -1, self.D)
        return blocks[:, first : first + heads * stride : stride]

    @property
    def query(self) -> np.ndarray:
        return rotated(normed(self.part(0, HEADS, 2), self.q_gain), self.cos_sin)

    @property
    def key(self) -> np.ndarray:
        return rotated(normed(self.part(2 * HEADS, KV_HEADS), self.k_gain), self.cos_sin)

    @property
    def value(self) -> np.ndarray:
        return self.part(2 * HEADS + KV_HEADS, KV_HEADS)


@functools.cache
def layer(D: int = 256, rope: int = 64) -> Layer:
    rng = np.random.default_rng([D, rope])
    qkv = (3 * rng.standard_normal((LENGTH, (2 * HEADS + 2 * KV_HEADS) * D), np.float32)).astype(BF16)
    gains = [(1 + 0.2 * rng.standard_normal(D)).astype(np.float32) for _ in range(2)]
    return Layer(D, qkv, *gains, rope_table(LENGTH, rope, 1e7))


def inverse(x: np.ndarray) -> np.ndarray:
    """1 / sqrt(sum(x²) / D + eps), the sum in the kernel's order: a lane's squares, then exchanges of the lanes."""
    lanes = x.astype(np.float32).reshape(*x.shape[:-1], 32, -1)
    sums = np.zeros(lanes.shape[:-1], np.float32)
    for i in range(lanes.shape[-1]):
        sums = sums + lanes[..., i] * lanes[..., i]
    for distance in (16, 8, 4, 2, 1):
        sums = sums + sums[..., np.arange(32) ^ distance]
    return np.float32(1) / np.sqrt(sums[..., :1] / np.float32(x.shape[-1]) + EPS)


def normed(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return ((x.astype(np.float32) * inverse(x)) * gain).astype(BF16)


def rotated(x: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    """bf16 [N, heads, D] at positions 0 .. N - 1; pairs (j, j + half)."""
    half, out = cos_sin.shape[2], x.copy()
    cos, sin = cos_sin[:, None, 0], cos_sin[:, None, 1]
    first, second = (x[..., at : at + half].astype(np.float32) for at in (0, half))
    out[..., :half] = (first * cos - second * sin).astype(BF16)
    out[..., half : 2 * half] = (second * cos + first * sin).astype(BF16)
    return out


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint16)


def cache_of(one: Layer, layout: Layout, ptok: int, sizes: list[tuple[int, int]], stored: int) -> Cache:
    """Streams (rows, committed), the first ``stored`` of their rows in the cache, NaN in the places of the others."""
    firsts = np.cumsum([0] + [rows for rows, _ in sizes[:-1]])
    streams = []
    for first, (rows, committed) in zip(firsts, sizes, strict=True):
        k, v = one.key[: committed + rows].copy(), one.value[: committed + rows].copy()
        k[committed + min(stored, rows) :], v[committed + min(stored, rows) :] = np.nan, np.nan
        streams.append(StreamRows(k, v, int(first), rows, committed))
    return build_cache(layout, p256_or(layout, ptok), streams)


def positions(cache: Cache) -> np.ndarray:
    """The position of each row of the launch."""
    rows = row_streams(cache.streams)
    return np.arange(len(rows)) - cache.streams[rows, 0] + cache.streams[rows, 2]


def store(one: Layer, cache: Cache, run=rope_store) -> np.ndarray:
    """A prompt pass over the streams' rows; the queries."""
    at = positions(cache)
    q = Output((len(at), HEADS, one.D))
    rows = row_streams(cache.streams)
    place = (float(EPS), KV_HEADS, cache.layout)
    norms = (one.q_gain, one.k_gain, one.cos_sin)
    run(q.array, one.qkv[at], cache.arena, cache.pages, cache.streams, rows, *norms, *place)
    return q.checked()


def record(one: Layer, cache: Cache) -> list[np.ndarray]:
    """A decode launch over the streams' rows: queries, and the window record's keys and values."""
    at = positions(cache)
    q, k, v = (Output((len(at), heads, one.D)) for heads in (HEADS, KV_HEADS, KV_HEADS))
    rows, _, depths = chain_tables(cache.streams)
    norms = (one.q_gain, one.k_gain, one.cos_sin, float(EPS))
    rope_record(q.array, one.qkv[at], k.array, v.array, cache.streams, rows, depths, *norms)
    return [a.checked() for a in (q, k, v)]


def assert_equal(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(bits(found), bits(expected))


# --- Prompt ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout, ptok", LAYOUTS)
@pytest.mark.parametrize("rows, committed", [(1, 0), (17, 0), (33, 47), (40, 250)])
def test_rows_land_at_their_positions_and_nowhere_else(layout, ptok, rows, committed):
    one = layer()
    cache = cache_of(one, layout, ptok, [(rows, committed)], stored=0)
    q = store(one, cache)
    assert_equal(q, one.query[committed : committed + rows])
    np.testing.assert_array_equal(cache.arena, cache_of(one, layout, ptok, [(rows, committed)], stored=rows).arena)


@pytest.mark.parametrize("layout, ptok", LAYOUTS)
def test_several_streams_in_one_launch(layout, ptok):
    one, sizes = layer(), [(5, 40), (0, 9), (1, 255), (20, 0)]
    cache = cache_of(one, layout, ptok, sizes, stored=0)
    assert_equal(store(one, cache), one.query[positions(cache)])
    np.testing.assert_array_equal(cache.arena, cache_of(one, layout, ptok, sizes, stored=20).arena)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks_of_any_size_store_what_one_pass_stores(chunk):
    one, total = layer(), 30
    cache = cache_of(one, paged, 16, [(total, 0)], stored=0)
    for at in range(0, total, chunk):
        cache.streams[0, 1:3] = min(chunk, total - at), at
        store(one, cache)
    np.testing.assert_array_equal(cache.arena, cache_of(one, paged, 16, [(total, 0)], stored=total).arena)


@pytest.mark.parametrize("D, rope", [(64, 16), (128, 32), (256, 256), (64, 64), (128, 8)])
def test_other_head_dims_and_rotary_dims(D, rope):
    one = layer(D, rope)
    cache = cache_of(one, paged, 16, [(9, 20)], stored=0)
    assert_equal(store(one, cache), one.query[20:29])
    np.testing.assert_array_equal(cache.arena, cache_of(one, paged, 16, [(9, 20)], stored=9).arena)


def test_dims_past_the_rotary_ones_are_as_normed():
    one = layer()
    q = store(one, cache_of(one, window, 0, [(40, 250)], stored=0))
    assert_equal(q[..., 64:], normed(one.part(0, HEADS, 2), one.q_gain)[250:290, :, 64:])
    assert (bits(q[..., :64]) != bits(normed(one.part(0, HEADS, 2), one.q_gain)[250:290, :, :64])).any()


def test_near_float64():
    """Two bf16 roundings of at most 2^-8: the normed pair, weighed by cos and sin, and the result."""
    one = layer()
    x = one.part(0, HEADS, 2).astype(np.float64)
    n = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + float(EPS)) * one.q_gain
    angle = np.arange(LENGTH)[:, None] * 1e7 ** (-np.arange(32) / 32)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = n[..., :32], n[..., 32:64]
    exact = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    reach = np.concatenate([abs(a * cos) + abs(b * sin), abs(b * cos) + abs(a * sin)], axis=-1)
    q = store(one, cache_of(one, window, 0, [(LENGTH, 0)], stored=0)).astype(np.float64)
    assert (np.abs(q[..., :64] - exact) <= (2**-8 * (reach + abs(exact)) + 32 * 2**-24 * reach) * 1.01).all()


# --- Decode: the window record, then keep ---------------------------------------------------------------------------


@pytest.mark.parametrize("D, rope", [(256, 64), (64, 16)])
def test_the_record_holds_what_a_prompt_would_store(D, rope):
    one = layer(D, rope)
    cache = cache_of(one, paged, 48, [(3, 47), (1, 0), (0, 5), (16, 255)], stored=0)
    for found, expected in zip(record(one, cache), (one.query, one.key, one.value), strict=True):
        assert_equal(found, expected[positions(cache)])
    cache.assert_untouched()


def test_rows_of_a_tree_stand_at_their_depth():
    one = layer()
    cache = cache_of(one, window, 0, [(3, 20)], stored=0)
    rows, _, depths = chain_tables(cache.streams)
    depths[2] = 2
    q, k, v = (np.empty((3, heads, 256), BF16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    gains = (one.q_gain, one.k_gain, one.cos_sin, float(EPS))
    rope_record(q, one.qkv[[20, 21, 21]], k, v, cache.streams, rows, depths, *gains)
    assert_equal(k, one.key[[20, 21, 21]])


def keep_rows(one: Layer, cache: Cache, paths, last: list[int], kept: list[int], record_rows) -> None:
    """Keep from a record that holds the rows of these positions."""
    place = (max(kept), cache.layout)
    tables = (paths, np.array(last, np.int32), np.array(kept, np.int32))
    k, v = one.key[record_rows], one.value[record_rows]
    keep(cache.arena, cache.pages, cache.streams, *tables, k, v, *place)


@pytest.mark.parametrize("layout, ptok", LAYOUTS)
def test_kept_rows_land_behind_the_committed_ones(layout, ptok):
    one, sizes = layer(), [(5, 46), (4, 0), (0, 9), (3, 255)]
    cache = cache_of(one, layout, ptok, sizes, stored=0)
    _, paths, _ = chain_tables(cache.streams)
    keep_rows(one, cache, paths, [4, 5, 0, 10], [5, 0, 0, 2], positions(cache))
    expected = cache_of(one, layout, ptok, sizes, stored=0)
    for stream, count in enumerate([5, 0, 0, 2]):
        for position in range(sizes[stream][1], sizes[stream][1] + count):
            for plane, rows in (("k", one.key), ("v", one.value)):
                for head in range(KV_HEADS):
                    at = cache.word(stream, plane, position, head, 0)
                    expected.arena[at : at + 128] = np.ascontiguousarray(rows[position, head]).view(np.uint32)
    np.testing.assert_array_equal(cache.arena, expected.arena)


def test_keep_follows_the_path_of_the_last_row():
    one, record_rows = layer(), np.array([7, 8, 9, 20, 21])
    cache = cache_of(one, paged, 16, [(5, 20)], stored=0)
    _, paths, _ = chain_tables(cache.streams)
    paths[4, :2] = 3, 4
    keep_rows(one, cache, paths, [4], [2], record_rows)
    np.testing.assert_array_equal(cache.arena, cache_of(one, paged, 16, [(5, 20)], stored=2).arena)


@pytest.mark.parametrize("layout, ptok", LAYOUTS[2:])
def test_checked_mode_has_nothing_to_say(layout, ptok):
    one = layer(64, 16)
    cache = cache_of(one, layout, ptok, [(3, 47), (2, 5)], stored=0)
    with checked():
        store(one, cache)
        record(one, cache)
        _, paths, _ = chain_tables(cache.streams)
        keep_rows(one, cache, paths, [2, 4], [3, 2], positions(cache))
    np.testing.assert_array_equal(cache.arena, cache_of(one, layout, ptok, [(3, 47), (2, 5)], stored=3).arena)


# --- Faults come out red, and refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout, ptok", LAYOUTS[2:])
def test_red_a_swapped_page_table(layout, ptok):
    one = layer()
    cache = cache_of(one, layout, ptok, [(40, 230)], stored=0)
    last = int(cache.streams[0, 4]) + 269 // (256 if layout is paged_p256 else ptok)
    cache.pages[[last - 1, last]] = cache.pages[[last, last - 1]]
    store(one, cache)
    assert (cache.arena != cache_of(one, layout, ptok, [(40, 230)], stored=40).arena).any()


@pytest.mark.parametrize(
    "old, new",
    [
        ("COMMITTED] + row - streams[stream, FIRST]", "COMMITTED] + row"),
        ("x * cos + partner * sin if second", "x * cos - partner * sin if second"),
        ("words, start, v_plane, v_exp_plane", "words, start, k_plane, k_exp_plane"),
    ],
)
def test_red_position_sign_and_plane(old, new):
    one, sizes = layer(), [(3, 20), (7, 40)]
    source = module.__loader__.get_source(module.__name__)
    assert source.count(old) == 1
    cache = cache_of(one, paged, 16, [*sizes, (0, 80)], stored=0)
    store(one, cache, module_from(source.replace(old, new), module.__name__).rope_store)
    assert (cache.arena != cache_of(one, paged, 16, [*sizes, (0, 80)], stored=7).arena).any()


@pytest.mark.parametrize(
    "D, rope, word", [(96, 32, "head_dim"), (256, 33, "rotary"), (256, 24, "rotary"), (256, 0, "rotary")]
)
def test_refused(D, rope, word):
    with pytest.raises(ValueError, match=word):
        module.check_rope(D, rope)


def test_the_table_is_rounded_once():
    table = rope_table(5, 64, 1e7)
    assert table.shape == (5, 2, 32) and table.dtype == np.float32
    assert table[3, 0, 7] == np.float32(np.cos(3.0 * 1e7 ** (-7 / 32)))
    assert table[3, 1, 7] == np.float32(np.sin(3.0 * 1e7 ** (-7 / 32)))
