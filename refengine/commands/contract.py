"""``refengine contract``: every kernel through its gates, every gate's controls red, every record met. Spec contract."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from backends.base import backend_names
from refengine.commands.names import known_name
from refengine.commands.report import check_report, progress_bar, show, write_report
from refengine.contract.backend import PREFIX
from refengine.contract.controls import Planted
from refengine.contract.gates import GATES, Verdict
from refengine.contract.registry import entries, entry_named, uncovered
from refengine.contract.runner import Order, results, tasks
from refengine.device import open_device


@dataclass(frozen=True)
class Request:
    """A run of the contract as the command line asks for it."""

    kernel: str | None
    device: str
    full: bool
    mutate: bool
    seed: int
    processes: int | None = None
    backend: str | None = None


@dataclass(frozen=True)
class Report:
    """What came of a run."""

    verdicts: list[Verdict]
    planted: list[Planted]
    missing: list[str]

    @property
    def failed(self) -> list[str]:
        """Kernels with a case that fails, or without an entry."""
        bad = {v.entry for v in self.verdicts if not v.passed}
        return sorted({k for name in bad for k in entry_named(name).subjects} | set(self.missing))

    @property
    def kernels(self) -> list[str]:
        ran = {v.entry for v in self.verdicts} | {p.entry for p in self.planted}
        return sorted({k for name in ran for k in entry_named(name).subjects} | set(self.missing))

    @property
    def missed(self) -> list[Planted]:
        """Planted faults that no gate found."""
        return [p for p in self.planted if not p.red]

    @property
    def line(self) -> str:
        """The summary of spec contract."""
        passed = len(self.kernels) - len(self.failed)
        red = len(self.planted) - len(self.missed)
        return (
            f"CONTRACT {len(self.kernels)} kernels: {passed} pass gates 1-4, {len(self.failed)} fail; "
            f"{len(self.planted)} controls: {red} red, {len(self.missed)} missed"
        )


def run(request: Request, json: Path | None) -> int:
    """Run the contract and show it; the exit status. Raises UserError, KernelError."""
    check_report(json)
    names = chosen(request.kernel) if request.backend is None else backend_entry(request.backend)
    order = Order(open_device(request.device).name, names, request.full, request.mutate, request.seed)
    report = collected(
        order, request.processes or processes(order.device), missing=[] if request.kernel else uncovered()
    )
    show(table(report))
    print(*findings(report), sep="\n", end="")
    print(report.line)
    if json is not None:
        write_report(json, body(report, order))
    return 1 if report.failed or report.missed else 0


def chosen(kernel: str | None) -> tuple[str, ...]:
    """Entries by name, or all. Raises UserError for a name that is none."""
    if kernel is None:
        return tuple(entries())
    return (known_name("KERNEL", kernel, list(entries())),)


def backend_entry(name: str) -> tuple[str, ...]:
    """The entry of a registered backend. Raises UserError for a name that is none."""
    return (PREFIX + known_name("--backend", name, backend_names()),)


def processes(device: str) -> int:
    """A GPU serves one process; the CPU machine takes a core a process."""
    return 1 if device == "cuda" else len(os.sched_getaffinity(0))


def collected(order: Order, count: int, missing: Sequence[str]) -> Report:
    """Run every task, with a progress bar."""
    work, found = tasks(order), []
    with progress_bar() as bar:
        task = bar.add_task("contract", total=len(work))
        for one in results(order, work, count):
            found += one
            bar.advance(task)
    verdicts = sorted((v for v in found if isinstance(v, Verdict)), key=lambda v: (v.entry, v.case))
    planted = sorted((p for p in found if isinstance(p, Planted)), key=lambda p: (p.entry, p.name))
    return Report(verdicts, planted, list(missing))


# --- What is shown ----------------------------------------------------------------------------------------------------


def table(report: Report) -> Table:
    """A row an entry."""
    shown = Table(
        "kernel", "cases", *GATES, "worst error", "controls", "s", caption="worst error: as a part of its bound"
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for name in dict.fromkeys([v.entry for v in report.verdicts] + [p.entry for p in report.planted]):
        shown.add_row(name, *row(report, name))
    return shown


def row(report: Report, name: str) -> list[str]:
    """The cells of an entry behind its name."""
    verdicts = [v for v in report.verdicts if v.entry == name]
    planted = [p for p in report.planted if p.entry == name]
    gates = ["-" if not verdicts else "red" if any(g in v.problems for v in verdicts) else "pass" for g in GATES]
    worst = f"{max((v.fraction for v in verdicts), default=0):.3f}"
    red = f"{sum(p.red for p in planted)} of {len(planted)} red"
    return [str(len(verdicts)), *gates, worst, red, f"{sum(v.seconds for v in verdicts):.1f}"]


def findings(report: Report) -> list[str]:
    """A line for everything that is wrong."""
    lines = [f"no contract entry: {kernel}" for kernel in report.missing]
    lines += [f"{v.entry} {v.case}: {gate}: {problem}" for v in report.verdicts for gate, problem in v.problems.items()]
    return lines + [f"{p.entry}: control not found by {p.gate}: {p.name}" for p in report.missed] + [""]


def body(report: Report, order: Order) -> dict[str, Any]:
    """The report as JSON."""
    figures = {
        "kernels": len(report.kernels), "failed": len(report.failed), "cases": len(report.verdicts),
        "controls": len(report.planted), "missed": len(report.missed),
    }  # fmt: skip
    return {
        "claims": [{"name": f"contract/{name}", "value": value, "unit": name} for name, value in figures.items()],
        "device": open_device(order.device).title, "seed": order.seed, "summary": report.line,
        "cases": [asdict(v) for v in report.verdicts], "controls": [asdict(p) for p in report.planted],
        "bits": {f"{v.entry} {v.case}": v.digest for v in report.verdicts},
    }  # fmt: skip
