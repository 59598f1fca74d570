"""Windows beside pages: the first stream keeps a window, the others take pages, in one arena and in the same launches."""

from __future__ import annotations

from collections.abc import Sequence

from backends import layout
from backends.arena import CacheShape
from backends.base import Sizes, Stream
from backends.paged import PagedBackend


class MixedBackend(PagedBackend):
    """The pool's pages, then one window of ``context`` positions, which belongs to the stream of place 0."""

    name = "mixed"
    layout = layout.mixed

    @classmethod
    def pool_pages(cls, sizes: Sizes) -> int:
        """Pages of the streams that have no window, and the spare ones."""
        return (sizes.streams - 1) * -(-sizes.context // cls.page_positions(sizes)) + sizes.spare_pages

    @classmethod
    def cache_words(cls, shape: CacheShape, sizes: Sizes) -> int:
        return super().cache_words(shape, sizes) + shape.page_words(sizes.context, sizes.kv)

    def has_window(self, stream: Stream) -> bool:
        """Whether the stream keeps a window."""
        return stream.slot == 0

    def positions_of(self, stream: Stream) -> int:
        return self.sizes.context if self.has_window(stream) else self.positions

    def address(self, stream: Stream) -> tuple[int, int]:
        if self.has_window(stream):
            return (self.pool.count + 1) * self.page_words, -1
        return super().address(stream)

    def grow(self, ends: Sequence[tuple[Stream, int]]) -> None:
        """Pages for the streams that take them; a window has room for all of its capacity."""
        super().grow([(stream, end) for stream, end in ends if not self.has_window(stream)])

    def held_pages(self, stream: Stream) -> int:
        return 1 if self.has_window(stream) else super().held_pages(stream)
