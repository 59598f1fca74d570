"""The instructions of one lane alone: for compiled lanewise functions, and as NumPy ufuncs for whole lane arrays."""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import int64, njit, types, uint32, uint64, vectorize
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True}


CALLED: dict[str, Any] = {**OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""For functions that only compiled code calls."""


def _llvm(name: str) -> Any:
    """An intrinsic of LLVM with one float32 operand."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FloatType()
        return builder.call(builder.module.declare_intrinsic(f"llvm.{name}", [kind]), args)

    return lower


# --- Conversions to integers ----------------------------------------------------------------------------------------------


def _converted(context, builder, value, given, kind):
    """A value of one numba type as another; a float as an integer as ``lanes.to_integer`` says."""
    if not (isinstance(given, types.Float) and isinstance(kind, types.Integer)):
        return context.cast(builder, value, given, kind)
    wide = ir.IntType(kind.bitwidth)
    name = f"llvm.fpto{'s' if kind.signed else 'u'}i.sat"
    saturate = builder.module.declare_intrinsic(name, [wide, value.type], ir.FunctionType(wide, [value.type]))
    found = builder.call(saturate, [value])
    if kind.bitwidth == 64:
        return builder.select(builder.fcmp_unordered("uno", value, value), ir.Constant(wide, 1 << 63), found)
    return found


def converter(kind: Any) -> Any:
    """``kind(x)`` of one lane; kind: an integer type of numba."""

    def convert(context, x):
        return kind(types.unliteral(x)), lambda c, b, s, args: _converted(c, b, args[0], s.args[0], kind)

    convert.__name__ = convert.__qualname__ = f"to_{kind}"
    return intrinsic(convert)


@intrinsic
def stored(context, x, array):
    """The value as the array's elements are."""
    given, kind = types.unliteral(x), array.dtype
    return kind(given, array), lambda c, b, s, args: _converted(c, b, args[0], given, kind)


to_int8, to_uint8, to_uint16 = converter(types.int8), converter(types.uint8), converter(types.uint16)
to_int32, to_uint32 = converter(types.int32), converter(types.uint32)
to_int64, to_uint64 = converter(types.int64), converter(types.uint64)

CONVERSIONS = {t: f"to_{t}" for t in ("int8", "uint8", "uint16", "int32", "uint32", "int64", "uint64")}
"""The function that stands for a conversion to an integer type."""


# --- What numba leaves undefined ------------------------------------------------------------------------------------------


@intrinsic
def note(context, fault, place, value):
    """Write an int64 where a fault is noted. fault: the address, for numba counts the references of an array."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store(args[2], builder.gep(address, [args[1]]))

    return types.void(types.int64, types.int64, types.int64), lower


@intrinsic
def within(context, index, size, fault, site):
    """The index if it is inside, else an IndexError; fault: the address of int64 [4], takes site, index and size."""
    return types.uint64(types.unliteral(index), size, types.int64, types.int64), _checked


def _checked(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    index, size = (context.cast(builder, v, t, types.uint64) for v, t in zip(args[:2], signature.args[:2]))
    with cgutils.if_unlikely(builder, builder.icmp_unsigned(">=", index, size)):
        noted = builder.inttoptr(args[2], ir.IntType(64).as_pointer())
        for place, value in enumerate((args[3], index, size), 1):
            builder.store(value, builder.gep(noted, [ir.Constant(ir.IntType(32), place)]))
        context.call_conv.return_user_exc(builder, IndexError, ())
    return index


@njit(**CALLED)
def lshift(a, b):
    """a << b; shifted out, all bits are 0."""
    shifted = a << (uint64(b) & uint64(63))
    return shifted if uint64(b) < uint64(64) else shifted ^ shifted


@njit(**CALLED)
def rshift(a, b):
    """a >> b; shifted out, all bits are the sign's."""
    return a >> min(uint64(b), uint64(63)) >> uint64(uint64(b) > uint64(63))


@intrinsic
def _is_integer(context, x):
    known = ir.Constant(ir.IntType(1), isinstance(types.unliteral(x), types.Integer))
    return types.boolean(x), lambda c, b, s, args: known


@njit(**CALLED)
def _divisor(b, fault, site):
    if _is_integer(b) and b == 0:
        note(fault, 1, site)
        raise ZeroDivisionError


@njit(**CALLED)
def floordiv(a, b, fault, site):
    """a // b; an integer divided by zero is a ZeroDivisionError, noted as ``within`` does."""
    _divisor(b, fault, site)
    return a // b


@njit(**CALLED)
def mod(a, b, fault, site):
    """a % b, as ``floordiv``."""
    _divisor(b, fault, site)
    return a % b


@njit(**CALLED)
def bound(x):
    """A bound of a range."""
    return int64(x)


@njit(**CALLED)
def truth(x):
    """An operand of ``and`` or ``or``."""
    return x


@intrinsic
def zero_of(context, function, arguments):
    """Zero of the type that the function returns for arguments of these types."""
    found = function.get_call_type(cpu_target.typing_context, arguments.types, {}).return_type
    return found(function, arguments), lambda c, b, s, args: c.get_constant_null(s.return_type)


# --- Instructions ---------------------------------------------------------------------------------------------------------


@intrinsic
def fma(context, a, b, c):
    return types.float32(types.float32, types.float32, types.float32), lambda c, b, s, args: b.fma(*args)


@intrinsic
def sqrt(context, x):
    return types.float32(types.float32), _llvm("sqrt")


@intrinsic
def _rint(context, x):
    return types.float32(types.float32), _llvm("rint")


@intrinsic
def float_bits(context, x):
    return types.uint32(types.float32), lambda c, b, s, args: b.bitcast(args[0], ir.IntType(32))


@intrinsic
def bits_float(context, bits):
    return types.float32(types.uint32), lambda c, b, s, args: b.bitcast(args[0], ir.FloatType())


@njit(**CALLED)
def fmax(a, b):
    """Of +0 and -0, +0."""
    if a == b:
        return bits_float(uint32(float_bits(a) & float_bits(b)))
    return b if (a < b or a != a) else a


@njit(**CALLED)
def fmin(a, b):
    """Of +0 and -0, -0."""
    if a == b:
        return bits_float(uint32(float_bits(a) | float_bits(b)))
    return b if (b < a or a != a) else a


@njit(**CALLED)
def round_int(x):
    return to_int32(_rint(x))


@njit(**CALLED)
def _bf16(x):
    bits = float_bits(x)
    rounded = uint32((bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16))
    return rounded if x == x else uint32(0x7FFF)


@njit(**CALLED)
def pack_bf16(low, high):
    return uint32(_bf16(low) | (_bf16(high) << uint32(16)))


@njit(**CALLED)
def bf16_low(word):
    return bits_float(uint32(word << uint32(16)))


@njit(**CALLED)
def bf16_high(word):
    return bits_float(uint32(word & uint32(0xFFFF0000)))


# --- As ufuncs: compiled at first use ------------------------------------------------------------------------------------


@njit(**OPTIONS)
def _fused(a, b, c):
    return fma(a, b, c)


SCALARS: dict[str, tuple[Any, str]] = {
    "fma": (_fused, "float32(float32, float32, float32)"),
    "fmax": (fmax, "float32(float32, float32)"),
    "fmin": (fmin, "float32(float32, float32)"),
    "pack_bf16": (pack_bf16, "uint32(float32, float32)"),
}


@cache
def ufunc(name: str) -> Any:
    """The instruction as a NumPy ufunc, for those that NumPy does not have."""
    scalar, signature = SCALARS[name]
    return vectorize([signature], nopython=True, cache=True)(scalar.py_func)
