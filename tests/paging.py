"""Caches for tests, laid out as the contract lays them, that tell whether a kernel wrote to them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from backends.layout import Layout, paged_p256
from refengine.contract import caches
from refengine.contract.caches import PLANES, StreamRows
from refengine.contract.workbench import BF16, NAN

__all__ = ["BF16", "NAN_WORD", "PLANES", "Cache", "StreamRows", "build_cache", "p256_or"]

NAN_WORD = np.uint32(NAN.word)
"""Two bf16 NaNs that no kernel writes: what unused words hold."""


@dataclass(frozen=True)
class Cache(caches.Cache):
    """A laid out cache, and its words as they were."""

    before: NDArray[np.uint32] = field(repr=False)

    def assert_untouched(self) -> None:
        """No kernel of these tests writes to the cache."""
        np.testing.assert_array_equal(self.arena, self.before)


def build_cache(layout: Layout, ptok: int, streams: list[StreamRows], padding: int | None = None) -> Cache:
    """Lay the streams out; padding: table entries past the end (None: the null page)."""
    laid = caches.build_cache(layout, ptok, streams, padding=padding)
    return Cache(**{f.name: getattr(laid, f.name) for f in fields(laid)}, before=laid.arena.copy())


def p256_or(layout: Layout, ptok: int) -> int:
    """The page size a layout takes in a test that asks for ``ptok``."""
    return 256 if layout is paged_p256 else ptok
