"""Flash Next's sparse attention at its real shapes, on every form of cache: the bytes of pages against those of windows.

    python benchmarks/flash_next.py --quick --json benchmarks/flash_next_cpu.json                         a CPU's
    python benchmarks/flash_next.py --device cuda --against benchmarks/flash_next_cpu.json --json benchmarks/flash_next_h200.json

One attention layer of qwen3.8-flash-next: two streams, filled, then a prompt pass, drafts that are rejected, and decode windows
of 1, 5 and 16 rows; queries, index queries, scores, attention rows, and all that is stored. A window's rows are held against
float64. Exit status 1 where bytes differ, a row leaves its bound, a word is written that should not be, or a planted fault does
not show.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels_numba.fp8 import KV_TYPES
from refengine.commands.report import check_report, progress_bar, read_report, write_report
from refengine.device import open_device
from refengine.errors import UserError
from refengine.registry import load_model
from refengine.verify.hashes import array_hash
from refengine.verify.sparse_bits import (
    SPARE_POSITIONS,
    WINDOW,
    Case,
    Form,
    Session,
    SparseBench,
    Step,
    misplaced_scores,
    unequal,
    worst_of,
)
from refengine.verify.sparse_controls import Reference, run_controls

SCRIPT = Path(__file__).resolve()
ROOT = SCRIPT.parent.parent
MODEL = "qwen3.8-flash-next"
PAGES = (16, 48, 128, 256, 512)
LENGTHS = (1022, 2046, 2047, 2048, 2049, 2051, 2052, 2055, 4098, 7001, 9000)
"""Cached positions: dense and sparse, both sides of the edge, each place in a block."""
SHORT, SPARSE = Case(37, 4), Case(2053, 4)
"""What a CPU runs too, and where faults are planted."""
ROWS, QUICK_ROWS, REPEATS = 300, 4, 3
TICK = "tick"


@dataclass(frozen=True)
class Work:
    """A case, the sizes of the pages that it runs on, and how often each form runs it."""

    case: Case
    pages: tuple[int, ...]
    repeats: int
    controls: bool = False

    @property
    def forms(self) -> list[Form]:
        """A window first."""
        return [WINDOW, *(Form("paged", size) for size in self.pages), Form("paged-p256")]

    @property
    def ticks(self) -> int:
        return len(self.forms) * self.repeats + self.controls


@dataclass
class Found:
    """What a type of cache gave. fractions: of the sampled rows, |error| / bound. controls: fault -> whether it came out red."""

    equal: int = 0
    unequal: list[str] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
    fractions: list[float] = field(default_factory=list)
    controls: dict[str, bool] = field(default_factory=dict)
    sparse: int = 0
    dense: int = 0


def planned(arguments: argparse.Namespace) -> list[Work]:
    """The table that the arguments ask for."""
    pages, repeats = tuple(arguments.pages or PAGES), arguments.repeats
    if arguments.lengths:
        rows = QUICK_ROWS if arguments.quick else ROWS
        return [Work(Case(length, rows), pages, repeats or REPEATS) for length in arguments.lengths]
    few = (1, (48,)) if arguments.quick else (REPEATS, pages)
    small = [
        Work(SHORT, pages, repeats or REPEATS, True),
        Work(SPARSE, arguments.pages or few[1], repeats or few[0], True),
    ]
    long = [] if arguments.quick else [Work(Case(length, ROWS), pages, repeats or REPEATS) for length in LENGTHS]
    return [*small, *long]


# --- One type of cache ----------------------------------------------------------------------------------------------------


def measured(works: Sequence[Work], kv: str, device: str, tick: Callable[[], None]) -> Found:
    """Every case of a table."""
    most = max(max(work.case.ends) for work in works) + SPARE_POSITIONS
    bench, found = SparseBench(load_model(MODEL), most, open_device(device)), Found()
    for work in works:
        reference = referred(bench, kv, work.case, found)
        tick()
        for form, shuffle in list(runs(work))[1:]:
            held_against(bench, form, kv, work.case, shuffle, reference, found)
            tick()
        if work.controls:
            for name, red in run_controls(bench, kv, work.case, reference):
                found.controls[f"{kv} L={work.case.length}: {name}"] = red
            tick()
    return found


def runs(work: Work) -> Iterator[tuple[Form, int]]:
    """Each form and the seed of its page order; the reference first."""
    for repeat in range(work.repeats):
        yield from ((form, repeat) for form in work.forms)


def referred(bench: SparseBench, kv: str, case: Case, found: Found) -> Reference:
    """A window's run: hashed, and held against float64."""
    session = Session(bench, WINDOW, kv, case, 0)
    session.fill()
    filled = tuple(stream.save() for stream in session.streams)
    steps = tuple(session.steps())
    kept = tuple(stream.save() for stream in session.streams)
    for step in steps:
        found.hashes |= {f"{kv} L={case.length} {step.name}: {name}": array_hash(a) for name, a in step.arrays.items()}
    for step in steps[:-1]:
        check_rows(bench, kv, case, step, kept, found)
    if session.strays():
        found.unequal.append(f"{kv} L={case.length} {WINDOW}: {session.strays()} bytes where nothing belongs")
    return Reference(steps, kept, filled)


