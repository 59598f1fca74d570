"""The example plug-in keeps its books: whatever is opened, grown and released, its two levels of tables name the right pages."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from backends.base import BackendError, Sizes
from backends.pool import PoolBroken
from refengine.verify.attention_bits import Heads

SHAPE, SIZES = Heads(4, 1, 64).shape, Sizes(context=300, streams=3, page_size=16, shuffle=7)


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "tutorials" / "two_level")
    return importlib.import_module("two_level").TwoLevelBackend(SHAPE, SIZES)


def test_the_books_are_right_after_every_step(backend):
    rng = np.random.default_rng(0)
    streams = []
    for _ in range(60):
        if streams and rng.integers(3) == 0:
            streams.pop(int(rng.integers(len(streams)))).release()
        elif len(streams) < SIZES.streams:
            streams.append(backend.open())
        if streams:
            streams[-1].grow(int(rng.integers(1, SIZES.context + 1)))
        backend.check()
    for stream in streams:
        stream.release()
    backend.check()
    assert (backend.pages == backend.null_page).all() and len(backend.free_leaves) == backend.leaves


def test_a_stream_cannot_grow_past_its_capacity(backend):
    with pytest.raises(BackendError, match="300"):
        backend.open().grow(301)


def exchange_pages(backend, stream):
    first = backend.leaf_start(backend.taken[stream.slot][0])
    backend.pages[[first, first + 1]] = backend.pages[[first + 1, first]]


def forget_to_clear(backend, stream):
    backend.taken[stream.slot].pop()


def lose_a_leaf(backend, stream):
    backend.free_leaves.pop()


@pytest.mark.parametrize("fault", [exchange_pages, forget_to_clear, lose_a_leaf])
def test_a_fault_in_the_books_is_found(backend, fault):
    stream = backend.open()
    stream.grow(200)
    backend.check()
    fault(backend, stream)
    with pytest.raises(PoolBroken, match="two-level: "):
        backend.check()
