"""What the attention entries share: a geometry of heads, rows drawn for it, and the table of cases of spec contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from backends.layout import LAYOUTS
from kernels_numba.streams import COMMITTED as COMMITTED_COLUMN
from refengine.contract.caches import Cache, StreamRows, build_cache, has_window
from refengine.contract.entry import Control, Entry, Inputs
from refengine.contract.gates import EXACT, REPEATS
from refengine.contract.workbench import Array, Poison, drawn_bf16
from refengine.verify import fp8_oracle
from refengine.verify.attention_bits import Heads

ROWS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 256, 257, 4096)
COMMITTED = (0, 1, 48, 255, 256, 257, 2047, 2048, 4096, 9000)
PAGE_SIZES = (1, 16, 48, 64, 128, 256, 512, 544)
GROUPS = (1, 3, 4, 6, 8, 12)
FORMS = (("window", 0), ("paged", 48), ("paged_p256", 256))
"""Each form of cache: its layout, and positions a page."""
MIXED = ("mixed", 48)
"""Windows and pages in one launch, stream by stream."""
MOST_EXACT = 48
"""Rows of a case that are held against float64; more are sampled, the first and the last among them."""


WIDENED = "widened"


@dataclass(frozen=True)
class AttentionCase:
    """Streams of (rows, committed) on a form of cache.

    layout: by name. ptok: positions a page. first_page: the lowest page id. number: which of the drawn streams the first is.
    kv: "bf16", "fp8", or WIDENED, a bf16 cache of the rows that an fp8 cache gives back.
    """

    geometry: Heads
    layout: str
    ptok: int
    streams: tuple[tuple[int, int], ...]
    first_page: int = 0
    number: int = 0
    kv: str = "bf16"

    @property
    def cache_kv(self) -> str:
        """What the cache's rows are made of."""
        return "fp8" if self.kv == "fp8" else "bf16"

    @property
    def as_bf16(self) -> str:
        """The kv of a case whose bf16 cache holds this one's rows."""
        return "bf16" if self.kv == "bf16" else WIDENED

    @property
    def firsts(self) -> list[int]:
        """First row of each stream in the launch."""
        return [int(n) for n in np.cumsum([0] + [rows for rows, _ in self.streams])[:-1]]

    def positions_a_page(self, stream: int) -> int:
        """Positions a page of a stream; 0: it has a window."""
        if self.layout == "window" or (self.layout == "mixed" and has_window(stream)):
            return 0
        return 256 if self.layout == "paged_p256" else self.ptok

    @property
    def total(self) -> int:
        """Rows of the launch."""
        return sum(rows for rows, _ in self.streams)

    @property
    def scores(self) -> int:
        """Scores of one head."""
        return sum(rows * (rows + committed) for rows, committed in self.streams)

    @property
    def group(self) -> str:
        """Cases of one group share kernels and data."""
        return f"{self.geometry} {self.layout} {self.kv} {max(committed for _, committed in self.streams)}"

    def __str__(self) -> str:
        form = self.layout + (f" P={self.ptok}" if self.layout in ("paged", "mixed") else "")
        form += f" {self.kv}" if self.kv != "bf16" else ""
        rows, committed = map(listed, zip(*self.streams, strict=True))
        far = f" pages from {self.first_page}" if self.first_page else ""
        return f"{self.geometry} {form} W={rows} p0={committed}{far}"


def listed(numbers: Sequence[int]) -> str:
    """Numbers in order; of many that are all alike, how many and which."""
    alike = len(numbers) > 4 and len(set(numbers)) == 1
    return f"{len(numbers)}x{numbers[0]}" if alike else ",".join(map(str, numbers))


class AttentionEntry(Entry):
    """What an entry says of cases like these."""

    def group(self, case: AttentionCase) -> str:
        return case.group

    def cost(self, case: AttentionCase) -> float:
        return 1.0 + case.geometry.heads * case.scores / 1e6


BLOCK = 1024
"""Positions that are drawn together, so that a position's data do not depend on how many there are."""


