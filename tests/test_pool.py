"""The page pool is deterministic, keeps what it promised, counts holders right, and takes nothing when it cannot give all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.paged import page_order, pool_order
from backends.pool import Claim, PagePool, PoolBroken, PoolFull


def books(pool: PagePool) -> tuple:
    """All that a refused call must leave as it is."""
    return pool.holders.tolist(), [(claim.left, list(claim.run)) for claim in pool.claims]


def refused(kind: type[Exception], words: str, call: Callable[[], object], pool: PagePool) -> None:
    before = books(pool)
    with pytest.raises(kind, match=words):
        call()
    assert books(pool) == before


# --- Which pages ------------------------------------------------------------------------------------------------------


def test_lowest_free_page_first():
    pool = PagePool(5)
    assert pool.take(3) == [0, 1, 2]
    pool.give_back([1, 0])
    assert pool.take(3) == [0, 1, 3] and pool.null_page == 5


def test_runs_come_from_the_top_and_lie_in_a_row():
    pool = PagePool(9)
    assert pool.take_run(2) == [7, 8] and pool.take_run(3) == [4, 5, 6]
    pool.give_back([7, 8])
    assert pool.take_run(3) == [1, 2, 3] and pool.take_run(1) == [8] and pool.take(2) == [0, 7]


def test_a_claim_takes_its_run_at_once_and_its_pages_lowest_first_later():
    pool = PagePool(8)
    claim = pool.claim(3, 2)
    assert (claim.run, claim.left, pool.free, pool.promised, pool.available) == ([6, 7], 3, 6, 3, 3)
    assert pool.take(1) == [0] and claim.take(2) == [1, 2]
    assert (claim.left, pool.free, pool.promised, pool.available) == (1, 3, 1, 2)


def test_nothing_is_a_claim_a_run_and_a_share_too():
    pool = PagePool(2)
    claim = pool.claim(0, 0)
    assert (claim.run, claim.take(0), pool.take(0), pool.take_run(0), pool.free) == ([], [], [], [], 2)
    pool.share([])
    pool.give_back([])
    claim.release()
    pool.check([])


def test_an_order_decides_which_page_is_lowest_and_no_run():
    pool = PagePool(4, [2, 0, 3, 1])
    assert pool.take_run(1) == [3] and pool.take(3) == [2, 0, 1]
    with pytest.raises(ValueError, match="each of the 3 pages once"):
        PagePool(3, [0, 0, 1])


@given(st.integers(2, 60), st.integers(0, 50))
def test_a_shuffled_order_does_not_start_in_order(pages, seed):
    order = page_order(pages, seed)
    assert sorted(order) == list(range(pages)) and order[0] > order[1]
    assert pool_order(pages + 3, pages, seed) == [*order, pages, pages + 1, pages + 2]


# --- Refusals change nothing ------------------------------------------------------------------------------------------


def test_too_few_pages_take_nothing():
    pool = PagePool(4)
    pool.claim(1, 1)
    for call in (lambda: pool.take(3), lambda: pool.claim(3), lambda: pool.claim(2, 1), lambda: pool.take_run(3)):
        refused(PoolFull, "3 pages wanted, 3 of 4 are free, 1 of them promised", call, pool)
    assert pool.take(2) == [0, 1]


def test_pages_that_lie_apart_are_no_run():
    pool = PagePool(4)
    pool.take(4)
    pool.give_back([0, 2])
    for call in (lambda: pool.take_run(2), lambda: pool.claim(0, 2)):
        refused(PoolFull, "2 pages in a row wanted, 2 of 4 are free, not in a row", call, pool)


def test_a_claim_gives_what_was_promised_and_no_more():
    pool = PagePool(4)
    claim = pool.claim(2)
    assert pool.take(2) == [0, 1]
    refused(PoolFull, "1 page wanted, 2 of 4 are free, 2 of them promised", lambda: pool.take(1), pool)
    refused(PoolFull, "3 pages wanted, 2 are left of what was claimed", lambda: claim.take(3), pool)
    assert claim.take(2) == [2, 3] and pool.promised == 0


def test_a_claim_is_released_once():
    pool = PagePool(4)
    claim = pool.claim(2, 1)
    claim.release()
    assert (pool.free, pool.promised, pool.claims) == (4, 0, [])
    refused(ValueError, "not in list", claim.release, pool)


@pytest.mark.parametrize("pages", [[0], [7], [-1], [1, 1], [1, 2, 0]])
@pytest.mark.parametrize("call", ["give_back", "share"])
def test_a_page_that_is_not_taken_is_neither_given_back_nor_shared(call, pages):
    pool = PagePool(3)
    pool.take(2)
    pool.give_back([0])
    refused(ValueError, "not a page that is taken", lambda: getattr(pool, call)(pages), pool)
    assert pool.take(2) == [0, 2]


# --- Holders ----------------------------------------------------------------------------------------------------------


def test_a_page_is_free_once_its_last_holder_gave_it_back():
    pool = PagePool(3)
    (page,) = pool.take(1)
    pool.share([page])
    pool.share([page])
    for left in (2, 1, 0):
        pool.give_back([page])
        assert pool.holders[page] == left and pool.free == (2 if left else 3)
    refused(ValueError, "page 0: not a page that is taken", lambda: pool.give_back([page]), pool)


def test_slots_freed_one_by_one_in_odd_order_free_each_page_once():
    """Pages of 4 whose slots end in any order: a page goes back with its last one, and the second time is refused."""
    pool, freed = PagePool(3), [0, 0, 0]
    pages = pool.take(3)
    for slot in (5, 0, 11, 2, 7, 1, 9, 4, 3, 10, 6, 8):
        freed[slot // 4] += 1
        if freed[slot // 4] == 4:
            pool.give_back([pages[slot // 4]])
        assert pool.free == freed.count(4) <= pool.count
    refused(ValueError, "not a page that is taken", lambda: pool.give_back(pages), pool)


# --- check finds what is broken ---------------------------------------------------------------------------------------


def filled() -> tuple[PagePool, list[list[int]], Claim]:
    """A pool of 8 pages, the pages that each of two holders has, a shared one among them, and a claim."""
    pool = PagePool(8)
    claim = pool.claim(3, 2)
    first, second = pool.take(1), claim.take(1)
    pool.share(first)
    return pool, [first, [*first, *second], claim.run], claim


def test_check_is_content_with_what_is_right():
    pool, held, _ = filled()
    pool.check(held)


def lost(pool: PagePool, held: list[list[int]], claim: Claim) -> None:
    held[1].pop()


def freed_while_mapped(pool: PagePool, held: list[list[int]], claim: Claim) -> None:
    pool.holders[1] = 0


def counted_twice(pool: PagePool, held: list[list[int]], claim: Claim) -> None:
    pool.share([0])


def shared_uncounted(pool: PagePool, held: list[list[int]], claim: Claim) -> None:
    held.append([6])


def null_page_held(pool: PagePool, held: list[list[int]], claim: Claim) -> None:
    held[0].append(pool.null_page)


def negative(pool: PagePool, held: list[list[int]], claim: Claim) -> None:
    pool.holders[5] = -1


def promised_too_much(pool: PagePool, held: list[list[int]], claim: Claim) -> None:
    claim.left = 5


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (lost, "page 1: 1 holders on the books, 0 in fact"),
        (freed_while_mapped, "page 1: 0 holders on the books, 1 in fact"),
        (counted_twice, "page 0: 3 holders on the books, 2 in fact"),
        (shared_uncounted, "page 6: 1 holders on the books, 2 in fact"),
        (null_page_held, "page 8: held, and none of the pool's 8 pages"),
        (negative, "page 5: -1 holders on the books, 0 in fact"),
        (promised_too_much, "5 pages are promised, 4 are free"),
    ],
)
def test_check_finds_each_corruption(plant, words):
    pool, held, claim = filled()
    plant(pool, held, claim)
    with pytest.raises(PoolBroken, match=words):
        pool.check(held)


# --- Anything, in any order -------------------------------------------------------------------------------------------

STEPS = st.lists(st.tuples(st.sampled_from(["take", "claim", "grow", "share", "end"]), st.integers(0, 4)), max_size=40)


@given(STEPS, st.integers(1, 12))
def test_every_page_is_free_or_held_by_those_who_hold_it(steps, count):
    pool, held, claims = PagePool(count, page_order(count, 3)), [], []
    for what, n in steps:
        try:
            if what == "take":
                held.append(pool.take(n))
            elif what == "claim":
                claims.append((pool.claim(n, n // 2), []))
            elif claims and what == "grow":
                claims[-1][1].extend(claims[-1][0].take(n))
            elif held and what == "share":
                pool.share(held[n % len(held)])
                held.append(list(held[n % len(held)]))
            elif claims and what == "end" and n % 2:
                claim, pages = claims.pop(n % len(claims))
                claim.release()
                pool.give_back(pages)
            elif held and what == "end":
                pool.give_back(held.pop(n % len(held)))
        except PoolFull:
            assert not fits(pool, what, n, claims[-1][0].left if what == "grow" else 0)
        pages = [*held, *(pages for _, pages in claims), *(claim.run for claim, _ in claims)]
        pool.check(pages)
        assert len({page for some in pages for page in some}) + pool.free == count
        assert pool.promised == sum(claim.left for claim, _ in claims) <= pool.free


def fits(pool: PagePool, what: str, n: int, left: int) -> bool:
    """Whether a step that was refused could have been done; left: of the claim that grows."""
    if what == "grow":
        return n <= left
    longest_run = max(map(len, "".join("x" if holders else "." for holders in pool.holders).split("x")))
    return n <= pool.available if what == "take" else n + n // 2 <= pool.available and n // 2 <= longest_run
