"""A prompt row's bits depend on its own keys alone: not on the pass it came in, its neighbours, or where the cache
keeps rows.

Window, pages of any size and pages of 256 give the same words, within the derived float64 bound, reading nothing but
the rows that exist; and each of these tests goes red on a planted fault.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from buffers import FILL, Output
from mutants import mutate
from paging import BF16, NAN_WORD, Cache, StreamRows, build_cache, p256_or

from backends.layout import Layout, paged, paged_p256, window
from kernels_numba.machine import KernelError
from kernels_numba.machine.modes import checked
from kernels_numba.prompt_attention import heads_per_block, launch_shape, prompt_attention, shared_bytes, slots
from refengine.verify import bounds
from refengine.verify.attention_oracle import prompt_attention as oracle

HEADS = [(12, 2), (8, 2), (16, 2)]
LAYOUTS = [(window, 0), (paged, 48), (paged_p256, 256)]
ROWS = [1, 15, 16, 17, 63, 64, 65, 129, 257]
COMMITTED = [0, 48, 255, 256, 257, 511, 512, 513]
LONG_ROWS, LONG_COMMITTED = [1, 17, 65], [2047, 2048]
PAGE_SIZES, PAGE_CASES = [1, 16, 48, 64, 256, 544], [(17, 48), (65, 255), (129, 513)]
SHORT, LONG = max(COMMITTED) + max(ROWS), max(LONG_COMMITTED) + max(LONG_ROWS)


class Prompt:
    """q: bf16 [N, H, D], k, v: bf16 [N, HK, D], unit normal: row i stands at position i."""

    def __init__(self, heads: int, kv_heads: int, D: int, length: int):
        rng = np.random.default_rng([heads, kv_heads, D])
        self.heads, self.kv_heads, self.D = heads, kv_heads, D
        self.scale = np.float32(D**-0.5)
        draw = [rng.standard_normal((length, h, D), np.float32).astype(BF16) for h in (heads, kv_heads, kv_heads)]
        self.q, self.k, self.v = draw

    def cache(self, layout: Layout, ptok: int, rows: int, committed: int, **how: int) -> Cache:
        """The cache after ``rows`` rows were stored behind ``committed``; q starts at the stream's first row."""
        keys = committed + rows
        return build_cache(layout, ptok, [StreamRows(self.k[:keys], self.v[:keys], 0, rows, committed)], **how)

    def attend(self, cache: Cache, kernel=prompt_attention) -> np.ndarray:
        """The rows of the cache's one stream, every output written, nothing else touched. bf16 [rows, H, D]."""
        rows, committed = (int(n) for n in cache.streams[0, 1:3])
        out = Output((rows, self.heads, self.D))
        launch(kernel, cache, 0, out.array, self.q[committed : committed + rows], self.scale)
        cache.assert_untouched()
        return out.checked()


