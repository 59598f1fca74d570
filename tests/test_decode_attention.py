"""A decoded row's bits depend on its own keys alone: not on its window, its neighbours, the cut, or where the cache
keeps rows.

A row of a window equals the same row decoded alone with its ancestors committed; streams of one launch equal each
alone; window, pages of any size and pages of 256 give the same words, within the derived float64 bound; and each
fault planted here goes red.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace

import numpy as np
import pytest
from buffers import Output
from mutants import module_from
from paging import BF16, NAN_WORD, PLANES, Cache, StreamRows, build_cache, p256_or

from backends.layout import Layout, paged, paged_p256, window
from kernels_numba import decode_attention as module
from kernels_numba.decode_attention import decode_attention
from kernels_numba.decode_plan import chain_tables, plan_decode
from kernels_numba.keep import keep
from kernels_numba.machine import KernelError, checked
from kernels_numba.streams import COLUMNS
from refengine.verify import bounds
from refengine.verify.attention_oracle import attend as exact_attention

HEADS = [(12, 2), (8, 2), (16, 2)]
LAYOUTS = [(window, 0), (paged, 48), (paged_p256, 256)]
ROWS = [1, 2, 15, 16]
COMMITTED = [0, 1, 48, 63, 64, 255, 256, 257, 511, 512, 513]
LONG_ROWS, LONG_COMMITTED = [1, 16], [2047, 2048, 2049]
PAGE_SIZES, PAGE_CASES = [1, 16, 48, 64, 256, 544], [(17, 48), (65, 255), (17, 513)]
SHORT = sorted({c + r for c in COMMITTED for r in range(16)} | {c + r for w, c in PAGE_CASES for r in range(w)})
LONG = sorted({c + r for c in LONG_COMMITTED for r in range(16)})
LENGTH = LONG[-1] + 1
GUARD = 64


class Rows:
    """q: bf16 [N, H, D], k, v: bf16 [N, HK, D], unit normal: row n stands at position n, in a cache or in a window."""

    def __init__(self, heads: int, kv_heads: int, D: int, length: int):
        rng = np.random.default_rng([heads, kv_heads, D])
        self.heads, self.kv_heads, self.D = heads, kv_heads, D
        self.scale = np.float32(D**-0.5)
        draw = [rng.standard_normal((length, h, D), np.float32).astype(BF16) for h in (heads, kv_heads, kv_heads)]
        self.q, self.k, self.v = draw

    def cache(self, layout: Layout, ptok: int, sizes: list[tuple[int, int]], **how: int) -> Cache:
        """A cache of streams (rows, committed), their rows of the launch in the order of the streams."""
        firsts = np.cumsum([0] + [rows for rows, _ in sizes])
        streams = [StreamRows(self.k[:c], self.v[:c], int(firsts[n]), rows, c) for n, (rows, c) in enumerate(sizes)]
        return build_cache(layout, ptok, streams, **how)

    def decode(self, cache: Cache, positions=None, tables=None, min_grouped=64, record=None, run=decode_attention):
        """Every row of the launch: written once, nothing else touched. bf16 [W, H, D].

        positions: of the launch's rows (default: those of chains). tables: rows, paths, depths (default: chains).
        record: k, v.
        """
        plan = plan_decode(cache.streams, self.heads, self.kv_heads, self.D, min_grouped)
        positions = chain_positions(cache.streams) if positions is None else positions
        k, v = (self.k[positions], self.v[positions]) if record is None else record
        buffer = np.full(plan.scratch_size + GUARD, np.nan, np.float32)
        out = Output((plan.rows, self.heads, self.D))
        tables = tables or chain_tables(cache.streams)
        run(
            out.array, self.q[positions], cache.arena, cache.pages, cache.streams, *tables, k, v, self.scale,
            buffer[: plan.scratch_size], plan, cache.layout,
        )  # fmt: skip
        cache.assert_untouched()
        assert np.isnan(buffer[plan.scratch_size :]).all(), "written past the scratch"
        assert not np.isnan(buffer[: plan.scratch_size]).all() or not plan.scratch_size
        return out.checked()

    def exact(self, positions: list[int]):
        """Rows at these positions in float64."""
        visible = np.arange(positions[-1] + 1) <= np.array(positions)[:, None]
        last = positions[-1] + 1
        return exact_attention(self.q[positions], self.k[:last], self.v[:last], visible, float(self.scale))


def chain_positions(streams: np.ndarray) -> np.ndarray:
    """The position of each row of a launch of chains."""
    rows, _, depths = chain_tables(streams)
    return streams[rows, 2] + depths - 1


@functools.cache
def data(heads: int, kv_heads: int, D: int = 256, length: int = LENGTH) -> Rows:
    return Rows(heads, kv_heads, D, length)


@functools.cache
def reference(heads: int, kv_heads: int) -> np.ndarray:
    """[N, H, D]: the row at each of SHORT and LONG, a stream of its own that reads a shared window; NaN elsewhere."""
    r, positions = data(heads, kv_heads), np.array(SHORT + LONG)
    cache = r.cache(window, 0, [(1, LENGTH)])
    streams = np.repeat(cache.streams, len(positions), axis=0)
    streams[:, 0], streams[:, 2] = np.arange(len(positions)), positions
    out = np.full(r.q.shape, np.nan, BF16)
    out[positions] = r.decode(replace(cache, streams=streams))
    return out


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint16)


def named(case) -> str:
    return getattr(case[0], "name", None) or "-".join(map(str, case))


def assert_rows(heads, layout, ptok, rows: int, committed: int) -> None:
    found = data(*heads).decode(data(*heads).cache(layout, p256_or(layout, ptok), [(rows, committed)]))
    np.testing.assert_array_equal(bits(found), bits(reference(*heads)[committed : committed + rows]))


# --- One row, one result --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", COMMITTED + LONG_COMMITTED)
@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
@pytest.mark.parametrize("heads", HEADS, ids=named)
def test_any_window_on_any_cache_gives_the_rows_alone(heads, layout, committed):
    cache = data(*heads).cache(layout[0], p256_or(*layout), [(1, committed)])
    for rows in ROWS if committed < LONG_COMMITTED[0] else LONG_ROWS:
        cache.streams[0, 1] = rows
        found = data(*heads).decode(cache)
        np.testing.assert_array_equal(bits(found), bits(reference(*heads)[committed : committed + rows]))


@pytest.mark.parametrize("ptok", PAGE_SIZES)
@pytest.mark.parametrize("heads", HEADS, ids=named)
def test_no_page_size_shows(heads, ptok):
    for rows, committed in PAGE_CASES:
        assert_rows(heads, paged, ptok, rows, committed)


def test_the_heads_of_the_27b():
    r = data(24, 4, 256, 530)
    found = [r.decode(r.cache(layout, ptok, [(3, 511)])) for layout, ptok in LAYOUTS]
    exact = r.exact([511, 512, 513])
    assert bounds.worst_fraction(found[0], exact.out, bounds.decode_attention(exact, 256)) <= 1
    for other in found[1:]:
        np.testing.assert_array_equal(bits(other), bits(found[0]))


@pytest.mark.slow
@pytest.mark.parametrize("ptok", PAGE_SIZES)
@pytest.mark.parametrize("heads", HEADS, ids=named)
def test_the_longest_window(heads, ptok):
    r = data(*heads)
    found, expected = (r.decode(r.cache(layout, ptok, [(128, 513)])) for layout in (paged, window))
    np.testing.assert_array_equal(bits(found), bits(expected))
    exact = r.exact([*range(513, 641)])
    assert bounds.worst_fraction(found, exact.out, bounds.decode_attention(exact, 256)) <= 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_streams_of_one_launch_give_each_alone(layout):
    r, sizes = data(12, 2), [(2, 513), (3, 0), (0, 300), (1, 2049), (0, 0), (16, 64), (1, 511)]
    cache = r.cache(layout[0], p256_or(*layout), sizes)
    order = np.array([5, 3, 6, 0, 1, 4, 2])  # the streams in which the launch's rows follow each other
    cache.streams[order, 0] = np.cumsum([0] + [sizes[s][0] for s in order])[:-1]
    found = r.decode(cache)
    for stream, (rows, committed) in enumerate(sizes):
        if rows:
            alone = r.decode(r.cache(layout[0], p256_or(*layout), [(rows, committed)]))
            first = int(cache.streams[stream, 0])
            np.testing.assert_array_equal(bits(found[first : first + rows]), bits(alone))


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
@pytest.mark.parametrize("committed", [60, 508])
def test_a_row_of_a_window_equals_it_alone_once_its_ancestors_are_kept(layout, committed):
    r, rows, accepted = data(12, 2), 7, 5
    cache = r.cache(layout[0], p256_or(*layout), [(rows, committed + rows)])
    for position in range(committed, committed + rows):
        poison_row(cache, position)
    cache.before[:] = cache.arena
    cache.streams[0, 1:3] = rows, committed
    drafted = r.decode(cache)
    keep_rows(r, cache, accepted)
    cache.before[:] = cache.arena
    cache.streams[0, 1:3] = rows - accepted, committed + accepted
    np.testing.assert_array_equal(bits(r.decode(cache)), bits(drafted[accepted:]))


def keep_rows(r: Rows, cache: Cache, accepted: int) -> None:
    """Keep the first rows of the one stream's chain."""
    _, paths, _ = chain_tables(cache.streams)
    positions = chain_positions(cache.streams)
    last, kept = np.array([accepted - 1], np.int32), np.array([accepted], np.int32)
    records = (r.k[positions], r.v[positions])
    keep(cache.arena, cache.pages, cache.streams, paths, last, kept, *records, accepted, cache.layout)


