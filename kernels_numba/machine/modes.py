"""How the CPU machine runs launches: plain, checked inside ``with checked():``, not at all inside ``recorded()``; inside
``watched()`` plain, and somebody sees what each was given and has left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from . import cpu
from .checked import CheckedLaunch
from .compiler import signature
from .frontend import Program

Grid = tuple[int, int, int]


class Plain:
    """Lock step, bounds checked, nothing else watched."""

    def run(self, program: Program, grid: Grid, threads: int, shared_bytes: int, args: tuple) -> None:
        cpu.run(program, cpu.fast(program), grid, threads, shared_bytes, args)

    def beside_gpu(self, program: Program, grid: Grid, threads: int, shared_bytes: int, args: tuple) -> None:
        """After a launch on a GPU: nothing."""


class Checked:
    """Every block watched; or, with ``sample``, one block watched and the others plain.

    counters: "global_bytes" and whatever kernels ``count``: "lookups" of page tables, "straddles" of staged items.
    """

    def __init__(self, sample: Callable[[Grid], Grid | None] | None):
        self.sample, self.counters = sample, Counter[str]()

    def run(self, program: Program, grid: Grid, threads: int, shared_bytes: int, args: tuple) -> None:
        if self.sample is None:
            self.watch(program, grid, threads, shared_bytes, args, None)
            return
        cpu.run(program, cpu.fast(program), grid, threads, shared_bytes, args)
        if (block := self.sample(grid)) is not None:
            self.watch(program, grid, threads, shared_bytes, args, block)

    def beside_gpu(self, program: Program, grid: Grid, threads: int, shared_bytes: int, args: tuple) -> None:
        """After a launch on a GPU: the sampled block runs here too, watched, on copies of the arrays."""
        if self.sample is not None and (block := self.sample(grid)) is not None:
            copies = tuple(a.get() if hasattr(a, "get") else a for a in args)
            self.watch(program, grid, threads, shared_bytes, copies, block)

    def watch(self, program: Program, grid: Grid, threads: int, shared: int, args: tuple, block: Grid | None) -> None:
        watched = type("Watched", (CheckedLaunch,), {"counters": self.counters})
        cpu.run(program, cpu.stepped(program), grid, threads, shared, args, watched, block)


class Watched(Plain):
    """Plain; ``see`` is called after each launch with the kernel's name and its arguments by name."""

    def __init__(self, see: Callable[[str, dict[str, Any]], None]):
        self.see = see

    def run(self, program: Program, grid: Grid, threads: int, shared_bytes: int, args: tuple) -> None:
        super().run(program, grid, threads, shared_bytes, args)
        self.beside_gpu(program, grid, threads, shared_bytes, args)

    def beside_gpu(self, program: Program, grid: Grid, threads: int, shared_bytes: int, args: tuple) -> None:
        """After a launch on a GPU: seen."""
        self.see(program.name, dict(zip(program.params, args, strict=True)))


@dataclass(frozen=True)
class Noted:
    """A launch as a compiler sees it. signature: a numba type for each parameter. threads, shared_bytes: a block's."""

    program: Program
    signature: tuple[Any, ...]
    threads: int
    shared_bytes: int


class Recording:
    """Nothing runs. launches: each different launch once, in order."""

    def __init__(self) -> None:
        self.noted: dict[Noted, None] = {}

    @property
    def launches(self) -> list[Noted]:
        return list(self.noted)

    def run(self, program: Program, grid: Grid, threads: int, shared_bytes: int, args: tuple) -> None:
        self.noted.setdefault(Noted(program, signature(args), threads, shared_bytes))

    def beside_gpu(self, program: Program, grid: Grid, threads: int, shared_bytes: int, args: tuple) -> None:
        """After a launch on a GPU: noted."""
        self.run(program, grid, threads, shared_bytes, args)


PLAIN = Plain()
_mode: ContextVar[Any] = ContextVar("mode", default=PLAIN)


def current() -> Any:
    """The mode that launches run in."""
    return _mode.get()


@contextmanager
def within(mode: Any) -> Iterator[Any]:
    """Launches inside run in this mode."""
    token = _mode.set(mode)
    try:
        yield mode
    finally:
        _mode.reset(token)


def checked(sample: Callable[[Grid], Grid | None] | None = None) -> AbstractContextManager[Checked]:
    """Launches on the CPU machine inside ``with checked():`` run in checked mode.

    sample: from a launch's grid to the one block to watch, or None; that block runs a second time, after the plain run
    of all (a kernel that gives other results when run twice must be checked whole). Default: all blocks.
    Raises KernelError at the first finding, naming kernel, lines, thread and word.
    """
    return within(Checked(sample))


def recorded() -> AbstractContextManager[Recording]:
    """Launches on the CPU machine inside ``with recorded():`` are noted and do not run: no array changes."""
    return within(Recording())


def watched(see: Callable[[str, dict[str, Any]], None]) -> AbstractContextManager[Watched]:
    """Inside ``with watched(see):`` each launch is followed by ``see(kernel's name, its arguments by name)``."""
    return within(Watched(see))
