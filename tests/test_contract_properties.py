"""Drawn shapes, page sizes, tables, lengths, streams and seeds: attention shares its twins' bits and touches only its own.

A draw that fails shrinks to few rows, few keys and a small page; its case prints as in the contract's table.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels_numba.fp8 import KV_TYPES
from refengine.contract.attention import AttentionCase
from refengine.contract.backend import BackendCase
from refengine.contract.entries.decode import BARE, CHAIN, TREE, DecodeCase
from refengine.contract.entries.scalar import ScalarCase
from refengine.contract.gates import EXACT, GUARDS, Trial, judge, this_device
from refengine.contract.registry import entry_named
from refengine.verify.attention_bits import Heads

CPU = this_device("cpu")
KEYS = 400
DRAWN = settings(
    max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
MANY = settings(DRAWN, max_examples=400)

page_sizes = st.integers(1, 80) | st.sampled_from([16, 48, 64, 128, 256, 512, 544])
streams = st.lists(st.tuples(st.integers(0, 40), st.integers(0, KEYS)), min_size=1, max_size=3).filter(
    lambda drawn: sum(rows for rows, _ in drawn) > 0
)


@st.composite
def geometries(draw):
    """Groups of 1 to 12 heads, 1 or 2 KV heads; wide heads with few of them."""
    D = draw(st.sampled_from([64, 128, 256]))
    kv_heads = draw(st.integers(1, 2))
    return Heads(kv_heads * draw(st.integers(1, 12 if D == 64 else 4)), kv_heads, D)


shapes = st.sampled_from([CHAIN, TREE, BARE])
kv_types = st.sampled_from(KV_TYPES)
HOW = {
    AttentionCase: st.just({}),
    DecodeCase: st.fixed_dictionaries({"shape": shapes}),
    ScalarCase: st.fixed_dictionaries(
        {"shape": shapes, "own": st.just("record"), "kv": kv_types, "most": st.integers(1, 20)}
    )
    | st.fixed_dictionaries({"own": st.just("cache"), "kv": kv_types, "most": st.integers(1, 20)}),
}
"""What a case of each kind has besides streams on a form of cache."""


@st.composite
def attention_cases(draw, kind=AttentionCase, most_rows=40):
    layout, ptok = draw(st.sampled_from([("window", 0), ("paged", None), ("paged_p256", 256)]))
    drawn = tuple((min(rows, most_rows), committed) for rows, committed in draw(streams))
    ptok = draw(page_sizes) if ptok is None else ptok
    how = draw(HOW[kind])
    return kind(draw(geometries()), layout, ptok, drawn, number=draw(st.integers(0, 5)), **how)


def hold(name: str, case, seed: int) -> None:
    """Gates 2 and 4 of a case."""
    problems = judge(entry_named(name), case, Trial(CPU, seed=seed)).problems
    assert not {EXACT, GUARDS} & set(problems), problems


@DRAWN
@given(attention_cases(), st.integers(0, 2**20))
def test_prompt_attention(case, seed):
    hold("prompt_attention", case, seed)


@DRAWN
@given(attention_cases(DecodeCase, 16), st.integers(0, 2**20))
def test_decode_attention(case, seed):
    hold("decode_attention", case, seed)


@DRAWN
@given(attention_cases(ScalarCase, 16), st.integers(0, 2**20))
def test_decode_scalar(case, seed):
    hold("decode_scalar", case, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, kind, most_rows",
    [("prompt_attention", AttentionCase, 40), ("decode_attention", DecodeCase, 16), ("decode_scalar", ScalarCase, 16)],
)
def test_many_draws(name, kind, most_rows):
    MANY(given(attention_cases(kind, most_rows), st.integers(0, 2**20))(lambda case, seed: hold(name, case, seed)))()


@pytest.mark.parametrize("backend", ["paged", "paged-p256"])
@settings(DRAWN, max_examples=8)
@given(
    phase=st.sampled_from(["prompt", "decode"]),
    heads=st.sampled_from([Heads(1, 1), Heads(3, 1), Heads(4, 2)]),
    ptok=page_sizes,
    drawn=st.lists(st.tuples(st.integers(1, 16), st.integers(0, KEYS)), min_size=1, max_size=3),
    seed=st.integers(0, 2**20),
)
def test_whole_backends(backend, phase, heads, ptok, drawn, seed):
    hold(f"backend {backend}", BackendCase(heads, phase, ptok, tuple(drawn)), seed)
