"""Tests of tutorial 10's exercises."""

from hashlib import sha256

from backends.arena import PaperArena
from backends.base import Sizes, backend_class
from refengine.lab.exercises import expect
from refengine.serve.prompt_cache import PromptCache
from refengine.verify.attention_bits import Heads


def paper_backend(page_size):
    """A backend with pages and two streams, without memory."""
    return backend_class("paged")(Heads(1, 1, 64).shape, Sizes(64, 2, page_size, spare_pages=16), arena=PaperArena)


def test_keys_as_the_prompt_cache(answers):
    """1. chain: the engine's keys"""
    cache = PromptCache(paper_backend(4))
    for ids in ([], [1, 2, 3], [1, 2, 3, 4], [5, 1, 2, 3, 4, 300, 70000, 8, 9]):
        found = answers.chain(ids, 4, cache.hashed)
        expect(f"chain({ids}, 4, hashed)", list(found), cache.keys(ids))


def test_equal_pages_behind_unequal_ones(answers):
    """1. chain: an equal page behind another page has another key"""
    one, two = (answers.chain([first, 0, 7, 7], 2, lambda data: sha256(data).digest()) for first in (1, 2))
    expect("chain([1, 0, 7, 7], 2, hashed)[2] == chain([2, 0, 7, 7], 2, hashed)[2]", one[2] == two[2], False)


def test_the_longest(answers):
    """2. longest: of several that fit"""
    kept = [(1, 2), (1, 2, 3, 4), (1, 2, 3), (9,)]
    expect(f"longest([1, 2, 3, 4, 5], {kept})", answers.longest([1, 2, 3, 4, 5], kept), 1)
    expect(f"longest([8, 1, 2], {kept})", answers.longest([8, 1, 2], kept), None)


def test_all_tokens_are_compared(answers):
    """2. longest: the last token differs"""
    expect("longest([1, 2, 4, 5], [(1, 2, 3), (1, 2)])", answers.longest([1, 2, 4, 5], [(1, 2, 3), (1, 2)]), 1)


def test_a_token_is_left_to_run(answers):
    """2. longest: the very prompt was kept"""
    expect("longest([1, 2, 3], [(1, 2, 3), (1, 2)])", answers.longest([1, 2, 3], [(1, 2, 3), (1, 2)]), 1)
    expect("longest([1], [(1,)])", answers.longest([1], [(1,)]), None)


def test_begin_by_hand(answers):
    """3. begin: the tutorial's example"""
    expect("begin([0, 1, 2], 10, 4)", answers.begin([0, 1, 2], 10, 4), ([0, 1], 2))


def test_begin_as_the_engine(answers):
    """3. begin: every length, as the engine shares pages"""
    for positions in range(1, 17):
        backend = paper_backend(4)
        first = backend.open(20)
        first.grow(positions)
        first.commit(positions, prompt=True)
        prefix = backend.snapshot(first)
        second = backend.open(20, prefix)
        shared = [page for page in second.pages if page in prefix.pages]
        copied = [page for page in prefix.pages if page not in second.pages]
        found = answers.begin(list(prefix.pages), positions, 4)
        expect(f"begin({prefix.pages}, {positions}, 4)", found, (shared, copied[0] if copied else None))


def test_resume_by_hand(answers):
    """4. resume: the tutorial's example"""
    expect("resume([8, 4, 2, 6, 1], {4: 9.0})", answers.resume([8, 4, 2, 6, 1], {4: 9.0}), (5.5, 1))
    expect("resume([8, 4, 2, 6, 1], {})", answers.resume([8, 4, 2, 6, 1], {}), (5.5, 5))


def test_resume_leaves_a_token(answers):
    """4. resume: states behind the end are of no use"""
    expect("resume([8, 4, 2], {1: 8.0, 3: 6.0, 4: 9.0})", answers.resume([8, 4, 2], {1: 8.0, 3: 6.0, 4: 9.0}), (6.0, 2))