def launch(kernel, cache: Cache, stream: int, out: np.ndarray, q: np.ndarray, scale: np.float32) -> None:
    """Launch prompt_attention for one stream of a cache."""
    _, heads, D = q.shape
    grid, threads, shared = launch_shape(int(cache.streams[stream, 1]), heads, cache.kv_heads, D)
    bound = kernel.at(D=D, HPC=heads_per_block(heads // cache.kv_heads), layout=cache.layout, kv=cache.kv)
    place = (cache.arena, cache.pages, cache.streams, stream)
    bound[grid, threads, None, shared](out, q, *place, heads, cache.kv_heads, scale)


@cache
def prompt(heads: int, kv_heads: int, D: int = 256, length: int = LONG) -> Prompt:
    return Prompt(heads, kv_heads, D, length)


@cache
def reference(heads: int, kv_heads: int, first: int = 0, rows: int = SHORT, D: int = 256) -> np.ndarray:
    """Rows first .. first + rows - 1 in one pass on a window."""
    p = prompt(heads, kv_heads, D)
    return p.attend(p.cache(window, 0, rows, first))


def rows_of(heads: int, kv_heads: int, rows: int, committed: int) -> np.ndarray:
    """The reference's rows committed .. committed + rows - 1."""
    if committed + rows <= SHORT:
        return reference(heads, kv_heads)[committed : committed + rows]
    first = min(LONG_COMMITTED)
    return reference(heads, kv_heads, first, LONG - first)[committed - first : committed - first + rows]


def in_sample(rows: int, committed: int) -> bool:
    """A third of the product, with every row count and every committed length in it thrice."""
    return (ROWS.index(rows) + COMMITTED.index(committed)) % 3 == 0


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint16)


def named(case) -> str:
    return getattr(case[0], "name", None) or "-".join(map(str, case))


def assert_rows(heads: int, kv_heads: int, layout: Layout, ptok: int, rows: int, committed: int) -> None:
    p = prompt(heads, kv_heads)
    found = p.attend(p.cache(layout, p256_or(layout, ptok), rows, committed))
    np.testing.assert_array_equal(bits(found), bits(rows_of(heads, kv_heads, rows, committed)))


# --- One row, one result --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", COMMITTED)
@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
@pytest.mark.parametrize("heads", HEADS, ids=named)
def test_any_pass_on_any_cache_gives_the_rows_of_one_long_pass(heads, layout, committed):
    for rows in ROWS:
        if heads == HEADS[0] or in_sample(rows, committed):
            assert_rows(*heads, *layout, rows, committed)


@pytest.mark.slow
@pytest.mark.parametrize("committed", COMMITTED)
@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
@pytest.mark.parametrize("heads", HEADS[1:], ids=named)
def test_the_rest_of_the_product(heads, layout, committed):
    for rows in ROWS:
        if not in_sample(rows, committed):
            assert_rows(*heads, *layout, rows, committed)


@pytest.mark.parametrize("committed", LONG_COMMITTED)
@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
@pytest.mark.parametrize("heads", HEADS, ids=named)
def test_far_rows_too(heads, layout, committed):
    for rows in LONG_ROWS:
        assert_rows(*heads, *layout, rows, committed)


@pytest.mark.parametrize("ptok", PAGE_SIZES)
@pytest.mark.parametrize("heads", HEADS, ids=named)
def test_no_page_size_shows(heads, ptok):
    for rows, committed in PAGE_CASES:
        assert_rows(*heads, paged, ptok, rows, committed)


@pytest.mark.parametrize("chunk, total", [(7, 70), (48, 200), (100, 200)])
def test_chunks_of_any_size_add_up_to_one_pass(chunk, total):
    p = prompt(12, 2)
    passes = [(at, min(chunk, total - at)) for at in range(0, total, chunk)]
    found = np.concatenate([p.attend(p.cache(paged, 48, rows, at)) for at, rows in passes])
    np.testing.assert_array_equal(bits(found), bits(reference(12, 2)[:total]))


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_a_stream_among_others_writes_its_own_rows_only(layout):
    p, sizes = prompt(12, 2), [(9, 50), (33, 7)]
    streams = [
        StreamRows(p.k[: c + r], p.v[: c + r], first, r, c) for first, (r, c) in zip((4, 13), sizes, strict=True)
    ]
    cache = build_cache(*layout, streams)
    q = np.full((50, 12, 256), np.nan, BF16)
    out = Output(q.shape)
    for stream, s in enumerate(streams):
        q[s.first : s.first + s.rows] = p.q[s.committed : s.committed + s.rows]
        launch(prompt_attention, cache, stream, out.array, q, p.scale)
        found = out.array[s.first : s.first + s.rows]
        np.testing.assert_array_equal(bits(found), bits(rows_of(12, 2, s.rows, s.committed)))
    outside = np.r_[0:4, 46:50]
    assert (bits(out.array[outside]) == FILL).all()


@pytest.mark.parametrize("padding", [-1, 0, 10**6])
def test_table_entries_past_the_last_page_are_not_read(padding):
    p = prompt(12, 2)
    found = p.attend(p.cache(paged, 16, 20, 33, padding=padding))
    np.testing.assert_array_equal(bits(found), bits(rows_of(12, 2, 20, 33)))


@pytest.mark.parametrize("D", [64, 128])
def test_smaller_head_dims(D):
    p = prompt(12, 2, D, 300)
    whole = p.attend(p.cache(window, 0, 300, 0))
    exact = oracle(p.q, p.k, p.v, 0, float(p.scale))
    assert bounds.worst_fraction(whole, exact.out, bounds.prompt_attention(exact, D)) <= 1
    for layout, ptok in LAYOUTS:
        np.testing.assert_array_equal(bits(p.attend(p.cache(layout, ptok, 70, 230))), bits(whole[230:]))


@pytest.mark.parametrize("group", [1, 3, 8])
def test_every_number_of_heads_a_block(group):
    p = prompt(group, 1, 256, 90)
    whole = p.attend(p.cache(window, 0, 90, 0))
    exact = oracle(p.q, p.k, p.v, 0, float(p.scale))
    assert bounds.worst_fraction(whole, exact.out, bounds.prompt_attention(exact, 256)) <= 1
    np.testing.assert_array_equal(bits(p.attend(p.cache(paged, 48, 33, 57))), bits(whole[57:]))


@pytest.mark.parametrize(
    "layout, ptok, straddles, lookups",
    [(window, 0, 0, 0), (paged, 48, 2, 8 * 256 + 2 * 16 * 32), (paged, 64, 0, 8 * 256), (paged_p256, 256, 0, 8 * 256)],
)
def test_what_a_block_looks_up(layout, ptok, straddles, lookups):
    """65 keys, two tiles of K and V items: only keys 32 .. 63 cross a page of 48, with 16 rows of 32 pieces."""
    p, blocks = prompt(12, 2), 6
    with checked() as watched:
        p.attend(p.cache(layout, ptok, 17, 48))
    assert (watched.counters["straddles"], watched.counters["lookups"]) == (blocks * straddles, blocks * lookups)


# --- And it is right ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", HEADS, ids=named)
@pytest.mark.parametrize("first, rows", [(0, SHORT), (min(LONG_COMMITTED), LONG - min(LONG_COMMITTED))])
def test_within_the_derived_bound(heads, first, rows):
    p, keys = prompt(*heads), first + rows
    exact = oracle(p.q[first:keys], p.k[:keys], p.v[:keys], first, float(p.scale))
    worst = bounds.worst_fraction(reference(*heads, first, rows), exact.out, bounds.prompt_attention(exact, 256))
    print(f"prompt_attention {heads} rows {first}..{keys - 1}: worst error {worst:.3f} of the bound")
    assert worst <= 1


def test_a_nan_that_is_a_key_shows():
    p = prompt(12, 2)
    cache = p.cache(paged, 48, 17, 48)
    cache.arena[cache.word(0, "v", 20, 1, 5)] = NAN_WORD
    cache.before[:] = cache.arena
    assert np.isnan(p.attend(cache).astype(np.float32)[:, 6:, 10:12]).all()


# --- Faults come out red --------------------------------------------------------------------------------------------


def differs(found: np.ndarray, rows: int, committed: int) -> bool:
    return bool((bits(found) != bits(rows_of(12, 2, rows, committed))).any())


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=named)
def test_red_a_swapped_page_table(layout):
    p, (rows, committed) = prompt(12, 2), (17, 513)
    cache = p.cache(*layout, rows, committed)
    first = int(cache.streams[0, 4])
    cache.pages[[first, first + 1]] = cache.pages[[first + 1, first]]
    assert differs(p.attend(cache), rows, committed)


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_red_one_key_value_changed_by_one_bf16_step(layout):
    p, (rows, committed) = prompt(12, 2), (17, 48)
    cache = p.cache(*layout, rows, committed)
    cache.arena[cache.word(0, "k", 31, 0, 77)] += 1
    cache.before[:] = cache.arena
    assert differs(p.attend(cache), rows, committed)


