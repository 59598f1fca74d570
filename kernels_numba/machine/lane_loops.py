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
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numba
import numpy as np

from . import scalars
from .arrays import GlobalArray, LocalArray, SharedArray
from .cache import cache_folder, write_once
from .dialect import Instruction
from .errors import KernelError
from .frontend import Program
from .lanes import LaneTypeError, Mask

HEADER = """from numba import boolean, float32, float64, int8, int32, int64, njit, uint8, uint16, uint32, uint64

from kernels_numba.machine.scalars import *
from kernels_numba.machine.scalars import CALLED, OPTIONS

"""


@cache
def scalar_source(program: Program) -> str:
    """The program and what it calls as numba source, callees first."""
    for name, value in program.env.items():
        if isinstance(value, Program) and not value.lanewise:
            raise KernelError(f"{program.name} is lanewise, but calls {value.name}, which is not: mark it @lanewise")
        if isinstance(value, Instruction) and not hasattr(scalars, name):
            raise KernelError(f"{program.name} is lanewise, but uses {name}: lanes meet there, use @device")
        if name == "cuda":
            raise KernelError(f"{program.name} is lanewise: pass what it needs of cuda as arguments")
    tree = Renamed({n: unique(p) for n, p in program.env.items() if isinstance(p, Program)}).visit(copied(program.tree))
    tree.name = unique(program)
    imports = "\n".join(f"from {shared_module(p)} import {unique(p)}" for p in dict.fromkeys(program.devices))
    return f"{imports}\n\n@njit(**CALLED)\n{ast.unparse(tree)}\n"


@cache
def shared_module(program: Program) -> str:
    """The name of the module that has a callee: loops share it, and with it one compilation a process."""
    return module_of(HEADER + scalar_source(program), program.name).__name__


def copied(tree: ast.FunctionDef) -> ast.FunctionDef:
    return ast.parse(ast.unparse(tree)).body[0]  # type: ignore[return-value]


def unique(program: Program) -> str:
    """A name that no other specialisation of the function has."""
    shown = ast.unparse(program.tree) + "".join(unique(p) for p in program.devices)
    return f"{program.name}_{hashlib.sha256(shown.encode()).hexdigest()[:8]}"


class Renamed(ast.NodeTransformer):
    """Callees by their unique names."""

    def __init__(self, names: dict[str, str]):
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node


def element(name: str, kind: str) -> str:
    """How the loop passes lane t's share of an argument."""
    return {"lane": f"{name}[t]", "scalar": name, "global": name, "shared": f"{name}[t // threads]"}.get(
        kind, f"{name}[{':, ' * (int(kind[-1]) if kind[-1].isdigit() else 0)}t]"
    )


def loop_source(program: Program, kinds: tuple[str, ...], results: int) -> str:
    """The loop over lanes; results: how many values the function returns (-1: one value, not a tuple; 0: none)."""
    names = [f"a{i}" for i in range(len(kinds))]
    outs = [f"out{i}" for i in range(abs(results))]
    passed = ", ".join(element(n, k) for n, k in zip(names, kinds))
    found = f"{unique(program)}({passed})"
    lines = [f"            found = {found}" if outs else f"            {found}"]
    lines += [f"            {o}[t] = found" + (f"[{i}]" if results > 0 else "") for i, o in enumerate(outs)]
    head = ", ".join(["active", "threads", *names, *outs])
    body = "\n".join(lines)
    return f"\n@njit(cache=True, **OPTIONS)\ndef loop({head}):\n    for t in range(active.size):\n        if active[t]:\n{body}\n"


def module_of(source: str, stem: str) -> ModuleType:
    """The source as a module, from a file named by its hash so that numba can keep its machine code."""
    digest = hashlib.sha256((source + inspect.getsource(scalars) + numba.__version__).encode()).hexdigest()[:16]
    path = cache_folder("lanes") / f"{stem}_{digest}.py"
    write_once(path, source)
    spec = importlib.util.spec_from_file_location(f"_lanes_{stem}_{digest}", path)
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def returned(program: Program) -> int:
    """How many values the function returns: n for a tuple, -1 for a single value, 0 for none."""
    values = [n.value for n in ast.walk(program.tree) if isinstance(n, ast.Return) and n.value is not None]
    if not values:
        return 0
    return len(values[0].elts) if isinstance(values[0], ast.Tuple) else -1


class LaneLoop:
    """The compiled form of one lanewise program, a loop for each way it is called. stepped: its lock-step form."""

    def __init__(self, program: Program, stepped: Callable):
        self.program, self.stepped = program, stepped
        self.loops: dict[tuple, tuple[Callable, tuple]] = {}
        self.results = returned(program)

    def __call__(self, launch: Any, mask: Mask, *args: Any) -> Any:
        key = tuple((kind_of(a), a.dtype.num, len(a.shape)) for a in args)
        if key not in self.loops:
            self.loops[key] = self.build(launch, mask, args)
        loop, dtypes = self.loops[key]
        outs = [np.zeros(launch.size, d) for d in dtypes]
        try:
            loop(launch.active(mask), launch.threads, *map(raw, args), *outs)
        except IndexError:
            message = f"{self.program.name}: an index is outside its array; checked mode names the thread"
            raise LaneTypeError(message) from None
        return outs[0] if self.results < 0 else tuple(outs)

    def build(self, launch: Any, mask: Mask, args: tuple) -> tuple[Callable, tuple]:
        """The loop for these kinds of argument, and the types it returns: those of a lock-step run on copies."""
        loop = loop_source(self.program, tuple(map(kind_of, args)), self.results)
        module = module_of(HEADER + scalar_source(self.program) + loop, self.program.name)
        copies = [LocalArray(a.data.copy()) if isinstance(a, LocalArray) else a for a in args]
        found = self.stepped(launch, mask, *copies)
        many = found if self.results > 0 else (found,) if self.results else ()
        return module.loop, tuple(value.dtype for value in many)
