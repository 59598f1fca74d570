"""A prefix: the first positions of a prompt in a backend's pages, held for streams that begin alike. Spec serving §4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backends.stream import BackendError

if TYPE_CHECKING:
    from backends.paged import PagedBackend


@dataclass(eq=False)
class Prefix:
    """``positions`` positions, all made by prompt passes. pages: that hold them, the last one perhaps in part; streams may hold
    them, too, and nobody writes these positions again. run: pages in a row, with the recurrent state behind the last position.

    Whoever takes it from ``Backend.snapshot`` releases it.
    """

    backend: PagedBackend
    positions: int
    pages: list[int]
    run: list[int]
    released: bool = False

    @property
    def run_base(self) -> int:
        """The word of the arena at which the run starts."""
        return self.run[0] * self.backend.page_words if self.run else 0

    @property
    def full_pages(self) -> list[int]:
        """Pages whose every position is kept: a stream that begins here shares them."""
        return self.pages[: self.positions // self.backend.positions]

    def check_held(self, backend: object) -> None:
        """Raise BackendError once it is released, or for another backend, whose pages these are not."""
        if self.backend is not backend:
            raise BackendError(
                f"a prefix of {self.positions} positions: lies in another backend; save it, and restore it here"
            )
        if self.released:
            raise BackendError(f"a prefix of {self.positions} positions: was released; take another snapshot")

    def release(self) -> None:
        """Give its hold of the pages up. Raises BackendError the second time."""
        self.backend.drop(self)
