"""What an expression of a kernel means before the kernel runs: constants, layouts, arithmetic on them, host functions."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from itertools import takewhile
from types import FunctionType, SimpleNamespace
from typing import Any

from .dialect import Instruction, Special, count
from .errors import KernelError

FOLDED = (int, float, bool, str, type(None))
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
    ast.NotIn: lambda a, b: a not in b,
}
UNKNOWN = object()
"""The value of what is known only when the kernel runs."""


class CompileTime:
    """Values of expressions. known: what names mean. local: names that the kernel assigns, whose values it alone knows."""

    known: dict[str, Any]
    local: set[str]

    def error(self, node: ast.AST, message: str) -> KernelError:
        """The error that names the kernel and the node's line."""
        raise NotImplementedError

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
        if not isinstance(base, tuple) or not isinstance(index, int):
            return UNKNOWN
        if not -len(base) <= index < len(base):
            raise self.error(node, f"index {index} is outside a tuple of {len(base)}")
        return base[index]

    def value_UnaryOp(self, node: ast.UnaryOp) -> Any:
        return self.folded(node, type(node.op), node.operand)

    def value_BinOp(self, node: ast.BinOp) -> Any:
        return self.folded(node, type(node.op), node.left, node.right)

    def value_Compare(self, node: ast.Compare) -> Any:
        left: ast.expr = node.left
        verdict: Any = True
        for op, right in zip(node.ops, node.comparators):
            verdict, left = self.folded(node, type(op), left, right), right
            if verdict is UNKNOWN or not verdict:
                break
        return verdict

    def value_BoolOp(self, node: ast.BoolOp) -> Any:
        """Python's value where the operands up to the one that decides are known.

        A boolean that decides does so behind unknown operands too, unless a device function among them must run.
        """
        decides = isinstance(node.op, ast.Or)
        values = [self.value(v) for v in node.values]
        for i, value in enumerate(values):
            if value is UNKNOWN:
                behind = zip(node.values[i:], values[i:])
                free = takewhile(lambda operand: not self.runs(operand[0]), behind)
                return decides if any(v is decides for _, v in free) else UNKNOWN
            if bool(value) is decides:
                return value
        return values[-1]

    def runs(self, node: ast.AST) -> bool:
        """Whether evaluating an expression calls a device function."""
        return any(isinstance(n, ast.Call) and hasattr(self.value(n.func), "program") for n in ast.walk(node))

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
        if any(a is UNKNOWN or isinstance(a, Special) for a in (*args, *kwargs.values())):
            return UNKNOWN
        try:
            return fn(*args, **kwargs)
        except (ArithmeticError, TypeError, ValueError, LookupError) as reason:
            raise self.error(node, f"compile-time call failed: {reason}") from reason

    def folded(self, node: ast.AST, op: type, *operands: ast.AST) -> Any:
        values = [self.value(o) for o in operands]
        if any(isinstance(v, (Special, Instruction, SimpleNamespace)) or hasattr(v, "program") for v in values):
            return UNKNOWN
        plain = op in (ast.Is, ast.IsNot, ast.In, ast.NotIn, ast.Eq, ast.NotEq) or all(
            isinstance(v, FOLDED) for v in values
        )
        if any(v is UNKNOWN for v in values) or not plain or op not in OPERATORS:
            return UNKNOWN
        try:
            if grows(op, values):
                raise OverflowError("the result leaves int64")
            found = OPERATORS[op](*values)
        except (ArithmeticError, TypeError, ValueError) as reason:
            raise self.error(node, f"compile-time arithmetic failed: {reason}") from None
        if type(found) is int and not all(map(in_int64, [found] if op is ast.USub else [found, *values])):
            raise self.error(node, "compile-time arithmetic failed: an operand or the result leaves int64")
        return found


def in_int64(value: Any) -> bool:
    """Whether an int fits; what is no int does."""
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def grows(op: type, values: list[Any]) -> bool:
    """Whether a power or a shift is too long to be worked out."""
    if op not in (ast.Pow, ast.LShift) or not all(isinstance(v, int) for v in values):
        return False
    return values[1] > 64 and abs(values[0]) > (op is ast.Pow)
