"""A lanewise function as numba source: what one lane does, every index checked.

The function's own names get a trailing underscore, so that none of them can hide a name of the module around it. What
numba would leave to chance is written as a call of machine/scalars.py: indices, shifts, conversions to integers.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from dataclasses import dataclass
from functools import cache

from . import scalars
from .dialect import Instruction
from .errors import KernelError
from .frontend import Program

FAULT = "fault"
"""In generated source the address of int64 [4]: the lane, and of an index that is outside its site, value and size."""

SHIFTS = {ast.LShift: "lshift", ast.RShift: "rshift"}
DIVISIONS = {ast.FloorDiv: "floordiv", ast.Mod: "mod"}


@dataclass(frozen=True)
class Site:
    """A place where a lane may stop, in the kernel's file: one index of a subscript, or a division. what: in words."""

    program: Program
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} ({self.program.name}, {self.program.filename}:{self.line})"


@cache
def unique(program: Program) -> str:
    """A name that no other specialisation of the function has."""
    shown = ast.unparse(program.tree) + "".join(unique(p) for p in program.devices)
    return f"{program.name}_{hashlib.sha256(shown.encode()).hexdigest()[:8]}"


@cache
def written(program: Program) -> tuple[ast.FunctionDef, dict[int, Site]]:
    """The function for one lane, line numbers those of the kernel's file, and its sites.

    Raises KernelError where lanes would meet.
    """
    for name, value in program.env.items():
        if isinstance(value, Program) and not value.lanewise:
            raise KernelError(f"{program.name} is lanewise, but calls {value.name}, which is not: mark it @lanewise")
        if isinstance(value, Instruction) and not hasattr(scalars, name):
            raise KernelError(f"{program.name} is lanewise, but uses {name}: lanes meet there, use @device")
        if name == "cuda":
            raise KernelError(f"{program.name} is lanewise: pass what it needs of cuda as arguments")
    writer = OneLane(program)
    return ast.fix_missing_locations(writer.visit(copy.deepcopy(program.tree))), writer.sites


def scalar_tree(program: Program) -> ast.FunctionDef:
    """The function for one lane."""
    return written(program)[0]


@cache
def sites(program: Program) -> dict[int, Site]:
    """Every place where a lane may stop, of the function and of those it calls, by its number."""
    return {**{n: s for p in program.devices for n, s in sites(p).items()}, **written(program)[1]}


class OneLane(ast.NodeTransformer):
    """Rewrites a program's tree. sites: those met, numbered by the function's hash and their order in it."""

    def __init__(self, program: Program):
        self.program, self.sites, self.names = program, dict[int, Site](), 0
        self.first = int(unique(program)[-8:], 16) << 16

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """The first argument is where a fault is noted."""
        node.name = unique(self.program)
        self.generic_visit(node)
        node.args.args.insert(0, ast.arg(FAULT))
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg += "_"
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id += "_"
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A function's name is the program's, never a variable."""
        assert isinstance(node.func, ast.Name)
        value = self.program.env[node.func.id]
        node.args = [self.visit(a) for a in node.args]
        if isinstance(value, Program):
            node.func.id, node.args = unique(value), [ast.Name(FAULT, ast.Load()), *node.args]
        else:
            node.func.id = scalars.CONVERSIONS.get(node.func.id, node.func.id)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        """A loop's variable is int64."""
        self.generic_visit(node)
        assert isinstance(node.iter, ast.Call)
        node.iter.args = [a if isinstance(a, ast.Constant) else called("bound", a) for a in node.iter.args]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.stmt]:
        """What goes into an array becomes of its type."""
        self.generic_visit(node)
        (target, *more), value = node.targets, node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and not more:
            value.elts = [self.stored(t, v) for t, v in zip(target.elts, value.elts)]
            return node
        if more:
            kept = self.fresh()
            out = [put(kept, value), *(s for t in node.targets for s in self.into(t, read(kept)))]
        else:
            out = self.into(target, value)
        return [ast.copy_location(s, node) for s in out]

    def into(self, target: ast.expr, value: ast.expr) -> list[ast.stmt]:
        """The assignment of a value; the elements of a tuple one by one."""
        if not isinstance(target, ast.Tuple):
            return [ast.Assign([target], self.stored(target, value))]
        names = [self.fresh() for _ in target.elts]
        unpacked = ast.Assign([ast.Tuple([ast.Name(n, ast.Store()) for n in names], ast.Store())], value)
        return [unpacked, *(s for t, n in zip(target.elts, names) for s in self.into(t, read(n)))]

    def stored(self, target: ast.expr, value: ast.expr) -> ast.expr:
        return called("stored", value, copy.deepcopy(target.value)) if isinstance(target, ast.Subscript) else value

    def fresh(self) -> str:
        self.names += 1
        return f"kept{self.names}"

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if type(node.op) in SHIFTS:
            return ast.copy_location(called(SHIFTS[type(node.op)], node.left, node.right), node)
        if type(node.op) in DIVISIONS:
            place = self.site(node, "integer division or modulo by zero")
            return ast.copy_location(called(DIVISIONS[type(node.op)], node.left, node.right, *place), node)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST | list[ast.stmt]:
        if type(node.op) not in {**SHIFTS, **DIVISIONS} and isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        old = copy.deepcopy(node.target)
        old.ctx = ast.Load()
        new = ast.copy_location(ast.BinOp(old, node.op, node.value), node)
        return self.visit(ast.copy_location(ast.Assign([node.target], new), node))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        node.values = [v if isinstance(v, ast.Compare) else called("truth", v) for v in node.values]
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.value, ast.Attribute):  # array.shape[axis]
            node.value = self.visit(node.value)
            return node
        shown = ast.unparse(node.value)
        self.generic_visit(node)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        checked = [self.within(node, shown, axis, part) for axis, part in enumerate(parts)]
        node.slice = ast.Tuple(checked, ast.Load()) if isinstance(node.slice, ast.Tuple) else checked[0]
        return node

    def within(self, node: ast.Subscript, shown: str, axis: int, index: ast.expr) -> ast.expr:
        """The index, checked against its axis."""
        shape = ast.Attribute(copy.deepcopy(node.value), "shape", ast.Load())
        size = ast.Subscript(shape, ast.Constant(axis), ast.Load())
        return called("within", index, size, *self.site(node, f"axis {axis} of {shown}"))

    def site(self, node: ast.expr, what: str) -> tuple[ast.expr, ast.expr]:
        """A new site, as the two arguments that a check takes."""
        number = self.first + len(self.sites)
        self.sites[number] = Site(self.program, node.lineno, what)
        return ast.Name(FAULT, ast.Load()), ast.Constant(number)


def read(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def put(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def called(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), list(arguments), [])