def poison_row(cache: Cache, position: int) -> None:
    for plane in PLANES:
        for head in range(cache.kv_heads):
            word = cache.word(0, plane, position, head, 0)
            cache.arena[word : word + cache.row_words] = NAN_WORD


def test_a_branch_of_a_tree_equals_the_row_alone_behind_its_ancestors():
    r, committed, parents = data(12, 2), 62, [-1, 0, 0, 2, 1]
    cache = r.cache(paged, 16, [(5, committed)])
    positions = np.arange(committed, committed + 5)  # whose data a row has: any will do
    rows, paths, depths = chain_tables(cache.streams)
    for row in range(5):
        path = [row]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        depths[row], paths[row] = len(path), -1
        paths[row, : len(path)] = path
    found = r.decode(cache, positions, (rows, paths, depths))
    for row in range(5):
        ancestors = [*range(committed), *positions[paths[row, : depths[row] - 1]]]
        streams = [StreamRows(r.k[ancestors], r.v[ancestors], 0, 1, len(ancestors))]
        alone = r.decode(build_cache(window, 0, streams), positions[row : row + 1])
        np.testing.assert_array_equal(bits(alone[0]), bits(found[row]))


@pytest.mark.parametrize("rows, committed", [(3, 2049), (1, 2048)])
def test_groups_folded_in_a_program_or_in_the_merge(rows, committed):
    r = data(12, 2)
    cache = r.cache(paged, 48, [(rows, committed)])
    expected = bits(reference(12, 2)[committed : committed + rows])
    for min_grouped in (0, 10**9):
        np.testing.assert_array_equal(bits(r.decode(cache, min_grouped=min_grouped)), expected)


