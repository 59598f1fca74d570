"""Passes without a model that notice any wrong byte: what is drawn is a hash of all that a stream reads back.

A row's keys and values are made of its token, its position and its phase. They are written through the page table and read back
through it in every pass, and the recurrent state is a running hash of them; the reply is what both say. So it is the reply that
``expected`` gives only if every row and the state are there, unchanged, and made by the phase that should have made them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from backends.arena import POISON, CacheShape
from backends.base import DECODE, PROMPT, Backend, Stream
from backends.paged import PagedBackend
from kernels_numba.streams import BASE, PTOK, TABLE
from refengine.serve.forward import Pass, Work

ATTENTION, LINEAR = (1, 3), (0, 2)
SHAPE = CacheShape(ATTENTION, LINEAR, 4, 2, 64, 2, 8, 16, 40, 3)
"""Two layers of each kind; a run takes three pages of one position."""
VOCABULARY = 50
FACTOR, MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def mixed(a: int, b: int) -> int:
    """A hash of two numbers: 64 bits."""
    x = (a ^ (b * FACTOR)) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    return (x ^ (x >> 27)) & MASK


def row_of(token: int, position: int, phase: str) -> int:
    """What a row's words are made of: 32 bits."""
    return mixed(mixed(token + 1, position), phase == PROMPT) & 0xFFFFFFFF


def token_from(rows: list[int], state: int) -> int:
    """The token that follows rows and the state behind them."""
    places = np.arange(1, len(rows) + 1, dtype=np.uint64)
    total = int((np.array(rows, np.uint64) * (places * np.uint64(FACTOR))).sum(dtype=np.uint64))
    return mixed(total, state) % VOCABULARY


def expected(prompt: Sequence[int], tokens: int, stop: Collection[int] = ()) -> list[int]:
    """The reply to a prompt, of a stream that is alone and begins with nothing."""
    reply = list(whole_reply(tuple(prompt), tokens))
    ends = [place + 1 for place, token in enumerate(reply) if token in stop]
    return reply[: min(ends, default=tokens)]


@cache
def whole_reply(prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """A reply that nothing ends."""
    rows: list[int] = []
    state, reply = 0, []
    for position, token in enumerate(prompt):
        rows.append(row_of(token, position, PROMPT))
        state = mixed(state, rows[-1])
    while len(reply) < tokens:
        reply.append(token_from(rows, state))
        rows.append(row_of(reply[-1], len(rows), DECODE))
        state = mixed(state, rows[-1])
    return tuple(reply)


@dataclass(eq=False)
class HashStep:
    """A Step through a backend made for SHAPE."""

    backend: Backend

    def __call__(self, phase: str, work: Work) -> Pass:
        self.backend.claim([(one.place, one.place.committed + len(rows.ids)) for one, rows in work.items()])
        for one, rows in work.items():
            read, state = self.read(one.place), self.state(one.place)
            draws, states, drawn = [], [], list(read)
            for token in rows.ids:
                drawn.append(row_of(token, len(drawn), phase))
                state = mixed(state, drawn[-1])
                states.append(state)
                draws.append(token_from(drawn, state))
            asked = [draws[row] for row in rows.asked]
            kept = len(rows.ids) if phase == PROMPT else len(rows.kept(asked, one.stop))
            self.write(one.place, drawn[len(read) :][:kept], states[kept - 1])
            one.place.commit(kept, prompt=phase == PROMPT)
            one.reply += rows.chosen(asked, one.stop)
        return Pass(phase, tuple(one.number for one in work), np.empty((len(work), 0), np.float32))

    # --- Where a stream's words are -----------------------------------------------------------------------------------

    def words(self, stream: Stream, positions: np.ndarray) -> np.ndarray:
        """int64 [positions, words]: the words of the arena with a position's keys and values of all layers."""
        row, shape = self.backend.stream_row(stream, 0, 0), self.backend.shape
        entries, slots = np.divmod(positions, row[PTOK])
        paged = row[TABLE] >= 0
        pages = np.asarray(self.backend.pages)[row[TABLE] + entries].astype(np.int64) if paged else 0 * entries
        return self.in_pages(row[BASE] + pages * shape.page_words(row[PTOK]), slots, row[PTOK])

    def in_pages(self, starts: np.ndarray, slots: np.ndarray, ptok: int) -> np.ndarray:
        """int64 [positions, words]: of slots of the pages, or windows, that begin at these words."""
        shape = self.backend.shape
        planes = np.array([shape.planes(layer, ptok)[:2] for layer in shape.attention_layers]).reshape(-1)
        heads, words = np.arange(shape.kv_heads), np.arange(shape.head_dim // 2)
        in_plane = (heads[:, None] * ptok + slots[:, None, None]) * len(words)  # [positions, HK, 1]
        rows = planes[:, None, None] + (in_plane + words)[:, None]  # [positions, planes, HK, words]
        return starts[:, None] + rows.reshape(len(slots), planes.size * heads.size * words.size)

    # --- What is there ------------------------------------------------------------------------------------------------

    def read(self, stream: Stream) -> list[int]:
        """Each committed row's hash; a row whose words are not all its own is another number."""
        if not stream.committed:
            return []
        found = self.backend.arena.words[self.words(stream, np.arange(stream.committed))]
        whole = (found == found[:, :1]).all(axis=1)
        return [int(row) if alike else 0 for row, alike in zip(found[:, 0], whole)]

    def write(self, stream: Stream, rows: list[int], state: int) -> None:
        """Rows behind the committed ones, and the state behind them."""
        places = self.words(stream, stream.committed + np.arange(len(rows)))
        self.backend.arena.words[places] = np.array(rows, np.uint32)[:, None]
        for layer in LINEAR:
            states, history = stream.state(layer)
            halves = np.array([state & MASK >> 32, state >> 32], np.uint32)
            states.view(np.uint32).reshape(-1)[:] = np.tile(halves, states.size // 2)
            history.view(np.uint16)[:] = np.uint16(state & 0xFFFF)

    def state(self, stream: Stream) -> int:
        """The running hash; another number where the layers' states and histories do not agree."""
        found: set[int] = set()
        for layer in LINEAR:
            states, history = stream.state(layer)
            words = states.view(np.uint32).reshape(-1, 2)
            found.add(int(words[0, 0]) | int(words[0, 1]) << 32)
            if not ((words == words[0]).all() and (history.view(np.uint16) == words[0, 0] & 0xFFFF).all()):
                return FACTOR
        return found.pop() if len(found) == 1 else FACTOR

    # --- What nobody may read -----------------------------------------------------------------------------------------

    def poison(self) -> int:
        """Poison every word that no stream and no prefix has written and may read; how many."""
        backend, words = self.backend, self.backend.arena.words
        meant = np.zeros(len(words), bool)
        for stream in backend.streams.values():
            meant[self.words(stream, np.arange(stream.committed))] = True
            meant[backend.run_base(stream) :][: backend.shape.run_words] = True
        for prefix in backend.prefixes if isinstance(backend, PagedBackend) else ():
            entries, slots = np.divmod(np.arange(prefix.positions), backend.positions)
            starts = np.array(prefix.pages, np.int64)[entries] * backend.page_words
            meant[self.in_pages(starts, slots, backend.positions)] = True
            meant[prefix.run_base :][: backend.shape.run_words] = True
        words[~meant] = POISON
        return int((~meant).sum())
