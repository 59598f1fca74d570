"""Arithmetic on lanes: NumPy arrays with one entry a thread, typed as numba types the same operation.

A value is a lane array [N], or a scalar that is the same for every lane: an ``Int`` for int64, else a NumPy scalar. The
result type of an operation is asked of numba's typing context once for each pair of operand types; the operands are cast to
it, the operation runs, nothing is contracted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core.errors import NumbaError
from numba.core.registry import cpu_target

Value = Any
"""A lane array [N], an Int or a NumPy scalar."""
Mask = Any
"""The lanes that take part: True (all), None (none), or a bool array [N]."""


class LaneTypeError(Exception):
    """An operation that the dialect has no type for, or whose float64 result nobody asked for."""


class DivisionByZero(Exception):
    """An integer division or modulo by zero. lane: the first of the launch's lanes that does it."""

    def __init__(self, lane: int, what: str = "integer division or modulo by zero"):
        super().__init__(what)
        self.lane = lane


BOOL = np.dtype(np.bool_)
FLOAT64 = np.dtype(np.float64)
INT64 = np.dtype(np.int64)
LEAST, MOST = -(2**63), 2**63 - 1


class Int(int):
    """An int64 that is the same for every lane: a Python int, because NumPy's scalars are slow, that answers as an array does."""

    __slots__ = ()
    dtype, ndim, shape, size = INT64, 0, (), 1

    def astype(self, dtype: Any, **_: Any) -> Any:
        return self if dtype == INT64 else np.int64(self).astype(dtype)


def uniform(value: Any) -> Any:
    """A scalar as a value: int64 as an Int."""
    return Int(value) if value.ndim == 0 and value.dtype == INT64 else value


def numba_result(op: Callable, *dtypes: np.dtype) -> tuple[np.dtype, ...]:
    """(operand types..., result type) that numba gives this operation."""
    context = cpu_target.typing_context
    context.refresh()
    try:
        signature = context.resolve_function_type(op, tuple(numba.from_dtype(d) for d in dtypes), {})
    except (NumbaError, NotImplementedError):
        signature = None
    if signature is None:
        raise LaneTypeError(f"no {op.__name__} of {' and '.join(map(str, dtypes))}")
    return tuple(np.dtype(str(t).replace("boolean", "bool")) for t in (*signature.args, signature.return_type))


def _rule(op: Callable, dtypes: tuple[np.dtype, ...], compares: bool) -> tuple[tuple[np.dtype, ...], np.dtype]:
    """The types that the operands are cast to, and the result's."""
    *casts, result = numba_result(op, *dtypes)
    if result == FLOAT64 and FLOAT64 not in dtypes:
        raise LaneTypeError(
            f"{op.__name__} of {' and '.join(map(str, dtypes))} gives float64: convert with float32(...) or int32(...)"
        )
    if not compares and op is not operator.truediv:
        casts = [result] * len(dtypes)
    return tuple(casts), result


def binary(op: Callable, function: Callable, compares: bool = False) -> Callable[[Value, Value], Value]:
    """An operation of two operands; its type rules are cached by the operands' type numbers.

    Two Ints are combined as Python's ints where 64 bits hold the result; else NumPy wraps it, as it wraps lane arrays.
    """
    rules: dict[int, tuple[Any, Any]] = {}
    ints = op is not operator.truediv
    shifts = op in (operator.lshift, operator.rshift)

    def apply(a: Value, b: Value) -> Value:
        if a.__class__ is Int and b.__class__ is Int and ints:
            if compares:
                return np.bool_(op(a, b))
            if not shifts or 0 <= b < 64:
                found = op(a, b)
                if LEAST <= found <= MOST:
                    return Int(found)
            return Int(function(np.int64(a), np.int64(b)))
        da, db = a.dtype, b.dtype
        key = da.num << 8 | db.num
        rule = rules.get(key)
        if rule is None:
            (ca, cb), _ = _rule(op, (da, db), compares)
            rule = rules[key] = (None if ca == da else ca, None if cb == db else cb)
        if rule[0] is not None:
            a = a.astype(rule[0])
        if rule[1] is not None:
            b = b.astype(rule[1])
        return function(a, b)

    return apply