def test_several_groups():
    r = data(4, 1, 64, 8300)
    cache = r.cache(paged, 48, [(16, 8250), (1, 4095)])
    assert list(plan_decode(cache.streams, 4, 1, 64).groups) == [4, 0]
    found = r.decode(cache)
    for min_grouped in (0, 10**9):
        np.testing.assert_array_equal(bits(r.decode(cache, min_grouped=min_grouped)), bits(found))
    exact = r.exact([*range(8250, 8266)])
    assert bounds.worst_fraction(found[:16], exact.out, bounds.decode_attention(exact, 64)) <= 1


@pytest.mark.parametrize("D", [64, 128])
def test_smaller_head_dims(D):
    r = data(12, 2, D, 600)
    found = [r.decode(r.cache(layout, ptok, [(9, 570)])) for layout, ptok in LAYOUTS]
    exact = r.exact([*range(570, 579)])
    assert bounds.worst_fraction(found[0], exact.out, bounds.decode_attention(exact, D)) <= 1
    for other in found[1:]:
        np.testing.assert_array_equal(bits(other), bits(found[0]))


@pytest.mark.parametrize("group", [1, 3, 16])
def test_any_group_of_heads(group):
    r = data(group, 1, 256, 600)
    found = r.decode(r.cache(paged, 48, [(3, 575)]))
    exact = r.exact([575, 576, 577])
    assert bounds.worst_fraction(found, exact.out, bounds.decode_attention(exact, 256)) <= 1


# --- What is not there is not read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [-1, 0, 10**6])
def test_table_entries_past_the_last_page_are_not_read(padding):
    r = data(12, 2)
    found = r.decode(r.cache(paged, 16, [(2, 513)], padding=padding))
    np.testing.assert_array_equal(bits(found), bits(reference(12, 2)[513:515]))


@pytest.mark.parametrize("fill", [-1, 0, 10**6])
def test_path_entries_past_a_rows_depth_are_not_read(fill):
    r = data(12, 2)
    cache = r.cache(paged, 48, [(15, 63)])
    rows, paths, depths = chain_tables(cache.streams)
    paths[np.arange(128) >= depths[:, None]] = fill
    np.testing.assert_array_equal(bits(r.decode(cache, tables=(rows, paths, depths))), bits(reference(12, 2)[63:78]))


