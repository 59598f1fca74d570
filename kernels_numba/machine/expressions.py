"""A kernel's expressions in lock step: each operator a call that works on whole lane arrays (machine/lanes.py).

Elements of local arrays are reached without a call where it is sure that the name holds a local array and the index is the
same for every lane: a statement's cost is its calls, and mma has ten operands.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from . import lanes
from .dialect import Instruction
from .frontend import Program, refuse
from .shared_memory import declares_shared
from .syntax import call, function_call, load_name, locate, method, named

BINARY = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mult", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.LShift: "lshift", ast.RShift: "rshift", ast.BitAnd: "bitand", ast.BitOr: "bitor", ast.BitXor: "bitxor",
    ast.Eq: "eq", ast.NotEq: "noteq", ast.Lt: "lt", ast.LtE: "lte", ast.Gt: "gt", ast.GtE: "gte",
}  # fmt: skip
UNARY = {ast.USub: "usub", ast.UAdd: "uadd", ast.Invert: "invert", ast.Not: "logical_not"}
INTEGER_CALLS = {"min": "int_min", "max": "int_max", "abs": "int_abs"}
INT_OPERATORS = tuple(op for op in BINARY if op is not ast.Div and issubclass(op, ast.operator))
DIVISIONS = (ast.FloorDiv, ast.Mod)
MAY_STOP = (ast.Subscript, ast.Call)
"""What may be wrong for a lane that Python would not let evaluate it; divisions as well."""


class Expressions:
    """Translates the expressions of one Program; ``namespace`` collects the constants the code refers to.

    ranks: of each parameter that is a local array its dimensions, of others 0. Then elements of local arrays whose index is
    sure to be the same for every lane, and not negative, are reached without a call: ``ints`` are the names that here are
    sure to hold one int, and whether it is sure not to be negative; in ``ranks`` stand the names that are sure to hold a local
    array. None: every access is a call, for checked mode.
    """

    def __init__(self, program: Program, callee: Callable, ranks: tuple[int, ...] | None):
        self.program, self.callee = program, callee
        self.direct = ranks is not None
        self.ranks = {p: rank for p, rank in zip(program.params, ranks or ()) if rank and self.stores(p) == 1}
        self.ints: dict[str, bool] = {}
        self.namespace: dict[str, Any] = {}
        self.names = 0

    def fresh(self, stem: str) -> str:
        self.names += 1
        return f"__{stem}{self.names}"

    def constant(self, value: Any) -> ast.expr:
        """A name for a typed constant."""
        name = f"__k{type(value).__name__}_{value}".replace("-", "m").replace(".", "_").replace("+", "p")
        self.namespace[name] = value
        return load_name(name)

    def error(self, node: ast.AST, message: str) -> Exception:
        return refuse(self.program.filename, node, self.program.name, message)

    # --- Local arrays, reached directly -----------------------------------------------------------------------------------

    def note(self, node: ast.Assign, waiting: frozenset[str]) -> None:
        """Remember a name, assigned this once, that is sure to hold one int or a local array. waiting: names that lanes
        outside may read, so that the assignment is a merge."""
        (target, *more), value = node.targets, node.value
        if not self.direct or more or not isinstance(target, ast.Name) or self.stores(target.id) != 1:
            return
        if declares(value):
            assert isinstance(value, ast.Call)
            self.ranks[target.id] = len(value.args[0].elts) if isinstance(value.args[0], ast.Tuple) else 1
        elif target.id not in waiting and self.sure(value) is not None:
            self.ints[target.id] = self.natural(value)

    def stores(self, name: str) -> int:
        """How often the function assigns a name; a parameter counts."""
        nodes = [n for n in ast.walk(self.program.counted) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        return sum(n.id == name for n in nodes) + (name in self.program.params)

    def sure(self, node: ast.expr) -> ast.expr | None:
        """The expression in Python's own ints, if it is sure to be one int for every lane."""
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node
        if isinstance(node, ast.Name) and node.id in self.ints:
            return load_name(node.id)
        if isinstance(node, ast.BinOp) and isinstance(node.op, INT_OPERATORS):
            left, right = self.sure(node.left), self.sure(node.right)
            return None if left is None or right is None else ast.BinOp(left, node.op, right)
        return None

    def natural(self, node: ast.expr) -> bool:
        """Whether what is sure to be one int is also sure not to be negative."""
        if isinstance(node, ast.Constant):
            return isinstance(node.value, int) and node.value >= 0
        if isinstance(node, ast.Name):
            return self.ints[node.id]
        assert isinstance(node, ast.BinOp)
        return not isinstance(node.op, ast.Sub) and self.natural(node.left) and self.natural(node.right)

    def row(self, node: ast.Subscript) -> ast.expr | None:
        """The lanes of one element of a local array, if both are sure; Python would count a negative index from the end."""
        if not self.direct or not isinstance(node.value, ast.Name) or node.value.id not in self.ranks:
            return None
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        index = [found for part in parts if (found := self.sure(part)) is not None and self.natural(part)]
        if not len(index) == len(parts) == self.ranks[node.value.id]:
            return None
        lanes_of: ast.expr = ast.Attribute(load_name(node.value.id), "rows", ast.Load())
        for number in index:
            lanes_of = ast.Subscript(lanes_of, number, ast.Load())
        return lanes_of

    def rank(self, node: ast.expr) -> int:
        """Dimensions of an argument that is sure to be a local array or a row of one; else 0."""
        if isinstance(node, ast.Name):
            return self.ranks.get(node.id, 0)
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and not isinstance(node.slice, ast.Tuple)
        ):
            return max(0, self.ranks.get(node.value.id, 0) - 1)
        return 0

    # --- Expressions ----------------------------------------------------------------------------------------------------

    def expression(self, node: ast.expr, mask: str) -> ast.expr:
        made = getattr(self, f"value_{type(node).__name__}")(node, mask)
        return locate(made, node)

    def value_Constant(self, node: ast.Constant, mask: str) -> ast.expr:
        value = node.value
        if isinstance(value, bool):
            return self.constant(np.bool_(value))
        if isinstance(value, int):
            return self.constant(np.uint64(value) if value >= 2**63 else lanes.Int(value))
        if isinstance(value, str):
            return ast.Constant(value)
        raise self.error(node, f"{value!r}: write float32({value!r}), a bare float is float64")

    def value_Name(self, node: ast.Name, mask: str) -> ast.expr:
        return load_name(node.id)

    def value_Tuple(self, node: ast.Tuple, mask: str) -> ast.expr:
        return ast.Tuple([self.expression(e, mask) for e in node.elts], ast.Load())

    def value_BinOp(self, node: ast.BinOp, mask: str) -> ast.expr:
        left = self.operand(node.left, mask, node.right)
        return self.operation(node, node.op, left, self.operand(node.right, mask), mask)

    def operation(self, node: ast.AST, op: ast.AST, left: ast.expr, right: ast.expr, mask: str) -> ast.expr:
        """An operator of two operands; a division looks at which lanes divide."""
        lanes_of = [load_name(mask)] if isinstance(op, DIVISIONS) else []
        return call(self.operator(node, op), *lanes_of, left, right)

    def operator(self, node: ast.AST, op: ast.AST) -> str:
        """The helper that does what an operator says."""
        if type(op) not in BINARY:
            raise self.error(node, f"operator {type(op).__name__} is not in the kernel dialect")
        return BINARY[type(op)]

    def operand(self, node: ast.expr, mask: str, *later: ast.expr) -> ast.expr:
        """An operand that is used up at once: an element of a local array need not be copied, unless a device function that
        a later operand calls may write to it."""
        if isinstance(node, ast.Subscript) and not self.is_shape(node) and not any(map(self.calls, later)):
            return locate(self.element("peek", node, mask), node)
        return self.expression(node, mask)

    def calls(self, node: ast.AST) -> bool:
        """Whether an expression calls a device function."""
        called = [n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
        return any(isinstance(self.program.env[name], Program) for name in called)

    def value_UnaryOp(self, node: ast.UnaryOp, mask: str) -> ast.expr:
        return call(UNARY[type(node.op)], self.expression(node.operand, mask))

    def value_Compare(self, node: ast.Compare, mask: str) -> ast.expr:
        """Of a chain, as Python does it, a later operand is evaluated for the lanes for which the earlier ones held."""
        for op in node.ops:
            self.operator(node, op)
        left, out, lazy = self.expression(node.left, mask), None, False
        for op, right in zip(node.ops, node.comparators):
            kept = self.fresh("c") if right is not node.comparators[-1] else ""
            test = partial(self.comparison, node, op, left, right, kept)
            lazy = lazy or may_stop(right)
            if out is None:
                out, lazy = test(mask), False
            elif lazy:
                out, mask = self.short_circuit("logical_and", out, test, mask)
            else:
                out = call("logical_and", out, test(mask))
            left = load_name(kept)
        assert out is not None
        return out

    def comparison(
        self, node: ast.Compare, op: ast.cmpop, left: ast.expr, right: ast.expr, kept: str, mask: str
    ) -> ast.expr:
        """One link of a chain; kept: the name under which the next one finds the right side."""
        value = self.expression(right, mask)
        return self.operation(node, op, left, named(kept, value) if kept else value, mask)

    def value_BoolOp(self, node: ast.BoolOp, mask: str) -> ast.expr:
        """Python's short circuit: a later operand is evaluated for the lanes that still need it."""
        function = "logical_or" if isinstance(node.op, ast.Or) else "logical_and"
        out = self.expression(node.values[0], mask)
        for later in node.values[1:]:
            out, needed = self.short_circuit(function, out, partial(self.expression, later), mask)
            mask = needed if isinstance(node.op, ast.And) else mask
        return out

    def short_circuit(
        self, function: str, first: ast.expr, later: Callable[[str], ast.expr], mask: str
    ) -> tuple[ast.expr, str]:
        """The first value combined with a later one, for which ``later`` gives the code under a mask; and that mask."""
        kept, needed = self.fresh("b"), self.fresh("m")
        need: ast.expr = load_name(kept)
        if function == "logical_or":
            need = call("logical_not", need)
        narrowed = named(needed, call("both", load_name(mask), need))
        parts: list[ast.expr] = [named(kept, first), narrowed, self.lazily(needed, later(needed), kept)]
        value = ast.Subscript(ast.Tuple(parts, ast.Load()), ast.Constant(2), ast.Load())
        return call(function, value, load_name(kept)), needed

    def lazily(self, mask: str, value: ast.expr, otherwise: str) -> ast.expr:
        """The value, not evaluated when no lane needs it."""
        return ast.IfExp(ast.Compare(load_name(mask), [ast.Is()], [ast.Constant(None)]), load_name(otherwise), value)

    def value_IfExp(self, node: ast.IfExp, mask: str) -> ast.expr:
        condition, yes, no = self.fresh("q"), self.fresh("yes"), self.fresh("no")
        kept = named(condition, self.expression(node.test, mask))
        yes_mask = named(yes, call("both", load_name(mask), load_name(condition)))
        no_mask = named(no, call("both", load_name(mask), call("logical_not", load_name(condition))))
        first = ast.Subscript(ast.Tuple([kept, yes_mask, no_mask], ast.Load()), ast.Constant(0), ast.Load())
        sides = [self.lazily(m, self.expression(e, m), m) for m, e in ((yes, node.body), (no, node.orelse))]
        return call("select", first, *sides)

    def is_shape(self, node: ast.Subscript) -> bool:
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"

    def value_Subscript(self, node: ast.Subscript, mask: str) -> ast.expr:
        if self.is_shape(node):
            if not isinstance(node.slice, ast.Constant):
                raise self.error(node, "an axis of a shape is known at compile time")
            return ast.Subscript(self.expression(node.value, mask), node.slice, ast.Load())
        return self.element("load", node, mask)

    def element(self, how: str, node: ast.Subscript, mask: str) -> ast.expr:
        row = self.row(node)
        if row is not None:
            return row if how == "peek" else ast.Call(ast.Attribute(row, "copy", ast.Load()), [], [])
        array, index = self.expression(node.value, mask), self.expression(node.slice, mask)
        return call(how, load_name("__x"), load_name(mask), array, index)

    def value_Attribute(self, node: ast.Attribute, mask: str) -> ast.expr:
        """An array's shape, or an index of the thread's place: ``cuda.threadIdx.x``."""
        if node.attr == "shape":
            return ast.Attribute(self.expression(node.value, mask), "shape", ast.Load())
        return ast.Attribute(load_name("__x"), ast.unparse(node).removeprefix("cuda.").replace(".", "_"), ast.Load())

    def value_Call(self, node: ast.Call, mask: str) -> ast.expr:
        if isinstance(node.func, ast.Attribute):
            return self.special(node, mask)
        assert isinstance(node.func, ast.Name)
        name = node.func.id
        target = self.program.env[name]
        if isinstance(target, Program):
            self.namespace[name] = self.callee(target, *((tuple(map(self.rank, node.args)),) if self.direct else ()))
            args = [self.expression(a, mask) for a in node.args]
            if declares_shared(target):
                return method("called", ast.Constant(self.fresh("at")), load_name(name), load_name(mask), *args)
            return function_call(name, load_name("__x"), load_name(mask), *args)
        if isinstance(target, Instruction):
            return self.instruction(node, target, mask)
        if name == "count":
            return method("count", load_name(mask), *[self.expression(a, mask) for a in node.args])
        if name in INTEGER_CALLS:
            return call(INTEGER_CALLS[name], *[self.expression(a, mask) for a in node.args])
        return self.conversion(node, name, mask)

    def instruction(self, node: ast.Call, target: Instruction, mask: str) -> ast.expr:
        """mma has ten operands, most of them elements of local arrays."""
        if target.name == "mma":
            args = [self.operand(a, mask, *node.args[i + 1 :]) for i, a in enumerate(node.args)]
        else:
            args = [self.expression(a, mask) for a in node.args]
        return method(f"do_{target.name}", load_name(mask), *args)

    def conversion(self, node: ast.Call, name: str, mask: str) -> ast.expr:
        """``float32(x)``; of a literal, the constant itself."""
        if len(node.args) != 1:
            raise self.error(node, f"{name} converts one value")
        argument = node.args[0]
        dtype = np.dtype(name.replace("boolean", "bool"))
        if isinstance(argument, ast.Constant):
            try:
                with np.errstate(all="ignore"):
                    return self.constant(lanes.CASTS[dtype.name](np.array(argument.value)[()]))
            except lanes.LaneTypeError as reason:
                raise self.error(node, str(reason)) from None
        return call(f"cast_{dtype}", self.expression(argument, mask))

    def special(self, node: ast.Call, mask: str) -> ast.expr:
        name = ast.unparse(node.func).removeprefix("cuda.").replace(".", "_")
        if name in ("shared_array", "local_array"):
            shape, kind = node.args
            dtype = ast.Constant(ast.unparse(kind).replace("boolean", "bool"))
            if name == "shared_array":
                return method(name, ast.Constant(self.fresh("at")), shape, dtype)
            return method(name, shape, dtype, ast.Constant(f"{node.lineno}:{node.col_offset}"))
        return method(name, load_name(mask))


def declares(node: ast.expr) -> bool:
    """Whether an expression declares a local array."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "cuda.local.array"


def may_stop(node: ast.expr) -> bool:
    """Whether an expression may be wrong for a lane that Python would not let evaluate it."""
    parts = list(ast.walk(node))
    return any(isinstance(n, MAY_STOP) or (isinstance(n, ast.BinOp) and isinstance(n.op, DIVISIONS)) for n in parts)
