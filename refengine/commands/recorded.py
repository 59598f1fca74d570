"""The runs that reports of ``compare --json`` hold: read, chosen by backend, and held against each other."""

from __future__ import annotations

import json as json_text
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refengine.commands.compare import Request as Compare
from refengine.errors import UserError
from refengine.names import known_name
from refengine.verify.planted import Fault

SHARED = ("model", "prompt", "prompt_tokens", "tokens", "parallel", "prompt_rows", "context", "seed")
"""What two runs must have in common: else they differ because they were asked for different things."""
TYPES = {"model": str, "page_size": int, "tokens": int, "parallel": int, "prompt_rows": int, "seed": int}
"""Of a report's request, what is never left out."""


@dataclass(frozen=True)
class Recorded:
    """An arm of a report of compare. report: the file and the backend, as given."""

    report: str
    request: Compare
    arm: dict[str, Any]

    @property
    def backend(self) -> str:
        return self.arm["backend"]


def recorded(given: str, other: Recorded | None) -> Recorded:
    """The arm that FILE or FILE:BACKEND names. other: the one to differ from, where no backend is given.

    Raises UserError for a file that is no report of compare, or a backend that it does not have.
    """
    name, backend = parts_of(given)
    request, arms = read_report(Path(name))
    if backend:
        known_name(f"{name}: backend", backend, [arm["backend"] for arm in arms])
    chosen = [arm for arm in arms if not backend or arm["backend"] == backend]
    if other is not None and not backend and name == parts_of(other.report)[0]:
        chosen = [arm for arm in arms if arm["backend"] != other.backend]
        chosen.sort(key=lambda arm: arm["attention_hash"] == other.arm["attention_hash"])
        if not chosen:
            raise UserError(f"{name}: has one backend only; name a second report")
    return Recorded(f"{name}:{chosen[0]['backend']}", request, chosen[0])


def parts_of(given: str) -> tuple[str, str]:
    """(file, backend or nothing) of FILE or FILE:BACKEND; a file's own name may have a colon."""
    name, colon, backend = given.rpartition(":")
    return (name, backend) if colon and not Path(given).is_file() else (given, "")


def read_report(path: Path) -> tuple[Compare, list[dict[str, Any]]]:
    """The request and the arms of a report. Raises UserError for a file that is none."""
    try:
        body = json_text.loads(path.read_text())
        given = {**body["request"], "backends": tuple(body["request"]["backends"])}
        arms = body["arms"]
        if not all(isinstance(given[name], kind) for name, kind in TYPES.items()):
            raise TypeError("request")
        if not arms or not all({"backend", "attention_hash"} <= set(arm) for arm in arms):
            raise KeyError("arms")
        return Compare(**given), arms
    except OSError as problem:
        raise UserError(f"{path}: {problem.strerror}; name a file of compare --json") from problem
    except (ValueError, KeyError, TypeError) as problem:
        raise UserError(f"{path}: is no report of compare; make one with compare --json") from problem


def check_alike(a: Recorded, b: Recorded, fault: Fault | None) -> None:
    """Refuse runs of different requests, and a run with itself that has no fault planted."""
    if fault is None and a == b:
        raise UserError(f"{b.report}: is the same run twice; name another backend or report, or --plant a fault")
    for name in SHARED:
        x, y = getattr(a.request, name), getattr(b.request, name)
        if x != y:
            flag = "MODEL" if name == "model" else "--" + name.replace("_", "-")
            raise UserError(f"{flag}: {x} in {a.report}, {y} in {b.report}; explain takes two runs of one request")
