"""The arena: every cache byte of a backend in one array of words, and where each part lies in it. Spec attention §3."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from kernels_numba.fp8 import row_words

POISON = np.uint32(0xFFFFFFFF)
"""What nobody has written: two bf16 NaNs, a float32 NaN."""
ALIGN = 4
"""Words: planes and pages start at multiples of 16 bytes."""


def aligned(words: int) -> int:
    """Words rounded up to 16 bytes."""
    return -(-words // ALIGN) * ALIGN


@dataclass(frozen=True)
class CacheShape:
    """What a backend needs to know of a model.

    attention_layers, linear_layers: layer numbers. heads, kv_heads, head_dim: of full attention. value_heads, value_dim,
    key_dim: of the recurrent state [value_heads, value_dim, key_dim] float32. conv_channels, conv_rows: of the convolution's
    history [conv_rows, conv_channels] bf16. index_dim: of the keys of each attention layer's sparse indexer, bf16, one head (0:
    it has none); index_ratio: positions a block, whose keys are pooled to one; index_heads: of its queries; index_budget: blocks
    that a sparse row reads. ngram_tokens, ngram_rows, ngram_channels: of the
    n-gram branch, whose last tokens [ngram_tokens] int32 and rows [ngram_rows, ngram_channels] bf16 a stream keeps (0: none).
    """

    attention_layers: tuple[int, ...]
    linear_layers: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    value_heads: int
    value_dim: int
    key_dim: int
    conv_channels: int
    conv_rows: int
    index_dim: int = 0
    index_ratio: int = 4
    index_heads: int = 0
    index_budget: int = 0
    ngram_tokens: int = 0
    ngram_rows: int = 0
    ngram_channels: int = 0

    def plane_words(self, positions: int, kv: str = "bf16") -> int:
        """Words of one layer's K (or V) for a page of ``positions``; kv: "bf16" or "fp8"."""
        return aligned(self.kv_heads * positions * row_words(self.head_dim, kv))

    def exponent_words(self, positions: int, kv: str = "bf16") -> int:
        """Words of the exponents of one layer's K (or V); none where the cache is bf16."""
        return aligned(-(-self.kv_heads * positions // 4)) if kv == "fp8" else 0

    def blocks(self, positions: int) -> int:
        """Whole blocks of the indexer in so many positions."""
        return positions // self.index_ratio

    def layer_words(self, positions: int, kv: str = "bf16") -> tuple[int, ...]:
        """Words of one layer's planes in a page, in order: K, V, exponents of K, of V, raw index keys, pooled ones."""
        plane, exponents = self.plane_words(positions, kv), self.exponent_words(positions, kv)
        index, pooled = (aligned(rows * self.index_dim // 2) for rows in (positions, self.blocks(positions)))
        return plane, plane, exponents, exponents, index, pooled

    def page_words(self, positions: int, kv: str = "bf16") -> int:
        """Words of a page: the planes of each attention layer."""
        return len(self.attention_layers) * sum(self.layer_words(positions, kv))

    def planes(self, layer: int, positions: int, kv: str = "bf16") -> tuple[int, ...]:
        """Word offsets of a layer's planes inside a page, as layer_words orders them; 0 for those that there are not."""
        sizes = self.layer_words(positions, kv)
        start = self.attention_layers.index(layer) * sum(sizes)
        return tuple(start + sum(sizes[:n]) if size else 0 for n, size in enumerate(sizes))

    def check_page(self, positions: int) -> None:
        """Raise ValueError for a page that would cut a block of the indexer in two."""
        if self.index_dim and positions % self.index_ratio:
            raise ValueError(
                f"pages of {positions} positions would cut the sparse indexer's blocks of {self.index_ratio}; take a multiple of "
                f"{self.index_ratio}"
            )

    @property
    def state_words(self) -> int:
        """Words of a layer's recurrent state."""
        return aligned(self.value_heads * self.value_dim * self.key_dim)

    @property
    def history_words(self) -> int:
        """Words of a layer's convolution history."""
        return aligned(-(-self.conv_rows * self.conv_channels // 2))

    @property
    def tail_words(self) -> int:
        """Words of the n-gram branch's rows."""
        return aligned(-(-self.ngram_rows * self.ngram_channels // 2))

    @property
    def run_words(self) -> int:
        """Words of a stream's run: each linear layer's state, then its history; the n-gram branch's tokens, then its rows."""
        return self.tails_offset + self.tail_words

    def state_offset(self, layer: int) -> int:
        """Word of a run at which a layer's state starts."""
        return self.linear_layers.index(layer) * (self.state_words + self.history_words)

    def history_offset(self, layer: int) -> int:
        """Word of a run at which a layer's history starts."""
        return self.state_offset(layer) + self.state_words

    @property
    def tokens_offset(self) -> int:
        """Word of a run at which the n-gram branch's tokens start."""
        return len(self.linear_layers) * (self.state_words + self.history_words)

    @property
    def tails_offset(self) -> int:
        """Word of a run at which the n-gram branch's rows start."""
        return self.tokens_offset + aligned(self.ngram_tokens)


def part_words(shape: CacheShape, runs: int, cache_words: int, rows: int) -> dict[str, int]:
    """Words of each part of an arena, in order. Sparse attention has no record: its rows are stored before any attends."""
    rows = 0 if shape.index_dim else rows
    return {
        "cache": aligned(cache_words),
        "runs": runs * shape.run_words,
        "records": len(shape.attention_layers) * 2 * rows * shape.kv_heads * shape.head_dim // 2,
    }


class Arena:
    """Windows or pages from the bottom; above them runs of recurrent states and histories, if they are not pages; the record.

    shape: the model's. cache_words: words for keys and values. runs: how many lie outside the pages. rows: of all windows of
    one decode pass together, at most. xp: numpy or cupy. Everything starts as POISON.
    """

    def __init__(self, shape: CacheShape, runs: int, cache_words: int, rows: int, xp: Any = np):
        self.shape, self.rows = shape, 0 if shape.index_dim else rows
        sizes = part_words(shape, runs, cache_words, rows)
        self.starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
        self.words = xp.full(sum(sizes.values()), POISON, dtype=np.uint32)

    def part(self, name: str, dtype: Any, shape: tuple[int, ...]) -> Any:
        """A part of the arena as an array: the same memory."""
        start = self.starts[name]
        return (
            self.words[start : start + int(np.prod(shape)) * np.dtype(dtype).itemsize // 4].view(dtype).reshape(shape)
        )

    def zero(self, start: int, words: int) -> None:
        """Make words zero."""
        self.words[start : start + words] = 0

    def copy(self, source: int, target: int, words: int) -> None:
        """Copy words to another place, which they do not overlap."""
        self.words[target : target + words] = self.words[source : source + words]

    @cached_property
    def records(self) -> Any:
        """bf16 [attention layers, 2, rows, kv_heads, head_dim]: keys and values of a decode pass's own rows."""
        s = self.shape
        return self.part("records", ml_dtypes.bfloat16, (len(s.attention_layers), 2, self.rows, s.kv_heads, s.head_dim))


class PaperArena(Arena):
    """An arena without memory: for streams that are admitted and released, but never run."""

    def __init__(self, shape: CacheShape, runs: int, cache_words: int, rows: int, xp: Any = np):
        self.starts, self.words = dict.fromkeys(part_words(shape, runs, cache_words, rows), 0), None

    def zero(self, start: int, words: int) -> None:
        """There are no words."""

    def copy(self, source: int, target: int, words: int) -> None:
        """There are no words."""
