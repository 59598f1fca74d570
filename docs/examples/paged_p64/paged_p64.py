"""A backend of one's own: pages of 64 positions, the size known to the compiler."""

from backends.layout import Layout
from backends.paged import PagedBackend
from kernels_numba.machine import count, device, int64


@device
def locate_paged_p64(pos, base, table, ptok, pages, page_words):
    """(word where the page starts, slot in it) of a position."""
    count("lookups")
    return base + int64(pages[table + (pos >> 6)]) * page_words, pos & 63


class PagedP64Backend(PagedBackend):
    """As PagedBackend; a page has 64 positions, so no item of 32 keys lies in two."""

    name = "paged-p64"
    layout = Layout("paged_p64", straddles=False, page=64, locate=locate_paged_p64)

    @classmethod
    def page_positions(cls, sizes):
        return 64
