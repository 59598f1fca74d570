"""Attention to listed keys gives a row the bits that decode gives it with those keys side by side: on any form of cache, in any
launch, with keys brought ahead or not; and each key is looked up once for a KV head.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from buffers import BF16, assert_same_bits, normal
from paging import StreamRows, build_cache, p256_or

from backends.layout import mixed, paged, paged_p256, window
from kernels_numba.decode_attention import decode_attention
from kernels_numba.decode_plan import chain_tables, plan_decode, row_streams
from kernels_numba.flash_next.attention import attend_listed, sparse_attention
from kernels_numba.flash_next.chunks import shared_bytes
from kernels_numba.flash_next.sparse_plan import plan_sparse
from kernels_numba.machine import checked
from refengine.verify import bounds
from refengine.verify.attention_oracle import attend
from refengine.verify.selection_oracle import listed_keys

LAYOUTS = [(window, 0), (paged, 16), (paged, 48), (paged_p256, 256), (mixed, 48)]
HEADS, D = (6, 2), 64
SCALE = np.float32(D**-0.5)


class Launch:
    """Streams of (rows, committed) with drawn rows and scores. budget: blocks that a sparse row reads."""

    def __init__(self, sizes: list[tuple[int, int]], budget: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.sizes, self.budget = sizes, budget
        self.lines = [[normal(rng, c + r, HEADS[1], D) for _ in "kv"] for r, c in sizes]
        self.ends = [c + n + 1 for r, c in sizes for n in range(r)]
        self.q = normal(rng, len(self.ends), HEADS[0], D)
        self.scores = np.maximum(rng.standard_normal((len(self.ends), max(self.ends) // 4 + 1), np.float32), 0)
        self.lists = [listed_keys(s, end, budget) for s, end in zip(self.scores, self.ends)]
        firsts = np.cumsum([0] + [r for r, _ in sizes])
        self.rows = [StreamRows(k, v, int(f), r, c) for (k, v), f, (r, c) in zip(self.lines, firsts, sizes)]

    def attend(self, layout=window, ptok=0, ahead=False) -> np.ndarray:
        """From scores to rows. bf16 [R, H, D]."""
        cache = build_cache(layout, p256_or(layout, ptok), self.rows)
        plan = plan_sparse(cache.streams, *HEADS, D, self.budget)
        out, scratch = np.zeros(self.q.shape, BF16), np.full(plan.scratch_size, np.nan, np.float32)
        sparse_attention(
            out, self.q, self.scores, cache.arena, cache.pages, cache.streams, row_streams(cache.streams), SCALE,
            np.full(plan.lists, 10**6, np.int32), scratch, plan, layout, ahead=ahead,
        )  # fmt: skip
        cache.assert_untouched()
        return out

    def decoded(self, row: int) -> np.ndarray:
        """A row by decode_attention: its keys side by side, its last one in the window record. bf16 [H, D]."""
        stream = int(np.repeat(np.arange(len(self.sizes)), [r for r, _ in self.sizes])[row])
        k, v = (part[self.lists[row]] for part in self.lines[stream])
        cache = build_cache(window, 0, [StreamRows(k[:-1], v[:-1], 0, 1, len(k) - 1)])
        plan = plan_decode(cache.streams, *HEADS, D)
        out = np.zeros((1, HEADS[0], D), BF16)
        decode_attention(
            out, self.q[row : row + 1], cache.arena, cache.pages, cache.streams, *chain_tables(cache.streams), k[-1:],
            v[-1:], SCALE, np.zeros(plan.scratch_size, np.float32), plan, window,
        )  # fmt: skip
        return out[0]


@pytest.mark.parametrize("sizes, budget", [([(5, 33), (2, 9)], 8), ([(9, 2046)], 512), ([(2, 2990), (3, 700)], 256)])
def test_a_row_has_the_bits_of_decode_with_its_keys_side_by_side(sizes, budget):
    launch = Launch(sizes, budget)
    assert_same_bits(launch.attend(), np.stack([launch.decoded(row) for row in range(len(launch.ends))]))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("layout, ptok", LAYOUTS)
def test_every_form_gives_the_same_bits(layout, ptok, ahead):
    launch = Launch([(3, 1100), (2, 61)], 140)
    assert_same_bits(launch.attend(layout, ptok, ahead), launch.attend())


def test_a_row_does_not_depend_on_the_launch():
    both = Launch([(3, 700), (2, 45)], 10)
    whole = both.attend()
    second = Launch([(2, 45)], 10)
    second.q, second.scores, second.rows = both.q[3:], both.scores[3:], [replace(both.rows[1], first=0)]
    assert_same_bits(second.attend(paged, 48), whole[3:])


def test_within_the_derived_bound():
    launch = Launch([(4, 1500)], 200)
    k, v = launch.lines[0]
    visible = np.stack([np.isin(np.arange(len(k)), own) for own in launch.lists])
    exact = attend(launch.q, k, v, visible, float(SCALE))
    assert bounds.worst_fraction(launch.attend(), exact.out, bounds.sparse_attention(exact, D)) <= 1


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("layout, ptok", LAYOUTS[1:4])
def test_a_key_is_looked_up_once_for_a_kv_head(layout, ptok, ahead):
    launch = Launch([(3, 600)], 140)
    with checked() as seen:
        watched = launch.attend(layout, ptok, ahead)
    assert seen.counters["lookups"] == HEADS[1] * sum(map(len, launch.lists))
    assert_same_bits(watched, launch.attend())


@pytest.mark.parametrize("dims", [64, 128, 256])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_ahead_fits_every_architecture(dims, kv):
    """The least that a block gets is 99 KiB; where keys lie, maxes and sums take 1 KiB beside."""
    assert shared_bytes(dims, kv, ahead=True) + 1024 <= 99 * 1024


@pytest.mark.parametrize(
    "heads, kv_heads, dims, budget, says",
    [
        (6, 2, 64, 0, "budget 0: 1 or more"),
        (34, 2, 64, 8, "1 to 16 query heads"),
        (6, 2, 96, 8, "head_dim 96: decode has"),
    ],
)
def test_a_launch_that_has_no_kernel_is_refused(heads, kv_heads, dims, budget, says):
    cache = build_cache(window, 0, Launch([(1, 40)], 8).rows)
    with pytest.raises(ValueError, match=says):
        plan_sparse(cache.streams, heads, kv_heads, dims, budget)


@pytest.mark.parametrize(
    "what, says",
    [
        ({"out": np.zeros((2, 6, 64), BF16)}, r"out \(2, 6, 64\): the plan is for \(1, 6, 64\)"),
        ({"listed": np.zeros((1, 35), np.int32)}, r"listed \(1, 35\): the plan needs \(1, 36\)"),
        ({"scratch": np.zeros(9, np.float32)}, r"scratch float32 \(9,\): decode needs float32 \[396\]"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(what, says):
    launch = Launch([(1, 40)], 8)
    cache = build_cache(window, 0, launch.rows)
    plan = plan_sparse(cache.streams, *HEADS, D, 8)
    fit = {"out": np.zeros((1, 6, 64), BF16), "listed": np.zeros((1, 36), np.int32)}
    fit |= {"scratch": np.zeros(plan.scratch_size, np.float32), **what}
    place = cache.arena, cache.pages, cache.streams, row_streams(cache.streams), SCALE
    with pytest.raises(ValueError, match=says):
        attend_listed(fit["out"], launch.q, *place, fit["listed"], fit["scratch"], plan, window)
