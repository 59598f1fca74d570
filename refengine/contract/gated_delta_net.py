"""What the entries of Gated DeltaNet share: heads, streams of a launch, their runs among runs of nobody. Spec attention §5."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any, ClassVar

import numpy as np

from kernels_numba.streams import COLUMNS, FIRST
from kernels_numba.streams import ROWS as ROWS_COLUMN
from refengine.contract.entry import Entry, Inputs, Outputs
from refengine.contract.workbench import BF16, Array, Poison, Workbench

GDN = "kernels_numba.gated_delta_net"
HEAD = 128
KEPT = 3
"""Rows of the convolution's input that a stream keeps."""
SPARE_SLOTS = 2
"""Slots that no stream of the launch has."""
GAP = 20
"""Words of nobody before each run and after the last."""
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


class OfStreams:
    """A case of streams of one launch, each of some rows; none: it takes no part. gap: rows of nobody before and after each
    stream's.
    """

    rows: tuple[int, ...]
    gap: int

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
        """The stream table: int64 [S, 13]."""
        streams = np.full((len(self.rows), COLUMNS), UNUSED, np.int64)
        streams[:, FIRST], streams[:, ROWS_COLUMN] = self.firsts, self.rows
        return streams

    def slots(self, seed: int) -> Array:
        """A slot a stream, in no order: int32 [S]. The n-th run of the memory has slot n."""
        order = np.random.default_rng((seed, len(self.rows))).permutation(len(self.rows) + SPARE_SLOTS)
        return order[: len(self.rows)].astype(np.int32)

    def written(self, slots: Array) -> Array:
        """bool [slots]: slots of streams that have rows."""
        return np.isin(np.arange(len(slots) + SPARE_SLOTS), slots[[s for s, _, _ in self.parts]])

    def __str__(self) -> str:
        return f"rows={','.join(map(str, self.rows))}" + f" gap={self.gap}" * (self.gap > 0)


@dataclass(frozen=True)
class StreamsCase(OfStreams):
    """Streams of the rows of a model's heads. draw: a draw of its own, whatever the seed."""

    heads: Heads
    rows: tuple[int, ...]
    gap: int = 0
    draw: int = 0

    def __str__(self) -> str:
        return f"{self.heads} {super().__str__()}" + f" draw={self.draw}" * (self.draw > 0)


class InRuns(Entry):
    """Kernels whose streams keep something in runs.

    kept: the input that holds it by slot, [slots, ...]; "slots" says which is whose. A kernel gets one memory with poison
    between the runs, and the words at which they start; the gates compare by slot again.
    """

    kept: ClassVar[str]

    def in_runs(self, inputs: Inputs, bench: Workbench, may_write: Array | None = None) -> tuple[Any, Any]:
        """(memory [words], runs int64 [S]) on the bench. may_write: bool [slots], those that must be written; None: no word."""
        kept, place = inputs[self.kept], bench.input
        memory = laid_out(kept, gap_poison(bench.poison).view(kept.dtype))
        runs = place("runs", run_starts(inputs["slots"], kept))
        if may_write is None:
            return place(self.kept, memory), runs
        of_slots = np.repeat(may_write, kept[0].size).reshape(kept.shape)
        return bench.changed(self.kept, memory, laid_out(of_slots, np.zeros(gap_of(kept), bool))), runs

    def view(self, inputs: Inputs, outputs: Outputs) -> Outputs:
        kept = inputs[self.kept]
        return {name: taken_out(array, kept) if name == self.kept else array for name, array in outputs.items()}


def gap_poison(poison: Poison) -> Array:
    """uint8 [4 · GAP]: all of it but a bit of each half word, so that poison copied from elsewhere shows."""
    return (poison.filled(4 * GAP).view(np.uint16) ^ np.uint16(1)).view(np.uint8)


def gap_of(kept: Array) -> int:
    """Elements of GAP words."""
    return 4 * GAP // kept.itemsize


def run_starts(slots: Array, kept: Array) -> Array:
    """Words at which slots' runs start: int64."""
    return GAP + slots.astype(np.int64) * (GAP + kept[0].nbytes // 4)


def laid_out(kept: Array, gap: Array) -> Array:
    """[slots, ...] one after the other in one dimension, ``gap`` before each and after the last."""
    runs = kept.reshape(len(kept), -1)
    gaps = np.broadcast_to(gap, (len(runs), len(gap)))
    return np.concatenate([np.concatenate([gaps, runs], axis=1).reshape(-1), gap])


def taken_out(memory: Array, kept: Array) -> Array:
    """laid_out the other way. kept: of the shape."""
    gap = gap_of(kept)
    return memory[:-gap].reshape(len(kept), -1)[:, gap:].reshape(kept.shape)


def drawn_as(case: Any, seed: int) -> int:
    """The seed of a case's numbers: its own draw or the run's."""
    return 2**32 - case.draw if case.draw else seed


def swap_runs(inputs: Inputs) -> None:
    """The first stream gets the last one's run, and the other way round."""
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
