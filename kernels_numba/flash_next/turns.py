"""Rotary angles of rows of text, and of rows whose pairs follow time, height and width of media. Spec flash-next.

A row of text turns each pair by its position. In a prompt with media, pair j of a row turns by one of three positions that
the prompt gives it: height where j % 3 is 1, width where it is 2, both only for the first pairs, time everywhere else. Rows
behind such a prompt turn by their position plus a shift. Angles alone differ: rows, blocks and what they see are as in text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels_numba.machine import bf16_high, bf16_low, cuda, device, int64, lanewise, pack_bf16, shfl_xor, uint32
from kernels_numba.rope_store import check_rope, rotate_head, turned

FIRST_AXES, AXES_LENGTH, SHIFT = range(3)
"""Columns of ``spans``."""


@dataclass(frozen=True)
class Turns:
    """How rows turn, a compile-time argument. media: whether by three positions; height, width: the pairs of a row from here
    on turn by time.
    """

    media: bool = False
    height: int = 0
    width: int = 0


TEXT = Turns()
INDEX_DIMS = (64, 128)
"""Dims of an index head that there are kernels for."""


def check_index_dim(DI: int) -> None:
    """Raise ValueError for dims of index heads that no kernel has."""
    if DI not in INDEX_DIMS:
        raise ValueError(f"index_dim {DI}: the sparse indexer has 64 and 128")


def check_index_rope(DI: int, rope: int) -> int:
    """The lanes between the two elements of a rotary pair of an index head. Raises ValueError when there is no such rotation."""
    check_index_dim(DI)
    return check_rope(DI, rope)


@dataclass(frozen=True, eq=False)
class Media:
    """The media positions of a launch's streams.

    spans: int64 [S, 3], of each stream: the first row of ``axes`` that is its own, how many of its positions have one, and
    what is added to the positions behind them. A stream of text has none, and adds 0. axes: int32 [rows, 3], the rotary
    positions of time, height and width, in the order of the stream's positions from 0 on. sections: rotary pairs of time,
    height and width (``mrope_section``).
    """

    spans: Any
    axes: Any
    sections: tuple[int, int, int]

    @property
    def turns(self) -> Turns:
        return Turns(True, 3 * self.sections[1], 3 * self.sections[2])


def tables(media: Media | None, unread: Any) -> tuple[Any, Any, Turns]:
    """(spans, axes, turns) as kernels take them; text has no tables: ``unread`` stands in their place."""
    return (unread, unread, TEXT) if media is None else (media.spans, media.axes, media.turns)


@device
def turn_head(words, cos_sin, spans, axes, stream, position, lane_word, *, D, ROPE, LANES, turns):
    """Rotate this lane's part of a head, uint32 [D/64]; the other elements of its pairs lie LANES lanes away.

    cos_sin: float32 [positions, 2, ROPE/2]. lane_word: where the lane's words start in the head.
    """
    if turns.media:
        partners = cuda.local.array(D // 64, uint32)  # [as words]
        for i in range(D // 64):
            partners[i] = shfl_xor(words[i], LANES)
        first, length, shift = spans[stream, FIRST_AXES], spans[stream, AXES_LENGTH], spans[stream, SHIFT]
        rotate_axes(
            words, partners, cos_sin, axes, first, length, shift, position, lane_word, D=D, ROPE=ROPE, turns=turns
        )
    else:
        rotate_head(words, cos_sin, position, lane_word, D=D, ROPE=ROPE, LANES=LANES)


@lanewise
def rotate_axes(words, partners, cos_sin, axes, first, length, shift, position, lane_word, *, D, ROPE, turns):
    """As rope_store.rotate, each pair by its own position."""
    for i in range(D // 64):
        at = 2 * (lane_word + i)
        if at < ROPE:
            second = at >= ROPE // 2
            j = at - ROPE // 2 if second else at
            row = pair_position(axes, first, length, shift, position, j, turns=turns)
            low = turned(bf16_low(words[i]), bf16_low(partners[i]), cos_sin[row, 0, j], cos_sin[row, 1, j], second)
            j += 1
            row = pair_position(axes, first, length, shift, position, j, turns=turns)
            cos, sin = cos_sin[row, 0, j], cos_sin[row, 1, j]
            words[i] = pack_bf16(low, turned(bf16_high(words[i]), bf16_high(partners[i]), cos, sin, second))


@lanewise
def pair_position(axes, first, length, shift, position, j, *, turns):
    """The position by which pair j turns, int64."""
    row = position + shift
    if position < length:
        axis = int64(0)
        if j % 3 == 1 and j < turns.height:
            axis = int64(1)
        if j % 3 == 2 and j < turns.width:
            axis = int64(2)
        row = int64(axes[first + position, axis])
    return row
