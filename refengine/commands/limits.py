"""Gate 5 as ``refengine contract`` runs, records and shows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from kernels_numba.machine.errors import SetupError
from kernels_numba.machine.records import ARCHITECTURES, compiler_version
from refengine.commands.report import progress_bar, write_report
from refengine.contract import limit_records
from refengine.contract.limit_records import Records, write_records
from refengine.contract.limits import (
    Compared,
    Finding,
    Limits,
    Measured,
    against_records,
    judged,
    launches_of,
    make_ptx,
    measure,
    uncached,
)
from refengine.contract.runner import spread
from refengine.cores import usable_cores


def fits(kernels: Sequence[str], recorded: Records) -> Limits:
    """Compile every launch of the kernels and judge it; a compiler that is missing is a limit problem."""
    try:
        return judged(compiled(kernels), recorded, kernels)
    except SetupError as missing:
        return Limits(Measured(""), [], [Finding("limits", "", f"not checked: {missing}")])


def compiled(kernels: Sequence[str]) -> Measured:
    """What every launch of the kernels compiles to, with a progress bar; the first time this takes minutes.

    Raises SetupError when a compiler is missing.
    """
    compiler_version()
    found = launches_of(kernels)
    cold = uncached(found)
    with progress_bar() as bar:
        tick = partial(bar.advance, bar.add_task("limits", total=len(cold) + len(found)))
        for _ in spread(make_ptx, cold, usable_cores()):
            tick()
        return measure(found, tick)


def record(kernels: Sequence[str], recorded: Records, json: Path | None) -> int:
    """Write the kernels' records anew and show what has changed; the exit status: 1 where a launch does not fit."""
    measured = compiled(kernels)
    compared, after = against_records(measured, recorded), judged(measured, measured.records, kernels)
    write_records(measured.records, [k for k in recorded if k not in measured.records], limit_records.RECORDS)
    show_lines(f"changed: {line}" for line in compared.changes)
    show_lines(f"new: {name}" for name in compared.new)
    show_lines(f"gone: {name}" for name in compared.gone)
    show_lines(map(str, after.problems))
    print(record_line(measured, compared, after))
    if json is not None:
        write_report(json, {"claims": claims(after), "limits": body(after)})
    return 1 if after.problems else 0


# --- What is shown ----------------------------------------------------------------------------------------------------


def show_lines(lines: Iterable[str]) -> None:
    """A line each, or nothing."""
    for line in lines:
        print(line)


def record_line(measured: Measured, compared: Compared, after: Limits) -> str:
    """The summary of a recording."""
    return (
        f"RECORDED {len(measured.records)} kernels, {len(measured.launches)} launches: {len(compared.changes)} figures "
        f"changed, {len(compared.new)} launches new, {len(compared.gone)} gone; {len(after.problems)} limit problems"
    )


def cell(limits: Limits, kernels: Iterable[str]) -> str:
    """Gate 5 in the row of an entry that covers the kernels."""
    red = {problem.kernel for problem in limits.problems}
    return "-" if not limits.measured.launches else "red" if red & set(kernels) else "pass"


def findings(limits: Limits) -> list[str]:
    """A line for every problem and every figure that differs from its record, and one for the whole gate."""
    measured, changes = limits.measured, limits.changes
    lines = [f"limits: {problem}" for problem in limits.problems] + [f"changed: {change}" for change in changes]
    whole = f"limits: {len(measured.launches)} launches on {len(ARCHITECTURES)} architectures, {measured.compiler}"
    return lines + ([f"{whole}: {len(changes)} figures changed since the records"] if measured.launches else [])


def claims(limits: Limits) -> list[dict[str, Any]]:
    """Figures that can be quoted."""
    figures = {
        "launches": len(limits.measured.launches),
        "limit_changes": len(limits.changes),
        "limit_problems": len(limits.problems),
    }
    return [{"name": f"contract/{name}", "value": value, "unit": name} for name, value in figures.items()]


def body(limits: Limits) -> dict[str, Any]:
    """Gate 5 as JSON."""
    return {
        "kernels": {name: asdict(record) for name, record in limits.measured.records.items()},
        "changes": [str(change) for change in limits.changes],
        "problems": [str(problem) for problem in limits.problems],
    }
