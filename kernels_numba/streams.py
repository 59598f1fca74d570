"""The stream table: one row a stream, int64, that tells a kernel where the stream's rows and cache are.

A table is ``int64 [S, 6]``; the constants are its columns. Spec attention §3.
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
COLUMNS = 6
"""Columns of the table."""
