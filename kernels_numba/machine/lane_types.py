"""What numba would let pass in a lanewise function and lock step refuses: read off numba's own typing of it.

numba makes float64 of a float32 with an int, and one type of whatever a variable or the returns take. Here as in lock step
(machine/lanes.py) float64 is for who asks for it, and only integers widen.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import Any

import numpy as np
from numba.core import ir, types

from .dialect import Instruction
from .frontend import Program, refuse
from .lane_source import DIVISIONS, scalar_tree
from .lanes import BOOL, FLOAT64, LaneTypeError, common_type, converted
from .scalars import CONVERSIONS

ANY_LAYOUT = "A"
"""numba's layout of a local array: a column of the array that holds it for all lanes. Others are C-contiguous."""

WANT_INTEGERS = {"within": "an index is an integer", "bound": "range takes integers"}

Types = list[Any]
"""A NumPy type for each element of a tuple, one for a scalar; numba's name where there is none."""


def check(program: Program, function: Any) -> None:
    """Refuse what lock step refuses, in each way that numba's dispatcher ``function`` of the program has been compiled.

    Raises KernelError naming the function, its file and line.
    """
    for compiled in function.overloads.values():
        typed = Typed(program, compiled.type_annotation)
        for statement in typed.statements:
            try:
                typed.check(statement)
            except LaneTypeError as reason:
                line = kernel_line(program, statement.loc.line - function.py_func.__code__.co_firstlineno)
                raise refuse(program.filename, ast.Pass(lineno=line), program.name, str(reason)) from None


def kernel_line(program: Program, line: int) -> int:
    """The line of the kernel's file that stands in a line of the generated function, where each statement has one."""
    tree = scalar_tree(program)
    lines = {new.lineno: old.lineno for old, new in zip(statements(tree), statements(ast.parse(ast.unparse(tree))))}
    return lines.get(line, tree.lineno)


def statements(tree: ast.AST) -> list[ast.stmt]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.stmt)]


def dtypes_of(kind: Any) -> Types:
    """The NumPy type of a scalar, or those of a tuple's elements; of anything else numba's name."""
    if isinstance(kind, types.BaseTuple):
        return [d for one in kind.types for d in dtypes_of(one)]  # type: ignore[attr-defined]
    kind = types.unliteral(kind)
    scalar = isinstance(kind, (types.Number, types.Boolean))
    return [np.dtype(str(kind).replace("boolean", "bool")) if scalar else str(kind)]


def integers(*kinds: Types) -> bool:
    return all(isinstance(d, np.dtype) and d.kind in "iu" for kind in kinds for d in kind)


def named(*kinds: Types) -> str:
    return " and ".join(", ".join(map(str, kind)) for kind in kinds)


