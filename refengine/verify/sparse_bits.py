"""Sparse attention through a whole backend at a model's shapes: two streams, every array of every pass, on any form of cache.
Spec flash-next, "Must hold".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from backends.arena import POISON, Arena, CacheShape
from backends.base import DECODE, PROMPT, Backend, Batch, Kept, Sizes, SparseNorms, Stream, backend_class
from backends.page_copies import Part, parts
from kernels_numba.flash_next.pages import BLOCK
from kernels_numba.flash_next.scores import fn_qsa_scores
from kernels_numba.rope_store import rope_table
from kernels_numba.streams import COMMITTED, ROWS
from refengine.device import Device
from refengine.model import cache_shape
from refengine.registry import ModelSpec
from refengine.verify import bounds
from refengine.verify.attention_oracle import attend
from refengine.verify.fp8_oracle import widened
from refengine.verify.selection_oracle import listed_keys

BF16 = ml_dtypes.bfloat16
WINDOWS = (1, 5, 16)
"""Rows of the decode passes that are kept, in order."""
DRAFTS = 4
"""Rows of a decode pass of other tokens before them, none of which is kept."""
STREAM_SHIFT, DRAFT_SHIFT = 1237, 577
"""Rows of the table between one stream's and the next one's; between those kept and the drafts in their places."""
FENCE = 1024
"""Words of poison before and after an arena."""
SPARE_PAGES, SPARE_POSITIONS = 3, 40
UNSCORED = np.float32(-1)
"""What a block has that a row does not see: no score is below 0."""
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Form:
    """A form of cache. page_size: of paged; the others have their own."""

    backend: str
    page_size: int = 256

    def __str__(self) -> str:
        return f"{self.backend} {self.page_size}" if self.backend == "paged" else self.backend


WINDOW = Form("window")


@dataclass(frozen=True)
class Case:
    """The first stream has ``length`` positions once its last ``rows`` are read by a pass that attends; the second about half."""

    length: int
    rows: int

    @property
    def lengths(self) -> list[int]:
        """Of each stream."""
        return [self.length, self.length // 2 + 3]

    @property
    def last_rows(self) -> list[int]:
        """Of the prompt pass that attends."""
        return [min(self.rows, length) for length in self.lengths]

    @property
    def ends(self) -> list[int]:
        """Positions of each stream once all windows are kept."""
        return [length + sum(WINDOWS) for length in self.lengths]


@dataclass(frozen=True, eq=False)
class Step:
    """What one pass gave, or what streams hold in the end. owners, positions: int64 [W], of the pass's rows. dense: of them."""

    name: str
    arrays: Arrays
    owners: NDArray[np.int64]
    positions: NDArray[np.int64]
    dense: int = 0


# --- Rows ---------------------------------------------------------------------------------------------------------------


def projected_rows(xp: Any, rows: int, columns: int) -> Any:
    """bf16 bits uint16 [rows, columns]: near normal numbers, made of whole ones where they are used, the same on any machine."""
    table = xp.empty((rows, columns), dtype=np.uint16)
    for row in range(0, rows, 512):
        part = table[row : row + 512]
        numbers = xp.arange(row * columns, row * columns + part.size, dtype=np.uint32)
        part[:] = bf16_of(mixed(numbers)).reshape(part.shape)
    return table


