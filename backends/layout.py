"""Where a cache row lives: the address function of each form of cache, and all that a kernel knows of a backend.

``locate(pos, base, table, ptok, pages, page_words) -> (start, slot)``: the word offset of the page (or window) that
holds position ``pos``, and the position's slot in it. With ``plane`` the word offset of a layer's K or V inside a
page,

    word(pos, hk, w) = start + plane + (hk · ptok + slot) · (D / 2) + w

A page is laid out as a window of ``ptok`` positions, so the forms differ in ``start`` and ``slot`` alone. Spec
attention §3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels_numba.machine import count, device, int64, uint32


@device
def locate_window(pos, base, table, ptok, pages, page_words):
    """A window is one page, at ``base``."""
    return base, pos


@device
def locate_paged(pos, base, table, ptok, pages, page_words):
    """A page of ``ptok`` positions, by its id in the stream's page table. Positions fit 32 bits, word offsets need
    64.
    """
    count("lookups")
    entry = int64(uint32(pos) // uint32(ptok))
    return base + int64(pages[table + entry]) * page_words, pos - entry * ptok


@device
def locate_paged_p256(pos, base, table, ptok, pages, page_words):
    """As locate_paged, the page size known to the compiler: no division is left."""
    count("lookups")
    return base + int64(pages[table + (pos >> 8)]) * page_words, pos & 255


@device
def locate_mixed(pos, base, table, ptok, pages, page_words):
    """A window or pages, as the stream's own row of the table says."""
    start, slot = base, pos
    if table >= 0:
        start, slot = locate_paged(pos, base, table, ptok, pages, page_words)
    return start, slot


@dataclass(frozen=True)
class Layout:
    """A form of cache, a compile-time argument of kernels.

    straddles: whether 64 consecutive positions from a multiple of 64, a tile, may lie in more than one page. page: the page
    size where it is known at compile time. locate: the device function above.
    """

    name: str
    straddles: bool
    page: int | None
    locate: Any


window = Layout("window", straddles=False, page=None, locate=locate_window)
paged = Layout("paged", straddles=True, page=None, locate=locate_paged)
paged_p256 = Layout("paged_p256", straddles=False, page=256, locate=locate_paged_p256)

mixed = Layout("mixed", straddles=True, page=None, locate=locate_mixed)

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (window, paged, paged_p256, mixed)}
"""Every layout, by name."""