def unary(op: Callable, function: np.ufunc) -> Callable[[Value], Value]:
    """An operation of one operand, in its own type; the result widens. Its type rules are cached."""
    rules: dict[int, tuple[np.dtype, ...]] = {}

    def apply(a: Value) -> Value:
        if a.__class__ is Int:
            return Int(function(np.int64(a)))
        rule = rules.get(a.dtype.num)
        if rule is None:
            taken, result = numba_result(op, a.dtype)
            rule = rules[a.dtype.num] = (result if taken == BOOL else taken, result)
        return function(a.astype(rule[0], copy=False)).astype(rule[1], copy=False)

    return apply


def divided(divide: Callable[[Value, Value], Value]) -> Callable[[Mask, Value, Value], Value]:
    """A division that no lane of the mask may do by an integer zero."""

    def apply(mask: Mask, a: Value, b: Value) -> Value:
        if b.ndim == 0:
            if b == 0 and b.dtype.kind != "f":
                raise DivisionByZero(0 if mask is True else int(mask.argmax()))
        elif b.dtype.kind != "f":
            bad = b == 0 if mask is True else mask & (b == 0)
            if bad.any():
                raise DivisionByZero(int(bad.argmax()))
        return divide(a, b)

    return apply


def floor_divide(a: Value, b: Value) -> Value:
    """a // b; the one quotient that int64 does not hold is 0, as numba has it."""
    found = np.floor_divide(a, b)
    if found.dtype != INT64 or not (b == -1 if b.ndim == 0 else (b == -1).any()):
        return found
    return np.where((b == -1) & (a == LEAST), np.int64(0), found)[()]


def _integers(name: str, function: np.ufunc) -> Callable[..., Value]:
    def apply(a: Value, *rest: Value) -> Value:
        for b in rest:
            if a.dtype.kind == "f" or b.dtype.kind == "f":
                raise LaneTypeError(f"{name} is for integers: use fmax or fmin on floats")
            wide = common_type(a.dtype, b.dtype)
            a = uniform(function(a.astype(wide), b.astype(wide)))
        return a

    return apply


def common_type(a: np.dtype, b: np.dtype) -> np.dtype:
    """The one type of a variable that takes values of both types."""
    if a == b:
        return a
    wide = np.promote_types(a, b)
    if a.kind not in "iub" or b.kind not in "iub" or wide.kind == "f":
        raise LaneTypeError(f"one variable takes {a} and {b}: convert one of them")
    return wide


add = binary(operator.add, np.add)
sub = binary(operator.sub, np.subtract)
mult = binary(operator.mul, np.multiply)
div = binary(operator.truediv, np.true_divide)
floordiv = divided(binary(operator.floordiv, floor_divide))
mod = divided(binary(operator.mod, np.remainder))
lshift = binary(operator.lshift, np.left_shift)
rshift = binary(operator.rshift, np.right_shift)
bitand = binary(operator.and_, np.bitwise_and)
bitor = binary(operator.or_, np.bitwise_or)
bitxor = binary(operator.xor, np.bitwise_xor)
eq = binary(operator.eq, np.equal, compares=True)
noteq = binary(operator.ne, np.not_equal, compares=True)
lt = binary(operator.lt, np.less, compares=True)
lte = binary(operator.le, np.less_equal, compares=True)
gt = binary(operator.gt, np.greater, compares=True)
gte = binary(operator.ge, np.greater_equal, compares=True)
usub = unary(operator.neg, np.negative)
uadd = unary(operator.pos, np.positive)
invert = unary(operator.invert, np.bitwise_not)
int_min = _integers("min", np.minimum)
int_max = _integers("max", np.maximum)