def check_rows(bench: SparseBench, kv: str, case: Case, step: Step, kept: Sequence[Any], found: Found) -> None:
    """Each row's scores where its blocks are; attention rows within their bound, where their keys are kept."""
    where = f"{kv} L={case.length} {step.name} {WINDOW}"
    found.dense, found.sparse = found.dense + step.dense, found.sparse + len(step.positions) - step.dense
    if misplaced_scores(step):
        found.unequal.append(
            f"{where}: {misplaced_scores(step)} scores where there is none, or none where there is one"
        )
    if not step.name.startswith("drafts"):
        worst = worst_of(step, step, kept, bench.shape)
        found.fractions += worst
        if max(worst) > 1:
            found.unequal.append(f"{where}: {max(worst):.3g} times the bound off float64")


def held_against(
    bench: SparseBench, form: Form, kv: str, case: Case, repeat: int, reference: Reference, found: Found
) -> None:
    """A form's run, step by step."""
    session = Session(bench, form, kv, case, repeat)
    session.fill()
    for step, wanted in zip(session.steps(), reference.steps, strict=True):
        differ = unequal(step, wanted)
        found.equal += not differ
        if differ:
            found.unequal.append(f"{kv} L={case.length} {step.name} {form} repeat {repeat + 1}: {', '.join(differ)}")
    if strays := session.strays():
        found.unequal.append(f"{kv} L={case.length} {form} repeat {repeat + 1}: {strays} bytes where nothing belongs")


# --- The whole ------------------------------------------------------------------------------------------------------------


