"""Flash Next's prep, pool and scores: what a layer stores is what rope_store stores, a block is pooled once its last position is
there, and no row sees it before."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from buffers import assert_same_bits

from backends import layout
from backends.arena import CacheShape
from backends.base import PROMPT, Backend, Sizes, Stream, backend_class
from kernels_numba.flash_next.prep import fn_attn_prep
from kernels_numba.flash_next.turns import Media
from kernels_numba.rope_store import rope_store, rope_table

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
