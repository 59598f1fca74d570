"""The scalar path gives, bit for bit, what NumPy gives in the order of the spec; slices shift what has a row for each row, and
nothing else. Without slices a scratch of 128 rows is overrun, and checked mode says where.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from buffers import Output, assert_same_bits, bits, normal
from mutants import module_from
from paging import p256_or

from backends.layout import Layout, mixed, paged, paged_p256, window
from kernels_numba import decode_scalar as module
from kernels_numba.decode_attention import decode_attention
from kernels_numba.decode_plan import chain_tables, plan_decode
from kernels_numba.machine import KernelError, checked
from kernels_numba.scalar_plan import ScalarPlan, pass_tables, plan_scalar, slices
from kernels_numba.streams import COLUMNS, COMMITTED, FIRST
from refengine.contract.caches import Cache, StreamRows, build_cache
from refengine.contract.workbench import NAN
from refengine.verify import bounds
from refengine.verify.attention_oracle import attend
from refengine.verify.fp8_oracle import through_fp8

LAYOUTS = [(window, 0), (paged, 48), (paged_p256, 256), (mixed, 48)]
CHUNK, TILE, F32 = 512, 64, np.float32
GUARD = 64
MANY = np.float32(-1.5)
"""What guards hold: no partial of these tests."""


class Launch:
    """Streams of (rows, committed) laid out, and everything a launch takes. own, kv: as the kernel's."""

    def __init__(
        self, heads, layout: Layout, ptok: int, sizes, own="record", kv="bf16", seed=0, most=128, through=False
    ):
        (self.heads, self.kv_heads, self.D), self.own, self.kv = heads, own, kv
        rng = np.random.default_rng([seed, *heads])
        self.scale, self.sizes, self.layout = np.float32(self.D**-0.5), sizes, layout
        self.lines = [[normal(rng, c + r, self.kv_heads, self.D) for _ in "kv"] for r, c in sizes]
        if kv == "fp8" or through:
            self.lines = [[through_fp8(a) for a in line] for line in self.lines]
        total = sum(rows for rows, _ in sizes)
        self.q = normal(rng, total, self.heads, self.D)
        firsts = np.cumsum([0] + [r for r, _ in sizes])
        held = [
            StreamRows(*(a[: c + r * (own == "cache")] for a in line), int(firsts[n]), r, c)
            for n, (line, (r, c)) in enumerate(zip(self.lines, sizes))
        ]
        self.cache = build_cache(layout, p256_or(layout, ptok), held, kv=kv)
        self.records = [np.concatenate([line[n][c:] for line, (_, c) in zip(self.lines, sizes)]) for n in range(2)]
        self.plan = plan_scalar(self.cache.streams, *heads, own, most)

    def tables(self) -> tuple[Any, Any, Any]:
        """rows, paths, depths."""
        if self.own == "record":
            return chain_tables(self.cache.streams)
        rows, depths = pass_tables(self.cache.streams)
        return rows, None, depths

    def run(self, plan: ScalarPlan | None = None, module: ModuleType = module, tables=None) -> np.ndarray:
        """Every row written once, and nothing around the scratch. bf16 [W, H, D]."""
        plan = plan or self.plan
        self.scratch = np.full(plan.scratch_size + 2 * GUARD, MANY)
        out, before = Output((plan.rows, self.heads, self.D)), self.cache.arena.copy()
        inside = self.scratch[GUARD : len(self.scratch) - GUARD]
        records = self.records if self.own == "record" else (None, None)
        module.scalar_attention(
            out.array, self.q, self.cache.arena, self.cache.pages, self.cache.streams, *(tables or self.tables()),
            *records, self.scale, inside, plan, self.layout, self.kv,
        )  # fmt: skip
        assert (self.scratch[:GUARD] == MANY).all() and (self.scratch[-GUARD:] == MANY).all()
        assert (bits(self.cache.arena) == bits(before)).all()
        return out.checked()

    def at_once(self) -> np.ndarray:
        """One launch over all rows, with a scratch that holds them."""
        return self.run(replace(self.plan, most=max(self.plan.rows, 1)))


