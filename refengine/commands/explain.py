"""``refengine explain``: two runs of ``compare`` once more, to the first place where they part, and what each had there."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from backends.base import backend_names
from refengine.checkpoint import load_weights
from refengine.commands.choice_words import choice_body, choice_words
from refengine.commands.compare import Request as Compare
from refengine.commands.compare import build_all, check, prompt_of, room, rotated
from refengine.commands.inputs import find_model
from refengine.commands.recorded import Recorded, check_alike, parts_of, recorded
from refengine.commands.report import check_report, progress_bar, show, write_report
from refengine.device import open_device
from refengine.errors import UserError
from refengine.model import check_dims, open_model
from refengine.names import known_name
from refengine.verify.compare import Arm, first_difference
from refengine.verify.explain import Parting, Place, Reading, Side, first_place, parting, read_at
from refengine.verify.fold_watch import FoldState
from refengine.verify.planted import FAULTS, Fault

SHOWN = 24
"""Fold states of a table, at most: the last ones before the runs part."""


@dataclass(frozen=True)
class Request:
    """An explanation as the command line asks for it. plant: part of a fault's name, for B."""

    a: str
    b: str | None
    plant: str | None
    device: str


def run(request: Request, json: Path | None) -> int:
    """Explain and show; the exit status: 0 where nothing parts, else 1. Raises UserError for reports that cannot be used."""
    check_report(json)
    a = recorded(request.a, None)
    b = recorded(request.b or parts_of(request.a)[0], a)
    fault = planted(request.plant)
    check_alike(a, b, fault)
    sides = both_sides(a, b, fault, request.device)
    with progress_bar() as bar:
        task = bar.add_task("running both", total=2)
        arms = []
        for side in sides:
            arms.append(side.run())
            bar.advance(task)
        if problem := not_repeated(a, arms[0]) or ("" if fault else not_repeated(b, arms[1])):
            print(f"UNCHECKED {problem}")
            return 1
        place = first_place(*arms)
        readings = [read_at(side, place) for side in sides] if place is not None else []
    line, body = told(a, b, arms, place, readings)
    if json is not None:
        write_report(
            json, {"claims": [], "a": asdict(a), "b": asdict(b), "planted": fault.name if fault else None, **body}
        )
    print(line)
    return 0 if line.startswith("EQUAL") else 1


# --- The two runs -----------------------------------------------------------------------------------------------------


def planted(name: str | None) -> Fault | None:
    """The fault that a part of its name says. Raises UserError where that is none, or several."""
    if name is None:
        return None
    found = [fault for fault in FAULTS if name in fault.name]
    if len(found) != 1:
        listed = "; ".join(fault.name for fault in found or FAULTS)
        raise UserError(f"--plant {name}: in the names of {len(found)} faults; take a part of one of: {listed}")
    return found[0]


def both_sides(a: Recorded, b: Recorded, fault: Fault | None, device_name: str) -> tuple[Side, Side]:
    """The runs, to be had again on this device; one model for both."""
    device = open_device(device_name)
    requests = [replace(one.request, backends=(one.backend,), device=device_name) for one in (a, b)]
    for request in requests:
        known_name("backend", request.backends[0], backend_names())
        check(request)
    spec, _, checkpoint = find_model(a.request.model, a.request.seed)
    check_dims(spec)
    prompt = prompt_of(requests[0], spec)
    context = room(requests[0], len(prompt), spec)
    model = open_model(spec, load_weights(checkpoint(), spec), device, context)
    prompts = rotated(prompt, a.request.parallel)

    def side(request: Compare, plant: Any) -> Side:
        build = partial(build_all, spec, request, context, device)
        name = request.backends[0]
        return Side(name, lambda: build()[0], model, device, prompts, request.prompt_rows, request.tokens, plant)

    return side(requests[0], nullcontext), side(requests[1], fault.planted if fault else nullcontext)


def not_repeated(one: Recorded, arm: Arm) -> str:
    """Why a run is not the report's, if it is not."""
    if arm.attention_hash == one.arm["attention_hash"]:
        return ""
    return f"{one.report} does not repeat here: attention hash {arm.attention_hash}, the report says {one.arm['attention_hash']}"


