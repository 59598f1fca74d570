"""Tests of tutorial 02's exercises."""

import numpy as np

from refengine.lab.exercises import expect
from refengine.lab.page_walk import PageWalk


def test_place_by_hand(answers):
    """1. place: the tutorial's example"""
    expect("place(6, 4, [4, 1, 0])", answers.place(6, 4, [4, 1, 0]), (1, 2))
    expect("place(50, 48, [4, 2, 0, 3])", answers.place(50, 48, [4, 2, 0, 3]), (2, 2))


def test_place_as_the_kernels(answers):
    """1. place: every position, as the engine's kernels find it"""
    for page_size in (48, 256):
        walk = PageWalk(page_size)
        for position in range(walk.positions):
            wanted = tuple(int(n) for n in walk.places[position])
            found = answers.place(position, page_size, walk.table)
            expect(f"place({position}, {page_size}, {walk.table})", tuple(found), wanted)


def test_gather(answers):
    """2. gather: a text in pages of 48"""
    rows = np.arange(100 * 2.0).reshape(100, 2)
    table, pages = [3, 0, 5], np.full((7, 48, 2), np.nan)
    for position in range(100):
        pages[table[position // 48], position % 48] = rows[position]
    expect("gather(pages, [3, 0, 5], 100)", answers.gather(pages, table, 100), rows)


def test_gather_reads_no_more(answers):
    """2. gather: entries that are not needed name no page"""
    rows = np.arange(10.0).reshape(10, 1)
    pages = np.full((2, 16, 1), np.nan)
    pages[1, :10] = rows
    expect("gather(pages, [1, 99, 99], 10)", answers.gather(pages, [1, 99, 99], 10), rows)


def test_items_of_48(answers):
    """3. pages_of_item: pages of 48, where item 1 straddles"""
    table = [4, 2, 0, 3]
    for item, wanted in enumerate([[4], [4, 2], [2], [0], [0, 3], [3]]):
        expect(f"pages_of_item({item}, 48, {table})", list(answers.pages_of_item(item, 48, table)), wanted)


def test_items_of_small_pages(answers):
    """3. pages_of_item: more than two pages"""
    expect(
        "pages_of_item(1, 10, [9, 8, 7, 6, 5, 4, 3])",
        list(answers.pages_of_item(1, 10, [9, 8, 7, 6, 5, 4, 3])),
        [6, 5, 4, 3],
    )
    expect("pages_of_item(1, 16, [9, 8, 7, 6])", list(answers.pages_of_item(1, 16, [9, 8, 7, 6])), [7, 6])
