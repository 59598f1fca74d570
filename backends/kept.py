"""A kept state: a copy of all that a stream has committed, on the host, in a layout that no form of cache decides.

So a stream that was saved on a window goes on in pages of any size, and the other way round, with the same bits. Nothing but
committed positions travels. Spec serving §4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from backends.arena import CacheShape
from backends.page_copies import (
    EXPONENTS,
    INDEX,
    POOLED,
    ROWS,
    Place,
    into_cache,
    on_host,
    out_of_cache,
    pages_place,
    parts,
    stream_place,
)
from backends.stream import BackendError, Stream
from kernels_numba.fp8 import row_words

if TYPE_CHECKING:
    from backends.base import Backend
    from backends.prefix import Prefix

ARRAYS = (ROWS, EXPONENTS, "states", "histories", INDEX, POOLED, "tokens", "tails")
"""Of a kept state; not each has all."""
Axes = dict[str, int]
"""The axes of an array in order, and their lengths."""


@dataclass(frozen=True, eq=False)
class Kept:
    """A stream's first ``positions`` positions and the recurrent state behind them; the first ``prompted`` of them were made by
    prompt passes. kv: "bf16" or "fp8".

    rows: uint32 [attention layers, K and V, KV heads, positions, row words], bf16 pairs or four e4m3 codes a word. exponents:
    int8 [attention layers, K and V, KV heads, positions] of an fp8 cache, else None. states: float32 [linear layers, HV, DV,
    DK]. histories: bf16 [linear layers, conv rows, C]. index: bf16 [attention layers, positions, DI], raw keys of a sparse
    indexer, and pooled: bf16 [attention layers, whole blocks, DI], else None. tokens: int32 [tokens], id + 1 of the n-gram
    branch's last ones, and tails: bf16 [rows, channels], else None. C-contiguous; layers in the model's order.
    """

    positions: int
    prompted: int
    kv: str
    rows: NDArray[np.uint32]
    exponents: NDArray[np.int8] | None
    states: NDArray[np.float32]
    histories: NDArray[Any]
    index: NDArray[Any] | None = None
    pooled: NDArray[Any] | None = None
    tokens: NDArray[np.int32] | None = None
    tails: NDArray[Any] | None = None

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Those that there are, by name."""
        named = {name: getattr(self, name) for name in ARRAYS}
        return {name: array for name, array in named.items() if array is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def release(self) -> None:
        """Nothing of a backend's is held."""

    def check(self, backend: Backend) -> None:
        """Raise BackendError, naming what differs, unless a stream of the backend can take this state."""
        if (kv := backend.sizes.kv) != self.kv:
            raise BackendError(f"{backend.name}: kept state: kv {self.kv}, this backend has {kv}; read the prompt anew")
        wanted = kept_axes(backend.shape, self.kv, self.positions)
        if set(wanted) != set(self.arrays):
            raise BackendError(f"{backend.name}: kept state: holds {', '.join(self.arrays)}, not {', '.join(wanted)}")
        for name, (dtype, axes) in wanted.items():
            if problem := unlike(self.arrays[name], dtype, axes):
                raise BackendError(f"{backend.name}: kept state: {name}: {problem}; read the prompt anew")


def kept_axes(shape: CacheShape, kv: str, positions: int) -> dict[str, tuple[np.dtype, Axes]]:
    """The type and the axes of each array of a kept state."""
    attention, linear = len(shape.attention_layers), len(shape.linear_layers)
    cached = {"attention layers": attention, "K and V": 2, "KV heads": shape.kv_heads, "positions": positions}
    heads = {"value heads": shape.value_heads, "value dims": shape.value_dim, "key dims": shape.key_dim}
    bf16, layers, dims = np.dtype(ml_dtypes.bfloat16), {"attention layers": attention}, {"index dims": shape.index_dim}
    indexer = {
        "index": (bf16, {**layers, "positions": positions, **dims}),
        "pooled": (bf16, {**layers, "blocks": shape.blocks(positions), **dims}),
    }
    ngrams = {
        "tokens": (np.dtype(np.int32), {"tokens": shape.ngram_tokens}),
        "tails": (bf16, {"rows": shape.ngram_rows, "channels": shape.ngram_channels}),
    }
    return {
        "rows": (np.dtype(np.uint32), cached | {"words a row": row_words(shape.head_dim, kv)}),
        **({"exponents": (np.dtype(np.int8), cached)} if kv == "fp8" else {}),
        "states": (np.dtype(np.float32), {"linear layers": linear, **heads}),
        "histories": (bf16, {"linear layers": linear, "rows": shape.conv_rows, "channels": shape.conv_channels}),
        **(indexer if shape.index_dim else {}),
        **(ngrams if shape.ngram_tokens else {}),
    }


def unlike(array: NDArray[Any], dtype: np.dtype, axes: Axes) -> str | None:
    """In what an array is not as wanted, if anything."""
    if array.dtype != dtype or array.ndim != len(axes) or not array.flags.c_contiguous:
        return f"{array.dtype} of {array.ndim} axes where C-contiguous {dtype} of {len(axes)} is needed"
    for (name, wanted), found in zip(axes.items(), array.shape, strict=True):
        if found != wanted:
            return f"{name} {found} where this backend has {wanted}"
    return None


# --- Save and restore -------------------------------------------------------------------------------------------------


def save(backend: Backend, stream: Stream) -> Kept:
    """A copy of what the stream has committed. Raises BackendError unless it is open here and in no pass."""
    check_between_passes(backend, stream)
    place = stream_place(backend, stream, stream.committed)
    return copied(backend, stream.committed, stream.prompted, place, backend.run_base(stream))


def save_prefix(prefix: Prefix) -> Kept:
    """A copy of a prefix's positions. Raises BackendError once it is released."""
    backend = prefix.backend
    prefix.check_held(backend)
    return copied(backend, prefix.positions, prefix.positions, pages_place(backend, prefix.pages), prefix.run_base)


def copied(backend: Backend, positions: int, prompted: int, place: Place, run: int) -> Kept:
    """A copy of positions that lie at ``place``, and of the recurrent state in the run that starts at word ``run``."""
    shape, kv = backend.shape, backend.sizes.kv
    sizes = {name: (tuple(axes.values()), dtype) for name, (dtype, axes) in kept_axes(shape, kv, positions).items()}
    cached = {part.name: backend.xp.empty(*sizes[part.name]) for part in parts(shape, kv)}
    out_of_cache(backend, place, positions, cached)
    found = {name: on_host(array) for name, array in cached.items()}
    found |= {name: np.empty(*sizes[name]) for name in ("states", "histories")}
    for n, layer in enumerate(shape.linear_layers):
        found["states"][n], found["histories"][n] = map(on_host, backend.state_at(run, layer))
    if shape.ngram_tokens:
        found["tokens"], found["tails"] = (on_host(array).copy() for array in backend.ngrams_at(run))
    return Kept(positions, prompted, kv, **{name: found.get(name) for name in ARRAYS})  # type: ignore[arg-type]


def restore(backend: Backend, kept: Kept, stream: Stream) -> None:
    """Put a kept state into an open stream that has nothing committed; ``committed`` is then the state's.

    Raises BackendError, and changes nothing, for a state that does not fit, a stream that is not empty or in a pass, and as
    claim does.
    """
    kept.check(backend)
    check_between_passes(backend, stream)
    if stream.committed:
        raise BackendError(
            f"{backend.name}: stream {stream.number}: has {stream.committed} positions; restore into a new one"
        )
    backend.claim([(stream, kept.positions)])
    names = [part.name for part in parts(backend.shape, kept.kv)]
    place, arrays = (
        stream_place(backend, stream, kept.positions),
        {n: backend.xp.asarray(kept.arrays[n]) for n in names},
    )
    into_cache(backend, place, kept.positions, arrays)
    for n, layer in enumerate(backend.shape.linear_layers):
        for memory, array in zip(stream.state(layer), (kept.states[n], kept.histories[n]), strict=True):
            memory[:] = backend.xp.asarray(array)
    if backend.shape.ngram_tokens:
        for memory, kept_array in zip(
            backend.ngrams_at(backend.run_base(stream)), (kept.tokens, kept.tails), strict=True
        ):
            memory[:] = backend.xp.asarray(kept_array)
    stream.committed, stream.prompted = kept.positions, kept.prompted


def check_between_passes(backend: Backend, stream: Stream) -> None:
    """Raise BackendError unless the stream is open here, and no pass has begun that may have moved its recurrent state."""
    backend.check_open(stream)
    if backend.current is not None and any(stream is member for member in backend.current.members):
        raise BackendError(f"{backend.name}: stream {stream.number}: is in a pass; finish it first")
