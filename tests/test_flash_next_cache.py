"""Flash Next's prep, pool and scores: what a layer stores is what rope_store stores, a block is pooled once its last position is
there, neither passes nor rejected rows leave a trace, and scores have the sums that they are said to have."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from buffers import assert_same_bits

from backends import layout
from backends.arena import CacheShape
from backends.base import PROMPT, Backend, Sizes, Stream, backend_class
from kernels_numba.flash_next.pool import fn_qsa_pool
from kernels_numba.flash_next.prep import fn_attn_prep
from kernels_numba.flash_next.scores import fn_qsa_scores
from kernels_numba.flash_next.turns import Media
from kernels_numba.machine import checked
from kernels_numba.machine.modes import recorded
from kernels_numba.rope_store import rope_store, rope_table
from kernels_numba.streams import COLUMNS, COMMITTED, POOLED_PLANE, PTOK, ROWS, TABLE
from refengine.contract.entry import product_modules
from refengine.contract.gates import this_device
from refengine.contract.registry import entries
from refengine.contract.workbench import NAN, Workbench

BF16 = ml_dtypes.bfloat16
H, HK, D, IH, DI, ROPE, EPS = 4, 2, 64, 2, 64, 16, 1e-6
SHAPE = CacheShape((0,), (), H, HK, D, 0, 0, 0, 0, 0, index_dim=DI, index_heads=IH, index_budget=8)
CONTEXT = 64
HEADS = (2 * H + 2 * HK) * D
GAINS = [np.linspace(0.5, most, n, dtype=np.float32) for most, n in ((1.5, D), (2.5, D), (3.5, DI))]
COS_SIN = rope_table(CONTEXT, ROPE, 10.0)


def projected(rows: int, seed: int = 0) -> np.ndarray:
    """bf16 [rows, columns]."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, HEADS + (IH + 1) * DI), np.float32).astype(BF16)


def opened(name: str = "paged", size: int = 16, kv: str = "bf16") -> tuple[Backend, Stream]:
    made = backend_class(name)(SHAPE, Sizes(CONTEXT, 2, size, 16, 3, 7, kv))
    made.open()
    return made, made.open()


