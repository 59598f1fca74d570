"""Prompts in a model's own words: runs of tokens, each the one that the model thinks follows. N-grams find their like in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backends.base import PROMPT, Backend, Sizes, backend_class
from refengine.device import Device
from refengine.model import Qwen35, cache_shape

MOST_WORDS = 320
"""Tokens whose followers are asked for: one prompt pass."""
RUN = 24
"""Tokens until a run starts anew, anywhere."""


def followers(model: Qwen35, device: Device) -> list[int]:
    """For each of the first tokens, the one with the largest logit behind it."""
    words = min(model.spec.vocabulary, MOST_WORDS)
    backend: Backend = backend_class("window")(cache_shape(model.spec), Sizes(words), device.xp)
    batch = backend.batch(PROMPT, [(backend.open(), words)])
    ids = device.put(np.arange(words, dtype=np.int32))
    logits = device.get(model.forward(ids, backend, batch, device.put(np.arange(words))))
    return [int(token) for token in logits.argmax(axis=1)]


def own_words(model: Qwen35, device: Device, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """A prompt of each length."""
    follower, rng = followers(model, device), np.random.default_rng(seed)
    return [written(follower, length, rng) for length in lengths]


def written(follower: Sequence[int], length: int, rng: np.random.Generator) -> list[int]:
    """Runs of RUN tokens, each from a random one on, or shorter where a token's follower is not known; it ends with its own
    beginning, so what follows stands in it."""
    again, tokens = min(RUN // 2, length // 3), list[int]()
    while len(tokens) < length - again:
        token, end = int(rng.integers(len(follower))), len(tokens) + RUN
        while token < len(follower) and len(tokens) < end:
            tokens.append(token)
            token = follower[token]
    return tokens[: length - again] + tokens[:again]
