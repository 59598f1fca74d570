"""What a backend's memory is taken by at one moment, in bytes, and how much of that is waste. Spec serving §2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backends.base import Backend, Stream
from backends.paged import PagedBackend

STATES = ("streams", "shared", "kept", "promised", "runs", "free")


@dataclass(frozen=True)
class Held:
    """Bytes by state, which add up to the pool and the windows.

    streams: keys and values of one stream. shared: of several. kept: of kept prompts alone. promised: to a stream, and not
    written yet: pages it has not taken, the rest of a window. runs: recurrent states. free: nobody's.
    tail: of ``streams`` and ``shared``, positions of a last page that are not written; of windows, all that is not written.
    rounding: of ``runs``, what makes them whole pages. shared_pages: pages of several streams.
    """

    streams: int
    shared: int
    kept: int
    promised: int
    runs: int
    free: int
    tail: int
    rounding: int
    shared_pages: int = 0

    @property
    def written(self) -> int:
        """Bytes of keys and values that streams hold."""
        return self.streams + self.shared

    def plus(self, other: Held) -> Held:
        """Both together."""
        return Held(*(getattr(self, name) + getattr(other, name) for name in Held.__dataclass_fields__))


def held(backend: Backend) -> Held:
    """The books of a backend, whatever its form of cache."""
    if not isinstance(backend, PagedBackend):
        return held_windows(backend, list(backend.streams.values()), backend.sizes.streams, runs=True)
    open_windows = [stream for stream in backend.streams.values() if backend.has_window(stream)]
    windows = backend.sizes.streams - backend.streams_on_pages(backend.sizes)
    return held_pages(backend).plus(held_windows(backend, open_windows, windows, runs=False))


def held_windows(backend: Backend, streams: Sequence[Stream], windows: int, runs: bool) -> Held:
    """Of the windows that there are, those of ``streams``. runs: whether each has its run beside it, outside a pool."""
    shape, context = backend.shape, backend.sizes.context
    window = 4 * shape.page_words(context, backend.sizes.kv)
    run = 4 * shape.run_words if runs else 0
    written = sum(window * stream.committed // context for stream in streams)
    reserved = len(streams) * window - written
    free = (windows - len(streams)) * (window + run)
    return Held(written, 0, 0, reserved, len(streams) * run, free, reserved, 0)


def held_pages(backend: PagedBackend) -> Held:
    """Of the pool's pages."""
    pool, page = backend.pool, 4 * backend.page_words
    tables = np.bincount(backend.pages, minlength=pool.count + 1)[: pool.count]  # by page: streams that name it
    one, several = (int(np.count_nonzero(found)) for found in (tables == 1, tables > 1))
    runs = [claim.run for claim in pool.claims] + [prefix.run for prefix in backend.prefixes]
    run_pages = sum(map(len, runs))
    kept = pool.count - pool.free - one - several - run_pages
    streams = [stream for stream in backend.streams.values() if not backend.has_window(stream)]
    slots = sum(len(stream.pages) * backend.positions - stream.committed for stream in streams)
    return Held(
        one * page, several * page, kept * page, pool.promised * page, run_pages * page, pool.available * page,
        tail=slots * page // backend.positions, rounding=run_pages * page - len(runs) * 4 * backend.shape.run_words,
        shared_pages=several,
    )  # fmt: skip
