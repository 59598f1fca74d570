"""A stream: one sequence's place in a backend, and what a backend is built for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kernels_numba.decode_plan import MOST_ROWS
from kernels_numba.fp8 import KV_TYPES

if TYPE_CHECKING:
    from backends.base import Backend
    from backends.kept import Kept
    from backends.pool import Claim


class BackendError(Exception):
    """A backend was asked for what it cannot do: one line that says what would do."""


class NoRoom(BackendError):
    """There is no room now; there will be when streams or kept prompts are released. Nothing was taken."""


@dataclass(eq=False)
class Stream:
    """One sequence's place: its cache rows, window record and recurrent state. ``committed`` positions are kept.

    prompted: the first so many of them were made by prompt passes, so others may begin with them. pages: that hold its
    positions, claim: what it was promised, where it takes pages. number: of its place among the backend's. A released stream
    has no slot any more, so nothing can be reached through it: every use raises BackendError.
    """

    backend: Backend
    number: int
    capacity: int
    committed: int = 0
    prompted: int = 0
    pages: list[int] = field(default_factory=list)
    claim: Claim | None = None
    released: bool = False

    @property
    def slot(self) -> int:
        """Its place in the arena. Raises BackendError once the stream is released."""
        self.check_open()
        return self.number

    def check_open(self) -> None:
        """Raise BackendError once the stream is released."""
        if self.released:
            raise BackendError(f"stream {self.number}: was released; open another")

    def grow(self, end: int) -> None:
        """Make sure that positions below ``end`` have a place. Raises BackendError as Backend.claim does."""
        self.backend.claim([(self, end)])

    def commit(self, rows: int, prompt: bool) -> None:
        """So many more positions are kept; prompt: a prompt pass made them."""
        if prompt and self.prompted == self.committed:
            self.prompted += rows
        self.committed += rows

    def state(self, layer: int) -> tuple[Any, Any]:
        """(recurrent state [HV, DV, DK] float32, conv history [3, C] bf16) of a linear layer: the memory itself."""
        self.check_open()
        return self.backend.state_at(self.backend.run_base(self), layer)

    def save(self) -> Kept:
        """A copy of all that is committed, on the host. Raises BackendError once released, or while in a pass."""
        return self.backend.save(self)

    def release(self) -> None:
        """Give everything back. Raises BackendError the second time."""
        self.backend.release(self)


TILES, SCALAR_BATCH, SCALAR_DECODE = "tiles", "scalar-batch", "scalar-decode"
ATTENTION = (TILES, SCALAR_BATCH, SCALAR_DECODE)
"""Which attention kernels a pass takes: always the tiles; the scalar path for every row of a pass that holds a stream on
pages; the scalar path for decode passes that hold one."""


@dataclass(frozen=True)
class Sizes:
    """What a backend is built for.

    context: positions a stream has room for. streams: how many at once. page_size: positions a page, for backends that let one
    choose. window_rows: rows of one stream's decode pass, at most. spare_pages: pages beyond what the streams can need.
    shuffle: seed of an order of the pages in which they are handed out (None: lowest first). kv: "bf16" or "fp8", what a
    cache row is made of. attention: one of ATTENTION. pool: pages in all, the streams' runs among them (None: as many as the
    streams can need together, and the spare ones). reverse: hand the pages out in that order backwards.
    """

    context: int
    streams: int = 1
    page_size: int = 256
    window_rows: int = 1
    spare_pages: int = 0
    shuffle: int | None = None
    kv: str = "bf16"
    attention: str = TILES
    pool: int | None = None
    reverse: bool = False

    def check(self, name: str) -> None:
        """Raise BackendError for sizes that make no sense."""
        for field_name in ("context", "streams", "page_size", "window_rows"):
            if getattr(self, field_name) < 1:
                raise BackendError(f"{name}: {field_name} {getattr(self, field_name)}: at least 1")
        for field_name in ("spare_pages", "pool", "shuffle"):
            if (getattr(self, field_name) or 0) < 0:
                raise BackendError(f"{name}: {field_name} {getattr(self, field_name)}: at least 0")
        if self.window_rows > MOST_ROWS:
            raise BackendError(f"{name}: window_rows {self.window_rows}: at most {MOST_ROWS}")
        for field_name, choices in (("kv", KV_TYPES), ("attention", ATTENTION)):
            if (chosen := getattr(self, field_name)) not in choices:
                raise BackendError(f"{name}: {field_name} {chosen!r}: use one of {', '.join(choices)}")
