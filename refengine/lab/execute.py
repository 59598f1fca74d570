"""Execute the tutorials as notebooks: what ``make tutorials`` does.

    python -m refengine.lab.execute            all of them
    python -m refengine.lab.execute 01 04      these

Each becomes build/tutorials/NN_name.ipynb. A line each; exit status 1 where one fails or takes longer than its limit.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

from refengine.cores import usable_cores
from refengine.errors import UserError
from refengine.lab.sources import ROOT
from refengine.lab.tutorials import Tutorial, find_tutorial, tutorials

OUT = ROOT / "build" / "tutorials"
LIMIT = 120
"""Seconds that a tutorial may take on a machine that nothing else uses much; the aim is half of it."""


@dataclass(frozen=True)
class Executed:
    """What became of a tutorial. problem: one line, empty where all is well."""

    name: str
    seconds: float
    problem: str = ""


def execute(path: Path, out: Path = OUT, limit: float = LIMIT) -> Executed:
    """Run one text notebook and write what it shows into ``out``."""
    import jupytext
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    notebook = jupytext.read(path)
    options: dict[str, Any] = {"timeout": None, "kernel_name": "python3", "extra_arguments": ["--log-level=CRITICAL"]}
    client = NotebookClient(notebook, resources={"metadata": {"path": str(ROOT)}}, **options)
    began, problem = time.monotonic(), ""
    try:
        asyncio.run(asyncio.wait_for(client.async_execute(), limit))
    except CellExecutionError as failed:
        problem = f"{failed_line(notebook)}: {failed.ename}: {' '.join(failed.evalue.split())}"
    except (TimeoutError, DeadKernelError):
        late = time.monotonic() - began >= limit
        problem = f"took longer than {limit:g} s" if late else "its kernel died"
    out.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, out / f"{path.stem}.ipynb")
    return Executed(path.stem, time.monotonic() - began, problem)


def failed_line(notebook: Any) -> str:
    """The first line of the cell that failed."""
    for cell in notebook.cells:
        if any(output.output_type == "error" for output in cell.get("outputs", [])):
            return f"in the cell {cell.source.strip().splitlines()[0]!r}"
    return "outside a cell"


def execute_all(chosen: list[Tutorial], jobs: int, run: Callable[[Path], Executed] = execute) -> Iterator[Executed]:
    """Several at a time, each in a process of its own, as they end."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(run, tutorial.path) for tutorial in chosen]):
            yield done.result()


def main(
    numbers: Annotated[list[str] | None, typer.Argument(help="Tutorials by number. Default: all.")] = None,
    jobs: Annotated[int, typer.Option(help="How many at a time.")] = min(2, usable_cores()),
) -> None:
    """Execute the tutorials as notebooks and write them to build/tutorials."""
    try:
        chosen = [find_tutorial(number) for number in numbers] if numbers else tutorials()
    except UserError as problem:
        print(f"tutorials: {problem}", file=sys.stderr)
        raise typer.Exit(2) from None
    failed = 0
    for done in execute_all(chosen, jobs):
        failed += bool(done.problem)
        print(f"{'FAILED' if done.problem else 'ok':6} {done.name:45} {done.seconds:6.1f} s  {done.problem}".rstrip())
        sys.stdout.flush()
    print(f"TUTORIALS {len(chosen) - failed} executed, {failed} failed")
    raise typer.Exit(1 if failed or not chosen else 0)


if __name__ == "__main__":
    typer.run(main)