def int_abs(a: Value) -> Value:
    """abs of an integer."""
    if a.dtype.kind == "f":
        raise LaneTypeError("abs is for integers")
    return uniform(np.abs(a))


def logical_not(a: Value) -> Value:
    return np.logical_not(a)


def logical(name: str, function: np.ufunc) -> Callable[[Value, Value], Value]:
    """``and``, ``or``: of booleans only, for Python's give one of their operands, of whatever type."""

    def apply(a: Value, b: Value) -> Value:
        for operand in (a, b):
            if operand.dtype is not BOOL:
                raise LaneTypeError(f"{name} takes booleans, not {operand.dtype}: write x != 0")
        return function(a, b)

    return apply


logical_and = logical("and", np.logical_and)
logical_or = logical("or", np.logical_or)


def to_integer(a: Value, dtype: np.dtype) -> Value:
    """A float as an integer, as a GPU's ``cvt.rzi`` has it: toward zero, beyond the type's range its nearest end.

    NaN is 0, as 64 bits 2^63's bit alone. NumPy and LLVM leave NaN and what is out of range to the processor. PTX has no
    conversion to 8 bits: there the result would depend on what is done with it.
    """
    if dtype.itemsize == 1:
        raise LaneTypeError(f"{dtype} of {a.dtype} is not defined on a GPU: write {dtype}(int32(x))")
    ends, whole = np.iinfo(dtype), np.trunc(a)
    top = a.dtype.type(2.0) ** (ends.bits - (dtype.kind == "i"))
    inside = (whole >= a.dtype.type(ends.min)) & (whole < top)
    if inside.all():
        return whole.astype(dtype)
    found = np.where(inside, whole, a.dtype.type(0)).astype(dtype)
    found = np.where(whole >= top, dtype.type(ends.max), np.where(whole < ends.min, dtype.type(ends.min), found))
    if ends.bits == 64:
        found = np.where(np.isnan(a), np.uint64(1 << 63).astype(dtype), found)
    return found[()]


def converted(a: Value, dtype: np.dtype) -> Value:
    """As another type: floats to nearest even, integers wrap, a float as an integer as ``to_integer`` has it."""
    return to_integer(a, dtype) if a.dtype.kind == "f" and dtype.kind in "iu" else a.astype(dtype)


def caster(dtype: np.dtype) -> Callable[[Value], Value]:
    """The conversion ``float32(x)``, ``int32(x)``, ...: as ``converted``, for one type."""
    integers = dtype.kind in "iu"

    def cast(a: Value) -> Value:
        made = to_integer(a, dtype) if integers and a.dtype.kind == "f" else a.astype(dtype)
        return uniform(made) if a.ndim == 0 else made

    return cast


CASTS: dict[str, Callable[[Value], Value]] = {
    name: caster(np.dtype(name.replace("boolean", "bool")))
    for name in ("bool", "int8", "uint8", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64")
}


# --- Masks ---------------------------------------------------------------------------------------------------------------


def both(mask: Mask, condition: Value) -> Mask:
    """The lanes of the mask for which the condition holds."""
    if mask is None:
        return None
    if condition.ndim == 0:
        return mask if condition else None
    if condition.dtype is not BOOL:
        condition = condition.astype(BOOL)
    lanes = condition if mask is True else mask & condition
    if lanes.all():
        return True
    return lanes if lanes.any() else None


def split(mask: Mask, condition: Value) -> tuple[Mask, Mask]:
    """The lanes for which the condition holds, and the others."""
    return both(mask, condition), both(mask, np.logical_not(condition))


def union(gone: Mask, mask: Mask) -> Mask:
    """Lanes in either."""
    if gone is None or mask is True:
        return mask
    if mask is None or gone is True:
        return gone
    return gone | mask


def without(mask: Mask, *gone: Mask) -> Mask:
    """The lanes of the mask that are in none of the others."""
    for g in gone:
        if g is None or mask is None:
            continue
        if g is True:
            return None
        mask = ~g if mask is True else mask & ~g
        if not mask.any():
            return None
    return mask