def mixed(x: Any) -> Any:
    """uint32, in place: every bit of a number changes half of its bits."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(16)
    return x


def bf16_of(x: Any) -> Any:
    """uint16: bf16 bits of the sum of a number's four bytes, less its mean, cut off."""
    byte = np.uint32(255)
    total = (x & byte) + (x >> np.uint32(8) & byte) + (x >> np.uint32(16) & byte) + (x >> np.uint32(24))
    value = (total.astype(np.int32) - np.int32(510)).astype(np.float32) * np.float32(2.0**-7)
    return (value.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def gains(device: Device, dims: int, seed: int) -> Any:
    """float32 [dims] on the device, around 1."""
    return device.put((np.random.default_rng(seed).integers(192, 320, dims) / 256).astype(np.float32))


def one_layer(spec: ModelSpec) -> CacheShape:
    """A model's cache cut to one attention layer."""
    whole = cache_shape(spec)
    heads = whole.heads, whole.kv_heads, whole.head_dim
    return CacheShape(
        (0,), (), *heads, 0, 0, 0, 0, 0, whole.index_dim, whole.index_ratio, whole.index_heads, whole.index_budget
    )


class SparseBench:
    """Rows for streams of up to ``positions`` positions of one layer of a model, on a device."""

    def __init__(self, spec: ModelSpec, positions: int, device: Device):
        self.device, self.shape = device, one_layer(spec)
        heads, index = self.shape.heads + self.shape.kv_heads, self.shape.index_heads + 1
        columns = 2 * heads * self.shape.head_dim + index * self.shape.index_dim
        most = positions + STREAM_SHIFT + DRAFT_SHIFT
        self.rows = projected_rows(device.xp, most, columns)
        dims = self.shape.head_dim, self.shape.index_dim
        q, k, index_q, index_k = (gains(device, dims[n // 2], n) for n in range(4))
        self.norms = SparseNorms(q, k, spec.norm_eps, index_q, index_k)
        self.rope = device.put(rope_table(positions, spec.rope.dims, spec.rope.theta))

    def projection(self, spans: Sequence[tuple[int, int]], shift: int) -> Any:
        """bf16 [W, columns]: (first, count) positions of each stream."""
        parts = [self.rows[a + n * STREAM_SHIFT + shift :][:count] for n, (a, count) in enumerate(spans)]
        return self.device.xp.concatenate(parts).view(BF16)


# --- A session ----------------------------------------------------------------------------------------------------------


class FencedArena(Arena):
    """An arena between poison: ``room`` is all of it."""

    def __init__(self, shape: CacheShape, runs: int, cache_words: int, rows: int, xp: Any = np):
        super().__init__(shape, runs, cache_words, rows, xp)
        self.room = xp.full(self.words.size + 2 * FENCE, POISON, dtype=np.uint32)
        self.words = self.room[FENCE:-FENCE]


class Session:
    """A case on a form of cache. shuffle: seed of the page order. begin: what its streams hold before the case's own passes."""

    def __init__(
        self, bench: SparseBench, form: Form, kv: str, case: Case, shuffle: int, begin: Sequence[Kept] | None = None
    ):
        self.bench, self.case = bench, case
        sizes = Sizes(max(case.ends) + SPARE_POSITIONS, 2, form.page_size, max(WINDOWS), SPARE_PAGES, shuffle, kv)
        self.backend: Backend = backend_class(form.backend)(bench.shape, sizes, bench.device.xp, FencedArena)
        self.streams: list[Stream] = [self.backend.open(begin=kept) for kept in begin or (None, None)]

    def fill(self) -> None:
        """Store the positions before the pass that attends."""
        counts = [a - b for a, b in zip(self.case.lengths, self.case.last_rows, strict=True)]
        if any(counts):
            batch = self.backend.batch(PROMPT, list(zip(self.streams, counts, strict=True)))
            self.store(batch, 0)
            self.backend.finish(batch)

    def steps(self) -> Iterator[Step]:
        """The case's passes after ``fill``, then what the streams hold."""
        yield self.attended(f"prompt {self.case.rows}", PROMPT, self.case.last_rows)
        yield self.attended(f"drafts {DRAFTS}", DECODE, [DRAFTS] * 2, drafts=True)
        for rows in WINDOWS:
            yield self.attended(f"window {rows}", DECODE, [rows] * 2)
        yield self.stored()

    def attended(self, name: str, phase: str, counts: Sequence[int], drafts: bool = False) -> Step:
        """A pass: stored, scored, attended to; scratch starts as NaN. drafts: of other tokens, and none is kept."""
        chains = [list(range(-1, count - 1)) for count in counts] if drafts else None
        batch = self.backend.batch(phase, list(zip(self.streams, counts, strict=True)), chains)
        positions = np.concatenate([np.arange(c, c + r) for c, r in batch.table[:, [COMMITTED, ROWS]]])
        q, index_q = self.store(batch, DRAFT_SHIFT if drafts else 0)
        scores = self.scores(index_q, batch)
        batch.scratch[:] = np.nan
        out = self.backend.attend_sparse(0, q, index_q, batch)
        arrays = {"q": q, "index_q": index_q, "scores": scores, "out": out}
        host = {key: self.bench.device.get(array) for key, array in arrays.items()}
        self.backend.finish(batch, [-1] * len(counts) if drafts else None)
        return Step(name, host, np.repeat([0, 1], counts), positions, batch.plan.dense_rows)

    def store(self, batch: Batch, shift: int) -> tuple[Any, Any]:
        """(q, index_q) of a pass's rows."""
        spans = [(int(c), int(r)) for c, r in batch.table[:, [COMMITTED, ROWS]]]
        return self.backend.store_sparse(
            0, self.bench.projection(spans, shift), self.bench.norms, self.bench.rope, batch
        )

    def scores(self, index_q: Any, batch: Batch) -> Any:
        """float32 [W, blocks] of a pass, by the kernel that the backend launches; UNSCORED where it writes nothing."""
        made, most = self.backend, int((batch.table[:, COMMITTED] + batch.table[:, ROWS]).max())
        scores = made.xp.full((batch.rows, most // BLOCK), UNSCORED, dtype=np.float32)
        place = made.arena.words, made.pages, made.layer_streams(0, batch), batch.owners
        fn_qsa_scores(scores, index_q, *place, made.layout)
        return scores

    def stored(self) -> Step:
        """Keys, values, index keys and pooled rows of each stream."""
        arrays = {
            f"{name} of stream {n}": array
            for n, stream in enumerate(self.streams)
            for name, array in stream.save().arrays.items()
            if array.size
        }
        return Step("stored", arrays, np.empty(0, np.int64), np.empty(0, np.int64))

    # --- Guards ---------------------------------------------------------------------------------------------------------

    def held(self, stream: int) -> list[int]:
        """The pages of a stream in order, or its window as a page."""
        own = self.streams[stream]
        return own.pages if self.backend.paged else [own.slot]

    def strays(self) -> int:
        """Bytes that are not poison in all of the arena's room but where the streams' positions belong."""
        made: Backend = self.backend
        arena: Any = made.arena
        written = arena.room.view(np.uint8) != np.uint8(0xFF)
        page_bytes = 4 * made.page_words
        inside = written[4 * FENCE :][: made.arena.words.size // made.page_words * page_bytes].reshape(-1, page_bytes)
        for part in parts(made.shape, made.sizes.kv):
            for n, end in enumerate(self.case.ends):
                forget(inside, self.held(n), part, part.planes(made.shape, made.positions, made.sizes.kv), made, end)
        return int(written.sum())


def forget(inside: Any, pages: list[int], part: Part, planes: NDArray[np.int64], made: Backend, end: int) -> None:
    """Set a part's rows of the first ``end`` positions to False. inside: bool [pages, bytes of a page], changed."""
    unit, a_page, count = 4 // part.a_word, made.positions // part.a_row, end // part.a_row
    width, full = part.width * unit, count // a_page
    for plane in planes.tolist():
        for head in range(part.heads):
            first = plane * unit + head * a_page * width
            if full:
                inside[made.xp.asarray(pages[:full]), first : first + a_page * width] = False
            if count % a_page:
                inside[pages[full], first : first + count % a_page * width] = False


# --- Checks -------------------------------------------------------------------------------------------------------------


def unequal(found: Step, wanted: Step) -> list[str]:
    """The arrays in which a step is not bit for bit the other."""
    assert found.arrays.keys() == wanted.arrays.keys()
    return [name for name, array in found.arrays.items() if not same_bits(array, wanted.arrays[name])]


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Equal as bytes: NaN equals NaN, -0 is not 0. C-contiguous both."""
    unit = f"u{a.dtype.itemsize}"
    return a.dtype == b.dtype and np.array_equal(a.view(unit), b.view(unit))


def misplaced_scores(step: Step) -> int:
    """Scores of blocks that a row does not see, and none where it sees one."""
    scores = step.arrays["scores"]
    seen = np.arange(scores.shape[1]) < ((step.positions + 1) // BLOCK)[:, None]
    return int((seen != (scores >= 0)).sum())


def sampled_rows(step: Step) -> list[int]:
    """The first and the last row of each stream."""
    return sorted({int(row) for n in (0, 1) for row in np.flatnonzero(step.owners == n)[[0, -1]]})


def worst_of(step: Step, reference: Step, kept: Sequence[Kept], shape: CacheShape) -> list[float]:
    """|out - float64| / bound of the sampled rows of a step, the largest of each; at most 1 is inside.

    Queries, scores and keys are the reference's: a row's list is that of a stable sort of its own scores.
    """
    found = []
    for row in sampled_rows(step):
        end, stream = int(step.positions[row]) + 1, int(step.owners[row])
        listed = listed_keys(reference.arrays["scores"][row], end, shape.index_budget)
        k, v = cached_rows(kept[stream], listed)
        exact = attend(
            reference.arrays["q"][row][None], k, v, np.ones((1, len(listed)), np.bool_), shape.head_dim**-0.5
        )
        bound = bounds.sparse_attention(exact, shape.head_dim)
        found.append(bounds.worst_fraction(step.arrays["out"][row][None], exact.out, bound))
    return found


def cached_rows(kept: Kept, positions: NDArray[np.int64]) -> NDArray[Any]:
    """bf16 [K and V, positions, HK, D] of a kept stream's layer."""
    rows = np.ascontiguousarray(kept.rows[0][:, :, positions].swapaxes(1, 2))
    if kept.exponents is None:
        return rows.view(BF16)
    return widened(rows.view(np.uint8), kept.exponents[0][:, :, positions].swapaxes(1, 2))