def apart(kv: str, tick: Callable[[], None]) -> Found:
    """A type of cache in its own process: compiling is much of the time."""
    command = [sys.executable, str(SCRIPT), "--part", kv, *sys.argv[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            last = line
            if line.strip() == TICK:
                tick()
    if process.returncode:
        raise UserError(f"{kv}: its process ended with status {process.returncode}; what it said stands above")
    return Found(**json.loads(last))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="a short length and a sparse one, for a CPU")
    parser.add_argument(
        "--lengths", type=int, nargs="+", help="cached positions; instead of the table, without controls"
    )
    parser.add_argument("--pages", type=int, nargs="+", help="page sizes of paged, multiples of 4")
    parser.add_argument("--repeats", type=int, help="runs of each form, each in another order of pages")
    parser.add_argument("--against", type=Path, help="a report of another machine, whose hashes must be met")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        return part(arguments) if arguments.part else report(arguments)
    except UserError as refusal:
        print(f"flash_next: {refusal}", file=sys.stderr)
        return 2


def part(arguments: argparse.Namespace) -> int:
    """A type of cache: a line a tick, then what was found."""
    found = measured(planned(arguments), arguments.part, arguments.device, lambda: print(TICK, flush=True))
    print(json.dumps(vars(found)))
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Run both types of cache, join them, hold them against the other machine's hashes."""
    check(arguments)
    theirs = read_report(arguments.against, SCRIPT.name, lambda r: dict(r["hashes"])) if arguments.against else {}
    works = planned(arguments)
    with progress_bar() as bar, ThreadPoolExecutor(len(KV_TYPES)) as pool:
        tasks = {kv: bar.add_task(kv, total=sum(work.ticks for work in works)) for kv in KV_TYPES}
        found = list(pool.map(lambda kv: apart(kv, lambda: bar.advance(tasks[kv])), KV_TYPES))
    body = joined(found, theirs)
    if arguments.json:
        write_report(arguments.json, {**body, "device": open_device(arguments.device).title})
    return said(body, theirs)


def check(arguments: argparse.Namespace) -> None:
    """Refuse what makes no sense before anything runs."""
    check_report(arguments.json)
    for flag, values, least in (
        ("--lengths", arguments.lengths, 4),
        ("--pages", arguments.pages, 4),
        ("--repeats", None if arguments.repeats is None else [arguments.repeats], 1),
    ):
        for value in values or ():
            if value < least:
                raise UserError(f"{flag} {value}: at least {least}")
            if flag == "--pages" and value % 4:
                raise UserError(f"--pages {value}: a page holds whole blocks; take a multiple of 4")


def joined(found: Sequence[Found], theirs: dict[str, str]) -> dict[str, Any]:
    """The report."""
    hashes = {key: value for one in found for key, value in one.hashes.items()}
    controls = {key: red for one in found for key, red in one.controls.items()}
    both = theirs.keys() & hashes.keys()
    differing = [f"{key}: {hashes[key]} here, {theirs[key]} there" for key in both if hashes[key] != theirs[key]]
    missing = [f"{key}: not run here" for key in theirs.keys() - hashes.keys()]
    figures = {
        "equal_cases": (sum(one.equal for one in found), "cases"),
        "unequal_cases": (sum(len(one.unequal) for one in found), "cases"),
        "controls_red": (sum(controls.values()), "controls"),
        "controls_missed": (len(controls) - sum(controls.values()), "controls"),
        "sparse_rows": (sum(one.sparse for one in found), "rows"),
        "dense_rows": (sum(one.dense for one in found), "rows"),
        "rows_within_the_bound": (sum(f <= 1 for one in found for f in one.fractions), "rows"),
        "largest_part_of_the_bound": (round(max(f for one in found for f in one.fractions), 4), "1"),
        "hashes_of_the_other_machine_met": (len(theirs) - len(differing) - len(missing), "hashes"),
        "hashes_of_the_other_machine_missed": (len(differing) + len(missing), "hashes"),
    }
    return {
        "claims": [{"name": f"flash_next/{name}", "value": v, "unit": unit} for name, (v, unit) in figures.items()],
        "model": MODEL,
        "unequal": [line for one in found for line in one.unequal],
        "missed": sorted([*differing, *missing]),
        "controls": controls,
        "hashes": hashes,
    }


def said(body: dict[str, Any], theirs: dict[str, str]) -> int:
    """Print the findings and the verdict; the exit status."""
    value = {claim["name"].split("/")[1]: claim["value"] for claim in body["claims"]}
    missed = [f"not red: {name}" for name, red in body["controls"].items() if not red]
    print(
        *body["unequal"],
        *body["missed"],
        *missed,
        sep="\n",
        end="\n" if body["unequal"] or body["missed"] or missed else "",
    )
    met = f"{value['hashes_of_the_other_machine_met']} hashes of the other machine met, {len(body['missed'])} missed"
    print(met if theirs else "held against no other machine (--against FILE)")
    print(
        f"FLASH_NEXT {value['equal_cases']} cases equal, {value['unequal_cases']} unequal; {value['controls_red']} controls red, "
        f"{value['controls_missed']} missed"
    )
    return 1 if body["unequal"] or body["missed"] or missed else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