@pytest.mark.parametrize("poison", [np.nan, np.inf, 6e4])
def test_a_row_does_not_read_the_rows_after_it(poison):
    r, keys = data(12, 2), slice(48, 64)
    k, v = r.k[keys].copy(), r.v[keys].copy()
    k[9:], v[9:] = poison, poison
    found = r.decode(r.cache(paged, 16, [(16, 48)]), record=(k, v))
    np.testing.assert_array_equal(bits(found[:9]), bits(reference(12, 2)[48:57]))


@pytest.mark.parametrize("plane", ["k", "v"])
@pytest.mark.parametrize("position", [20, 520])
def test_a_nan_that_is_a_key_shows(plane, position):
    r = data(12, 2)
    cache = r.cache(paged, 48, [(3, 530)])
    cache.arena[cache.word(0, plane, position, 1, 5)] = NAN_WORD
    cache.before[:] = cache.arena
    assert np.isnan(r.decode(cache).astype(np.float32)[:, 6:, 10:12]).all()


def test_a_row_that_sees_no_key_gives_zero():
    r = data(12, 2)
    cache = r.cache(window, 0, [(2, 0), (1, 0)])
    rows, paths, depths = chain_tables(cache.streams)
    depths[2] = 0
    found = r.decode(cache, np.array([0, 1, 0]), (rows, paths, depths))
    np.testing.assert_array_equal(bits(found[:2]), bits(reference(12, 2)[:2]))
    assert (bits(found[2]) == 0).all()


# --- And it is right ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", HEADS, ids=named)
@pytest.mark.parametrize("positions", [SHORT, LONG], ids=["short", "long"])
def test_within_the_derived_bound(heads, positions):
    exact = data(*heads).exact(positions)
    worst = bounds.worst_fraction(reference(*heads)[positions], exact.out, bounds.decode_attention(exact, 256))
    print(f"decode {heads} rows {positions[0]}..{positions[-1]}: worst error {worst:.3f} of the bound")
    assert worst <= 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_checked_mode_has_nothing_to_say(layout):
    r = data(8, 2, 64, 600)
    cache = r.cache(layout[0], p256_or(*layout), [(2, 571), (1, 3)])
    with checked() as seen:
        watched = r.decode(cache)
    np.testing.assert_array_equal(bits(watched), bits(r.decode(cache)))
    assert bool(seen.counters["straddles"]) is layout[0].straddles
    assert bool(seen.counters["lookups"]) is (layout[0] is not window)


# --- Faults come out red --------------------------------------------------------------------------------------------