@lru_cache(8)
def stream_data(geometry: Heads, seed: int, stream: int, length: int) -> tuple[Array, Array, Array]:
    """(q [N, H, D], k, v [N, HK, D]) in bf16 of a stream's positions 0 .. N - 1; no two streams are alike.

    length: a multiple of BLOCK.
    """
    blocks = [block_data(geometry, seed, stream, number) for number in range(length // BLOCK)]
    q, k, v = (np.concatenate(part) for part in zip(*blocks, strict=True))
    return q, k, v


@lru_cache(64)
def block_data(geometry: Heads, seed: int, stream: int, block: int) -> tuple[Array, ...]:
    """The data of one block of a stream's positions."""
    dims, place = geometry.head_dim, (block,) if block else ()
    shapes = (geometry.heads, geometry.kv_heads, geometry.kv_heads)
    return tuple(drawn_bf16((seed, dims, stream, n, *place), BLOCK, heads, dims) for n, heads in enumerate(shapes))


def length_for(positions: int) -> int:
    """A round number of positions, so that cases share their data."""
    return -(-max(positions, 1) // BLOCK) * BLOCK


def sampled(rows: int) -> Array:
    """Rows to hold against float64."""
    return (
        np.unique(np.linspace(0, rows - 1, min(rows, MOST_EXACT)).astype(np.int64)) if rows else np.empty(0, np.int64)
    )


# --- Inputs -----------------------------------------------------------------------------------------------------------


def case_data(case: AttentionCase, seed: int) -> list[tuple[Array, Array, Array]]:
    """(q, k, v) of each stream's positions; k and v as the cache gives them back."""
    length = length_for(max(rows + committed for rows, committed in case.streams))
    read = stream_data if case.kv == "bf16" else fp8_data
    return [read(case.geometry, seed, case.number + n, length) for n in range(len(case.streams))]


@lru_cache(8)
def fp8_data(geometry: Heads, seed: int, stream: int, length: int) -> tuple[Array, Array, Array]:
    """As stream_data, keys and values through an fp8 cache, neighbours with unlike exponents."""
    q, k, v = stream_data(geometry, seed, stream, length)
    power = (np.arange(length)[:, None] + np.arange(geometry.kv_heads)) % 3 - 1
    scale = np.exp2(power)[..., None].astype(k.dtype)
    return q, fp8_oracle.through_fp8(k * scale), fp8_oracle.through_fp8(v * scale)


def queries(case: AttentionCase, seed: int) -> Array:
    """bf16 [W, H, D]: the rows of the launch."""
    return np.concatenate([q[c : c + r] for (q, _, _), (r, c) in zip(case_data(case, seed), case.streams, strict=True)])


def laid_out(case: AttentionCase, poison: Poison, seed: int, own_rows: bool) -> Cache:
    """The streams' cache; own_rows: with the launch's own rows stored (a prompt pass), or without (a decode window)."""
    rows = [
        StreamRows(k[: c + r * own_rows], v[: c + r * own_rows], first, r, c)
        for (_, k, v), first, (r, c) in zip(case_data(case, seed), case.firsts, case.streams, strict=True)
    ]
    return build_cache(LAYOUTS[case.layout], case.ptok, rows, poison, first_page=case.first_page, kv=case.cache_kv)


# --- Faults in inputs -------------------------------------------------------------------------------------------------


def plant_row(inputs: Inputs, plane: str) -> None:
    """One element of a committed K or V row of the first stream, changed by one bf16 step."""
    laid: Cache = inputs["cache"]
    position = min(31, int(laid.streams[0, COMMITTED_COLUMN]) - 1)
    laid.arena[laid.word(0, plane, position, 0, 7)] += 1


def stale_length(inputs: Inputs) -> None:
    """A committed length that is one short."""
    inputs["cache"].streams[0, COMMITTED_COLUMN] -= 1


def attention_controls() -> Sequence[Control]:
    """Faults that every attention kernel must show."""
    return [
        Control("a page table whose first entry names a later page", EXACT, lambda i: i["cache"].swap_first_pages()),
        Control("a K row changed by one bf16 step", EXACT, lambda i: plant_row(i, "k")),
        Control("a V row changed by one bf16 step", EXACT, lambda i: plant_row(i, "v")),
        Control("a stale length", EXACT, stale_length),
        Control("a K row changed after the first run", REPEATS, lambda i: plant_row(i, "k")),
    ]