class Typed:
    """One compiled function with the types that numba gave its variables."""

    def __init__(self, program: Program, annotation: Any):
        self.env, self.types, self.signatures = program.env, annotation.typemap, annotation.calltypes
        self.statements = [s for _, block in sorted(annotation.blocks.items()) for s in block.body]
        assigned = [s for s in self.statements if isinstance(s, ir.Assign)]
        self.globals = {s.target.name: s.value.name for s in assigned if isinstance(s.value, ir.Global)}
        self.met = defaultdict[str, list[Types]](list)

    def dtypes(self, variable: ir.Var) -> Types:
        return dtypes_of(self.types[variable.name])

    def check(self, statement: ir.Stmt) -> None:
        if isinstance(statement, ir.SetItem):
            self.store(statement)
        elif isinstance(statement, ir.Assign) and isinstance(statement.value, ir.Var):
            self.meets(statement.target.name, "one variable takes", statement.value)
        elif isinstance(statement, ir.Assign) and isinstance(statement.value, ir.Expr):
            getattr(self, f"check_{statement.value.op}", lambda _: None)(statement.value)

    # --- Memory ---------------------------------------------------------------------------------------------------------

    def check_getitem(self, value: ir.Expr) -> None:
        array = self.types[value.value.name]
        if isinstance(array, types.Array) and array.layout != ANY_LAYOUT:
            self.whole_index(array, value.index)

    def whole_index(self, array: types.Array, index: ir.Var) -> None:
        if len(self.dtypes(index)) != array.ndim:
            many = len(self.dtypes(index))
            raise LaneTypeError(f"an array of {array.ndim} dimensions takes as many indices, not {many}")

    def store(self, statement: ir.SetItem) -> None:
        array, value = self.types[statement.target.name], self.dtypes(statement.value)
        if array.layout != ANY_LAYOUT:
            raise LaneTypeError("a lanewise function writes its own local arrays alone: store in a @device function")
        self.whole_index(array, statement.index)
        if value != [BOOL] and value != dtypes_of(array.dtype):
            raise LaneTypeError(f"an array of {array.dtype} takes no {named(value)}: convert it")

    # --- Arithmetic -----------------------------------------------------------------------------------------------------

    def check_binop(self, value: ir.Expr) -> None:
        name = (value.immutable_fn if value.op == "inplace_binop" else value.fn).__name__
        self.asked_for(name, [self.dtypes(v) for v in value.list_vars()], value)

    check_inplace_binop = check_unary = check_binop

    def asked_for(self, name: str, operands: list[Types], value: ir.Expr) -> None:
        """float64 is for who asks for it."""
        if dtypes_of(self.signatures[value].return_type) == [FLOAT64] and [FLOAT64] not in operands:
            raise LaneTypeError(f"{name} of {named(*operands)} gives float64: convert with float32(...) or int32(...)")

    def check_call(self, value: ir.Expr) -> None:
        name, given = self.globals.get(value.func.name, ""), [self.dtypes(a) for a in value.args]
        if name in WANT_INTEGERS and not integers(given[0]):
            raise LaneTypeError(WANT_INTEGERS[name])
        if name == "truth" and given[0] != [BOOL]:
            raise LaneTypeError(f"and, or take booleans, not {named(given[0])}: write x != 0")
        if name in CONVERSIONS.values() or name == "stored":
            self.conversion(given[0], dtypes_of(self.signatures[value].return_type))
        if name in DIVISIONS.values():
            self.asked_for(name, given[:2], value)
        if name in ("min", "max", "abs"):
            self.integer_call(name, given, dtypes_of(self.signatures[value].return_type))
        if isinstance(self.env.get(name), Instruction):
            self.instruction(name, self.env[name], given)

    def conversion(self, given: Types, result: Types) -> None:
        """Lock step's own conversion says what it refuses."""
        converted(np.zeros(1, given[0]), result[0])

    def instruction(self, name: str, instruction: Instruction, given: list[Types]) -> None:
        for number, (operand, kind) in enumerate(zip(instruction.operands, given)):
            if kind != dtypes_of(operand):
                raise LaneTypeError(f"{name}: operand {number} is {operand}, not {named(kind)}: convert it")

    def integer_call(self, name: str, given: list[Types], result: Types) -> None:
        if not integers(*given):
            raise LaneTypeError(f"{name} is for integers" + (": use fmax or fmin on floats" if name != "abs" else ""))
        if not integers(result):
            raise LaneTypeError(f"{name} of {named(*given)}: convert one of them")

    def check_cast(self, value: ir.Expr) -> None:
        """The value of a return, converted to what the function returns."""
        self.meets("return", "the function returns", value.value)

    def meets(self, place: str, what: str, value: ir.Var) -> None:
        """Types that meet in one place are one type, or integers."""
        self.met[place].append(self.dtypes(value))
        wide, *others = self.met[place]
        for kind in others:
            try:
                wide = [a if a == b else common_type(a, b) for a, b in zip(wide, kind, strict=True)]
            except (LaneTypeError, AttributeError, TypeError, ValueError):
                raise LaneTypeError(f"{what} {named(wide, kind)}: convert one of them") from None
