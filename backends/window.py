"""Windows: each stream's cache is contiguous, reserved whole for the context."""

from __future__ import annotations

from collections.abc import Sequence

from backends import layout
from backends.arena import CacheShape
from backends.base import Backend, Sizes, Stream


class WindowBackend(Backend):
    """A window a stream: one page of ``context`` positions, at the stream's place in the arena."""

    name = "window"
    layout = layout.window
    paged = False

    @classmethod
    def page_positions(cls, sizes: Sizes) -> int:
        return sizes.context

    @classmethod
    def cache_words(cls, shape: CacheShape, sizes: Sizes) -> int:
        return sizes.streams * shape.page_words(sizes.context, sizes.kv)

    def address(self, stream: Stream) -> tuple[int, int]:
        return stream.slot * self.page_words, -1

    def grow(self, ends: Sequence[tuple[Stream, int]]) -> None:
        """A window has room for all of its capacity."""

    def freed(self, stream: Stream) -> None:
        """The next stream writes over it."""
