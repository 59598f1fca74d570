"""One block of a kernel's launch, run statement by statement: what tracing and debugging have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from . import cpu
from .errors import KernelError
from .frontend import Program
from .modes import Grid, within

Function = Callable[..., Any]


class Done(Exception):
    """The block has run: nothing after it is launched."""


class NoSuchBlock(KernelError):
    """A block that the grid does not have: nothing has run."""


class OneBlock:
    """Launches before the kernel's run plain. Of its own first launch one block runs, all of it in lock step, and nothing more.

    kernel: by name. block: of the grid. make: builds the block's launch, a traced one, say. around: what to call in the place of
    the kernel's lock-step function. program, grid, threads, scalars (arguments that are no arrays): of the launch; program is
    None where it never came.
    """

    def __init__(
        self, kernel: str, block: Grid, make: Callable[..., cpu.Launch], around: Callable[[Function], Function]
    ):
        self.kernel, self.block, self.make, self.around = kernel, block, make, around
        self.program: Program | None = None
        self.grid: Grid | None = None
        self.threads = 0
        self.scalars: dict[str, Any] = {}

    def run(self, program: Program, grid: Grid, threads: int, shared_bytes: int, args: tuple) -> None:
        """Raises NoSuchBlock, Done behind the block, and KernelError as launches do."""
        if program.name != self.kernel:
            cpu.run(program, cpu.fast(program), grid, threads, shared_bytes, args)
            return
        if not all(0 <= b < n for b, n in zip(self.block, grid)):
            raise NoSuchBlock(f"{self.kernel}: block {self.block}: its grid is {grid}; name one below that")
        self.program, self.grid, self.threads = program, grid, threads
        self.scalars = {n: a for n, a in zip(program.params, args) if not getattr(a, "ndim", 0)}
        function = self.around(cpu.stepped(program))
        cpu.run(program, function, grid, threads, shared_bytes, args, self.make, self.block)
        raise Done

    def beside_gpu(self, program: Program, grid: Grid, threads: int, shared_bytes: int, args: tuple) -> None:
        """After a launch on a GPU: nothing, for one block runs on the CPU machine alone."""


@contextmanager
def one_block(
    kernel: str,
    block: Grid = (0, 0, 0),
    make: Callable[..., cpu.Launch] = cpu.Launch,
    around: Callable[[Function], Function] = lambda function: function,
) -> Iterator[OneBlock]:
    """Inside, as ``OneBlock`` says; the body ends where the block does. Raises KernelError as launches do."""
    mode = OneBlock(kernel, block, make, around)
    try:
        with within(mode):
            yield mode
    except Done:
        pass