SMALL, LEAST = (6, 2, 64), (1, 1, 64)


# --- The order of the spec, in NumPy --------------------------------------------------------------------------------


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    """a · b + c in float32, rounded once: the sum in float64 with its last bit odd where it is not exact."""
    product, c = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)
    even = total.view(np.int64) & 1 == 0
    return np.where((lost != 0) & even, np.nextafter(total, np.copysign(np.inf, lost)), total).astype(F32)


def exp(x: np.ndarray) -> np.ndarray:
    """E of spec numerics §3, for x <= 0."""
    t = F32(x) * F32(1.4426950408889634)
    r = t + F32(12582912.0)
    f = t - (r - F32(12582912.0))
    q = F32(1.559467782e-4)
    for c in (1.3406643411e-3, 9.617692791e-3, 5.5503103882e-2, 2.4022652209e-1, 6.9314724207e-1, 1.0):
        q = fma(q, f, F32(c))
    found = (q.view(np.uint32) + (np.asarray(r).view(np.uint32) << np.uint32(23))).view(F32)
    return np.where(t < -126, F32(0), found)


def chunk_in_numpy(q, k, v, scale):
    """(m, l, o) of up to 512 keys of a row and head, from nothing. q: [D], k, v: [n, D], float32."""
    m, total, o = F32(-np.inf), F32(0), np.zeros(len(q), F32)
    for start in range(0, len(k), TILE):
        keys, values = k[start : start + TILE], v[start : start + TILE]
        s = np.zeros(len(keys), F32)
        for d in range(len(q)):
            s = fma(q[d], keys[:, d], s)
        s = s * scale
        n = np.maximum(m, s.max())
        alpha = F32(0) if m == -np.inf else exp(m - n)[()]
        p = np.zeros(TILE, F32)
        p[: len(s)] = exp(s - n)
        sums = ((p[:16] + p[16:32]) + p[32:48]) + p[48:]
        for apart in (8, 4, 2, 1):
            sums = sums + sums[np.arange(16) ^ apart]
        pv = np.zeros(len(q), F32)
        for key in range(len(keys)):
            pv = fma(p[key], values[key], pv)
        m, total, o = n, fma(total, alpha, sums[0]), fma(o, alpha, pv)
    return m, total, o


def fold(state, part):
    """FOLD of spec attention §2; an empty state is None, a part is not."""
    if state is None:
        return part
    (m, total, o), (cm, cl, co) = state, part
    n = np.maximum(m, cm)
    a, b = exp(m - n)[()], exp(cm - n)[()]
    return n, fma(total, a, cl * b), fma(o, a, co * b)


def row_in_numpy(q, k, v, scale) -> np.ndarray:
    """bf16 [D]: one row and head over its keys: chunks into groups of four, groups into the row."""
    q, k, v = (a.astype(F32) for a in (q, k, v))
    row = None
    for group in range(0, len(k), 4 * CHUNK):
        folded = None
        for start in range(group, min(group + 4 * CHUNK, len(k)), CHUNK):
            folded = fold(folded, chunk_in_numpy(q, k[start : start + CHUNK], v[start : start + CHUNK], scale))
        row = fold(row, folded)
    return (row[2] / row[1]).astype(ml_dtypes.bfloat16)


