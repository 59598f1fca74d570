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
import linecache
import operator
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from numba.core import types as numba_types

from .dialect import Const, Instruction, Special, count, cuda
from .errors import KernelError

FOLDED = (int, float, bool, str, type(None))
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
OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
}
UNKNOWN = object()


@dataclass(frozen=True, eq=False)
class Program:
    """A kernel or device function with its compile-time arguments bound: what a machine translates.

    tree: the function, original line numbers. env: every free name of the tree. lanewise: see ``machine.lanewise``.
    counted: the tree with its ``count`` statements, which only the checked CPU machine runs.
    """

    name: str
    kind: str
    lanewise: bool
    tree: ast.FunctionDef
    counted: ast.FunctionDef
    env: dict[str, Any]
    filename: str
    params: tuple[str, ...] = field(default=())

    @property
    def devices(self) -> list[Program]:
        """The device functions it calls, in order of appearance."""
        return [v for v in self.env.values() if isinstance(v, Program)]


def refuse(filename: str, node: ast.AST, kernel: str, message: str) -> KernelError:
    """A KernelError that names the kernel, the file and line, and shows the line."""
    line = getattr(node, "lineno", 0)
    shown = linecache.getline(filename, line).strip()
    return KernelError(f"{kernel}: {filename}:{line}: {message}" + (f"  [{shown}]" if shown else ""))


def parse(fn: Callable[..., Any]) -> tuple[ast.FunctionDef, str]:
    """The function's syntax tree with the file's own line numbers, and the file's name."""
    lines, first = inspect.getsourcelines(fn)
    tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    ast.increment_lineno(tree, first - 1)
    return tree, fn.__code__.co_filename


def compile_time_names(fn: Callable[..., Any]) -> list[str]:
    """The keyword-only parameters: what ``.at`` binds."""
    return [p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY]


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


class Binder(ast.NodeTransformer):
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

    # --- What a node means before the kernel runs ---------------------------------------------------------------------

    def value(self, node: ast.AST) -> Any:
        """The compile-time value of an expression, or UNKNOWN."""
        method = getattr(self, f"value_{type(node).__name__}", None)
        return method(node) if method else UNKNOWN

    def value_Constant(self, node: ast.Constant) -> Any:
        return node.value

    def value_Name(self, node: ast.Name) -> Any:
        return UNKNOWN if node.id in self.local else self.known.get(node.id, UNKNOWN)

    def value_Attribute(self, node: ast.Attribute) -> Any:
        base = self.value(node.value)
        return UNKNOWN if base is UNKNOWN else getattr(base, node.attr, UNKNOWN)

    def value_Tuple(self, node: ast.Tuple) -> Any:
        items = [self.value(e) for e in node.elts]
        return UNKNOWN if any(i is UNKNOWN for i in items) else tuple(items)

    def value_Subscript(self, node: ast.Subscript) -> Any:
        base, index = self.value(node.value), self.value(node.slice)
        return base[index] if isinstance(base, tuple) and isinstance(index, int) else UNKNOWN

    def value_UnaryOp(self, node: ast.UnaryOp) -> Any:
        return self.folded(node, type(node.op), node.operand)

    def value_BinOp(self, node: ast.BinOp) -> Any:
        return self.folded(node, type(node.op), node.left, node.right)

    def value_Compare(self, node: ast.Compare) -> Any:
        left, verdict = node.left, True
        for op, right in zip(node.ops, node.comparators):
            one = self.folded(node, type(op), left, right)
            if one is UNKNOWN:
                return UNKNOWN
            verdict, left = verdict and one, right
        return verdict

    def value_BoolOp(self, node: ast.BoolOp) -> Any:
        """A constant operand may decide alone: what the other operands are then does not matter."""
        decides = isinstance(node.op, ast.Or)
        values = [self.value(v) for v in node.values]
        if any(v is not UNKNOWN and bool(v) is decides for v in values):
            return decides
        return UNKNOWN if UNKNOWN in values else not decides

    def value_IfExp(self, node: ast.IfExp) -> Any:
        test = self.value(node.test)
        return UNKNOWN if test is UNKNOWN else self.value(node.body if test else node.orelse)

    def value_Call(self, node: ast.Call) -> Any:
        """A host function, called with compile-time arguments only, runs now."""
        fn = self.value(node.func)
        host = isinstance(fn, FunctionType) or fn in (min, max, abs, len, int)
        if fn is UNKNOWN or not host or fn is count:
            return UNKNOWN
        args = [self.value(a) for a in node.args]
        kwargs = {k.arg: self.value(k.value) for k in node.keywords if k.arg is not None}
        return UNKNOWN if UNKNOWN in [*args, *kwargs.values()] else fn(*args, **kwargs)

    def folded(self, node: ast.AST, op: type, *operands: ast.AST) -> Any:
        values = [self.value(o) for o in operands]
        if any(isinstance(v, (Special, Instruction, SimpleNamespace)) or hasattr(v, "program") for v in values):
            return UNKNOWN
        plain = op in (ast.Is, ast.IsNot, ast.In, ast.Eq, ast.NotEq) or all(isinstance(v, FOLDED) for v in values)
        if UNKNOWN in values or not plain or op not in OPERATORS:
            return UNKNOWN
        try:
            return OPERATORS[op](*values)
        except (ArithmeticError, TypeError) as reason:
            raise self.error(node, f"compile-time arithmetic failed: {reason}") from None

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
