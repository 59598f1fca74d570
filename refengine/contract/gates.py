"""The first four gates: is a kernel right, does it share its twins' bits, does it repeat them, does it touch only its own?

A case is run three times, each with fresh buffers and another poison where the kernel may not look. The gates read what the
three runs gave; a gate's verdict is the first thing wrong, or nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from kernels_numba.machine import KernelError, checked
from refengine.contract.entry import Bounds, Entry, Inputs, Modules, Outputs, Plant, product_modules
from refengine.contract.workbench import NAN, POISONS, Array, Poison, Workbench, bits
from refengine.device import Device, open_device
from refengine.verify.bounds import worst_fraction

Run = tuple[Outputs, list[str]]
"""Outputs, and what was touched that may not be."""
BOUND, EXACT, REPEATS, GUARDS = GATES = ("bound", "exact", "repeats", "guards")


@dataclass
class Verdict:
    """What the gates say of one case.

    problems: gate -> the first thing wrong. fraction: the worst error as a part of its bound. digest: of all outputs.
    seconds: all runs together.
    """

    entry: str
    case: str
    problems: dict[str, str] = field(default_factory=dict)
    fraction: float = 0.0
    digest: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class Trial:
    """Everything a case is judged with.

    modules: the code on trial. plant: a fault for the inputs of every run. drift: one for every run but the first.
    recorded: digest of each case's outputs on another machine, by ``key``. watched: also run once in checked mode.
    """

    device: Device
    modules: Modules | None = None
    plant: Plant | None = None
    drift: Plant | None = None
    recorded: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    watched: bool = False


def key(entry: Entry, case: Any, seed: int) -> str:
    """Names a case's bits in records."""
    return f"{entry.name} {case}" + (f" seed={seed}" if seed else "")


def judge(entry: Entry, case: Any, trial: Trial) -> Verdict:
    """Run a case and put it through gates 1 to 4."""
    verdict, started = Verdict(entry.name, str(case)), time.perf_counter()
    try:
        runs = [run(entry, case, trial, poison, again=poison is not NAN) for poison in POISONS]
        if trial.watched and trial.device.name == "cpu":
            with checked():
                run(entry, case, trial, NAN)
    except KernelError as problem:
        verdict.problems[GUARDS] = str(problem)
    else:
        (outputs, _), clean = runs[0], entry.inputs(case, NAN, trial.seed)
        verdict.digest = digest(outputs)
        gates = (
            gate_bound(verdict, outputs, entry.exact(case, clean)),
            gate_exact(entry, case, clean, trial, verdict, outputs),
            *gates_repeats_and_guards(entry, case, trial, runs),
        )
        verdict.problems.update((gate, problem) for gate, problem in zip(GATES, gates, strict=True) if problem)
    verdict.seconds = time.perf_counter() - started
    return verdict


def run(entry: Entry, case: Any, trial: Trial, poison: Poison, again: bool = False) -> Run:
    """One run of a trial with fresh buffers. again: not the first."""
    inputs = entry.inputs(case, poison, trial.seed)
    if trial.plant is not None:
        trial.plant(inputs)
    if trial.drift is not None and again:
        trial.drift(inputs)
    return launched(entry, case, inputs, Workbench(trial.device, poison), trial.modules)


def launched(entry: Entry, case: Any, inputs: Inputs, bench: Workbench, modules: Modules | None = None) -> Run:
    """A launch on a bench, of the product's modules or of others."""
    entry.launch(case, inputs, bench, modules or product_modules(entry))
    outputs, problems = bench.finish()
    return entry.view(inputs, outputs), problems


# --- Gate 1 -----------------------------------------------------------------------------------------------------------


def gate_bound(verdict: Verdict, outputs: Outputs, exact: Bounds) -> str | None:
    """Error within the derived bound; NaN passes no comparison."""
    problem = None
    for name, (value, bound) in exact.items():
        part = worst_fraction(outputs[name], value, bound)
        verdict.fraction = max(verdict.fraction, part)
        if not part <= 1 and problem is None:
            problem = f"{name}: error is {part:.3g} of its bound"
    return problem


# --- Gate 2 -----------------------------------------------------------------------------------------------------------


def gate_exact(entry: Entry, case: Any, inputs: Inputs, trial: Trial, verdict: Verdict, outputs: Outputs) -> str | None:
    """The bits of every twin, on clean modules, and of the record. inputs: without a planted fault."""

    def twin(other: Any, own: Inputs) -> Outputs:
        return launched(entry, other, own, Workbench(trial.device, NAN))[0]

    for what, wanted in entry.twins(case, inputs, twin):
        for name, array in wanted.items():
            if problem := difference(entry, case, name, outputs[name], array):
                return f"differs from {what}: {problem}"
    recorded = trial.recorded.get(key(entry, case, trial.seed))
    if recorded is not None and recorded != verdict.digest:
        return f"outputs hash to {verdict.digest}, recorded {recorded}"
    return None


def difference(entry: Entry, case: Any, name: str, found: Array, wanted: Array) -> str | None:
    """The first element in which two outputs differ, with both values in hex, and how many differ."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{name} is {found.dtype} {found.shape}, not {wanted.dtype} {wanted.shape}"
    where = np.argwhere(bits(found) != bits(wanted))
    if not len(where):
        return None
    index = tuple(int(i) for i in where[0])
    digits = 2 * found.dtype.itemsize
    values = " and ".join(f"0x{int(bits(a)[index]):0{digits}x}" for a in (found, wanted))
    return f"{name} at {entry.place(name, index, case)}: {values}, {len(where)} differ"


def digest(outputs: Outputs) -> str:
    """SHA-256 of all outputs, 16 hex digits."""
    sha = hashlib.sha256()
    for name in sorted(outputs):
        sha.update(name.encode() + bits(np.ascontiguousarray(outputs[name])).tobytes())
    return sha.hexdigest()[:16]


# --- Gates 3 and 4 ----------------------------------------------------------------------------------------------------


def gates_repeats_and_guards(entry: Entry, case: Any, trial: Trial, runs: list[Run]) -> tuple[str | None, str | None]:
    """Three runs, three poisons: equal bits prove both that they repeat and that no poison was read.

    Where they differ, the first run is repeated with its own poison: if it too differs, the kernel does not repeat.
    """
    touched = next((problems[0] for _, problems in runs if problems), None)
    first = runs[0][0]
    for poison, (outputs, _) in zip(POISONS[1:], runs[1:], strict=True):
        for name, array in outputs.items():
            problem = difference(entry, case, name, array, first[name])
            if problem is None:
                continue
            if not repeats(entry, case, trial, first):
                return f"another run differs: {problem}", touched
            return None, touched or f"reads what nobody wrote: with {poison.name} there {problem}"
    return None, touched


def repeats(entry: Entry, case: Any, trial: Trial, before: Outputs) -> bool:
    """Whether a run with the same poison gives the same bits."""
    outputs, _ = run(entry, case, trial, NAN, again=True)
    return digest(outputs) == digest(before)


@cache
def this_device(name: str) -> Device:
    """The device, opened once a process."""
    return open_device(name)