def test_red_a_causal_limit_one_too_far():
    p, (rows, committed) = prompt(12, 2), (17, 48)
    wrong = mutate(prompt_attention, "committed + row, scale, part=0", "committed + row + 1, scale, part=0")
    found = p.attend(p.cache(window, 0, rows, committed), wrong)
    exact = oracle(
        p.q[committed : committed + rows], p.k[: committed + rows], p.v[: committed + rows], committed, float(p.scale)
    )
    assert differs(found, rows, committed)
    assert bounds.worst_fraction(found, exact.out, bounds.prompt_attention(exact, 256)) > 1


def test_red_no_lookup_for_the_half_past_the_page():
    p, (rows, committed) = prompt(12, 2), (17, 48)
    wrong = mutate(prompt_attention, "slot + row >= ptok and key0", "slot + row >= ptok + ITEM and key0")
    assert differs(p.attend(p.cache(paged, 48, rows, committed), wrong), rows, committed)
    assert not differs(p.attend(p.cache(paged, 64, rows, committed), wrong), rows, committed)


def test_red_the_poison_is_seen():
    p, (rows, committed) = prompt(12, 2), (17, 48)
    wrong = mutate(prompt_attention, "present = key0 + row < keys", "present = key0 + row <= keys")
    assert np.isnan(p.attend(p.cache(window, 0, rows, committed), wrong).astype(np.float32)).any()


@pytest.mark.parametrize(
    "old, new, finding",
    [
        ("    cp_wait(slots(D) - 1)\n", "", "wait"),
        ("    cp_wait(slots(D) - 1)\n    cuda.syncthreads()\n", "    cp_wait(slots(D) - 1)\n", "barrier"),
        ("    cuda.syncthreads()\n    ahead", "    ahead", "barrier"),
    ],
    ids=["no wait", "no barrier before use", "no barrier after use"],
)
def test_red_checked_mode_names_a_missing_wait_or_barrier(old, new, finding):
    p, wrong = prompt(12, 2), mutate(prompt_attention, old, new)
    with checked(), pytest.raises(KernelError, match=f"prompt_attention: .*{finding}"):
        p.attend(p.cache(window, 0, 17, 48), wrong)


# --- The launch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group, expected", [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 8), (12, 4), (16, 8)])
def test_heads_a_block(group, expected):
    assert heads_per_block(group) == expected


@pytest.mark.parametrize("D, ns, kib", [(64, 8, 32), (128, 8, 64), (256, 2, 96)])
def test_slots_and_shared_memory(D, ns, kib):
    assert (slots(D), shared_bytes(D)) == (ns, kib * 1024)


def test_no_rows_launch_nothing():
    assert launch_shape(0, 12, 2, 256)[0] == (0, 6)


@pytest.mark.parametrize(
    "heads, kv_heads, D, word", [(33, 2, 256, "kv_heads"), (24, 0, 256, "kv_heads"), (8, 2, 96, "head_dim")]
)
def test_refused(heads, kv_heads, D, word):
    with pytest.raises(ValueError, match=word):
        launch_shape(16, heads, kv_heads, D)
