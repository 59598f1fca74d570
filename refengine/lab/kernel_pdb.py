"""pdb that knows kernels: it stops at a kernel's own lines alone, and its variables are those of a thread or of all of them.

The lock-step function runs one statement for all threads, so a step is a step of the whole block.
"""

from __future__ import annotations

import linecache
import pdb
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TextIO

from kernels_numba.machine.frontend import Program
from kernels_numba.machine.place import kernel_frames, program_of, spot_of, statement_line, statements, turns_of
from refengine.errors import UserError
from refengine.lab.lane_view import active, names, runs, summary, variables
from refengine.lab.trace_data import module_file, shown_turns

HINT = "lane N or lanes: whose values; where: block, turns, lines; vars: all variables; help: pdb's own commands"


class KernelPdb(pdb.Pdb):
    """A debugger for one block. lane: whose values expressions have; None: arrays over all lanes.

    stops: breakpoints, lines of the kernel's file or names of device functions, to run to; none: it stops at the first line.
    """

    def __init__(
        self, lane: int | None = None, stops: Sequence[str] = (), stdin: TextIO | None = None, stdout: TextIO | None = None
    ):  # fmt: skip
        super().__init__(stdin=stdin, stdout=stdout, nosigint=True, readrc=False)
        self.use_rawinput = stdin is None
        self.prompt, self.lane, self.stops, self.left = "(kernel) ", lane, stops, False
        self.lines: dict[FrameType, int] = {}
        self.cmdqueue += [*(f"break {stop}" for stop in stops), *(["continue"] if stops else [])]

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The lock-step function under this debugger. What stops it can be looked at before it goes on upward.

        It raises UserError for a lane or a breakpoint that the block does not have.
        """

        def debugged(*args: Any) -> None:
            self.check(function.__globals__["__lockstep__"], args[0].threads)
            try:
                self.runcall(function, *args)
            except Exception as fault:
                self.message(f"stopped by: {fault}")
                self.interaction(None, fault.__traceback__)
                raise
            finally:
                self.clear_all_breaks()  # they are the process's, not this debugger's
            if not self.left:
                self.message("the block has run to its end")

        return debugged

    def check(self, kernel: Program, threads: int) -> None:
        """Raise UserError for a lane or a breakpoint that the kernel's block does not have."""
        if self.lane is not None and self.lane >= threads:
            raise UserError(f"--lane {self.lane}: the block has {threads} threads; name one below that")
        for stop in self.stops:
            if not stops_in(reached(kernel), stop.partition(",")[0].strip()):
                names = ", ".join(program.name for program in reached(kernel))
                raise UserError(
                    f"--break {stop}: no line of code of {kernel.name}, nor a function that it calls: {names}"
                )

    def set_quit(self) -> None:
        """The block is left where it stands."""
        super().set_quit()
        self.left = True

    # --- Where it stops -----------------------------------------------------------------------------------------------

    def stop_here(self, frame: FrameType) -> bool:
        return program_of(frame) is not None and bool(super().stop_here(frame))

    def break_anywhere(self, frame: FrameType) -> bool:
        return program_of(frame) is not None and bool(super().break_anywhere(frame))

    def dispatch_line(self, frame: FrameType) -> Any:
        """A call that spans lines comes back to its first line when its arguments are ready: that is no new stop."""
        program, line = program_of(frame), frame.f_lineno
        if program is not None:
            before, self.lines[frame] = self.lines.get(frame, line), line
            if before != line == statement_line(program, before):
                return self.trace_dispatch
        return super().dispatch_line(frame)

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        self.lines.pop(frame, None)
        return super().dispatch_return(frame, arg)

    def user_call(self, frame: FrameType, argument_list: None) -> None:
        """Stepping into a device function stops at its first statement, not at its call."""

    def user_line(self, frame: FrameType) -> None:
        """A statement's first line, unless another one has a breakpoint; not the line of the function's name."""
        program, line = program_of(frame), frame.f_lineno
        if program is None or line == program.counted.lineno:
            return
        if line == statement_line(program, line) or self.get_breaks(program.filename, line):
            super().user_line(frame)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """Only the command ``return`` stops where a function ends."""
        if self.returnframe is frame:
            super().user_return(frame, return_value)

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """The kernel and the device functions that it is in."""
        stack, _ = super().get_stack(f, t)
        own = [(frame, line) for frame, line in stack if program_of(frame) is not None]
        return own, max(0, len(own) - 1)

    # --- What expressions see -----------------------------------------------------------------------------------------

    def setup(self, f: FrameType | None, tb: TracebackType | None) -> Any:
        result = super().setup(f, tb)
        self.refresh()
        return result

    def _select_frame(self, number: int) -> None:
        super()._select_frame(number)  # type: ignore[misc]
        self.refresh()

    def refresh(self) -> None:
        """Give expressions the variables of the chosen frame and lane."""
        assert self.curframe is not None
        self.curframe_locals = names(self.curframe, self.lane)

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        frame, line = frame_lineno
        program: Program = frame.f_globals["__lockstep__"]
        turns = shown_turns(turns_of(kernel_frames(frame))[-1])
        place = f"{module_file(program.filename)}:{line} {program.name}" + (f" [{turns}]" if turns else "")
        return place + lprefix + linecache.getline(program.filename, line).strip()

    # --- Commands -----------------------------------------------------------------------------------------------------

    def do_lane(self, arg: str) -> None:
        """lane N: expressions have the values of thread N of the block. lane: says which thread that is."""
        assert self.curframe is not None
        threads = self.curframe.f_locals["__x"].threads
        if arg and not (arg.isdecimal() and int(arg) < threads):
            self.error(f"lane {arg}: 0 to {threads - 1}")
            return
        self.lane = int(arg) if arg else self.lane
        self.refresh()
        self.message(self.whose())

    def do_lanes(self, arg: str) -> None:
        """lanes: expressions have arrays whose first axis is all threads of the block."""
        self.lane = None
        self.refresh()
        self.message(self.whose())

    def whose(self) -> str:
        return (
            "all lanes" if self.lane is None else f"lane {self.lane}: warp {self.lane // 32}, its lane {self.lane % 32}"
        )

    def do_where(self, arg: str) -> None:
        """where: the block, the lanes that run this statement, the turns of the loops, and the lines from the kernel inward."""
        assert self.curframe is not None
        launch, lanes = self.curframe.f_locals["__x"], active(self.curframe)
        block = tuple(int(b) for b in launch.blocks[0])
        running = f"lanes {runs(lanes)}" if 0 < lanes.sum() < len(lanes) else "all lanes" if lanes.any() else "no lane"
        self.message(
            f"block {block} of a grid of {tuple(int(n) for n in self.grid(launch))}; {running} of {len(lanes)} here"
        )
        frames = [frame for frame, _ in self.stack]
        for frame, turns in zip(frames, turns_of(frames)):
            mark = ">" if frame is self.curframe else " "
            spot = spot_of(frame)
            source = linecache.getline(spot.program.filename, spot.line).strip()
            self.message(f"{mark} {spot.program.name}:{spot.line} [{shown_turns(turns)}] {source}")

    do_w = do_bt = do_where

    @staticmethod
    def grid(launch: Any) -> tuple[Any, Any, Any]:
        return launch.gridDim_x, launch.gridDim_y, launch.gridDim_z

    def do_vars(self, arg: str) -> None:
        """vars: every variable of the function, in one line each."""
        assert self.curframe is not None
        for name, value in variables(self.curframe, self.lane).items():
            self.message(f"{name} = {summary(value)}")

    def do_args(self, arg: str) -> None:
        """args: the function's parameters, in one line each."""
        assert self.curframe is not None
        held = variables(self.curframe, self.lane)
        for name in self.curframe.f_globals["__lockstep__"].params:
            self.message(f"{name} = {summary(held[name])}")

    do_a = do_args

    def do_break(self, arg: str, temporary: Any = False) -> Any:
        """break LINE, break FUNCTION, break FILE:LINE, each with an optional ``, condition``: stop there."""
        name, comma, condition = arg.partition(",")
        found = next((p for p in self.programs() if p.name == name.strip()), None)
        if found is not None:
            arg = f"{found.filename}:{found.counted.body[0].lineno}{comma}{condition}"
        super().do_break(arg, temporary)

    do_b = do_break

    def programs(self) -> list[Program]:
        """The kernel and every device function that it may come to."""
        return reached(self.stack[0][0].f_globals["__lockstep__"]) if self.stack else []

    def do_run(self, arg: str) -> None:
        """run: not here; a block runs once."""
        self.error("a block runs once; quit, and debug it again")

    do_restart = do_run


# --- Where one can stop -------------------------------------------------------------------------------------------------


def reached(kernel: Program) -> list[Program]:
    """A kernel and every device function that it may come to."""
    found = [kernel]
    for program in found:
        found += [p for p in program.devices if p not in found]
    return found


def stops_in(programs: Sequence[Program], stop: str) -> bool:
    """Whether a breakpoint is a function's name, LINE of the first one's file or FILE:LINE, where code stands."""
    file, _, line = stop.rpartition(":")
    if not line.isdecimal():
        return stop in [program.name for program in programs]
    named = Path(file or programs[0].filename).stem
    return any(Path(p.filename).stem == named and has_code(p, int(line)) for p in programs)


def has_code(program: Program, line: int) -> bool:
    """Whether a line of a file is one of a function's statements, no comment and not empty."""
    text = linecache.getline(program.filename, line).strip()
    inside = any(s.lineno <= line <= (s.end_lineno or s.lineno) for s in statements(program))
    return inside and bool(text) and not text.startswith("#")
