"""How a launch of sparse attention is cut: chunks of 512 entries of a row's list, one partial each. Spec flash-next.

A partial is a slot, counted from 0 in every row; a row that has fewer leaves the others as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels_numba.decode_plan import CHUNK, carve_partials, check_heads
from kernels_numba.flash_next.pages import BLOCK
from kernels_numba.flash_next.select import list_width
from kernels_numba.streams import COMMITTED, ROWS


@dataclass(frozen=True)
class SparsePlan:
    """A launch of ``rows`` rows whose lists have at most ``slots`` chunks. budget: blocks that a sparse row reads."""

    slots: int
    rows: int
    heads: int
    kv_heads: int
    D: int
    budget: int

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.heads // self.kv_heads

    @property
    def partials(self) -> tuple[int, int, int]:
        """(slots, R, H): the shape of pm and pl; po has D after it."""
        return self.slots, self.rows, self.heads

    @property
    def scratch_size(self) -> int:
        """float32 elements that a launch needs as scratch: po, pm and pl."""
        return int(np.prod(self.partials, dtype=np.int64)) * (self.D + 2)

    @property
    def lists(self) -> tuple[int, int]:
        """The shape of the table of lists, int32."""
        return self.rows, list_width(self.budget)

    def carve(self, scratch: Any) -> tuple[Any, Any, Any]:
        """(po, pm, pl) inside scratch, float32 [at least scratch_size]. Raises ValueError when it is smaller."""
        return carve_partials(scratch, self.partials, self.D)


def plan_sparse(streams: NDArray[np.int64], heads: int, kv_heads: int, D: int, budget: int) -> SparsePlan:
    """Cut a launch. streams: int64 [S, columns] (kernels_numba/streams.py), on the host.

    Raises ValueError for heads or D that attention does not have, and for a budget below 1.
    """
    check_heads(heads, kv_heads, D)
    if budget < 1:
        raise ValueError(f"budget {budget}: 1 or more blocks a row")
    longest = int((streams[:, COMMITTED] + streams[:, ROWS]).max(initial=1))
    slots = -(-min(longest, BLOCK * budget + BLOCK - 1) // CHUNK)
    return SparsePlan(slots, int(streams[:, ROWS].sum()), heads, kv_heads, D, budget)
