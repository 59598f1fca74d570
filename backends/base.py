"""What a backend is: streams that own cache rows and recurrent state, and the two calls a layer makes.

The engine calls ``batch`` once a pass, ``store`` and ``attend`` once an attention layer, ``finish`` when the pass is through.
The batch's phase picks the kernels, never its row count (spec serving §0). A backend decides where rows live and nothing
else; others register under the entry-point group ``refengine.backends``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from math import prod
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from backends import sparse
from backends.arena import Arena, CacheShape, part_words
from backends.attention import attend, plan_pass
from backends.batch import DECODE, PROMPT, Batch, Norms
from backends.kept import Kept, check_between_passes, restore, save, save_prefix
from backends.layout import Layout
from backends.pool import PoolBroken
from backends.prefix import Prefix
from backends.sparse import SparseNorms
from backends.stream import TILES, BackendError, NoRoom, Sizes, Stream
from kernels_numba import decode_plan, keep, rope_store
from kernels_numba.decode_attention import TILE
from kernels_numba.scalar_plan import pass_tables
from kernels_numba.streams import (
    BASE,
    COLUMNS,
    COMMITTED,
    FIRST,
    INDEX_PLANE,
    K_EXP_PLANE,
    K_PLANE,
    PAGE_WORDS,
    POOLED_PLANE,
    PTOK,
    ROWS,
    TABLE,
    V_EXP_PLANE,
    V_PLANE,
)
from kernels_numba.tree_plan import plan_trees

__all__ = [
    "DECODE",
    "PROMPT",
    "Backend",
    "BackendError",
    "Batch",
    "NoRoom",
    "Kept",
    "Norms",
    "Sizes",
    "SparseNorms",
    "Stream",
    "backend_class",
    "backend_names",
]

Beginning = Prefix | Kept
"""What a stream may begin with: pages that it shares, or rows on the host that are copied into it."""

BF16 = ml_dtypes.bfloat16
PLANES = [K_PLANE, V_PLANE, K_EXP_PLANE, V_EXP_PLANE, INDEX_PLANE, POOLED_PLANE]


class Backend(ABC):
    """A form of cache. shape: of the model. sizes: what it is for. xp: numpy or cupy, where arrays live. arena: what memory is
    made of (backends.arena).

    Raises BackendError when the sizes make no sense.
    """

    name: ClassVar[str]
    layout: ClassVar[Layout]
    paged: ClassVar[bool]

    def __init__(self, shape: CacheShape, sizes: Sizes, xp: Any = np, arena: type[Arena] = Arena):
        sizes.check(self.name)
        self.shape, self.sizes, self.xp = shape, sizes, xp
        self.positions = self.page_positions(sizes)
        self.check_layout()
        self.page_words = shape.page_words(self.positions, sizes.kv)
        self.columns = -(-sizes.context // self.positions)
        self.arena = arena(shape, *self.arena_sizes(shape, sizes), xp)
        self.free_slots = list(range(sizes.streams))
        self.streams: dict[int, Stream] = {}
        self.current: Batch | None = None
        self.pages = xp.full(sizes.streams * self.columns, self.null_page, dtype=np.int32)

    def check_layout(self) -> None:
        """Raise BackendError for heads that no kernel has, or where the page size does not keep what the layout or the shape
        needs."""
        shape = self.shape
        try:
            if shape.attention_layers:
                decode_plan.check_heads(shape.heads, shape.kv_heads, shape.head_dim)
            if self.paged:
                shape.check_page(self.positions)
        except ValueError as refusal:
            raise BackendError(f"{self.name}: {refusal}") from refusal
        if shape.index_dim and self.sizes.attention != TILES:
            raise BackendError(
                f"{self.name}: attention {self.sizes.attention!r}: sparse attention has one path; use {TILES!r}"
            )
        page, layout = self.positions, self.layout
        if layout.page not in (None, page):
            raise BackendError(f"{self.name}: pages of {page} positions, its layout {layout.name} has {layout.page}")
        if self.paged and not layout.straddles and page % TILE:
            raise BackendError(
                f"{self.name}: pages of {page} positions: layout {layout.name} says that tiles of {TILE} never straddle; "
                f"set straddles=True or take a multiple of {TILE}"
            )

    # --- What a form of cache decides -----------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def page_positions(cls, sizes: Sizes) -> int:
        """Positions a page. Raises BackendError for a page size that this form does not have."""

    @classmethod
    @abstractmethod
    def cache_words(cls, shape: CacheShape, sizes: Sizes) -> int:
        """Words of the arena for keys and values."""

    @classmethod
    def arena_runs(cls, sizes: Sizes) -> int:
        """Runs of the arena that lie outside ``cache_words``: one a stream."""
        return sizes.streams

    @classmethod
    def arena_sizes(cls, shape: CacheShape, sizes: Sizes) -> tuple[int, int, int]:
        """(runs, cache words, record rows) of the arena."""
        return cls.arena_runs(sizes), cls.cache_words(shape, sizes), sizes.streams * sizes.window_rows

    @classmethod
    def arena_bytes(cls, shape: CacheShape, sizes: Sizes) -> int:
        """Bytes of the whole arena."""
        return 4 * sum(part_words(shape, *cls.arena_sizes(shape, sizes)).values())

    def positions_of(self, stream: Stream) -> int:
        """Positions a page of the stream."""
        return self.positions

    @property
    def null_page(self) -> int:
        """The page that unused table entries name."""
        return 0

    @abstractmethod
    def address(self, stream: Stream) -> tuple[int, int]:
        """(BASE, TABLE) of the stream table: spec attention §3."""

    @abstractmethod
    def grow(self, ends: Sequence[tuple[Stream, int]]) -> None:
        """Give every stream a place for positions below its end, which is within its capacity: all streams, or none."""

    @abstractmethod
    def freed(self, stream: Stream) -> None:
        """Take the stream's cache rows back."""

    # --- Streams ----------------------------------------------------------------------------------------------------------

    def open(self, capacity: int | None = None, begin: Beginning | None = None) -> Stream:
        """A new stream of ``capacity`` positions (default: the context), which has room for all of them from now on.

        begin: what it begins with, of a prompt that was read before; without, nothing is committed and its recurrent state is
        zero. Raises BackendError for a capacity that this backend can never have, and NoRoom when it has none now.
        """
        capacity = self.sizes.context if capacity is None else capacity
        self.check_fits(capacity)
        if begin is not None:
            self.check_beginning(begin, capacity)
        if not self.free_slots:
            raise NoRoom(f"{self.name}: no stream is free; release one")
        stream = Stream(self, self.free_slots[0], capacity)
        self.seat(stream, begin)
        self.streams[self.free_slots.pop(0)] = stream
        try:
            self.start(stream, begin)
        except BaseException:
            stream.release()
            raise
        return stream

    def check_fits(self, capacity: int) -> None:
        """Raise BackendError for a stream that would not fit if it were alone."""
        if capacity < 1:
            raise BackendError(f"{self.name}: a stream of {capacity} positions: ask for at least 1")
        if capacity > self.sizes.context:
            raise BackendError(f"{self.name}: a stream of {capacity} positions: the context is {self.sizes.context}")

    def check_beginning(self, begin: Beginning, capacity: int) -> None:
        """Raise BackendError for what a stream of this capacity cannot begin with."""
        if begin.positions > capacity:
            raise BackendError(f"{self.name}: a stream of {capacity} positions cannot begin with {begin.positions}")
        if isinstance(begin, Kept):
            begin.check(self)
        else:
            begin.check_held(self)

    def seat(self, stream: Stream, begin: Beginning | None) -> None:  # noqa: B027
        """Claim all that the stream will need, if that is more than its place. Raises NoRoom, changing nothing."""

    def start(self, stream: Stream, begin: Beginning | None) -> None:
        """Fill the stream's run, and its first positions."""
        if begin is None:
            self.arena.zero(self.run_base(stream), self.shape.run_words)
        elif self.arena.words is None:
            stream.committed = stream.prompted = begin.positions
        else:
            restore(self, begin if isinstance(begin, Kept) else save_prefix(begin), stream)

    def snapshot(self, stream: Stream) -> Beginning:
        """The stream's positions as what others may begin with; it goes on. Release it when nobody will.

        Raises BackendError where a decode pass has made some of them: prompt rows have other bits (spec serving §0). Raises
        NoRoom where it takes pages and there are none.
        """
        self.check_prompted(stream)
        return stream.save()

    def check_prompted(self, stream: Stream) -> None:
        """Raise BackendError unless the stream is open here, in no pass, and prompt passes made all that it has committed."""
        check_between_passes(self, stream)
        if stream.prompted < stream.committed:
            raise BackendError(
                f"{self.name}: stream {stream.number}: positions from {stream.prompted} on were generated; only what prompt "
                "passes made can be begun with"
            )

    def check(self) -> None:
        """Raise PoolBroken unless every place and page is free, or held by just those who hold it."""
        if sorted([*self.free_slots, *self.streams]) != list(range(self.sizes.streams)):
            raise PoolBroken(f"{self.name}: places free {self.free_slots}, taken {sorted(self.streams)}")
        for slot, stream in self.streams.items():
            if stream.released or stream.slot != slot or stream.committed > stream.capacity:
                raise PoolBroken(f"{self.name}: stream {stream.number} does not belong to place {slot}")

    def release(self, stream: Stream) -> None:
        """Take a stream's place back. Raises BackendError for one that is not open here."""
        self.check_open(stream)
        self.freed(stream)
        self.free_slots = sorted([*self.free_slots, stream.slot])
        del self.streams[stream.slot]
        stream.released = True
        if self.current is not None and stream in self.current.members:
            self.current = None

    def check_open(self, stream: Stream) -> None:
        """Raise BackendError for a stream that was released, or is another backend's."""
        if stream.backend is not self:
            raise BackendError(f"{self.name}: stream {stream.number}: belongs to another backend; open one here")
        stream.check_open()

    def save(self, stream: Stream) -> Kept:
        """A copy of all that the stream has committed, on the host. Raises BackendError where it is not open or in a pass."""
        return save(self, stream)

    def restore(self, kept: Kept, capacity: int | None = None) -> Stream:
        """A new stream that goes on where the kept one stood, whatever form of cache it was on.

        Raises BackendError for a state of another shape or kv, and as open does; then no stream is open.
        """
        return self.open(capacity, kept)

    def claim(self, ends: Sequence[tuple[Stream, int]]) -> None:
        """Make sure that each (stream, end) has a place for positions below ``end``: all streams, or none.

        Raises BackendError for a stream that is not open here or stands twice, an end beyond its capacity, or too few
        free pages.
        """
        for place, (stream, end) in enumerate(ends):
            self.check_open(stream)
            if any(stream is other for other, _ in ends[:place]):
                raise BackendError(f"{self.name}: stream {stream.slot}: stands twice; join its rows")
            if end > stream.capacity:
                raise BackendError(
                    f"stream {stream.slot}: position {end - 1} is past its capacity of {stream.capacity}"
                )
        self.grow(ends)

    def run_base(self, stream: Stream) -> int:
        """The word of the arena at which the stream's run starts: its recurrent states and histories."""
        return self.arena.starts["runs"] + stream.slot * self.shape.run_words

    def linear_layer(self, layer: int) -> tuple[Any, Any]:
        """The arena from a linear layer's place in a run on: (float32 [words], bf16 [2 · words]), so that its state and history
        of a stream start at word ``run_base`` of them.
        """
        words, shape = self.arena.words, self.shape
        return words[shape.state_offset(layer) :].view(np.float32), words[shape.history_offset(layer) :].view(BF16)

    def state_at(self, base: int, layer: int) -> tuple[Any, Any]:
        """(recurrent state [HV, DV, DK] float32, conv history [3, C] bf16) of a linear layer in the run that starts at a word."""
        shape, (states, histories) = self.shape, self.linear_layer(layer)
        dims, rows = (shape.value_heads, shape.value_dim, shape.key_dim), (shape.conv_rows, shape.conv_channels)
        return states[base:][: prod(dims)].reshape(dims), histories[2 * base :][: prod(rows)].reshape(rows)

    def ngram_state(self) -> tuple[Any, Any]:
        """The arena from the n-gram branch's place in a run on: tokens int32 [words], tails bf16 [2 · words]."""
        words, shape = self.arena.words, self.shape
        return words[shape.tokens_offset :].view(np.int32), words[shape.tails_offset :].view(BF16)

    def ngrams_at(self, base: int) -> tuple[Any, Any]:
        """(tokens int32 [tokens], tails bf16 [rows, channels]) of the n-gram branch in the run that starts at a word."""
        shape, (tokens, tails) = self.shape, self.ngram_state()
        dims = (shape.ngram_rows, shape.ngram_channels)
        return tokens[base:][: shape.ngram_tokens], tails[2 * base :][: prod(dims)].reshape(dims)

    def stream_row(self, stream: Stream, first: int, rows: int) -> list[int]:
        """The stream's row of the stream table; the planes are layer_tables' to add."""
        row = [0] * COLUMNS
        row[FIRST], row[ROWS], row[COMMITTED], row[PTOK] = first, rows, stream.committed, self.positions_of(stream)
        row[BASE], row[TABLE] = self.address(stream)
        return row

    def layer_tables(self, table: np.ndarray) -> np.ndarray:
        """int64 [L, S, 13]: the stream table of each attention layer, with its planes (without layers: one, as it is)."""
        layers = self.shape.attention_layers
        tables = np.repeat(table[None], max(1, len(layers)), axis=0)
        for ptok in np.unique(table[:, PTOK]).tolist():
            alike = np.flatnonzero(table[:, PTOK] == ptok)
            tables[:, alike, PAGE_WORDS] = self.shape.page_words(ptok, self.sizes.kv)
            for place, layer in enumerate(layers):
                tables[place, alike[:, None], PLANES] = self.shape.planes(layer, ptok, self.sizes.kv)
        return tables

    # --- A pass -----------------------------------------------------------------------------------------------------------

    def batch(
        self, phase: str, work: Sequence[tuple[Stream, int]], parents: Sequence[Sequence[int]] | None = None
    ) -> Batch:
        """The tables of a pass over (stream, rows) pairs; streams get a place for their rows.

        parents: of a decode pass's rows, that are drafts then: the window row that each follows, -1 where it follows the
        committed positions. ``finish`` is told which are accepted. Without it a stream's rows follow each other and are kept.

        A stream with no rows sits the pass out. A backend is in one pass at a time, for it has one window record: the
        newest batch takes the place of one that was not finished. Raises BackendError, and changes nothing, for a pass
        that makes no sense or a stream without room.
        """
        self.check_pass(phase, work, parents)
        self.claim([(stream, stream.committed + rows) for stream, rows in work])
        first, table = 0, []
        for stream, rows in work:
            table.append(self.stream_row(stream, first, rows))
            first += rows
        members = tuple(stream for stream, _ in work)
        on_host = np.array(table, np.int64).reshape(-1, COLUMNS)
        self.current = self.tables(phase, members, on_host, parents)
        return self.current

    def check_pass(
        self, phase: str, work: Sequence[tuple[Stream, int]], parents: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Raise BackendError for an unknown phase, or rows that a stream cannot have in a pass of it."""
        if phase not in (PROMPT, DECODE):
            raise BackendError(f"{self.name}: phase {phase!r}: use {PROMPT!r} or {DECODE!r}")
        most = self.sizes.window_rows
        for stream, rows in work:
            if not isinstance(rows, (int, np.integer)) or rows < 0:
                raise BackendError(f"{self.name}: stream {stream.number}: {rows} rows; at least 0, and whole")
            if phase == DECODE and rows > most:
                raise BackendError(
                    f"{self.name}: stream {stream.number}: {rows} decode rows; window_rows allows {most}"
                )
        if parents is not None:
            self.check_drafts(phase, [rows for _, rows in work], parents)

    def check_drafts(self, phase: str, rows: Sequence[int], parents: Sequence[Sequence[int]]) -> None:
        """Raise BackendError for drafts in a prompt pass, or parents that are not the rows' or stand after them."""
        if phase != DECODE:
            raise BackendError(f"{self.name}: parents: drafts belong to {DECODE!r} passes")
        if [len(p) for p in parents] != list(rows):
            raise BackendError(f"{self.name}: parents: one for each of the {list(rows)} rows of the streams")
        if not all(isinstance(row, (int, np.integer)) for window in parents for row in window):
            raise BackendError(f"{self.name}: parents: whole numbers, -1 for the committed positions")
        try:
            decode_plan.check_parents(parents)
        except ValueError as refusal:
            raise BackendError(f"{self.name}: {refusal}") from refusal
        if self.shape.index_dim and any(list(p) != list(range(-1, len(p) - 1)) for p in parents):
            raise BackendError(
                f"{self.name}: parents: rows of sparse attention see all before them; draft chains, no trees"
            )

    def check_current(self, batch: Batch) -> None:
        """Raise BackendError unless the batch is the pass that this backend is in."""
        if batch is not self.current:
            raise BackendError(
                f"{self.name}: this batch is over: finished, replaced by a newer one, or a stream of it was released; "
                "make another"
            )

    def tables(
        self,
        phase: str,
        members: tuple[Stream, ...],
        table: np.ndarray,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Batch:
        """A batch with its tables on the device."""
        put = self.xp.asarray
        streams, runs = put(self.layer_tables(table)), put(np.array([self.run_base(s) for s in members], np.int64))
        plan = plan_pass(self, phase, table)
        cut = (None, None) if plan is None else (plan.to(self.xp), self.xp.empty(plan.scratch_size, dtype=np.float32))
        if phase == PROMPT:
            owners, depths = pass_tables(table)
            return Batch(phase, members, table, streams, put(owners), runs, None, put(depths), *cut)
        lines = decode_plan.chain_tables(table) if parents is None else decode_plan.tree_tables(table, parents)
        owners, paths, depths = map(put, lines)
        batch = Batch(phase, members, table, streams, owners, runs, paths, depths, *cut)
        if parents is None:
            return batch
        schedule = plan_trees(parents, table[:, FIRST].tolist()).to(self.xp)
        return replace(batch, parents=tuple(map(tuple, parents)), schedule=schedule)

    def layer_states(self, layer: int, batch: Batch) -> tuple[Any, Any]:
        """linear_layer, for a pass; batch.runs says where the batch's runs start. Raises as check_current does."""
        self.check_current(batch)
        return self.linear_layer(layer)

    def ngram_states(self, batch: Batch) -> tuple[Any, Any]:
        """ngram_state, for a pass, as layer_states. Raises as check_current does."""
        self.check_current(batch)
        return self.ngram_state()

    def store_sparse(self, layer: int, projection: Any, norms: SparseNorms, rope: Any, batch: Batch) -> tuple[Any, Any]:
        """As store, for a layer with an indexer; decode rows go to the cache, too, and whole blocks of index keys are pooled.

        projection: bf16 [W, (2·H + 2·HK)·D + (IH + 1)·DI], rows [H × (query | gate) | keys | values | IH index queries | index
        key]. Returns (q bf16 [W, H, D], index_q bf16 [W, IH, DI]). Raises as check_current does. Spec flash-next.
        """
        self.check_current(batch)
        return sparse.store(self, layer, projection, norms, rope, batch)

    def attend_sparse(self, layer: int, q: Any, index_q: Any, batch: Batch) -> Any:
        """As attend, each row to the keys that its index queries choose: bf16 [W, H, D]. Raises as check_current does."""
        self.check_current(batch)
        return sparse.attend(self, layer, q, index_q, batch)

    def store(self, layer: int, qkv: Any, norms: Norms, rope: Any, batch: Batch) -> Any:
        """Norm and rotate q and k; keys and values go to the cache (prompt) or to the window record (decode).

        qkv: bf16 [W, (2·H + 2·HK)·D], rows [H × (query | gate) | keys | values]. rope: float32 [positions, 2, dims / 2].
        Returns q: bf16 [W, H, D]. Raises as check_current does.
        """
        self.check_current(batch)
        shape, address, streams = self.shape, (self.arena.words, self.pages), self.layer_streams(layer, batch)
        q = self.xp.empty((batch.rows, shape.heads, shape.head_dim), dtype=BF16)
        if batch.phase == PROMPT:
            rope_store.rope_store(
                q,
                qkv,
                *address,
                streams,
                batch.owners,
                norms.q,
                norms.k,
                rope,
                norms.eps,
                shape.kv_heads,
                self.layout,
                self.sizes.kv,
            )
        else:
            rope_store.rope_record(
                q,
                qkv,
                *self.record(layer, batch),
                streams,
                batch.owners,
                batch.depths,
                norms.q,
                norms.k,
                rope,
                norms.eps,
                self.sizes.kv,
            )
        return q

    def attend(self, layer: int, q: Any, batch: Batch) -> Any:
        """Attention of the batch's rows; q and the result: bf16 [W, H, D]. The phase picks the kernels.

        Raises as check_current does.
        """
        self.check_current(batch)
        return attend(self, layer, q, batch)

    def finish(self, batch: Batch, accepted: Sequence[int] | None = None) -> None:
        """The pass is through: its rows are committed; a decode pass's records are kept in the caches.

        accepted: of a drafted pass, the window row of each stream up to whose path its drafts are kept, -1: none of them.
        Raises as check_current does, so a pass is committed once, and BackendError for rows that the pass does not have.
        """
        self.check_current(batch)
        kept = self.kept_rows(batch, accepted)
        if batch.held:
            raise BackendError(
                f"{self.name}: drafts: recurrent layers wait for the accepted rows; finish through the model"
            )
        if batch.phase == DECODE and not self.shape.index_dim:
            last, counts = (self.xp.asarray(a) for a in batch.ends(kept))
            most = max(map(len, kept), default=0)
            for layer in self.shape.attention_layers:
                keep.keep(
                    self.arena.words, self.pages, self.layer_streams(layer, batch), batch.paths, last, counts,
                    *self.record(layer, batch), most, self.layout, self.sizes.kv,
                )  # fmt: skip
        for stream, path in zip(batch.members, kept):
            stream.commit(len(path), prompt=batch.phase == PROMPT)
        self.current = None

    def kept_rows(self, batch: Batch, accepted: Sequence[int] | None) -> list[list[int]]:
        """The window rows of each stream that ``finish`` keeps, in order. Raises BackendError as it does."""
        rows = [int(n) for n in batch.table[:, ROWS]]
        if not batch.drafted:
            if accepted is not None:
                raise BackendError(f"{self.name}: accepted: this pass has no drafts; leave it out")
            return [list(range(n)) for n in rows]
        if accepted is None or len(accepted) != len(rows):
            raise BackendError(f"{self.name}: accepted: name the last accepted row of each of {len(rows)} streams")
        for stream, (last, count) in enumerate(zip(accepted, rows)):
            if not -1 <= last < count:
                raise BackendError(f"{self.name}: accepted: stream {stream}: row {last}; it has {count}, -1 is none")
        return [batch.path(stream, last) for stream, last in enumerate(accepted)]

    def planes(self, layer: int) -> tuple[int, int]:
        """Word offsets of a layer's K and V in a page."""
        k, v = self.shape.planes(layer, self.positions, self.sizes.kv)[:2]
        return k, v

    def layer_streams(self, layer: int, batch: Batch) -> Any:
        """The stream table of an attention layer: int64 [S, 13] on the device."""
        return batch.streams[self.shape.attention_layers.index(layer)]

    def record(self, layer: int, batch: Batch) -> tuple[Any, Any]:
        """A layer's window record, keys and values: bf16 [W, HK, D] each."""
        both = self.arena.records[self.shape.attention_layers.index(layer)]
        return both[0, : batch.rows], both[1, : batch.rows]

    def cache_bytes(self, stream: Stream) -> int:
        """Bytes of keys and values that the stream holds. Raises BackendError for a stream that is not open here."""
        self.check_open(stream)
        return 4 * self.shape.page_words(self.positions_of(stream), self.sizes.kv) * self.held_pages(stream)

    def held_pages(self, stream: Stream) -> int:
        """Pages (or windows) the stream holds."""
        return 1


# --- By name --------------------------------------------------------------------------------------------------------------

ENTRY_POINTS = "refengine.backends"


def backend_names() -> list[str]:
    """Every registered backend, the plug-ins too."""
    return [point.name for point in entry_points(group=ENTRY_POINTS)]


def backend_class(name: str) -> type[Backend]:
    """A backend by name. Raises BackendError for a name that nobody registered."""
    found = entry_points(group=ENTRY_POINTS, name=name)
    if not found:
        raise BackendError(f"backend {name}: unknown; there are {', '.join(backend_names())}")
    return next(iter(found)).load()