def assert_partials(on_trial: ModuleType = module) -> None:
    """The float32 partials of every row and head of a window over two chunks."""
    launch = Launch(SMALL, paged, 48, [(3, 575)])
    launch.run(module=on_trial)
    po, pm, pl = launch.plan.carve(launch.scratch[GUARD:-GUARD])
    for row, head, slot in product(range(3), range(6), range(2)):
        keys = slice(CHUNK * slot, min(CHUNK * (slot + 1), 575 + row + 1))
        k, v = (a[keys, head // launch.plan.group].astype(F32) for a in launch.lines[0])
        m, total, o = chunk_in_numpy(launch.q[row, head].astype(F32), k, v, launch.scale)
        assert_same_bits(np.array([pm[slot, row, head], pl[slot, row, head]]), np.array([m, total]))
        assert_same_bits(po[slot, row, head], o)


def test_partials_to_the_last_bit():
    assert_partials()


ORDERS = [
    ("fma(high, bf16_high(k1), fma(low, bf16_low(k1), s1))", "fma(low, bf16_low(k1), fma(high, bf16_high(k1), s1))"),
    ("((s[0] + s[1]) + s[2]) + s[3]", "(s[0] + s[1]) + (s[2] + s[3])"),
    ("x = x + shfl_xor(x, 8)\n    x = x + shfl_xor(x, 4)", "x = x + shfl_xor(x, 4)\n    x = x + shfl_xor(x, 8)"),
    ("high = fma(p, bf16_high(pair), high)", "high = high + p * bf16_high(pair)"),
    ("fma(o[2 * n], alpha, low)", "o[2 * n] * alpha + low"),
]


@pytest.mark.parametrize(("old", "new"), ORDERS, ids=lambda text: text.split("\n")[0])
def test_red_another_order(old, new):
    source = inspect.getsource(module)
    assert source.count(old) == 1
    with pytest.raises(AssertionError, match="elements differ"):
        assert_partials(module_from(source.replace(old, new), module.__name__))


@pytest.mark.parametrize("own", ["record", "cache"])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("heads", [(6, 2, 64), (3, 1, 128), (2, 1, 256)], ids=str)
def test_numpy_in_the_order_of_the_spec(heads, kv, own):
    launch = Launch(heads, paged, 48, [(2, 575), (3, 62)], own, kv)
    found, first = launch.run(), 0
    for (k, v), (rows, committed) in zip(launch.lines, launch.sizes):
        for row in (0, rows - 1):
            head, seen = (row + 1) % heads[0], committed + row + 1
            kv_head = head // (heads[0] // heads[1])
            wanted = row_in_numpy(launch.q[first + row, head], k[:seen, kv_head], v[:seen, kv_head], launch.scale)
            assert_same_bits(found[first + row, head], wanted)
        first += rows


def test_numpy_in_the_order_of_the_spec_over_groups():
    launch = Launch(LEAST, window, 0, [(1, 4700)])
    k, v = launch.lines[0]
    assert_same_bits(launch.run()[0, 0], row_in_numpy(launch.q[0, 0], k[:, 0], v[:, 0], launch.scale))


def test_the_other_path_rounds_otherwise():
    launch = Launch(SMALL, window, 0, [(3, 700)])
    plan, out = plan_decode(launch.cache.streams, *SMALL), np.empty_like(launch.q)
    place = (launch.cache.arena, launch.cache.pages, launch.cache.streams)
    scratch = np.empty(plan.scratch_size, np.float32)
    decode_attention(out, launch.q, *place, *launch.tables(), *launch.records, launch.scale, scratch, plan, window)
    found = launch.run()
    assert (bits(found) != bits(out)).any()
    np.testing.assert_allclose(found.astype(float), out.astype(float), rtol=2**-5, atol=2**-8)


# --- Slices ---------------------------------------------------------------------------------------------------------

SIZES = {
    1: [(1, 70)], 127: [(127, 0)], 128: [(128, 3)], 129: [(100, 40), (29, 500)], 255: [(128, 0), (127, 48)],
    256: [(128, 60), (128, 1)], 257: [(100, 129), (128, 0), (29, 513)], 4096: [(64, 0)] * 64,
}  # fmt: skip


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", SIZES)
def test_slices_of_windows_are_one_launch(rows, kv):
    launch = Launch(LEAST, paged, 48, SIZES[rows], kv=kv)
    assert_same_bits(launch.run(), launch.at_once())


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", [1, 127, 128, 129, 255, 256, 257])
def test_slices_of_a_prompt_pass_are_one_launch(rows, kv):
    launch = Launch(LEAST, *LAYOUTS[rows % 4], [(rows, 450), (40, 7)], "cache", kv)
    assert_same_bits(launch.run(), launch.at_once())


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_slices_of_a_long_prompt_pass_are_one_launch(kv):
    launch = Launch(LEAST, paged, 48, [(4096, 0)], "cache", kv)
    assert_same_bits(launch.run(), launch.at_once())


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda case: case[0].name)
def test_fp8_gives_the_bits_of_the_widened_rows(layout):
    for own in ("record", "cache"):
        narrow, wide = (
            Launch(SMALL, *layout, [(9, 505), (130 if own == "cache" else 128, 3)], own, kv, through=True)
            for kv in ("fp8", "bf16")
        )
        assert_same_bits(narrow.run(), wide.run())


@pytest.mark.parametrize("most", [1, 3, 128])
def test_no_size_of_slices_shows(most):
    launch = Launch(LEAST, paged, 48, [(7, 508), (6, 60)])
    assert_same_bits(launch.run(replace(launch.plan, most=most)), launch.run())


class Recorder:
    """Stands in for a kernel: notes each launch's grid and arguments in a list that kernels share, and runs nothing."""

    def __init__(self, name: str, launches: list[tuple[str, Any, tuple]]):
        self.name, self.launches = name, launches

    def at(self, **_: Any) -> Recorder:
        return self

    def __getitem__(self, launch: tuple) -> Any:
        return lambda *args: self.launches.append((self.name, launch[0], args))


def first_row(view: np.ndarray, whole: np.ndarray) -> int:
    """The row of an array at which a view of its rows starts."""
    apart = view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    row, rest = divmod(apart, whole.strides[0])
    assert rest == 0 and view.base is not None
    return row


def assert_slices(launch: Launch, on_trial: ModuleType = module) -> None:
    """A pair of launches a slice, each on its slice's rows of what has a row for each row, and on the rest as it stands."""
    plan, (rows, paths, depths) = launch.plan, launch.tables()
    launches: list[tuple[str, Any, tuple]] = []
    names = ("decode_scalar", "decode_merge")
    kernels = {name: getattr(on_trial, name) for name in names}
    vars(on_trial).update({name: Recorder(name, launches) for name in names})
    out, scratch = np.empty_like(launch.q), np.empty(plan.scratch_size, np.float32)
    streams, (k, v) = launch.cache.streams, launch.records
    try:
        on_trial.scalar_attention(
            out, launch.q, launch.cache.arena, launch.cache.pages, streams, rows, paths, depths, k, v, launch.scale,
            scratch, plan, launch.layout, "bf16",
        )  # fmt: skip
    finally:
        vars(on_trial).update(kernels)
    wanted = list(slices(plan.rows))
    assert [name for name, _, _ in launches] == [*names] * len(wanted)
    for (first, count), (_, grid, args), (_, merge_grid, merge_args) in zip(wanted, launches[::2], launches[1::2]):
        assert grid == (count, plan.kv_heads, plan.slots) and merge_grid == (count, plan.heads)
        assert [first_row(args[n], whole) for n, whole in ((3, launch.q), (7, rows), (8, paths), (9, depths))] == [
            first
        ] * 4
        assert args[6] is streams and args[10] is k and args[11] is v
        assert [first_row(merge_args[n], whole) for n, whole in ((0, out), (5, rows), (6, depths))] == [first] * 3
        assert merge_args[4] is streams and merge_args[7] is plan.groups
        assert all(args[n] is merge_args[n + 1] for n in range(3))


@pytest.mark.parametrize("rows", SIZES)
def test_what_slices_shift(rows):
    launch = Launch(LEAST, window, 0, SIZES[rows])
    assert_slices(launch)
    counts = [count for _, count in launch.plan.slices()]
    assert counts == [128] * (rows // 128) + [rows % 128] * (rows % 128 > 0)


SHIFTS = [
    ("paths[own_rows], depths[own_rows]\n", "paths, depths[own_rows]\n"),
    ("tables = rows[own_rows]", "tables = rows"),
    ("paths[own_rows], depths[own_rows]\n", "paths[own_rows], depths\n"),
    ("pl, q[own_rows], *place", "pl, q, *place"),
    ("            out[own_rows], po", "            out, po"),
    ("streams, rows[own_rows], depths[own_rows], plan", "streams, rows, depths[own_rows], plan"),
    ("*place, *tables, *record", "arena, pages, streams[first:], *tables, *record"),
]


@pytest.mark.parametrize(("old", "new"), SHIFTS)
def test_red_a_shift_left_out(old, new):
    source = inspect.getsource(module)
    assert source.count(old) == 1
    wrong = module_from(source.replace(old, new), module.__name__)
    with pytest.raises(AssertionError):
        assert_slices(Launch(LEAST, window, 0, SIZES[257]), wrong)
    assert_slices(Launch(LEAST, window, 0, SIZES[257]))


# --- Without slices -------------------------------------------------------------------------------------------------


def test_one_launch_over_a_scratch_of_128_rows_is_named_in_checked_mode():
    launch = Launch(LEAST, window, 0, [(129, 0)], "cache")
    with (
        checked(),
        pytest.raises(KernelError, match=r"decode_scalar: .*index 128 is outside axis 1 .*array p[oml], .*128"),
    ):
        launch.run(replace(launch.plan, sliced=False))
    with checked():
        launch.run()


def test_one_launch_over_a_scratch_of_128_rows_overwrites_the_neighbours_first():
    """Row 128 + i of slot 0 lies where row i of slot 1 does: partials of other rows, until somebody looks."""
    launch = Launch(LEAST, window, 0, [(128, 400), (120, 0)], "cache")
    clean = launch.plan.carve(launch_scratch(launch, launch.plan))[0][1, :100].copy()
    with pytest.raises(KernelError, match="decode_merge: .*index 128 is outside"):
        launch.run(replace(launch.plan, sliced=False))
    overwritten = launch.plan.carve(launch.scratch[GUARD:-GUARD])[0][1, :100]
    assert not np.isin(MANY, overwritten) and (bits(overwritten) != bits(clean)).any(axis=(1, 2)).all()


def launch_scratch(launch: Launch, plan: ScalarPlan) -> np.ndarray:
    """The scratch as the first slice alone leaves it."""
    alone = Launch(LEAST, window, 0, [(128, 400)], "cache")
    alone.run()
    assert alone.plan.partials == plan.partials
    return alone.scratch[GUARD:-GUARD].copy()


def test_257_rows_in_one_launch_are_refused():
    launch = Launch(LEAST, window, 0, [(257, 0)], "cache")
    with pytest.raises(KernelError, match="decode_scalar: .*is outside a global array"):
        launch.run(replace(launch.plan, sliced=False))


# --- And it is right ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("heads", [(24, 4, 256), (12, 1, 64), (4, 2, 128)], ids=str)
def test_within_the_derived_bound(heads, kv):
    launch = Launch(heads, paged, 48, [(3, 1100)], kv=kv)
    (k, v), found = launch.lines[0], launch.run()
    visible = np.arange(1103) <= np.arange(1100, 1103)[:, None]
    exact = attend(launch.q, k, v, visible, float(launch.scale))
    worst = bounds.worst_fraction(found, exact.out, bounds.scalar_attention(exact, heads[2]))
    print(f"scalar {heads} {kv}: worst error {worst:.3f} of the bound")
    assert worst <= 1
    dropped = attend(launch.q, k, v, np.arange(1103) < np.arange(1100, 1103)[:, None], float(launch.scale))
    assert bounds.worst_fraction(found, dropped.out, bounds.scalar_attention(dropped, heads[2])) > 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda case: case[0].name)
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_checked_mode_has_nothing_to_say(layout, kv):
    for own in ("record", "cache"):
        launch = Launch((3, 1, 64), *layout, [(2, 511), (1, 3)], own, kv)
        with checked():
            watched = launch.run()
        assert_same_bits(watched, launch.run())


def test_a_row_that_sees_no_key_gives_zero():
    launch = Launch(LEAST, window, 0, [(2, 0)])
    rows, paths, depths = launch.tables()
    depths[1] = 0
    assert (bits(launch.run(tables=(rows, paths, depths))[1]) == 0).all()


def test_a_nan_that_is_a_key_shows():
    launch = Launch(SMALL, paged, 48, [(3, 530)])
    cache: Cache = launch.cache
    cache.arena[cache.word(0, "v", 520, 1, 5)] = NAN.word
    assert np.isnan(launch.run().astype(np.float32)[:, 3:, 10:12]).all()


def test_ptx_has_each_rounding_that_the_source_writes():
    pytest.importorskip("numba_cuda")
    from kernels_numba.machine.modes import recorded
    from kernels_numba.machine.records import float_operations, ptx_text

    for own, kv in (("record", "fp8"), ("cache", "bf16")):
        launch = Launch(SMALL, paged, 48, [(2, 60)], own, kv)
        with recorded() as recording, pytest.raises(AssertionError, match="not written"):
            launch.run()
        (one,) = (noted for noted in recording.launches if noted.program.name == "decode_scalar")
        text = ptx_text(one.program, one.signature)
        assert float_operations(text).unwanted == {} and ".f64" not in text


# --- The plan -------------------------------------------------------------------------------------------------------


def table(*sizes: tuple[int, int]) -> np.ndarray:
    """The stream table of (rows, committed) in order."""
    firsts = np.cumsum([0] + [rows for rows, _ in sizes])
    rows = [(firsts[n], r, c, 0, -1, c + r, *[0] * (COLUMNS - 6)) for n, (r, c) in enumerate(sizes)]
    return np.array(rows, np.int64).reshape(-1, COLUMNS)


def test_slices_cover_each_row_once():
    for rows in (0, 1, 127, 128, 129, 255, 256, 257, 4096):
        covered = [row for first, count in slices(rows) for row in range(first, first + count)]
        assert covered == [*range(rows)] and all(0 < count <= 128 for _, count in slices(rows))


def test_one_plan_decides_partials_scratch_and_slices():
    plan = plan_scalar(table((257, 300), (5, 1000)), 24, 4, 256, "cache")
    assert (plan.slots, plan.rows, plan.partials) == (2, 262, (2, 128, 24))
    assert plan.scratch_size == 2 * 128 * 24 * 258 and list(plan.slices()) == [(0, 128), (128, 128), (256, 6)]
    po, pm, pl = plan.carve(np.zeros(plan.scratch_size, np.float32))
    assert po.shape == (2, 128, 24, 256) and pm.shape == pl.shape == (2, 128, 24)
    few = plan_scalar(table((3, 300)), 24, 4, 256, "record")
    assert few.partials == (1, 3, 24) and list(few.slices()) == [(0, 3)]
    assert list(replace(plan, sliced=False).slices()) == [(0, 262)]


def test_no_rows_launch_nothing():
    plan = plan_scalar(table((0, 300)), 6, 2, 64, "cache")
    assert (plan.scratch_size, list(plan.slices())) == (0, [])


def test_a_pass_counts_rows_from_its_streams_first():
    rows, depths = pass_tables(table((2, 9), (0, 4), (3, 0)))
    assert rows.tolist() == [0, 0, 2, 2, 2] and depths.tolist() == [1, 2, 1, 2, 3]
    assert depths.dtype == rows.dtype == np.int32 and (FIRST, COMMITTED) == (0, 2)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: plan_scalar(table((129, 0)), 6, 2, 64, "record"), "128 at most, cut it into slices"),
        (lambda: plan_scalar(table((1, 0)), 6, 2, 64, "window"), "own 'window': use one of record, cache"),
        (lambda: plan_scalar(table((1, 0)), 6, 2, 96, "cache"), "head_dim 96"),
        (lambda: plan_scalar(table((1, 0)), 34, 2, 64, "cache"), "16 query heads"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_scratch_too_small_and_an_out_of_another_shape_are_refused():
    launch = Launch(LEAST, window, 0, [(3, 5)])
    with pytest.raises(ValueError, match=r"needs float32 \[198\]"):
        launch.plan.carve(np.zeros(197, np.float32))
    with pytest.raises(ValueError, match="the plan is for"):
        launch.run(replace(launch.plan, heads=2))