def prep(made: Backend, batch: Any, rows: np.ndarray, media: Media | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(q, index_q) of a pass."""
    q, index_q = np.zeros((len(rows), H, D), BF16), np.zeros((len(rows), IH, DI), BF16)
    address = made.arena.words, made.pages, made.layer_streams(0, batch), batch.owners
    fn_attn_prep(q, index_q, rows, *address, *GAINS, COS_SIN, EPS, HK, made.layout, made.sizes.kv, media)
    return q, index_q


@pytest.mark.parametrize("kv", ("bf16", "fp8"))
@pytest.mark.parametrize("name", ("window", "paged", "mixed"))
def test_prep_gives_the_bits_of_rope_store(name, kv):
    rows = projected(21)
    made, stream = opened(name, kv=kv)
    first = made.batch(PROMPT, [(stream, 21)])
    q, _ = prep(made, first, rows)
    made.finish(first)
    other, twin = opened(name, kv=kv)
    batch = other.batch(PROMPT, [(twin, 21)])
    wanted, heads = np.zeros_like(q), np.ascontiguousarray(rows[:, :HEADS])
    address = other.arena.words, other.pages, other.layer_streams(0, batch), batch.owners
    rope_store(wanted, heads, *address, *GAINS[:2], COS_SIN, EPS, HK, other.layout, kv)
    assert_same_bits(q, wanted)
    other.finish(batch)
    found, stored = stream.save(), twin.save()
    assert_same_bits(found.rows, stored.rows)
    assert kv == "bf16" or found.exponents.tobytes() == stored.exponents.tobytes()
    assert_same_bits(found.index[0], rows[:, -DI:])


def test_a_stream_of_media_whose_axes_are_its_positions_has_the_bits_of_text():
    rows, kept = projected(9), []
    for media in (
        None,
        Media(np.array([[1, 9, 5]]), np.arange(-1, 9, dtype=np.int32)[:, None].repeat(3, 1), (4, 2, 2)),
    ):
        made, stream = opened()
        batch = made.batch(PROMPT, [(stream, 9)])
        queries = prep(made, batch, rows, media)
        made.finish(batch)
        kept.append((*queries, stream.save().rows))
    for text, turned in zip(*kept, strict=True):
        assert_same_bits(turned, text)


def test_each_axis_turns_its_own_pairs():
    """One axis at a time is off: queries change in the pairs of its section, and in no others."""
    rows, sections = projected(1), (4, 2, 2)
    owned = {0: {0, 3, 6, 7}, 1: {1, 4}, 2: {2, 5}}
    made, stream = opened()
    batch = made.batch(PROMPT, [(stream, 1)])
    straight, _ = prep(made, batch, rows, Media(np.array([[0, 1, 0]]), np.full((1, 3), 7, np.int32), sections))
    for axis, pairs in owned.items():
        axes = np.full((1, 3), 7, np.int32)
        axes[0, axis] = 30
        q, _ = prep(made, batch, rows, Media(np.array([[0, 1, 0]]), axes, sections))
        changed = np.flatnonzero((q != straight).any(axis=(0, 1)))
        assert {int(d) % 8 for d in changed} == pairs and changed.max() < ROPE


def test_dims_that_no_kernel_has_are_refused_by_name():
    made, stream = opened()
    address = (
        made.arena.words,
        made.pages,
        made.layer_streams(0, made.batch(PROMPT, [(stream, 1)])),
        np.zeros(1, np.int32),
    )
    q, index_q = np.zeros((1, H, D), BF16), np.zeros((1, IH, 96), BF16)
    with pytest.raises(ValueError, match="^index_dim 96: "):
        fn_attn_prep(q, index_q, projected(1), *address, *GAINS, COS_SIN, EPS, HK, layout.paged)


# --- Pool ---------------------------------------------------------------------------------------------------------------


def pool(made: Backend, batch: Any) -> None:
    most = int(batch.table[:, ROWS].max())
    fn_qsa_pool(made.arena.words, made.pages, made.layer_streams(0, batch), most, GAINS[2], COS_SIN, EPS, made.layout)


def read(made: Backend, stream: Stream, rows: np.ndarray, committed: int | None = None) -> None:
    """A pass: prep and pool. committed: how many of its rows are accepted."""
    batch = made.batch(PROMPT, [(stream, len(rows))])
    prep(made, batch, rows)
    pool(made, batch)
    made.finish(batch)
    if committed is not None:
        stream.committed -= len(rows) - committed


@pytest.mark.parametrize("name, size", [("window", 16), ("paged", 4), ("paged", 16), ("paged-p256", 0), ("mixed", 48)])
@pytest.mark.parametrize("cuts", [(41,), (1,) * 41, (12, 29), (13, 28), (14, 27), (15, 26), (3, 2, 7, 1, 28)])
def test_how_a_prompt_is_cut_leaves_no_trace_in_raw_or_pooled_keys(name, size, cuts):
    rows = projected(41)
    made, stream = opened("window")
    read(made, stream, rows)
    whole = stream.save()
    made, stream = opened(name, size or 16)
    for start, count in zip(np.cumsum((0, *cuts)), cuts, strict=False):
        read(made, stream, rows[start : start + count])
    found = stream.save()
    assert found.pooled.shape == (1, 10, DI) and np.isfinite(found.pooled.astype(np.float32)).all()
    for name, array in whole.arrays.items():
        assert_same_bits(found.arrays[name], array)


@pytest.mark.parametrize("accepted", range(6))
def test_rejected_rows_of_a_window_leave_no_trace(accepted):
    """Drafts that complete a block, of which some are accepted; then other rows in their places."""
    rows, drafts = projected(30), projected(6, seed=1)
    drafts[:accepted] = rows[13 : 13 + accepted]
    made, stream = opened()
    read(made, stream, rows[:13])
    read(made, stream, drafts, accepted)
    read(made, stream, rows[13 + accepted :])
    other, twin = opened("window")
    read(other, twin, rows)
    for name, array in twin.save().arrays.items():
        assert_same_bits(stream.save().arrays[name], array)


def test_a_kept_state_goes_on_in_the_middle_of_a_block_and_pools_to_the_same_bits():
    rows = projected(30)
    made, stream = opened("window")
    read(made, stream, rows[:18])
    kept = stream.save()
    read(made, stream, rows[18:])
    for name, size in (("paged", 4), ("paged", 48), ("mixed", 16)):
        other = backend_class(name)(SHAPE, Sizes(CONTEXT, 2, size, 16, 3, 7))
        other.open()
        again = other.restore(kept)
        read(other, again, rows[18:])
        assert_same_bits(again.save().pooled, stream.save().pooled)
    assert kept.pooled.shape[1] == 4 and stream.save().pooled.shape[1] == 7


def test_pooling_again_gives_the_same_bits():
    made, stream = opened()
    read(made, stream, projected(30))
    before = stream.save()
    stream.committed = 0
    batch = made.batch(PROMPT, [(stream, 30)])
    pooled = made.arena.words.copy()
    pool(made, batch)
    assert made.arena.words.tobytes() == pooled.tobytes()
    made.finish(batch)
    assert_same_bits(stream.save().pooled, before.pooled)


# --- Scores -------------------------------------------------------------------------------------------------------------


def scored(queries: np.ndarray, keys: np.ndarray, rows: int = 1) -> np.ndarray:
    """float32 [rows, blocks + 1]: scores of a window's last rows. queries: bf16 [rows, IH, DI]; keys: bf16 [blocks, DI]."""
    arena = np.full(4 + keys.size // 2, 0xFFB5FFB5, np.uint32)
    arena[4:] = keys.view(np.uint32).reshape(-1)
    row = np.zeros((1, COLUMNS), np.int64)
    row[0, [COMMITTED, TABLE, PTOK, POOLED_PLANE]] = 4 * len(keys) - rows, -1, 4 * len(keys), 4
    scores = np.full((rows, len(keys) + 1), -1, np.float32)
    fn_qsa_scores(scores, queries, arena, np.zeros(1, np.int32), row, np.zeros(rows, np.int32), layout.window)
    return scores


def exact_fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """a · b + c of bf16 values a, b, rounded once."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = np.float32(float(exact))
    around = sorted({near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))})
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))


def in_order(query: np.ndarray, key: np.ndarray) -> np.float32:
    """A score as its module states it: lanes of eight dims, exchanges, heads from zero, one division."""
    total = np.float32(0)
    for head in query.astype(np.float32):
        lanes = []
        for q, k in zip(head.reshape(-1, 8), key.astype(np.float32).reshape(-1, 8), strict=True):
            part = q[0] * k[0]
            for a, b in zip(q[1:], k[1:], strict=True):
                part = exact_fma(a, b, part)
            lanes.append(part)
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
        total = total + max(lanes[0], np.float32(0))
    return total / np.sqrt(np.float32(len(key)))


@pytest.mark.parametrize("dims", (64, 128))
@pytest.mark.parametrize("heads", (1, 4))
def test_sums_have_the_order_that_they_are_said_to_have(dims, heads):
    rng = np.random.default_rng(dims + heads)
    query, keys = (rng.standard_normal(shape, np.float32).astype(BF16) for shape in ((1, heads, dims), (7, dims)))
    found = scored(query, keys)
    assert_same_bits(found[0, :7], np.array([in_order(query[0], key) for key in keys], np.float32))
    assert np.float32(11.313708498984761).view(np.uint32) == 0x413504F3 == np.sqrt(np.float32(128)).view(np.uint32)


def test_scores_below_zero_are_zeros_without_a_sign():
    query, keys = np.ones((1, 2, 64), BF16), -np.arange(5 * 64, dtype=np.float32).reshape(5, 64).astype(BF16)
    assert scored(query, keys)[0, :5].tobytes() == np.zeros(5, np.float32).tobytes()


def test_rows_of_a_window_see_blocks_that_are_complete_at_their_positions():
    """Seven rows end with block 3: the first ones do not see the blocks that later ones complete."""
    rng = np.random.default_rng(0)
    query, keys = (rng.standard_normal(shape, np.float32).astype(BF16) for shape in ((7, 2, 64), (4, 64)))
    found, last = scored(query, keys, 7), scored(query[-1:], keys)
    assert (found != -1).sum(axis=1).tolist() == [2, 2, 3, 3, 3, 3, 4]
    assert_same_bits(found[-1:], last)


def test_no_blocks_are_no_launch_and_other_dims_are_refused():
    scored(np.ones((1, 2, 64), BF16), np.ones((1, 64), BF16))
    args: list[Any] = [
        np.zeros(1, np.uint32),
        np.zeros(1, np.int32),
        np.zeros((1, COLUMNS), np.int64),
        np.zeros(1, np.int32),
    ]
    fn_qsa_scores(np.zeros((1, 0), np.float32), np.ones((1, 2, 64), BF16), *args, layout.window)
    with pytest.raises(ValueError, match="^index_dim 32: the sparse indexer has 64 and 128$"):
        fn_qsa_scores(np.zeros((1, 1), np.float32), np.ones((1, 2, 32), BF16), *args, layout.window)


# --- Page lookups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, size, pages", [("window", 16, 0), ("paged", 4, 1), ("paged", 48, 1), ("mixed", 48, 1)])
def test_lookups_are_one_a_stored_row_and_head_one_a_block(name, size, pages):
    """Of a warp's 32 threads where a warp takes the row or the block; of one thread where scores share it."""
    made, stream = opened(name, size)
    batch = made.batch(PROMPT, [(stream, 29)])
    with checked() as seen:
        _, index_q = prep(made, batch, projected(29))
    assert seen.counters["lookups"] == pages * 32 * 29 * (HK + 1)
    with checked() as seen:
        pool(made, batch)
    assert seen.counters["lookups"] == pages * 32 * (29 // 4)
    address = made.arena.words, made.pages, made.layer_streams(0, batch), batch.owners
    with checked() as seen:
        fn_qsa_scores(np.zeros((29, 7), np.float32), index_q, *address, made.layout)
    assert seen.counters["lookups"] == pages * sum((position + 1) // 4 for position in range(29))


# --- On a GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("fn_attn_prep", "fn_qsa_pool", "fn_qsa_scores"))
def test_ptx_has_each_rounding_that_the_source_writes(name):
    """On pages, the rows of media where there are such; on windows and pages, with rows of several words a lane."""
    pytest.importorskip("numba_cuda")
    from kernels_numba.machine.records import float_operations, ptx_text

    entry = entries()[name]
    for case in (
        entry.control_cases()[1],
        replace(entry.control_cases()[-1], layout="mixed", streams=((3, 5), (2, 14))),
    ):
        with recorded() as recording:
            entry.launch(case, entry.inputs(case, NAN, 0), Workbench(this_device("cpu"), NAN), product_modules(entry))
        (one,) = recording.launches
        text = ptx_text(one.program, one.signature)
        assert float_operations(text).unwanted == {} and ".f64" not in text
        assert ("fma.rn.f32" in text) == (name == "fn_qsa_scores")
