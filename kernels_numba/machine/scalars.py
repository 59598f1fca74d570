"""The instructions of one lane alone: for compiled lanewise functions, and as NumPy ufuncs for whole lane arrays."""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import int32, njit, types, uint32, vectorize
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
    return int32(_rint(x))


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
