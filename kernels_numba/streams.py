"""The stream table: one row a stream, int64, that tells a kernel where the stream's rows and cache are.

A table is ``int64 [S, COLUMNS]``; the constants are its columns. The first six say where the stream stands, the others
where one layer's planes lie in a page of its form: streams of one launch may have pages and windows of different sizes.
Spec attention §3.
"""

from __future__ import annotations

FIRST = 0
"""First row of the stream in this launch."""
ROWS = 1
"""Rows w of the stream in this launch."""
COMMITTED = 2
"""Committed positions p: the first row stands at position p."""
BASE = 3
"""Word offset in the arena of the stream's window; for pages, of the pool's page 0."""
TABLE = 4
"""First entry of the stream's page table in ``pages``; -1: a window, that is one page of PTOK positions at BASE."""
PTOK = 5
"""Positions a page (window: its capacity)."""
PAGE_WORDS = 6
"""Words a page."""
K_PLANE = 7
"""Word offset in a page (or window) of the layer's keys, [HK, PTOK, row]; a multiple of 4, as the following are."""
V_PLANE = 8
"""Of its values."""
K_EXP_PLANE = 9
"""Of the exponents of its keys, int8 [HK, PTOK]; 0 where the cache is bf16."""
V_EXP_PLANE = 10
"""Of the exponents of its values."""
INDEX_PLANE = 11
"""Of the raw keys of its sparse indexer, bf16 [PTOK, row]; 0 where the layer has none."""
POOLED_PLANE = 12
"""Of the pooled keys of its blocks, bf16 [PTOK / block, row]: blocks never straddle pages."""
COLUMNS = 13
"""Columns of the table."""
