"""The front end of both machines: a kernel's source with its compile-time arguments bound.

Names that mean something before the kernel runs (compile-time arguments, module constants, layouts) are replaced by what
they mean, arithmetic on constants is done, branches on constants are pruned, and whatever is not in the dialect is refused
by file and line. What is left, a ``Program``, is still a numba.cuda kernel a person can read.
"""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
from collections.abc import Callable
from itertools import count as count_up
from itertools import dropwhile
from types import ModuleType, SimpleNamespace
from typing import Any

from numba.core import types as numba_types

from .compile_time import FOLDED, UNKNOWN, CompileTime
from .dialect import Const, Instruction, Special, count, cuda
from .errors import KernelError
from .program import Program, compile_time_names, parse, refuse

KEPT_BUILTINS = {"range": range, "min": min, "max": max, "abs": abs}
STATEMENTS = (
    ast.Assign,
    ast.AugAssign,
    ast.If,
    ast.While,
    ast.For,
    ast.Break,
    ast.Continue,
    ast.Return,
    ast.Pass,
    ast.Expr,
)


def specialise(fn: Callable[..., Any], kind: str, lanewise: bool, bound: dict[str, Any]) -> Program:
    """Bind compile-time arguments and reduce the source to the dialect.

    Raises KernelError naming file and line for anything outside the dialect, or an argument missing or unknown.
    """
    wanted = compile_time_names(fn)
    if missing := [n for n in wanted if n not in bound]:
        raise KernelError(
            f"{fn.__name__}: compile-time argument {missing[0]} is missing; bind it with .at({missing[0]}=...)"
        )
    if unknown := [n for n in bound if n not in wanted]:
        raise KernelError(f"{fn.__name__}: no compile-time argument {unknown[0]}; it has {', '.join(wanted) or 'none'}")
    tree, filename = parse(fn)
    outer = inspect.getclosurevars(fn)
    known = {**vars(builtins), **fn.__globals__, **outer.nonlocals, **bound}
    binder = Binder(fn.__name__, filename, tree, known, set(wanted))
    binder.reduce()
    tree.name = fn.__name__
    counted = tree
    plain = Uncounted().visit(copy.deepcopy(tree))
    params = tuple(a.arg for a in tree.args.args)
    return Program(fn.__name__, kind, lanewise, plain, counted, binder.env, filename, params)


