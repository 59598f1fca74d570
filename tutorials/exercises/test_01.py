"""Tests of tutorial 01's exercises."""

import numpy as np

from refengine.lab.exercises import expect, expect_close
from refengine.registry import load_model
from refengine.verify.attention_oracle import prompt_attention


def test_bytes_of_one_token(answers):
    """1. cache_bytes: one token"""
    expect("cache_bytes(16, 4, 256, 1)", answers.cache_bytes(16, 4, 256, 1), 65_536)
    expect("cache_bytes(1, 1, 64, 1, 1)", answers.cache_bytes(1, 1, 64, 1, 1), 128)


def test_bytes_of_real_models(answers):
    """1. cache_bytes: a model's longest text"""
    for name in ("qwen3.5-tiny", "qwen3.5-0.8b", "qwen3.8-27b"):
        model = load_model(name)
        layers, heads, dim = len(model.attention_layers), model.attention.kv_heads, model.attention.head_dim
        found = answers.cache_bytes(layers, heads, dim, model.max_positions)
        wanted = model.kv_bytes_per_token() * model.max_positions
        expect(f"cache_bytes({layers}, {heads}, {dim}, {model.max_positions})", found, wanted)


def test_attend_by_hand(answers):
    """2. attend: the tutorial's example"""
    root = np.sqrt(2.0)  # takes the scale out again
    q, k = np.array([root, 0.0]), np.array([[0.0, 5.0], [np.log(2), 3.0], [0.0, 1.0]])
    found = answers.attend(q, k, np.array([[4.0, 0.0], [0.0, 8.0], [4.0, 4.0]]))
    expect_close("attend([sqrt(2), 0], k, v)", found, np.array([2.0, 5.0]), 1e-12)


def test_attend_large_scores(answers):
    """2. attend: scores of 1,000 and more"""
    k, v = np.array([[1000.0], [1000.0], [-1000.0]]), np.array([[1.0], [3.0], [9.0]])
    expect_close(
        "attend([2], k, v) with scores of 2,000", answers.attend(np.array([2.0]), k, v), np.array([2.0]), 1e-12
    )


def test_step_grows(answers):
    """3. step: the cache grows by the new token"""
    cache = []
    first = answers.step(cache, np.ones(2), np.ones(2), np.array([5.0, 7.0]))
    expect("len(cache) after one step", len(cache), 1)
    expect_close("step of the first token", first, np.array([5.0, 7.0]), 1e-12)


def test_step_by_step_is_all_at_once(answers):
    """3. step: token by token gives what all at once gives"""
    q, k, v = np.random.default_rng(0).standard_normal((3, 20, 1, 8))
    wanted = prompt_attention(q, k, v, committed=0, scale=8**-0.5).out
    cache = []
    for token in range(20):
        found = answers.step(cache, q[token, 0], k[token, 0], v[token, 0])
        expect_close(f"step of token {token}", found, wanted[token, 0], 1e-12)
