"""Pages of 256 positions, the size known to the compiler: addresses need no division, items never straddle."""

from __future__ import annotations

from backends import layout
from backends.base import Sizes
from backends.paged import PagedBackend


class PagedP256Backend(PagedBackend):
    """As PagedBackend; whatever page size is asked for, a page has 256 positions."""

    name = "paged-p256"
    layout = layout.paged_p256

    @classmethod
    def page_positions(cls, sizes: Sizes) -> int:
        return 256
