"""Tests of tutorial 09's exercises."""

from backends.arena import PaperArena
from backends.base import Sizes, backend_class
from backends.pool import PagePool, PoolFull
from refengine.lab.exercises import expect
from refengine.serve.paper import PaperStep
from refengine.serve.requests import Request
from refengine.serve.scheduler import Scheduler
from refengine.verify.attention_bits import Heads


def test_pages_by_hand(answers):
    """1. pages_needed: the tutorial's requests"""
    expect("pages_needed(12, 12, 4)", answers.pages_needed(12, 12, 4), 6)
    expect("pages_needed(2, 2, 4)", answers.pages_needed(2, 2, 4), 1)


def test_pages_are_rounded_up_once(answers):
    """1. pages_needed: prompt and reply share a page"""
    expect("pages_needed(5, 3, 8)", answers.pages_needed(5, 3, 8), 1)
    expect("pages_needed(5, 4, 8)", answers.pages_needed(5, 4, 8), 2)


def test_a_run_is_claimed_too(answers):
    """1. pages_needed: a recurrent state"""
    expect("pages_needed(30000, 96, 256, 10)", answers.pages_needed(30000, 96, 256, 10), 128)


def test_admission_by_hand(answers):
    """2. admitted: the tutorial's line"""
    expect("admitted(10, [6, 6, 1])", answers.admitted(10, [6, 6, 1]), 1)
    expect("admitted(10, [6, 1])", answers.admitted(10, [6, 1]), 2)
    expect("admitted(4, [])", answers.admitted(4, []), 0)


def test_admission_as_the_pool(answers):
    """2. admitted: as the engine's pool promises"""
    for line in ([3, 3, 3, 3], [9, 1, 1], [1, 9, 1], [2, 2, 2, 2, 2, 1], [10], [11, 1]):
        pool, count = PagePool(10), 0
        try:
            for pages in line:
                pool.claim(pages)
                count += 1
        except PoolFull:
            pass
        expect(f"admitted(10, {line})", answers.admitted(10, line), count)


def test_waits_by_hand(answers):
    """3. waits: the tutorial's requests"""
    found = answers.waits(10, 4, [(12, 12), (12, 12), (2, 2)])
    expect("waits(10, 4, [(12, 12), (12, 12), (2, 2)])", list(found), [0, 11, 11])


def test_waits_of_one_token(answers):
    """3. waits: replies of one token are over in the round in which they begin"""
    found = answers.waits(1, 4, [(2, 1), (2, 2), (1, 3), (1, 1)])
    expect("waits(1, 4, [(2, 1), (2, 2), (1, 3), (1, 1)])", list(found), [0, 1, 2, 4])


def test_waits_as_the_scheduler(answers):
    """3. waits: as the engine's scheduler"""
    for requests in ([(9, 4), (3, 8), (20, 2), (1, 1), (4, 4)], [(8, 3)] * 7, [(1, 9), (30, 2), (2, 2), (2, 2)]):
        found = answers.waits(10, 4, list(requests))
        expect(f"waits(10, 4, {requests})", list(found), scheduled(requests))


def scheduled(requests):
    """Rounds that each waits in the engine."""
    sizes = Sizes(context=40, streams=len(requests), page_size=4, pool=10)
    backend = backend_class("paged")(Heads(1, 1, 64).shape, sizes, arena=PaperArena)
    scheduler = Scheduler(backend, PaperStep(backend), prompt_rows=1000)
    line = [Request(range(prompt), reply) for prompt, reply in requests]
    for request in line:
        scheduler.submit(request)
    rounds = dict.fromkeys(line, 0)
    while scheduler.waiting or scheduler.live:
        list(scheduler.round())
        for request in scheduler.waiting:
            rounds[request] += 1
    return list(rounds.values())
