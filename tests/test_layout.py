"""The three forms of cache name the same row by one expression, in 64 bits, and cross a page only where they say so."""

from __future__ import annotations

import numpy as np
import pytest

from backends.layout import LAYOUTS, paged, paged_p256, window
from kernels_numba.machine import cuda, int64, kernel


@kernel
def locate(out, positions, pages, base, table, ptok, page_words, *, layout):
    """out[i] = (start, slot) of positions[i], int64 [n, 2], n at most 32."""
    i = int64(cuda.threadIdx.x)
    if i < positions.shape[0]:
        out[i, 0], out[i, 1] = layout.locate(positions[i], base, table, ptok, pages, page_words)


def located(layout, positions, pages, base=0, table=0, ptok=256, page_words=1000):
    out = np.full((len(positions), 2), -1, np.int64)
    args = (np.array(positions, np.int64), np.array(pages, np.int32), base, table, ptok, page_words)
    locate.at(layout=layout)[1, 32](out, *args)
    return [tuple(map(int, row)) for row in out]


def test_a_window_is_one_page():
    assert located(window, [0, 47, 5000], [9], base=64) == [(64, 0), (64, 47), (64, 5000)]


def test_pages_come_from_the_streams_part_of_the_table():
    found = located(paged, [0, 47, 48, 100], [8, 8, 5, 0, 3], base=64, table=2, ptok=48)
    assert found == [(5064, 0), (5064, 47), (64, 0), (3064, 4)]


@pytest.mark.parametrize("position", [0, 255, 256, 257, 511, 512])
def test_p256_is_paged_at_256(position):
    assert located(paged_p256, [position], [4, 2, 7]) == located(paged, [position], [4, 2, 7])


@pytest.mark.parametrize("layout", [paged, paged_p256])
def test_offsets_are_64_bits(layout):
    assert located(layout, [3], [131072], page_words=16384) == [(2147483648, 3)]


@pytest.mark.parametrize("page", [65535, 65536])
def test_page_ids_past_16_bits(page):
    assert located(paged, [0], [page], ptok=1, page_words=8) == [(page * 8, 0)]


def test_layouts_by_name():
    assert {n: (x.straddles, x.page) for n, x in LAYOUTS.items()} == {
        "window": (False, None), "paged": (True, None), "paged_p256": (False, 256), "mixed": (True, None)
    }  # fmt: skip
