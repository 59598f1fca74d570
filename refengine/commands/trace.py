"""``refengine trace``: one block of a kernel, every access to memory written down, as a page to step through."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from kernels_numba.machine import KernelError
from kernels_numba.machine.one_block import NoSuchBlock, one_block
from kernels_numba.machine.trace import traced
from refengine.commands.report import check_report, show, write_report, write_whole
from refengine.errors import UserError
from refengine.lab.kernel_case import Launchable, Wish, checked_launch, kernel_named, run_in
from refengine.lab.trace_data import COUNTERS, Function, Traced, second_lookups
from refengine.lab.trace_page import html, still_svg

SHOWN = 12
"""Lines of the table on the terminal: those that move most bytes."""
NAMED_STEPS = 8
"""Steps that the last line names."""


@dataclass(frozen=True)
class Request:
    """A trace as the command line asks for it. step: of the still; None: the first that looks up a second page."""

    wish: Wish
    out: Path | None
    svg: Path | None
    step: int | None


def run(request: Request, json: Path | None) -> int:
    """Trace and write; the exit status: 0, or 1 where a fault is found. Raises UserError, NoSuchBlock."""
    wish = replace(request.wish, kernel=kernel_named(request.wish.kernel))
    out = request.out or Path(f"trace-{wish.kernel}.html")
    check(request, out, json)
    kernel, block = wish.kernel, wish.block_number
    try:
        found, trace = run_in(wish, lambda: traced(kernel, block), lambda one: one.mode is not None)
    except NoSuchBlock:
        raise
    except KernelError as fault_of_all:
        print(f"FAULT {fault_of_all}")
        return 1
    result = Traced(trace, found)
    fault = checked_block(found, kernel, block)
    still = still_svg(result, request.step) if request.svg is not None else ""
    write_whole(out, html(result).encode(), "--out")
    if request.svg is not None:
        write_whole(request.svg, still.encode(), "--svg")
    show(table(result))
    if json is not None:
        write_report(json, {"claims": claims(result), **report(result), "fault": fault})
    print(f"FAULT {fault}" if fault else verdict(result, out))
    return 1 if fault else 0


def check(request: Request, out: Path, json: Path | None) -> None:
    """Refuse files that cannot be written, or that two flags name, before the work."""
    taken: dict[Path, str] = {}
    for flag, path in (("--out", out), ("--svg", request.svg), ("--json", json)):
        check_report(path, flag)
        if path is not None and (other := taken.setdefault(path.resolve(), flag)) != flag:
            raise UserError(f"{flag} {path}: is the file of {other}; name another")
    if request.step is not None and request.svg is None:
        raise UserError(f"--step {request.step}: is for the still; name its file with --svg")


def checked_block(found: Launchable, kernel: str, block: tuple[int, int, int]) -> str:
    """What checked mode says of the same block: a race, a missing wait; or nothing."""
    try:
        with one_block(kernel, block, checked_launch()):
            found.launch()
    except KernelError as fault:
        return str(fault)
    return ""


# --- The report -----------------------------------------------------------------------------------------------------


def table(result: Traced) -> Table:
    """The lines where most bytes move, in order of the source; what they call included."""
    shown = Table("line", "warps", "global bytes", "shared bytes", "lookups", "conflicts", "source")
    for column in shown.columns[1:-1]:
        column.justify = "right"
    counted = [(f, line, counts) for f in result.functions.values() for line, counts in f.counts.items()]
    most = sorted(counted, key=lambda one: -(one[2]["global_bytes"] + one[2]["shared_bytes"]))[:SHOWN]
    for function, line, counts in sorted(most, key=lambda one: (list(result.functions.values()).index(one[0]), one[1])):
        numbers = (f"{counts[name]:,}" for name in COUNTERS)
        shown.add_row(f"{function.name}:{line}", *numbers, source_line(function, line))
    return shown


def source_line(function: Function, line: int) -> str:
    return function.lines[line - function.first].strip().replace("[", r"\[")


def verdict(result: Traced, out: Path) -> str:
    """The last line."""
    totals, steps = result.totals, len(result.trace.steps)
    named = ("global_bytes", "lookups", "straddles", "conflicts")
    numbers = ", ".join(f"{totals[name]:,} {name.replace('_', ' ')}" for name in named)
    return f"TRACED {result.trace.program.name}: {steps} steps, {numbers}; no fault found; open {out}{second(result)}"


def second(result: Traced) -> str:
    """Which steps look a second page up; nothing where none does."""
    found = second_lookups(result)
    named = ", ".join(map(str, found[:NAMED_STEPS])) + ", ..." * (len(found) > NAMED_STEPS)
    return f"; second lookups at step{'s' * (len(found) > 1)} {named}" if found else ""


def report(result: Traced) -> dict[str, Any]:
    """The trace for the JSON report."""
    assert result.trace.mode is not None
    lines = [{"function": f.name, "file": f.file, "line": line, **counts}
             for f in result.functions.values() for line, counts in sorted(f.counts.items())]  # fmt: skip
    mode = result.trace.mode
    return {
        "kernel": result.trace.program.name, "case": str(result.found.case), "block": mode.block, "grid": mode.grid,
        "threads": mode.threads, "steps": len(result.trace.steps), "totals": result.totals, "lines": lines,
        "memory": [asdict(memory) for memory in result.trace.memories.values()],
    }  # fmt: skip


def claims(result: Traced) -> list[dict[str, Any]]:
    """Figures that can be quoted."""
    kernel = result.trace.program.name
    units = {
        "global_bytes": "bytes",
        "shared_bytes": "bytes",
        "lookups": "lookups",
        "straddles": "items",
        "conflicts": "passes",
    }
    return [
        {"name": f"trace/{kernel}/{name}", "value": result.totals[name], "unit": unit} for name, unit in units.items()
    ]
