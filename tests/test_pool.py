"""The page pool is deterministic, gives nothing twice, and takes nothing when it cannot give all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.paged import page_order
from backends.pool import PagePool, PoolFull


def test_lowest_free_page_first():
    pool = PagePool(5)
    assert pool.take(3) == [0, 1, 2]
    pool.give_back([1, 0])
    assert pool.take(3) == [0, 1, 3] and pool.null_page == 5


def test_an_order_decides_which_page_is_lowest():
    assert PagePool(4, [2, 0, 3, 1]).take(3) == [2, 0, 3]
    with pytest.raises(ValueError, match="each of the 3 pages once"):
        PagePool(3, [0, 0, 1])


def test_too_few_pages_take_nothing():
    pool = PagePool(2)
    with pytest.raises(PoolFull, match="3 pages wanted, 2 of 2 are free"):
        pool.take(3)
    assert pool.take(2) == [0, 1]


@pytest.mark.parametrize("pages", [[0], [7], [1, 1]])
def test_a_page_that_is_not_taken_cannot_be_given_back(pages):
    pool = PagePool(3)
    pool.take(2)
    pool.give_back([0])
    with pytest.raises(ValueError, match="not a page that is taken"):
        pool.give_back(pages)
    assert pool.take(2) == [0, 2]


@given(st.lists(st.integers(0, 4), max_size=40), st.integers(1, 12))
def test_every_page_is_free_or_held_once(steps, count):
    pool, held = PagePool(count, page_order(count, 3)), []
    for step in steps:
        if step and step <= len(pool.free):
            held.append(pool.take(step))
        elif held:
            pool.give_back(held.pop(len(held) // 2))
        taken = [page for pages in held for page in pages]
        assert len(set(taken)) == len(taken) and len(taken) + len(pool.free) == count


@given(st.integers(2, 60), st.integers(0, 50))
def test_a_shuffled_order_does_not_start_in_order(pages, seed):
    order = page_order(pages, seed)
    assert sorted(order) == list(range(pages)) and order[0] > order[1]
