"""What a command shows: a table, a bar while it works, and a report as JSON, written whole or not at all."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from refengine import __version__
from refengine.errors import UserError

T = TypeVar("T")
PACKAGES = ("numba", "numba-cuda", "numpy", "ml_dtypes", "cupy-cuda13x", "safetensors")
PIPE_WIDTH = 160
"""Columns of a table that goes to a file or a pipe."""


def show(table: Table) -> None:
    """Print a table as wide as the terminal is, or as PIPE_WIDTH; what is too long goes on in the next line."""
    for column in table.columns:
        column.overflow = "fold"
    Console(width=None if Console().is_terminal else PIPE_WIDTH).print(table)


def progress_bar() -> Progress:
    """A bar on stderr that leaves nothing behind; none where stderr is no terminal."""
    columns = (TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def versions() -> dict[str, str]:
    """What the figures depend on."""
    found = {"refengine": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def command_line() -> str:
    """The command as one would type it."""
    program = Path(sys.argv[0])
    script = ["python", os.path.relpath(program)] if program.suffix == ".py" else [program.name]
    return shlex.join([*script, *sys.argv[1:]])


def check_report(path: Path | None, flag: str = "--json") -> None:
    """Raise UserError when no file of a flag can be written there: call it before the work."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{flag} {path}: is a folder; name a file")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as problem:
        raise unwritable(path, problem, flag) from problem


def write_report(path: Path, body: dict[str, Any]) -> None:
    """Write ``body`` with the versions and the command. Raises UserError when the file cannot be written."""
    text = json.dumps({"command": command_line(), "versions": versions(), **body}, indent=1) + "\n"
    write_whole(path, text.encode(), "--json")


def write_whole(path: Path, data: bytes, flag: str) -> None:
    """Write the file of a flag, whole or not at all. Raises UserError when it cannot be written."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as out:
            temporary = Path(out.name)
            out.write(data)
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as problem:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise unwritable(path, problem, flag) from problem


def read_report(path: Path, command: str, part: Callable[[Any], T]) -> T:
    """What ``part`` takes of an earlier report of a command, given with --against. Raises UserError for a file that is none."""
    try:
        return part(json.loads(path.read_text()))
    except OSError as problem:
        raise UserError(f"--against {path}: {problem.strerror}; name a file of {command} --json") from problem
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise UserError(f"--against {path}: is no report of {command}; make one with {command} --json") from problem


def unwritable(path: Path, problem: OSError, flag: str) -> UserError:
    """The refusal of a file's path."""
    return UserError(f"{flag} {path}: cannot be written: {problem.strerror}; name a file in a folder of yours")
