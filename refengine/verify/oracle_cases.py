"""The small random models that are held against the public transformers implementation, and what they read.

Between them: head_dims 256, 128 and 64, GQA groups of 6, 2 and 8, rotary dims of a quarter and of a whole head, 3, 2 and
1 value heads a key head, a head of its own and one tied to the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from refengine.checkpoint import make_checkpoint
from refengine.registry import FULL_ATTENTION, LINEAR_ATTENTION, Attention, GatedDeltaNet, Mlp, ModelSpec, Rope, Tokens

SEED = 0
TOKENS = 80
PROMPT_PASSES = (47, 25)
"""Rows of the prompt passes; the other tokens are decoded one by one."""
F, L = FULL_ATTENTION, LINEAR_ATTENTION


@dataclass(frozen=True, eq=False)
class Oracle:
    """What the public implementation makes of a sequence of W tokens, all float32.

    logits, bf16_logits: [W, vocabulary], of a float32 and of a bfloat16 run on the same bfloat16 weights.
    layers: [layers, W, hidden], each layer's output, and head: [W, vocabulary], the logits, of a float32 run in which the
    residual stream is rounded to bfloat16 before each layer and before the final norm: the input of a layer is the
    rounded output of the one before it, so that an engine whose residual stream is bfloat16 can take the very same.
    """

    logits: np.ndarray
    bf16_logits: np.ndarray
    layers: np.ndarray
    head: np.ndarray

    @property
    def parts(self) -> list[np.ndarray]:
        """Each layer's output, then the head's."""
        return [*self.layers, self.head]


def read_oracle(path: Path) -> Oracle:
    """A recorded one (benchmarks/record_oracle.py)."""
    with np.load(path) as file:
        return Oracle(**{field.name: file[field.name] for field in fields(Oracle)})


@dataclass(frozen=True)
class Case:
    """A model and the tokens that it reads."""

    spec: ModelSpec

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def ids(self) -> np.ndarray:
        """Token ids: int32 [TOKENS], the same on every platform."""
        words = np.random.PCG64(SEED).random_raw(TOKENS)
        return (words % np.uint64(self.spec.vocabulary)).astype(np.int32)

    def checkpoint(self, folder: Path) -> Path:
        """Make the model's checkpoint inside ``folder``."""
        return make_checkpoint(self.spec, folder / self.name, SEED)


def small(
    name: str, kinds: tuple[str, ...], hidden: int, tied: bool, attention: Attention, rope: int, heads: tuple[int, int]
) -> Case:
    """heads: key and value heads of the Gated DeltaNet layers."""
    return Case(
        ModelSpec(
            name=name,
            family="qwen3_5",
            hidden=hidden,
            vocabulary=320,
            layers=len(kinds),
            layer_types=kinds,
            norm_eps=1e-6,
            tied_head=tied,
            max_positions=4096,
            attention=attention,
            rope=Rope(rope, 1e7),
            gated_delta_net=GatedDeltaNet(*heads, key_dim=128, value_dim=128, conv_width=4),
            mlp=Mlp(2 * hidden),
            tokens=Tokens("bytes", (256,), 256, ("<|end|>",)),
        )
    )


CASES = (
    small("oracle-d256", (L, F, L), 128, False, Attention(6, 1, 256, True), 64, (1, 3)),
    small("oracle-d128", (L, F), 192, True, Attention(4, 2, 128, True), 32, (2, 4)),
    small("oracle-d64", (F, L, F), 128, False, Attention(8, 1, 64, True), 64, (2, 2)),
)
