"""Exercises of tutorial 16: write your own backend. Replace each ``raise NotImplementedError`` by your answer."""

import numpy as np

from kernels_numba.machine import int64, uint32  # noqa: F401


def locate_packed(pos, base, table, ptok, pages, page_words):
    """(word where the page starts, slot in it) of a position; two page ids an entry.

    As ``locate_paged`` of backends/layout.py, but entry ``n // 2`` of the stream's table holds page number ``n``: in its low 16
    bits if ``n`` is even, in its high 16 bits if it is odd. pages: int32, so an entry may be negative. The test makes a device
    function of it: use what ``locate_paged`` uses, and ``>>``, ``&``, ``%``, ``if``. A name has one type: ``int64(...)`` is safe.
    """
    raise NotImplementedError


def enter_packed(pages: np.ndarray, table: int, number: int, page: int) -> None:
    """Name a stream's page in its table.

    pages: int32, changed in place. table: the first entry of the stream. number: which of the stream's pages, from 0. page: its
    id, 0 to 65,535. The other half of the entry stays as it is. This runs on the host: any NumPy will do.
    """
    raise NotImplementedError


def stray_writes(before: np.ndarray, after: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Indices of the words that changed and may not have.

    before, after: float32 [n], a memory before and after a launch; a NaN of one bit pattern that became a NaN of another has
    changed, and one that stayed has not. allowed: bool [n]. Returns int64, in order.
    """
    raise NotImplementedError
