"""What the entries of Gated DeltaNet share: heads, streams of a launch, their slots among slots of nobody. Spec attention §5."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from kernels_numba.streams import COLUMNS, FIRST
from kernels_numba.streams import ROWS as ROWS_COLUMN
from refengine.contract.entry import Inputs
from refengine.contract.workbench import BF16, Array, Poison

GDN = "kernels_numba.gated_delta_net"
HEAD = 128
KEPT = 3
"""Rows of the convolution's input that a stream keeps."""
SPARE_SLOTS = 2
"""Slots that no stream of the launch has."""
UNUSED = -7
"""In columns of the stream table that no kernel here reads."""
PIECES = (1, 33, 31, 65)
"""Lengths of the pieces into which a stream is cut, over and over."""


@dataclass(frozen=True)
class Heads:
    """HK key heads and HV value heads, a multiple."""

    key: int
    value: int

    @property
    def channels(self) -> int:
        """C, the channels [q | k | v] of the convolution."""
        return (2 * self.key + self.value) * HEAD

    @property
    def columns(self) -> int:
        """Of the input projection: [q | k | v | z | b | a]."""
        return self.channels + self.value * HEAD + 2 * self.value

    def __str__(self) -> str:
        return f"HK={self.key} HV={self.value}"


TINY, ODD, REAL = Heads(2, 6), Heads(1, 3), Heads(16, 48)


@dataclass(frozen=True)
class StreamsCase:
    """Streams of one launch, each of some rows; none: it takes no part. gap: rows of nobody before and after each stream's.

    draw: a draw of its own, whatever the seed.
    """

    heads: Heads
    rows: tuple[int, ...]
    gap: int = 0
    draw: int = 0

    @property
    def firsts(self) -> list[int]:
        """First row of each stream in the launch."""
        before = np.cumsum([0, *self.rows])[:-1]
        return [int(n) + self.gap * (s + 1) for s, n in enumerate(before)]

    @property
    def total(self) -> int:
        """Rows of the launch."""
        return sum(self.rows) + self.gap * (len(self.rows) + 1)

    @property
    def parts(self) -> Iterator[tuple[int, int, int]]:
        """(stream, first row, row after its last) of streams that have rows."""
        return ((s, a, a + n) for s, (a, n) in enumerate(zip(self.firsts, self.rows, strict=True)) if n)

    @property
    def owned(self) -> Array:
        """bool [total]: rows of a stream."""
        owned = np.zeros(self.total, bool)
        for _, start, stop in self.parts:
            owned[start:stop] = True
        return owned

    def table(self) -> Array:
        """The stream table: int64 [S, 11]."""
        streams = np.full((len(self.rows), COLUMNS), UNUSED, np.int64)
        streams[:, FIRST], streams[:, ROWS_COLUMN] = self.firsts, self.rows
        return streams

    def slots(self, seed: int) -> Array:
        """A slot a stream, in no order: int32 [S]."""
        order = np.random.default_rng((seed, len(self.rows))).permutation(len(self.rows) + SPARE_SLOTS)
        return order[: len(self.rows)].astype(np.int32)

    def written(self, slots: Array) -> Array:
        """bool [slots]: slots of streams that have rows."""
        return np.isin(np.arange(len(slots) + SPARE_SLOTS), slots[[s for s, _, _ in self.parts]])

    def __str__(self) -> str:
        apart = f" gap={self.gap}" * (self.gap > 0) + f" draw={self.draw}" * (self.draw > 0)
        return f"{self.heads} rows={','.join(map(str, self.rows))}{apart}"


def drawn_as(case: Any, seed: int) -> int:
    """The seed of a case's numbers: its own draw or the run's."""
    return 2**32 - case.draw if case.draw else seed


def swap_slots(inputs: Inputs) -> None:
    """The first stream gets the last one's slot, and the other way round."""
    inputs["slots"][[0, -1]] = inputs["slots"][[-1, 0]]


def scattered(rows: Array, held: Array, poison: Poison) -> Array:
    """Rows where ``held`` (bool) is true, in order; poison elsewhere."""
    whole = poisoned(poison, (len(held), *rows.shape[1:]), rows.dtype)
    whole[held] = rows
    return whole


def poisoned(poison: Poison, shape: tuple[int, ...], dtype: type | np.dtype = BF16) -> Array:
    """An array of poison."""
    return poison.filled(int(np.prod(shape)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)


def pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Rows start .. stop in pieces."""
    for length in cycle(PIECES):
        if start >= stop:
            return
        yield start, min(start + length, stop)
        start += length
