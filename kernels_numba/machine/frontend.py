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
        self.name, self.filename, self.tree, self.known = name, filename, tree, known
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
        self.tree.decorator_list, self.tree.returns = [], None
        self.tree.body = self.block(self.tree.body) or [ast.copy_location(ast.Pass(), self.tree)]
        ast.fix_missing_locations(self.tree)

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
            node.iter.args = [self.visit(a) for a in node.iter.args]  # type: ignore[attr-defined]
            self.env["range"] = range
        node.body = self.block(node.body) or [ast.copy_location(ast.Pass(), node)]
        return [node]

    def check_range(self, node: ast.For) -> None:
        call = node.iter
        good = isinstance(call, ast.Call) and self.value(call.func) is range and 1 <= len(call.args) <= 3
        if not good or not isinstance(node.target, ast.Name):
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
        if isinstance(known, FOLDED):
            return ast.copy_location(ast.Constant(known), node)
        if isinstance(known, tuple):
            return ast.copy_location(ast.Tuple([self.literal(node, k) for k in known], ast.Load()), node)
        return self.named(node, known)

    def named(self, node: ast.AST, known: Any) -> ast.expr:
        """An instruction, type, device function or part of ``cuda`` by a name of the program's own."""
        if isinstance(known, Special):
            self.env["cuda"] = cuda
            return ast.copy_location(ast.parse(f"cuda.{known.name}", mode="eval").body, node)
        if isinstance(known, Instruction):
            name = known.name
        elif isinstance(known, numba_types.Type):
            name = str(known)
        elif known is count or any(known is b for b in KEPT_BUILTINS.values()):
            name = known.__name__
        else:
            raise self.error(node, f"{ast.unparse(node)} is not in the kernel dialect")
        self.env[name] = known
        return ast.copy_location(ast.Name(name, ast.Load()), node)

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
        """Operands known not to decide are dropped."""
        kept = [v for v in node.values if self.value(v) is UNKNOWN]
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
        node.args = [self.visit(a) for a in node.args]  # type: ignore[misc]
        return node

    def check_operands(self, node: ast.Call, instruction: Instruction) -> None:
        wanted = instruction.operands
        if len(node.args) != len(wanted):
            raise self.error(node, f"{instruction.name} takes {len(wanted)} operands, not {len(node.args)}")
        for operand, argument in zip(wanted, node.args):
            if isinstance(operand, Const) and not isinstance(self.value(argument), int):
                raise self.error(argument, f"{instruction.name}: {ast.unparse(argument)} must be known at compile time")

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
        taken = sum(name.startswith(f"{program.name}__") for name in self.env)
        name = f"{program.name}__{taken}"
        self.env[name] = program
        return name

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if any(isinstance(n, ast.Slice) for n in ast.walk(node.slice)):
            raise self.error(node, "a slice is not in the kernel dialect: index single elements")
        return self.generic_visit(node)

    def refused(self, node: ast.AST) -> ast.AST:
        raise self.error(node, f"{type(node).__name__} is not in the kernel dialect")

    visit_Lambda = visit_ListComp = visit_Dict = visit_List = visit_Set = visit_JoinedStr = visit_NamedExpr = refused
    visit_GeneratorExp = visit_Await = visit_Yield = visit_Starred = refused
