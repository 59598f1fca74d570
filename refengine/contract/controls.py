"""Planted faults: a gate counts because here it comes out red.

A control changes the inputs of a run, a mutant the source of a kernel. Mutants are data: ``mutants/ENTRY.yaml`` names for each
the module, the text to replace (which must stand there once) and by what, the gates of which one must find it, and, where
that is ``guards``, what the finding says.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import linecache
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from refengine.contract.entry import Control, Entry, Modules, product_modules
from refengine.contract.gates import GATES, GUARDS, REPEATS, Trial, Verdict, judge
from refengine.errors import UserError
from refengine.registry.strict_yaml import load_yaml

FOLDER = Path(__file__).parent / "mutants"
_numbers = itertools.count()


@dataclass(frozen=True)
class Mutant:
    """A kernel's source with one place changed.

    module: which of the entry's. old, new: the text. gates: one of them must find it. says: what its finding says, a
    regular expression. control: whether it is planted in every run of the contract, not in ``--mutate`` alone.
    """

    entry: str
    name: str
    module: str
    old: str
    new: str
    gates: tuple[str, ...]
    says: str = ""
    control: bool = False


@dataclass(frozen=True)
class Planted:
    """What became of a planted fault. found: what the gate says, or nothing: missed."""

    entry: str
    name: str
    gate: str
    found: str

    @property
    def red(self) -> bool:
        return bool(self.found)


# --- Mutants as data --------------------------------------------------------------------------------------------------


def mutants(entry: Entry, folder: Path = FOLDER) -> list[Mutant]:
    """The mutants of an entry. Raises UserError for a file that is none, by file and key."""
    path = folder / f"{entry.name}.yaml"
    if not path.exists():
        return []
    listed = load_yaml(path)
    if not isinstance(listed, list):
        raise UserError(f"{path}: a list of mutants is wanted")
    return [read_mutant(path, entry, one) for one in listed]


def read_mutant(path: Path, entry: Entry, one: Any) -> Mutant:
    """One item of a file of mutants."""
    where = f"{path}: {one.get('name', one) if isinstance(one, dict) else one}"
    if not isinstance(one, dict) or not {"name", "replace", "by", "gates"} <= set(one):
        raise UserError(f"{where}: needs name, replace, by and gates")
    if unknown := set(one) - {"name", "module", "replace", "by", "gates", "says", "control"}:
        raise UserError(f"{where}: no key {sorted(unknown)[0]}")
    module, gates = one.get("module", entry.modules[0]), tuple(one["gates"])
    if module not in entry.modules:
        raise UserError(f"{where}: module {module}: use one of {', '.join(entry.modules)}")
    if not gates or not set(gates) <= set(GATES):
        raise UserError(f"{where}: gates {list(gates)}: use some of {', '.join(GATES)}")
    if gates == (GUARDS,) and not one.get("says"):
        raise UserError(f"{where}: needs says, what the finding says: a mutant that does not run would pass for found")
    return Mutant(
        entry.name,
        one["name"],
        module,
        one["replace"],
        one["by"],
        gates,
        one.get("says", ""),
        one.get("control", False),
    )


def mutated(entry: Entry, mutant: Mutant) -> Modules:
    """The entry's modules with the fault planted. Raises UserError unless the text stands in the module once."""
    source = inspect.getsource(importlib.import_module(mutant.module))
    if (times := source.count(mutant.old)) != 1:
        raise UserError(f"{mutant.old!r} stands {times} times in {mutant.module}, not once")
    planted = module_from(source.replace(mutant.old, mutant.new), mutant.module)
    return with_users(product_modules(entry), mutant.module, planted)


def with_users(modules: Modules, name: str, planted: ModuleType) -> Modules:
    """The modules with one replaced, and with copies of those that import from it, at first or second hand.

    An entry names its modules so that each stands before those that it imports from.
    """
    out, changed = {**modules, name: planted}, {name: (modules[name], planted)}
    for user in reversed([n for n in modules if n != name]):
        taken = {
            key: vars(new)[key]
            for old, new in changed.values()
            for key, value in vars(modules[user]).items()
            if not key.startswith("__") and key in vars(new) and value is vars(old).get(key) and callable(value)
        }
        if taken:
            out[user] = module_from(inspect.getsource(modules[user]), user)
            vars(out[user]).update(taken)
            changed[user] = (modules[user], out[user])
    return out


def module_from(source: str, origin: str) -> ModuleType:
    """The source as a module whose lines inspect and tracebacks can show."""
    filename = f"<mutant {next(_numbers)} of {origin}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = sys.modules[filename] = ModuleType(filename)
    module.__file__ = filename
    exec(compile(source, filename, "exec"), module.__dict__)
    return module


# --- Judging ----------------------------------------------------------------------------------------------------------


def plant_control(entry: Entry, control: Control, trial: Trial) -> Planted:
    """Run the control cases with a fault in the inputs, until its gate finds it. Records are left out: they would find any."""
    clean = replace(trial, recorded={})
    drifts = control.gate == REPEATS
    planted = replace(clean, drift=control.plant) if drifts else replace(clean, plant=control.plant)
    return judged(entry, control.name, (control.gate,), "", planted)


def plant_mutant(entry: Entry, mutant: Mutant, trial: Trial) -> Planted:
    """Run the control cases with a fault in the source, until one of its gates finds it; what cannot be planted is missed."""
    try:
        modules = mutated(entry, mutant)
    except UserError as gone:
        return Planted(entry.name, f"{mutant.name}: cannot be planted: {gone}", mutant.gates[0], "")
    planted = replace(trial, modules=modules, watched=GUARDS in mutant.gates)
    return judged(entry, mutant.name, mutant.gates, mutant.says, planted)


def judged(entry: Entry, name: str, gates: tuple[str, ...], says: str, trial: Trial) -> Planted:
    for case in entry.control_cases():
        for gate, problem in problems(judge(entry, case, trial), gates):
            if re.search(says, problem):
                return Planted(entry.name, name, gate, problem)
    return Planted(entry.name, name, gates[0], "")


def problems(verdict: Verdict, gates: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """What the named gates found."""
    found: Mapping[str, str] = verdict.problems
    return ((gate, found[gate]) for gate in gates if gate in found)