class Uncounted(ast.NodeTransformer):
    """Drop ``count(...)`` statements: they exist for checked mode only."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        counted = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "count"
        return ast.copy_location(ast.Pass(), node) if counted else node


class Binder(CompileTime, ast.NodeTransformer):
    """Replace what is known, fold, prune, and refuse what is not in the dialect."""

    def __init__(self, name: str, filename: str, tree: ast.FunctionDef, known: dict[str, Any], bound: set[str]):
        self.name, self.filename, self.tree, self.known, self.bound = name, filename, tree, known, bound
        stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self.local = (stored | {a.arg for a in tree.args.args}) - bound
        self.env: dict[str, Any] = {}

    def error(self, node: ast.AST, message: str) -> KernelError:
        return refuse(self.filename, node, self.name, message)

    def reduce(self) -> None:
        args = self.tree.args
        if args.vararg or args.kwarg or args.defaults or args.posonlyargs:
            raise self.error(self.tree, "a kernel takes plain positional arguments and keyword-only compile-time ones")
        args.kwonlyargs, args.kw_defaults = [], []
        for a in args.args:
            a.annotation = None
        self.check_names()
        self.tree.decorator_list, self.tree.returns = [], None
        self.tree.body = self.block(self.tree.body) or [ast.copy_location(ast.Pass(), self.tree)]
        ast.fix_missing_locations(self.tree)
        self.check_reads()

    def check_names(self) -> None:
        """The kernel's variables are its own: no compile-time argument, none of the names that machines add."""
        stored = [(n, n.id) for n in ast.walk(self.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        for node, name in [*((a, a.arg) for a in self.tree.args.args), *stored]:
            if name in self.bound:
                raise self.error(node, f"{name} is a compile-time argument: assign to a variable of another name")
            if name.startswith("__"):
                raise self.error(node, f"{name}: a kernel's variables do not start with two underscores")

    def check_reads(self) -> None:
        """Every variable that is read has an assignment left after pruning."""
        names = [n for n in ast.walk(self.tree) if isinstance(n, ast.Name)]
        written = {n.id for n in names if isinstance(n.ctx, ast.Store)} | {a.arg for a in self.tree.args.args}
        for node in names:
            if node.id in self.local and node.id not in written:
                raise self.error(node, f"{node.id} is read, but no branch that is left assigns it")

    # --- Statements -----------------------------------------------------------------------------------------------------

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for statement in body:
            if not isinstance(statement, STATEMENTS):
                raise self.error(statement, f"{type(statement).__name__} is not in the kernel dialect")
            out += self.statement(statement)
        return out

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return []
        if isinstance(node, ast.If):
            return self.branch(node)
        if isinstance(node, (ast.For, ast.While)):
            return self.loop(node)
        return [self.generic_visit(node)]  # type: ignore[list-item]

    def branch(self, node: ast.If) -> list[ast.stmt]:
        test = self.value(node.test)
        if test is not UNKNOWN:
            return self.block(node.body if test else node.orelse)
        node.test = self.expression(node.test)
        node.body = self.block(node.body) or [ast.copy_location(ast.Pass(), node)]
        node.orelse = self.block(node.orelse)
        return [node]

    def loop(self, node: ast.For | ast.While) -> list[ast.stmt]:
        if node.orelse:
            raise self.error(node, "a loop's else is not in the kernel dialect")
        if isinstance(node, ast.While):
            node.test = self.expression(node.test)
        else:
            self.check_range(node)
            call = node.iter
            assert isinstance(call, ast.Call)
            call.func, call.args = self.named(call.func, range), [self.expression(a) for a in call.args]
        node.body = self.block(node.body) or [ast.copy_location(ast.Pass(), node)]
        return [node]

    def check_range(self, node: ast.For) -> None:
        call = node.iter
        good = isinstance(call, ast.Call) and self.value(call.func) is range and 1 <= len(call.args) <= 3
        if not good or call.keywords or not isinstance(node.target, ast.Name):  # type: ignore[attr-defined]
            raise self.error(node, "a for loop goes over range(...) with one variable")

    # --- Expressions ----------------------------------------------------------------------------------------------------

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr) and not isinstance(getattr(node, "ctx", None), ast.Store):
            known = self.value(node)
            if known is not UNKNOWN:
                return self.literal(node, known)
        return super().visit(node)

    def expression(self, node: ast.expr) -> ast.expr:
        made = self.visit(node)
        assert isinstance(made, ast.expr)
        return made

    def literal(self, node: ast.AST, known: Any) -> ast.expr:
        """The expression that stands for a compile-time value."""
        if hasattr(known, "item") and not isinstance(known, numba_types.Type):
            known = known.item()
        if type(known) is int and not -(2**63) <= known < 2**64:
            raise self.error(node, f"{known} is outside int64")
        if isinstance(known, FOLDED):
            return ast.copy_location(ast.Constant(known), node)
        if isinstance(known, tuple):
            return ast.copy_location(ast.Tuple([self.literal(node, k) for k in known], ast.Load()), node)
        return self.named(node, known)

    def named(self, node: ast.AST, known: Any) -> ast.expr:
        """An instruction, type, device function or part of ``cuda`` by a name of the program's own."""
        if isinstance(known, Special):
            self.own(node, "cuda", cuda)
            return ast.copy_location(ast.parse(f"cuda.{known.name}", mode="eval").body, node)
        if isinstance(known, Instruction):
            name = known.name
        elif isinstance(known, numba_types.Type):
            name = str(known)
        elif known is count or any(known is b for b in KEPT_BUILTINS.values()):
            name = known.__name__
        else:
            raise self.error(node, f"{ast.unparse(node)} is not in the kernel dialect")
        self.own(node, name, known)
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    def own(self, node: ast.AST, name: str, meaning: Any) -> None:
        """Give a name of the program its meaning."""
        if name in self.local:
            raise self.error(node, f"{name} is also a variable here: give the variable another name")
        self.env[name] = meaning

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self.local and isinstance(node.ctx, ast.Load):
            raise self.error(node, f"name {node.id} is not defined")
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr != "shape":
            raise self.error(node, f"attribute .{node.attr} is not in the kernel dialect")
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        test = self.value(node.test)
        return self.generic_visit(node) if test is UNKNOWN else self.visit(node.body if test else node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """Dropped are the constants in front, which do not decide, and booleans that do not."""
        values = [(v, self.value(v)) for v in node.values]
        rest = list(dropwhile(lambda operand: operand[1] is not UNKNOWN, values))
        spare = isinstance(node.op, ast.And)
        kept = [v for v, known in rest if known is not spare]
        if len(kept) == 1:
            return self.visit(kept[0])
        node.values = [self.visit(v) for v in kept]  # type: ignore[misc]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        fn = self.value(node.func)
        if hasattr(fn, "program"):
            return self.device_call(node, fn)
        if fn is UNKNOWN or isinstance(fn, (ModuleType, SimpleNamespace)):
            raise self.error(node, f"{ast.unparse(node.func)} is not a function of the kernel dialect")
        if node.keywords:
            raise self.error(node, "keyword arguments are for the compile-time arguments of device functions")
        node.func = self.named(node.func, fn)  # type: ignore[assignment]
        if isinstance(fn, Instruction):
            self.check_operands(node, fn)
        if isinstance(fn, Special) and fn.name.endswith("array"):
            self.check_array(node)
        node.args = [self.visit(a) for a in node.args]  # type: ignore[misc]
        return node

    def check_operands(self, node: ast.Call, instruction: Instruction) -> None:
        wanted = instruction.operands
        if len(node.args) != len(wanted):
            raise self.error(node, f"{instruction.name} takes {len(wanted)} operands, not {len(node.args)}")
        for operand, argument in zip(wanted, node.args):
            if isinstance(operand, Const) and not isinstance(self.value(argument), int):
                raise self.error(argument, f"{instruction.name}: {ast.unparse(argument)} must be known at compile time")

    def check_array(self, node: ast.Call) -> None:
        """``cuda.shared.array(shape, type)``: both known."""
        shape, kind = map(self.value, node.args) if len(node.args) == 2 else (UNKNOWN, UNKNOWN)
        sizes = shape if isinstance(shape, tuple) else (shape,)
        if not all(type(size) is int and size >= 0 for size in sizes) or not isinstance(kind, numba_types.Type):
            name = ast.unparse(node.func)
            where = name.split(".")[-2]
            raise self.error(
                node, f"a {where} array takes a shape known at compile time and a type, as {name}(64, float32)"
            )

    def device_call(self, node: ast.Call, fn: Any) -> ast.AST:
        bound: dict[str, Any] = {}
        for k in node.keywords:
            assert k.arg is not None
            bound[k.arg] = self.value(k.value)
            if bound[k.arg] is UNKNOWN:
                raise self.error(node, f"compile-time argument {k.arg}={ast.unparse(k.value)} is not known here")
        program = fn.program(**bound)
        if len(node.args) != len(program.params):
            raise self.error(node, f"{program.name} takes {len(program.params)} arguments, not {len(node.args)}")
        node.func = ast.copy_location(ast.Name(self.device_name(program), ast.Load()), node)
        node.args, node.keywords = [self.visit(a) for a in node.args], []  # type: ignore[misc]
        return node

    def device_name(self, program: Program) -> str:
        for name, value in self.env.items():
            if value is program:
                return name
        taken = {*self.env, *self.local}
        name = next(n for i in count_up() if (n := f"{program.name}__{i}") not in taken)
        self.env[name] = program
        return name

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if any(isinstance(n, ast.Slice) for n in ast.walk(node.slice)):
            raise self.error(node, "a slice is not in the kernel dialect: index single elements")
        of_an_array = not isinstance(node.value, ast.Attribute)
        for index in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            known = self.value(index)
            if of_an_array and isinstance(known, int) and known < 0:
                raise self.error(node, f"index {known}: arrays of the kernel dialect do not count from the end")
        return self.generic_visit(node)

    def refused(self, node: ast.AST) -> ast.AST:
        raise self.error(node, f"{type(node).__name__} is not in the kernel dialect")

    visit_Lambda = visit_ListComp = visit_Dict = visit_List = visit_Set = visit_JoinedStr = visit_NamedExpr = refused
    visit_GeneratorExp = visit_Await = visit_Yield = visit_Starred = refused
