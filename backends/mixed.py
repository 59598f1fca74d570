"""Windows beside pages: the first stream keeps a window, the others take pages, in one arena and in the same launches."""

from __future__ import annotations

from backends import layout
from backends.arena import CacheShape
from backends.base import Sizes, Stream
from backends.paged import PagedBackend


class MixedBackend(PagedBackend):
    """The pool's pages, then one window of ``context`` positions, which belongs to the stream of place 0."""

    name = "mixed"
    layout = layout.mixed

    @classmethod
    def streams_on_pages(cls, sizes: Sizes) -> int:
        """All but the first."""
        return sizes.streams - 1

    @classmethod
    def cache_words(cls, shape: CacheShape, sizes: Sizes) -> int:
        return super().cache_words(shape, sizes) + shape.page_words(sizes.context, sizes.kv)

    def has_window(self, stream: Stream) -> bool:
        return stream.slot == 0

    @property
    def fits_a_window(self) -> bool:
        return self.run_pages <= self.pool.count

    def positions_of(self, stream: Stream) -> int:
        return self.sizes.context if self.has_window(stream) else self.positions

    def address(self, stream: Stream) -> tuple[int, int]:
        if self.has_window(stream):
            return (self.pool.count + 1) * self.page_words, -1
        return super().address(stream)

    def held_pages(self, stream: Stream) -> int:
        return 1 if self.has_window(stream) else super().held_pages(stream)