def differs(found: np.ndarray, committed: int) -> bool:
    return bool((bits(found) != bits(reference(12, 2)[committed : committed + len(found)])).any())


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=named)
@pytest.mark.parametrize("pages", [(0, 1), (-2, -1)])
def test_red_a_swapped_page_table(layout, pages):
    r = data(12, 2)
    cache = r.cache(*layout, [(2, 513)])
    first, count = int(cache.streams[0, 4]), -(-513 // layout[1])
    a, b = (first + page % count for page in pages)
    cache.pages[[a, b]] = cache.pages[[b, a]]
    assert differs(r.decode(cache), 513)


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
@pytest.mark.parametrize("position", [31, 512])
def test_red_one_key_value_changed_by_one_bf16_step(layout, position):
    r = data(12, 2)
    cache = r.cache(*layout, [(2, 513)])
    cache.arena[cache.word(0, "k", position, 0, 77)] += 1
    cache.before[:] = cache.arena
    assert differs(r.decode(cache), 513)


def mutant(old: str, new: str):
    """decode_attention with a planted fault, in the one place that has the text."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in the module"
    return module_from(source.replace(old, new), module.__name__).decode_attention


def test_red_a_causal_limit_one_too_far():
    r = data(12, 2)
    cache = r.cache(window, 0, [(16, 48)])
    rows, paths, depths = chain_tables(cache.streams)
    paths[:] = np.minimum(np.arange(128), 15)
    wrong = mutant("limit = committed + depths[row]", "limit = committed + depths[row] + 1")
    found = r.decode(cache, tables=(rows, paths, depths), run=wrong)
    exact = r.exact([*range(48, 64)])
    assert differs(found, 48)
    assert bounds.worst_fraction(found, exact.out, bounds.decode_attention(exact, 256)) > 1


@pytest.mark.parametrize("committed", [48, 512, 513])
def test_red_a_stale_length(committed):
    r = data(12, 2)
    cache = r.cache(window, 0, [(2, committed)])
    positions = chain_positions(cache.streams)
    cache.streams[0, 2] -= 1
    assert differs(r.decode(cache, positions), committed)


def test_red_a_page_kept_too_long():
    r = data(12, 2)
    wrong = mutant("page_end = key - slot + ptok", "page_end = key - slot + ptok + 1")
    assert differs(r.decode(r.cache(paged, 48, [(1, 513)]), run=wrong), 513)
    assert not differs(r.decode(r.cache(window, 0, [(1, 513)]), run=wrong), 513)


def test_red_the_poison_is_seen():
    r = data(12, 2)
    wrong = mutant("    if key < committed:\n        cp_async16", "    if key <= committed:\n        cp_async16")
    assert differs(r.decode(r.cache(window, 0, [(1, 48)]), run=wrong), 48)


@pytest.mark.parametrize("committed, kernel", [(599, "decode_rows"), (200, "decode_partial")])
def test_red_a_barrier_removed(committed, kernel):
    r = data(8, 2, 64, 600)
    wrong = mutant("    cp_wait(1)\n    cuda.syncthreads()\n", "    cp_wait(1)\n")
    with checked(), pytest.raises(KernelError, match=kernel):
        r.decode(r.cache(window, 0, [(1, committed)]), run=wrong)


def test_red_a_wait_removed():
    r = data(8, 2, 64, 600)
    wrong = mutant("    cp_wait(1)\n", "    pass\n")
    with checked(), pytest.raises(KernelError, match="decode_rows.*wait"):
        r.decode(r.cache(window, 0, [(1, 599)]), run=wrong)


# --- The plan -------------------------------------------------------------------------------------------------------


def table(*sizes: tuple[int, int]) -> np.ndarray:
    """The stream table of (rows, committed) in order."""
    firsts = np.cumsum([0] + [rows for rows, _ in sizes])
    return np.array(
        [(firsts[n], r, c, 0, -1, c + r, *[0] * (COLUMNS - 6)) for n, (r, c) in enumerate(sizes)], np.int64
    ).reshape(-1, COLUMNS)


@pytest.mark.parametrize(
    "rows, committed, groups, slots",
    [(0, 700, 0, 0), (1, 0, 0, 1), (1, 512, 0, 2), (15, 8192, 0, 17), (16, 8192, 4, 5), (64, 2559, 1, 3)],
)
def test_slots(rows, committed, groups, slots):
    plan = plan_decode(table((rows, committed)), 24, 4, 256)
    assert (list(plan.groups), plan.slots) == ([groups], (slots,))


def test_items_are_key_major():
    plan = plan_decode(table((1, 100), (4, 1100), (0, 900)), 12, 2, 256)
    assert plan.items.tolist() == [[1, 0, -1], [1, 16, -1], [1, 0, -2], [1, 16, -2]]
    grouped = plan_decode(table((4, 2600)), 12, 2, 256, min_grouped=4)
    assert grouped.items.tolist() == [[0, 0, 0], [0, 16, 0], [0, 0, -1], [0, 16, -1]]
    assert (grouped.rows_grid, grouped.partial_grid, grouped.merge_grid) == (8, (4, 2, 2), (4, 12))


def test_no_streams_and_no_rows_are_a_plan():
    for streams in (table(), table((0, 5000))):
        plan = plan_decode(streams, 12, 2, 256)
        assert (plan.rows, plan.scratch_size, len(plan.items)) == (0, 0, 0)


@pytest.mark.parametrize(
    "heads, kv_heads, D, word",
    [(33, 2, 256, "kv_heads"), (24, 0, 256, "kv_heads"), (34, 2, 256, "16"), (8, 2, 96, "head_dim")],
)
def test_heads_refused(heads, kv_heads, D, word):
    with pytest.raises(ValueError, match=word):
        plan_decode(table((1, 1)), heads, kv_heads, D)


def test_rows_refused():
    with pytest.raises(ValueError, match="128 at most"):
        plan_decode(table((129, 7)), 12, 2, 256)
    overlapping = table((3, 7), (2, 5))
    overlapping[1, 0] = 2
    with pytest.raises(ValueError, match="each once"):
        plan_decode(overlapping, 12, 2, 256)


def test_scratch_too_small_is_refused_and_left_alone():
    plan = plan_decode(table((3, 700)), 12, 2, 256)
    scratch = np.full(plan.scratch_size - 1, np.nan, np.float32)
    with pytest.raises(ValueError, match="scratch"):
        plan.carve(scratch)
    assert np.isnan(scratch).all()
