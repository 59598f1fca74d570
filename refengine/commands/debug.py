"""``refengine debug``: one block of a kernel under pdb, at the kernel's own lines, in lock step."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from io import StringIO
from typing import TextIO

from kernels_numba.machine import KernelError
from kernels_numba.machine.cpu import Launch
from kernels_numba.machine.one_block import NoSuchBlock, one_block
from refengine.errors import UserError
from refengine.lab.kernel_case import Wish, checked_launch, kernel_named, run_in
from refengine.lab.kernel_pdb import HINT, KernelPdb


@dataclass(frozen=True)
class Request:
    """A debugging as the command line asks for it. stops: breakpoints to run to. prompt: pdb's own; else an editor's debugger
    does the stopping. checked: races and the like stop it, too."""

    wish: Wish
    lane: int | None
    stops: tuple[str, ...]
    prompt: bool
    checked: bool


def run(request: Request, stdin: TextIO | None = None) -> int:
    """Debug one block; the exit status: 0, or 1 where a fault stopped it. Raises UserError, NoSuchBlock.

    stdin: where commands come from; None: the terminal, or what is piped in.
    """
    wish = replace(request.wish, kernel=kernel_named(request.wish.kernel))
    if request.lane is not None and request.lane < 0:
        raise UserError(f"--lane {request.lane}: at least 0")
    if not request.prompt and (request.stops or request.lane is not None):
        raise UserError("--no-prompt: an editor stops it; leave out --break and --lane")
    debugger = KernelPdb(request.lane, request.stops, stdin or piped(), sys.stdout)
    around = debugger.around if request.prompt else lambda function: function
    print(f"{wish.kernel}, block {wish.block_number}" + (f". {HINT}" if request.prompt else ", no prompt"))
    make = checked_launch() if request.checked else Launch
    try:
        run_in(
            wish, lambda: one_block(wish.kernel, wish.block_number, make, around), lambda one: one.program is not None
        )
    except NoSuchBlock:
        raise
    except KernelError as fault:
        print(f"FAULT {fault}")
        return 1
    return 0


def piped() -> TextIO | None:
    """Where commands are piped in from: nowhere if stdin is closed, which ends them; None for a terminal."""
    if sys.stdin is None:
        return StringIO()
    return None if sys.stdin.isatty() else sys.stdin
