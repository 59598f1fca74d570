"""``refengine inspect``: what the kernels of a model and a backend compile to on each architecture, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from backends.base import backend_class, backend_names
from kernels_numba.machine.compiler import Capability, architecture
from kernels_numba.machine.modes import Noted
from kernels_numba.machine.records import ARCHITECTURES, Record, ptx_text, records, sass_text
from refengine.commands.report import check_report, progress_bar, read_report, show, write_report
from refengine.errors import UserError
from refengine.model import check_dims
from refengine.names import known_name
from refengine.registry import load_model
from refengine.verify.launches import arguments, launches

NUMBERS = tuple(f"{major}{minor}" for major, minor in ARCHITECTURES)


@dataclass(frozen=True)
class Request:
    """An inspection as the command line asks for it."""

    kernel: str | None
    model: str
    backend: str
    sm: str
    ptx: bool
    sass: bool
    against: Path | None


@dataclass(frozen=True)
class Compiled:
    """A launch on one architecture."""

    launch: Noted
    record: Record

    @property
    def key(self) -> str:
        """Names it in reports."""
        return " ".join(filter(None, (self.record.kernel, arguments(self.launch.program), self.record.sm)))


def run(request: Request, json: Path | None) -> int:
    """Compile and show; the exit status: 0, or 1 where --against finds changes. Raises UserError, KernelError."""
    check_report(json)
    targets = architectures(request.sm)
    before = None if request.against is None else read_report(request.against, "inspect", code_hashes)
    known_name("--backend", request.backend, backend_names())
    spec = load_model(request.model)
    check_dims(spec)
    chosen = of_kernel(launches(spec, backend_class(request.backend)), request.kernel)
    check_compiler()
    found = compile_all(chosen, targets)
    if request.ptx or request.sass:
        print(*listings(chosen, request, targets[0]), sep="\n")
    else:
        show(table(found))
    if json is not None:
        write_report(json, {"claims": claims(found), "model": request.model, "backend": request.backend,
                            "compiler": found[0].record.compiler, "kernels": [summary(c) for c in found]})  # fmt: skip
    return 0 if before is None else compared(found, before)


# --- The request ----------------------------------------------------------------------------------------------------


def architectures(sm: str) -> list[Capability]:
    """The capabilities that ``80,90`` names, in order. Raises UserError for one that is not supported."""
    numbers = [n.strip().removeprefix("sm_") for n in sm.split(",") if n.strip()] or [""]
    return [ARCHITECTURES[NUMBERS.index(known_name("--sm", n, NUMBERS))] for n in dict.fromkeys(numbers)]


def of_kernel(found: Sequence[Noted], kernel: str | None) -> list[Noted]:
    """The launches of one kernel, or all. Raises UserError for a kernel that is not among them."""
    if kernel is not None:
        known_name("KERNEL", kernel, sorted({one.program.name for one in found}))
    return [one for one in found if kernel in (None, one.program.name)]


def check_compiler() -> None:
    """Raise UserError where numba-cuda is missing."""
    if find_spec("numba_cuda") is None:
        raise UserError("inspect: needs numba-cuda; on Linux x86-64: pip install 'numba-cuda[cu13]' nvidia-cuda-nvcc")


def code_hashes(report: dict[str, Any]) -> dict[str, str]:
    """The code hashes of a report, by launch and architecture."""
    return {kernel["key"]: kernel["code_hash"] for kernel in report["kernels"]}


# --- Compiling ------------------------------------------------------------------------------------------------------


def compile_all(chosen: Sequence[Noted], targets: Sequence[Capability]) -> list[Compiled]:
    """Every launch on every architecture, with a progress bar; the first time this takes seconds a kernel."""
    found = []
    with progress_bar() as bar:
        task = bar.add_task("compiling", total=len(chosen))
        for one in chosen:
            bar.update(task, description=one.program.name)
            found += [Compiled(one, r) for r in records(one.program, one.signature, targets, one.threads)]
            bar.advance(task)
    return found


def listings(chosen: Sequence[Noted], request: Request, target: Capability) -> Iterator[str]:
    """The PTX and the machine code that were asked for, each under a line that names it."""
    for one in chosen:
        title = f"// {one.program.name} {arguments(one.program)}".rstrip()
        if request.ptx:
            yield f"{title}: PTX\n{ptx_text(one.program, one.signature)}"
        if request.sass:
            yield f"{title}: {architecture(target)}\n{sass_text(one.program, one.signature, target, one.threads)}"


# --- The report -----------------------------------------------------------------------------------------------------


def table(found: Sequence[Compiled]) -> Table:
    """A row an architecture, a section a launch."""
    shown = Table("kernel", "SM", "regs", "shared", "stack", "spills", "PTX", "code", "code hash",
                  caption="bytes; shared: static + dynamic, a block; stack, spills: stores / loads, a thread")  # fmt: skip
    for column in shown.columns[1:-1]:
        column.justify = "right"
    for launch, compiled in groupby(found, lambda c: c.launch):
        records = [c.record for c in compiled]
        for title, record in zip(titles(launch, len(records)), records, strict=True):
            shown.add_row(title, *cells(launch, record))
        shown.add_section()
    return shown


def titles(launch: Noted, rows: int) -> list[str]:
    """The kernel's name and compile-time arguments, spread over the rows of its section."""
    name, bound = f"[bold]{launch.program.name}[/bold]", arguments(launch.program)
    return [f"{name} {bound}"] if rows == 1 else [name, bound, *[""] * (rows - 2)]


def cells(launch: Noted, r: Record) -> tuple[str, ...]:
    """The numbers of a row."""
    return (
        r.sm.removeprefix("sm_"),
        str(r.registers),
        f"{r.shared_bytes:,} + {launch.shared_bytes:,}",
        f"{r.stack_bytes:,}",
        f"{r.spill_store_bytes:,} / {r.spill_load_bytes:,}",
        f"{r.ptx_bytes:,}",
        f"{r.code_bytes:,}",
        r.code_hash,
    )


def summary(one: Compiled) -> dict[str, Any]:
    """A record for the JSON report."""
    bound, dynamic = arguments(one.launch.program), one.launch.shared_bytes
    launch = {"arguments": bound, "threads": one.launch.threads, "dynamic_shared_bytes": dynamic}
    return {"key": one.key, **launch, **asdict(one.record)}


def claims(found: Sequence[Compiled]) -> list[dict[str, Any]]:
    """Figures that can be quoted."""
    spills = [c for c in found if c.record.spill_store_bytes or c.record.spill_load_bytes]
    return [
        {"name": "inspect/kernels", "value": len({c.launch for c in found}), "unit": "kernels"},
        {"name": "inspect/records", "value": len(found), "unit": "records"},
        {"name": "inspect/records_that_spill", "value": len(spills), "unit": "records"},
        {"name": "inspect/most_registers", "value": max(c.record.registers for c in found), "unit": "registers"},
    ]


def compared(found: Sequence[Compiled], before: dict[str, str]) -> int:
    """Say what has changed since an earlier report; the exit status."""
    changed = [c.key for c in found if before.get(c.key) != c.record.code_hash]
    for key in changed:
        print(f"{'changed' if key in before else 'new'}: {key}")
    print(f"{len(changed)} of {len(found)} changed")
    return 1 if changed else 0
