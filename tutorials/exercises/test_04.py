"""Tests of tutorial 04's exercises."""

import ml_dtypes
import numpy as np

from kernels_numba.machine import cuda, float32, int64, kernel
from kernels_numba.prompt_attention import row_sum
from refengine.lab.exercises import expect, expect_bits


@kernel
def row_sums(out, p):
    """out[tile] = the prompt kernel's row_sum of p[tile]. out: float32 [tiles]; p: float32 [tiles, 64]. A warp a tile."""
    sums = cuda.local.array(8, float32)  # [8 blocks of 8 columns]: the lane's two columns added
    tile, quad = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x) % 4
    for n in range(8):
        sums[n] = p[tile, 8 * n + 2 * quad] + p[tile, 8 * n + 2 * quad + 1]
    total = row_sum(sums)
    if cuda.threadIdx.x == 0:
        out[tile] = total


def weights(tiles):
    return np.random.default_rng(4).random((tiles, 64), np.float32)


def test_row_sum_adds_up(answers):
    """1. row_sum: whole numbers, where the order does not matter"""
    expect_bits("row_sum(0, 1, .. 63)", answers.row_sum(np.arange(64, dtype=np.float32)), np.float32(2016))


def test_row_sum_is_the_kernel_s(answers):
    """1. row_sum: the bits of the real kernel"""
    p = weights(50)
    wanted = np.zeros(50, np.float32)
    row_sums.at()[50, 32](wanted, p)
    for tile in range(50):
        expect_bits(f"row_sum of tile {tile}", answers.row_sum(p[tile]), wanted[tile])


def paged(x, page_size):
    """(pages, table): the numbers in pages, the first page last; NaN in what is unused."""
    count = -(-len(x) // page_size)
    table = [*range(1, count), 0] if count > 1 else [0]
    pages = np.full((count + 1, page_size), np.nan, np.float32)
    for position, number in enumerate(x):
        pages[table[position // page_size], position % page_size] = number
    return pages, table


def test_paged_sum_of_a_page(answers):
    """2. paged_sum: tiles of 8 in one page"""
    x = np.array([16_777_216, *[1] * 7, *[1] * 8], np.float32)  # the 1s of the first tile are lost
    expect_bits("paged_sum of 16777216 and 15 ones", answers.paged_sum(*paged(x, 16), 16), np.float32(16_777_224))


def test_paged_sum_takes_any_page_size(answers):
    """2. paged_sum: the same bits for every page size"""
    x = weights(2).reshape(-1)[:100]
    tiles = [np.add.accumulate(x[i : i + 8])[-1] for i in range(0, 100, 8)]
    wanted = np.add.accumulate(np.array(tiles, np.float32))[-1]
    for page_size in (1, 3, 8, 12, 16, 48, 128):
        found = answers.paged_sum(*paged(x, page_size), 100)
        expect_bits(f"paged_sum of 100 numbers in pages of {page_size}", found, wanted)


def bf16(*numbers):
    return np.array(numbers, ml_dtypes.bfloat16).reshape(2, 1, -1)


def test_first_difference_none(answers):
    """3. first_difference: equal outputs, NaN among them"""
    a = bf16(1.0, np.nan, 2.0, 3.0)
    expect("first_difference(a, a)", answers.first_difference(a, a.copy()), None)


def test_first_difference_is_the_first(answers):
    """3. first_difference: row, head and dim of the first"""
    found = answers.first_difference(bf16(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), bf16(1.0, 2.0, 3.0, 4.0, 5.5, 6.5))
    expect("first_difference([1 .. 6], [1, 2, 3, 4, 5.5, 6.5])", found, (1, 0, 1, "40A0", "40B0"))


def test_first_difference_of_zeros(answers):
    """3. first_difference: 0.0 and -0.0"""
    found = answers.first_difference(bf16(0.0, 1.0), bf16(-0.0, 1.0))
    expect("first_difference([0.0, 1.0], [-0.0, 1.0])", found, (0, 0, 0, "0000", "8000"))
