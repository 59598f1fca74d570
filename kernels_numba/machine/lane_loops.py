"""Lanewise device functions, compiled: one loop over lanes around the function's own scalar source.

In a lanewise function no thread meets another, so running lane after lane gives what lock step gives, without an array for
each intermediate value. The loop is written out as a Python module, named by a hash of its whole source and of what that
source calls, and numba keeps the machine code beside it: a changed kernel can never find old code.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
from numba.core.errors import NumbaError
from numba.core.types import Array, Type

from . import lane_source, lane_types, lanes, scalars
from .arrays import GlobalArray, LocalArray, SharedArray
from .cache import cache_folder, holds, write_once
from .compiler import first_line
from .emulate import LaneError
from .errors import KernelError
from .frontend import Program
from .lane_source import scalar_tree, sites, unique
from .lanes import DivisionByZero, Mask

HEADER = """import numpy as np
from numba import boolean, float32, float64, int8, int32, int64, njit, uint8, uint16, uint32, uint64

from kernels_numba.machine.scalars import *
from kernels_numba.machine.scalars import CALLED, OPTIONS
"""


# --- Modules ------------------------------------------------------------------------------------------------------------


@cache
def tools() -> str:
    """What a loop depends on besides its source."""
    return "".join(map(inspect.getsource, (scalars, lane_source, lane_types, lanes))) + numba.__version__


def name_of(source: str, stem: str) -> str:
    """A module's name, that no other source has."""
    return f"{stem}_{hashlib.sha256((source + tools()).encode()).hexdigest()[:16]}"


def path_of(name: str) -> Path:
    return cache_folder("lanes") / f"{name}.py"


def module_of(source: str, stem: str) -> ModuleType:
    """The source as a module, from a file, so that numba can keep its machine code."""
    name = name_of(source, stem)
    full = f"_lanes_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, write_once(path_of(name), source))
        assert spec and spec.loader
        module = sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[full]


@cache
def scalar_module(program: Program) -> ModuleType:
    """The module of a function for one lane. Loops and callers share it, and with it one compilation a process."""
    imports = "".join(f"from {scalar_module(p).__name__} import {unique(p)}\n" for p in dict.fromkeys(program.devices))
    written = ast.unparse(scalar_tree(program))
    return module_of(f"{HEADER}{imports}\n\n@njit(**CALLED)\n{written}\n", program.name)


@cache
def callees(program: Program) -> tuple[Program, ...]:
    """The program and all that it calls, callees first."""
    below = [q for p in program.devices for q in callees(p)]
    return tuple(dict.fromkeys([*below, program]))


# --- Arguments ----------------------------------------------------------------------------------------------------------


def kind_of(value: Any) -> str:
    if isinstance(value, GlobalArray):
        return "global"
    if isinstance(value, SharedArray):
        return "shared"
    if isinstance(value, LocalArray):
        return f"local{len(value.shape)}"
    return "scalar" if value.ndim == 0 else "lane"


def raw(value: Any) -> Any:
    """What numba gets for an argument."""
    if isinstance(value, GlobalArray):
        return value.flat.reshape(tuple(map(int, value.shape)))
    if isinstance(value, SharedArray):
        return value.rows.reshape(len(value.rows), *map(int, value.shape))
    return value.data if isinstance(value, LocalArray) else value


def element(name: str, kind: str, lane: str) -> str:
    """How the loop passes a lane's share of an argument."""
    if kind.startswith("local"):
        return f"{name}[{':, ' * int(kind[-1])}{lane}]"
    return {"lane": f"{name}[{lane}]", "scalar": name, "global": name, "shared": f"{name}[{lane} // threads]"}[kind]


def element_type(value: Any) -> Type:
    """numba's type of a lane's share of an argument."""
    scalar: Any = numba.from_dtype(value.dtype)
    if isinstance(value, LocalArray):
        return Array(scalar, len(value.shape), "A")
    return Array(scalar, len(value.shape), "C") if isinstance(value, (GlobalArray, SharedArray)) else scalar


