"""Flash Next's prep and pool: what a layer stores is what rope_store stores, a block is pooled once its last position is
there, and neither passes nor rejected rows leave a trace."""

from __future__ import annotations

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
from kernels_numba.flash_next.turns import Media
from kernels_numba.rope_store import rope_store, rope_table
from kernels_numba.streams import ROWS

BF16 = ml_dtypes.bfloat16
H, HK, D, IH, DI, ROPE, EPS = 4, 2, 64, 2, 64, 16, 1e-6
SHAPE = CacheShape((0,), (), H, HK, D, 0, 0, 0, 0, 0, index_dim=DI)
CONTEXT = 64
HEADS = (2 * H + 2 * HK) * D
GAINS = [np.linspace(0.5, most, n, dtype=np.float32) for most, n in ((1.5, D), (2.5, D), (3.5, DI))]
TABLE = rope_table(CONTEXT, ROPE, 10.0)


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
    fn_attn_prep(q, index_q, rows, *address, *GAINS, TABLE, EPS, HK, made.layout, made.sizes.kv, media)
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
    rope_store(wanted, heads, *address, *GAINS[:2], TABLE, EPS, HK, other.layout, kv)
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
        fn_attn_prep(q, index_q, projected(1), *address, *GAINS, TABLE, EPS, HK, layout.paged)


# --- Pool ---------------------------------------------------------------------------------------------------------------


def pool(made: Backend, batch: Any) -> None:
    most = int(batch.table[:, ROWS].max())
    fn_qsa_pool(made.arena.words, made.pages, made.layer_streams(0, batch), most, GAINS[2], TABLE, EPS, made.layout)


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
