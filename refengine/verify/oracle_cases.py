"""The small random models that are held against the public transformers implementation, and what they read.

Between them: head_dims 256, 128 and 64, GQA groups of 6, 2 and 8, rotary dims of a quarter and of a whole head, 3, 2 and
1 value heads a key head, a head of its own and one tied to the embedding. One with experts. Two of Flash Next, whose budgets of a
few blocks make most rows sparse: 4 and 2 streams, GQA groups of 12 and 2, the n-gram branch in another layer; end tokens among
what they read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import numpy as np

from refengine.checkpoint import make_checkpoint
from refengine.registry import FULL_ATTENTION, LINEAR_ATTENTION, Attention, GatedDeltaNet, Mlp, ModelSpec, Rope, Tokens
from refengine.registry.parts import Experts, Hyper, Indexer, Ngrams

SEED = 0
TOKENS = 80
PROMPT_PASSES = (47, 25)
"""Rows of the prompt passes; the other tokens are decoded one by one."""
END_AT = (0, 29, 30, 61, 70)
"""Where Flash Next reads end tokens: first, two in a row, in prompt passes."""
F, L = FULL_ATTENTION, LINEAR_ATTENTION


@dataclass(frozen=True, eq=False)
class Oracle:
    """What the public implementation makes of a sequence of W tokens, float32, and what it chose there.

    logits, bf16_logits: [W, vocabulary], of a float32 and of a bfloat16 run on the same bfloat16 weights.
    layers: [layers, W, the residual's width], each layer's output, and head: [W, vocabulary], the logits, of a float32 run in
    which the residual stream is rounded to bfloat16 before each layer and before the final norm: the input of a layer is the
    rounded output of the one before it, so that an engine whose residual stream is bfloat16 can take the very same.
    experts: [layers, W, K], the picks of that run; keys: bool [layers, W, W], what each row of a sparse layer reads, nothing in
    other layers. No layers in a model without.
    """

    logits: np.ndarray
    bf16_logits: np.ndarray
    layers: np.ndarray
    head: np.ndarray
    experts: np.ndarray = field(default_factory=partial(np.zeros, (0, 0, 0), np.int8))
    keys: np.ndarray = field(default_factory=partial(np.zeros, (0, 0, 0), bool))

    def choices(self, number: int) -> dict[str, np.ndarray]:
        """What a layer chose, as choices.py has it; nothing for the head."""
        found = {}
        if number < len(self.experts):
            found["experts"] = self.experts[number].astype(np.int32)
        if number < len(self.keys) and self.keys[number].any():
            found["keys"] = self.keys[number]
        return found

    @property
    def parts(self) -> list[np.ndarray]:
        """Each layer's output, then the head's."""
        return [*self.layers, self.head]


def read_oracle(path: Path) -> Oracle:
    """A recorded one (benchmarks/record_oracle.py)."""
    with np.load(path) as file:
        return Oracle(**{one.name: file[one.name] for one in fields(Oracle) if one.name in file})


@dataclass(frozen=True)
class Case:
    """A model and the tokens that it reads."""

    spec: ModelSpec

    @property
    def chooses(self) -> bool:
        """Whether its layers choose experts or keys."""
        return self.spec.experts is not None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def ids(self) -> np.ndarray:
        """Token ids: int32 [TOKENS], the same on every platform."""
        words = np.random.PCG64(SEED).random_raw(TOKENS)
        ids = (words % np.uint64(self.spec.vocabulary)).astype(np.int32)
        if self.spec.ngrams is not None:
            ids[list(END_AT)] = self.spec.ngrams.end
        return ids

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


def with_experts(case: Case, experts: Experts, width: int) -> Case:
    """The same with experts, and a shared one of that width, in place of its MLPs."""
    return Case(replace(case.spec, family="qwen3_5_moe", mlp=Mlp(width), experts=experts))


def flash_next(case: Case, mlp: Mlp, experts: Experts, indexer: Indexer, hyper: Hyper, ngrams: Ngrams) -> Case:
    """A Flash Next of these parts and the case's others."""
    spec = replace(case.spec, family="qwen4_exp", gated_delta_net=replace(case.spec.gated_delta_net, gate="sigmoid"))
    return Case(replace(spec, mlp=mlp, experts=experts, indexer=indexer, hyper=hyper, ngrams=ngrams))


def small_ngrams(layer: int, width: int, heads: int) -> Ngrams:
    return Ngrams(layer, width, size=3, heads=heads, base=500, divisor=128, parts=4, seed=1234, end=256, conv_width=4)


DENSE = (
    small("oracle-d256", (L, F, L), 128, False, Attention(6, 1, 256, True), 64, (1, 3)),
    small("oracle-d128", (L, F), 192, True, Attention(4, 2, 128, True), 32, (2, 4)),
    small("oracle-d64", (F, L, F), 128, False, Attention(8, 1, 64, True), 64, (2, 2)),
)
MOE = with_experts(
    small("oracle-moe", (L, F), 128, False, Attention(4, 2, 128, True), 32, (2, 4)), Experts(8, 3, 64), width=96
)
FLASH_NEXT = (
    flash_next(
        small("oracle-flash", (L, L, F), 128, False, Attention(12, 1, 256, True), 64, (1, 3)),
        Mlp(64), Experts(8, 2, 64), Indexer(4, 128, 16, 4), Hyper(4, 32), small_ngrams(1, 128, 8),
    ),
    flash_next(
        small("oracle-two-streams", (L, F), 192, False, Attention(4, 2, 64, True), 64, (2, 2)),
        Mlp(48), Experts(12, 4, 32), Indexer(2, 64, 24, 4), Hyper(2, 16), small_ngrams(0, 96, 4),
    ),
)  # fmt: skip
CASES = (*DENSE, MOE, *FLASH_NEXT)
