"""``refengine contract``: every kernel through its gates, every gate's controls red, every record met. Spec contract."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from backends.base import backend_names
from refengine.commands import limits
from refengine.commands.report import check_report, progress_bar, read_report, show, write_report
from refengine.contract import limit_records
from refengine.contract.backend import PREFIX
from refengine.contract.controls import Planted
from refengine.contract.gates import GATES, Verdict, key
from refengine.contract.limit_records import Records, read_records
from refengine.contract.limits import Limits
from refengine.contract.registry import entries, entry_named, product_kernels, uncovered
from refengine.contract.runner import Order, results, table_of, tasks
from refengine.cores import usable_cores
from refengine.device import open_device
from refengine.errors import UserError
from refengine.names import known_name

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
H200 = "contract_h200*.json"
"""Reports whose bits every run is held against, where the checkout has them and --against names no other."""


@dataclass(frozen=True)
class Request:
    """A run of the contract as the command line asks for it.

    kernels: entries; none: all. backend: one backend, a plug-in's perhaps, and nothing else.
    record: rewrite gate 5's records and do nothing else. against: a report whose bits this run must have.
    """

    kernels: tuple[str, ...]
    device: str
    full: bool
    mutate: bool
    seed: int
    processes: int | None = None
    record: bool = False
    against: Path | None = None
    backend: str | None = None


@dataclass(frozen=True)
class Report:
    """What came of a run."""

    verdicts: list[Verdict]
    planted: list[Planted]
    missing: list[str]
    limits: Limits

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
            f"{len(self.planted)} controls: {red} red, {len(self.missed)} missed; "
            f"{len(self.limits.problems)} limit problems"
        )


def run(request: Request, json: Path | None) -> int:
    """Run the contract and show it; the exit status. Raises UserError, KernelError."""
    check_report(json)
    check(request)
    names, records = chosen(request), of_request(request, read_records(limit_records.RECORDS))
    if request.record:
        return limits.record(kernels_of(request), records, json)
    reports = [request.against] if request.against else sorted(BENCHMARKS.glob(H200))
    bits = {case: digest for path in reports for case, digest in read_report(path, "contract", digests).items()}
    order = Order(open_device(request.device).name, names, request.full, request.mutate, request.seed, bits)
    held = held_cases(order, request.against)
    report = collected(order, request, records)
    show(table(report))
    print(*findings(report), held, report.line, sep="\n")
    if json is not None:
        write_report(json, body(report, order))
    return 1 if report.failed or report.missed or report.limits.problems else 0


def check(request: Request) -> None:
    """Raise UserError for a seed that is none, and for options that --record would ignore."""
    if request.seed < 0:
        raise UserError(f"--seed {request.seed}: at least 0")
    if request.record and (request.mutate or request.full or request.against or request.backend):
        raise UserError("--record: compiles, and runs no case; leave out --mutate, --full, --against and --backend")
    if request.backend is not None and (request.kernels or request.mutate):
        raise UserError(f"--backend {request.backend}: runs that backend alone; leave out KERNEL and --mutate")


def chosen(request: Request) -> tuple[str, ...]:
    """Entries by name, or all. Raises UserError for a kernel or a backend that is none."""
    if request.backend is not None:
        return (PREFIX + known_name("--backend", request.backend, backend_names()),)
    return tuple(dict.fromkeys(known_name("KERNEL", name, list(entries())) for name in request.kernels)) or tuple(
        entries()
    )


def kernels_of(request: Request) -> list[str]:
    """The kernels of the entries that are asked for, or all there are; a backend brings none."""
    if request.backend is not None:
        return []
    return (
        [k for name in request.kernels for k in entries()[name].kernels] if request.kernels else list(product_kernels())
    )


def of_request(request: Request, records: Records) -> Records:
    """The records of what is asked for; without a name all, those of kernels that are gone too."""
    everything = not request.kernels and request.backend is None
    return {k: r for k, r in records.items() if everything or k in kernels_of(request)}


def collected(order: Order, request: Request, records: Records) -> Report:
    """Run every task and gate 5, with a progress bar."""
    work, found = tasks(order), []
    with progress_bar() as bar:
        task = bar.add_task("contract", total=len(work))
        for one in results(order, work, request.processes or usable_cores()):
            found += one
            bar.advance(task)
    verdicts = sorted((v for v in found if isinstance(v, Verdict)), key=lambda v: (v.entry, v.case))
    planted = sorted((p for p in found if isinstance(p, Planted)), key=lambda p: (p.entry, p.name))
    missing = [] if request.kernels or request.backend else uncovered()
    return Report(verdicts, planted, missing, limits.fits(kernels_of(request), records))


# --- Bits of another run ------------------------------------------------------------------------------------------------


def digests(report: dict[str, Any]) -> dict[str, str]:
    """The digests of a report, by case."""
    return {str(case): str(digest) for case, digest in report["bits"].items()}


def held_cases(order: Order, against: Path | None) -> str:
    """How many of the run's cases have recorded bits. Raises UserError where a file that was named has none of them."""
    keys = [key(e, case, order.seed) for e in map(entry_named, order.names) for case in table_of(e, order.full)]
    held = sum(k in order.recorded for k in keys)
    if against is not None and not held:
        raise UserError(f"--against {against}: has the bits of no case of this run; make it with the same --seed")
    return f"{held} of {len(keys)} cases have recorded bits"


# --- What is shown ----------------------------------------------------------------------------------------------------


def table(report: Report) -> Table:
    """A row an entry."""
    shown = Table("kernel", "cases", *GATES, "limits", "worst error", "controls", "s",
                  caption="worst error: as a part of its bound")  # fmt: skip
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
    fit = limits.cell(report.limits, entry_named(name).kernels)
    worst = f"{max((v.fraction for v in verdicts), default=0):.3f}"
    red = f"{sum(p.red for p in planted)} of {len(planted)} red"
    return [str(len(verdicts)), *gates, fit, worst, red, f"{sum(v.seconds for v in verdicts):.1f}"]


def findings(report: Report) -> list[str]:
    """A line for everything that is wrong."""
    lines = [f"no contract entry: {kernel}" for kernel in report.missing]
    lines += [f"{v.entry} {v.case}: {gate}: {problem}" for v in report.verdicts for gate, problem in v.problems.items()]
    lines += [f"{p.entry}: control not found by {p.gate}: {p.name}" for p in report.missed]
    return lines + limits.findings(report.limits)


def body(report: Report, order: Order) -> dict[str, Any]:
    """The report as JSON."""
    figures = {
        "kernels": len(report.kernels), "failed": len(report.failed), "cases": len(report.verdicts),
        "controls": len(report.planted), "missed": len(report.missed),
    }  # fmt: skip
    counted = [{"name": f"contract/{name}", "value": value, "unit": name} for name, value in figures.items()]
    return {
        "claims": counted + limits.claims(report.limits),
        "device": open_device(order.device).title, "seed": order.seed, "summary": report.line,
        "cases": [asdict(v) for v in report.verdicts], "controls": [asdict(p) for p in report.planted],
        "bits": {key(entry_named(v.entry), v.case, order.seed): v.digest for v in report.verdicts},
        "limits": limits.body(report.limits),
    }  # fmt: skip