# --- What is said -----------------------------------------------------------------------------------------------------


def told(
    a: Recorded, b: Recorded, arms: list[Arm], place: Place | None, readings: list[Reading]
) -> tuple[str, dict[str, Any]]:
    """(the last line, the report); the rest is printed."""
    where = first_difference(*arms)
    if where is None:
        return f"EQUAL {a.report} and {b.report}: nothing parts", {"verdict": "EQUAL"}
    if place is None:
        line = f"PARTED behind attention, which is equal in every layer: {where}"
        return line, {"verdict": line}
    found = parting(*readings)
    show(table(a, b, readings, found))
    why = cause(a, b, readings, found)
    line = f"PARTED {where}; {why}"
    states = [[state_body(*one) for one in reading.states] for reading in readings]
    body = {
        "place": asdict(place), "choice": choice_body(found.choice), "key": key_body(found), "step": found.step,
        "cause": why, "folds": states,
    }  # fmt: skip
    return line, {"verdict": line, **body}


def cause(a: Recorded, b: Recorded, readings: list[Reading], found: Parting) -> str:
    """Why they part, as far as what was read says."""
    said = [choice_words((a.backend, b.backend), found.choice)] if found.choice is not None else []
    if found.queries_differ:
        return "; ".join([*said, "the row's query differs already: what parts lies before this attention"])
    kernels = [reading.states[0][0] for reading in readings if reading.states]
    if found.key is not None:
        said.append(key_words(found))
    elif found.choice is None and len(set(kernels)) > 1:
        return f"query and keys are equal: {kernels[0]} and {kernels[1]} sum them in different orders"
    elif found.choice is None:
        said.append("query and keys are equal: the sums of the kernel itself differ")
    return "; ".join([*said, *(f"{one.backend}: {r.wrong_entry}" for one, r in zip((a, b), readings) if r.wrong_entry)])


def key_words(found: Parting) -> str:
    """The first key whose rows differ."""
    assert found.key is not None
    x, y = found.key
    both = "key of both" if found.choice is not None else "key"
    return f"the first {both} that differs is position {x.position}, its {found.plane} row: {x.where} against {y.where}"


def table(a: Recorded, b: Recorded, readings: list[Reading], found: Parting) -> Table:
    """Both folds, tile by tile, until they part."""
    first = "keys from" if readings[0].choice is None else "entries from"
    shown = Table(first, f"{a.backend}: kernel", "m", "l", "o", f"{b.backend}: kernel", "m", "l", "o", "")
    end = None if found.step is None else found.step + 1
    pairs = list(enumerate(zip(readings[0].states[:end], readings[1].states)))
    for number, ((left, x), (right, y)) in pairs[-SHOWN:]:
        keys = str(x.key) if x.key == y.key else f"{x.key} / {y.key}"
        shown.add_row(keys, left, *values(x), right, *values(y), "parts" if number == found.step else "equal")
    return shown


def values(state: FoldState) -> list[str]:
    """m, l and o with their bits."""
    return [f"{x:.7g}\n{bits}" for x, bits in zip((state.m, state.l, state.o), state.bits(), strict=True)]


def state_body(kernel: str, state: FoldState) -> dict[str, Any]:
    """A fold state for the report, its values in hex."""
    m, total, o = state.bits()
    return {"kernel": kernel, "key": state.key, "m": m, "l": total, "o": o}


def key_body(found: Parting) -> dict[str, Any] | None:
    """The first key that differs, for the report."""
    if found.key is None:
        return None
    x, y = found.key
    return {"position": x.position, "plane": found.plane, "a": x.where, "b": y.where, "dim": first_dim(found)}


def first_dim(found: Parting) -> int:
    """The first dim in which the rows of that key differ."""
    assert found.key is not None
    x, y = ((row.k if found.plane == "K" else row.v) for row in found.key)
    return int(np.flatnonzero(x.view(np.uint32) != y.view(np.uint32))[0])