# --- The loop -----------------------------------------------------------------------------------------------------------


@cache
def returned(program: Program) -> int:
    """How many values the function returns: n for a tuple, -1 for a single value, 0 for none."""
    values = [n.value for n in ast.walk(program.tree) if isinstance(n, ast.Return) and n.value is not None]
    if not values:
        return 0
    if isinstance(values[0], ast.Tuple):
        return len(values[0].elts)
    callee = program.env.get(values[0].func.id) if isinstance(values[0], ast.Call) else None  # type: ignore[attr-defined]
    return returned(callee) if isinstance(callee, Program) else -1


def loop_source(program: Program, kinds: tuple[str, ...], types: tuple[Type, ...]) -> str:
    """The loop over lanes. It notes the lane it is at, and what the function returns is zero in lanes that are not active."""
    names, count = [f"a{i}" for i in range(len(kinds))], returned(program)
    places = [f"found[{i}]" for i in range(count)] if count >= 0 else ["found"]
    first, here = (", ".join(element(n, k, lane) for n, k in zip(names, kinds)) for lane in "0t")
    lines = [
        "",
        "",
        "@njit(cache=True, **OPTIONS)",
        f"def loop({', '.join(['fault', 'active', 'threads', *names])}):",
        f'    """A lane\'s arguments: {", ".join(map(str, types))}."""',
        f"    found = zero_of({unique(program)}, (fault, {first},))" if places else "",
        *(f"    out{i} = np.full(active.size, {place})" for i, place in enumerate(places)),
        "    for t in range(active.size):",
        "        if active[t]:",
        *(["            note(fault, 0, t)"] if sites(program) else []),
        f"            found = {unique(program)}(fault, {here})",
        *(f"            out{i}[t] = {place}" for i, place in enumerate(places)),
        f"    return {', '.join(f'out{i}' for i in range(len(places)))}",
    ]
    return f"{HEADER}from {scalar_module(program).__name__} import {unique(program)}\n" + "\n".join(lines) + "\n"


class LaneLoop:
    """The compiled form of one lanewise program, a loop for each way it is called."""

    def __init__(self, program: Program):
        self.program = program
        self.loops: dict[tuple, Any] = {}

    def __call__(self, launch: Any, mask: Mask, *args: Any) -> Any:
        key = tuple((kind_of(a), a.dtype.num, len(a.shape)) for a in args)
        if key not in self.loops:
            self.loops[key] = self.build(args)
        fault = np.zeros(4, np.int64)
        try:
            return self.loops[key](
                fault.__array_interface__["data"][0], launch.active(mask), launch.threads, *map(raw, args)
            )
        except (IndexError, ZeroDivisionError) as stopped:
            lane, site, index, size = map(int, fault)
            place = str(sites(self.program)[site])
            outside = isinstance(stopped, IndexError)
            raise (LaneError(lane, index, size, place) if outside else DivisionByZero(lane, place)) from None

    def build(self, args: tuple) -> Any:
        """The loop for these kinds of argument. Its file stands for code that has been checked; numba's is beside it."""
        types = tuple(map(element_type, args))
        source = loop_source(self.program, tuple(map(kind_of, args)), types)
        if not holds(path_of(name_of(source, self.program.name)), source.encode()):
            self.check(types)
        return module_of(source, self.program.name).loop

    def check(self, types: tuple[Type, ...]) -> None:
        """Compile the function for one lane. Raises KernelError where numba has no types for it, or lock step others."""
        functions = [(p, getattr(scalar_module(p), unique(p))) for p in callees(self.program)]
        try:
            functions[-1][1].compile((numba.int64, *types))
        except NumbaError as reason:
            said = first_line(reason).replace("_' is not defined", "' is read before it is assigned")
            raise KernelError(f"{self.program.name}: {self.program.filename}: {said}") from reason
        for program, function in functions:
            lane_types.check(program, function)
