"""The instructions of the dialect on a GPU: one inline-PTX intrinsic each, typed by the dialect's own declaration.

An instruction that touches memory is a side effect with a memory clobber, so it stays between its barriers. The others
are pure. Those in which lanes meet are convergent: they are not moved under a branch. An array operand and its word
become an address: a 32-bit one in the shared window, a 64-bit one in global memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types, typing
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import intrinsic

from .dialect import INSTRUCTIONS, Const, Global, Instruction, Operand, Same, Shared

I32, I64, F32, VOID = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.VoidType()
SHARED_SPACE = 3
"""The LLVM address space of shared memory."""

OPERANDS = {
    "mma": "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13}",
    "ldmatrix4": "{$0, $1, $2, $3}, [$4]",
    "ldmatrix4_trans": "{$0, $1, $2, $3}, [$4]",
    "cp_async16": "[$0], [$1], 16, $2",
    "cp_commit": "",
    "cp_wait": "$0",
    "shfl_xor": "$0, $1, $2, 31, -1",
    "shfl": "$0, $1, $2, 31, -1",
    "fma": "$0, $1, $2, $3",
    "sqrt": "$0, $1",
    "fmax": "$0, $1, $2",
    "fmin": "$0, $1, $2",
    "round_int": "$0, $1",
    "pack_bf16": "$0, $2, $1",
}
"""What follows the opcode: results, then operands, numbered as they come; an array and its word are one address."""

IN_MEMORY = frozenset({"ldmatrix4", "ldmatrix4_trans", "cp_async16", "cp_commit", "cp_wait"})


# --- Types ------------------------------------------------------------------------------------------------------------


def expected(operand: Operand) -> str:
    """The operand's type in words, for an error."""
    if isinstance(operand, Shared | Global):
        return "a C-contiguous array of 32-bit words"
    if isinstance(operand, Const):
        return "an int known at compile time"
    return "a 32-bit scalar" if isinstance(operand, Same) else str(operand)


def accepted(operand: Operand, given: types.Type) -> types.Type | None:
    """The type that the operand is taken as, or None. Only an integer for a signed operand is converted."""
    plain = types.unliteral(given)
    if isinstance(operand, Shared | Global):
        fits = isinstance(plain, types.Array) and plain.layout == "C" and getattr(plain.dtype, "bitwidth", 0) == 32
    elif isinstance(operand, Const):
        return given if isinstance(given, types.IntegerLiteral) else None
    elif isinstance(operand, Same):
        fits = plain in (types.float32, types.int32, types.uint32)
    elif isinstance(plain, types.Integer) and operand in (types.int32, types.int64):
        return operand
    else:
        fits = plain == operand
    return plain if fits else None


def signature(instruction: Instruction, given: tuple[types.Type, ...]) -> Any:
    """The instruction's signature for the operands' types. Raises TypingError naming instruction and operand."""
    taken = [accepted(o, g) for o, g in zip(instruction.operands, given, strict=True)]
    for number, (operand, take) in enumerate(zip(instruction.operands, taken, strict=True)):
        if take is None:
            has = types.unliteral(given[number])
            raise TypingError(f"{instruction.name}: operand {number} is {expected(operand)}, not {has}: convert it")
    same = next((t for o, t in zip(instruction.operands, taken, strict=True) if isinstance(o, Same)), None)
    results = [same if isinstance(r, Same) else r for r in instruction.results]
    return typing.signature(types.Tuple(results) if len(results) > 1 else (*results, types.void)[0], *taken)


# --- Code -------------------------------------------------------------------------------------------------------------


def address(context: Any, builder: Any, operand: Operand, kind: types.Array, array: Any, word: Any) -> Any:
    """The address of a word (int64) of an array of the given numba type."""
    data = context.make_array(kind)(context, builder, value=array).data
    if isinstance(operand, Shared):
        base = builder.ptrtoint(builder.addrspacecast(data, I32.as_pointer(SHARED_SPACE)), I32)
        return builder.add(base, builder.shl(builder.trunc(word, I32), ir.Constant(I32, 2)))
    return builder.add(builder.ptrtoint(data, I64), builder.shl(word, ir.Constant(I64, 2)))


def inputs(instruction: Instruction, context: Any, builder: Any, kinds: tuple, values: tuple) -> list[tuple[Any, str]]:
    """What the assembly takes, with constraints: arrays and words joined to addresses, constants as immediates."""
    found: list[tuple[Any, str]] = []
    operands = iter(zip(instruction.operands, kinds, values, strict=True))
    for operand, kind, value in operands:
        if isinstance(operand, Shared | Global):
            _, _, word = next(operands)
            at = address(context, builder, operand, kind, value, word)
            found.append((at, "r" if isinstance(operand, Shared) else "l"))
        elif isinstance(operand, Const):
            found.append((ir.Constant(I32, kind.literal_value), "n"))
        elif isinstance(operand, Same):
            found.append((builder.bitcast(value, I32), "r"))
        else:
            found.append((value, "f" if kind == types.float32 else "r"))
    return found


def assembly(instruction: Instruction) -> Callable:
    """The lowering of an instruction that is one line of inline PTX."""
    words = [F32 if r == types.float32 else I32 for r in instruction.results]
    returns = VOID if not words else words[0] if len(words) == 1 else ir.LiteralStructType(words)
    memory = instruction.name in IN_MEMORY
    attributes = ["nounwind"] + ["convergent"] * instruction.collective + ["readnone"] * (not memory)
    line = f"{instruction.ptx} {OPERANDS[instruction.name]}".rstrip() + ";"

    def lower(context: Any, builder: Any, sig: Any, values: tuple) -> Any:
        taken = inputs(instruction, context, builder, sig.args, values)
        constraints = ["=f" if w is F32 else "=r" for w in words] + [c for _, c in taken] + ["~{memory}"] * memory
        kind = ir.FunctionType(returns, [v.type for v, _ in taken])
        asm = ir.InlineAsm(kind, line, ",".join(constraints), side_effect=memory)
        return result(context, builder, sig.return_type, builder.call(asm, [v for v, _ in taken], attrs=attributes))

    return lower


def result(context: Any, builder: Any, kind: types.Type, out: Any) -> Any:
    """The assembly's output as numba holds a value of this type."""
    if kind == types.void:
        return context.get_dummy_value()
    if isinstance(kind, types.BaseTuple):
        return context.make_tuple(builder, kind, [builder.extract_value(out, i) for i in range(len(kind))])
    return builder.bitcast(out, context.get_value_type(kind))


def float_bits(context: Any, builder: Any, sig: Any, values: tuple) -> Any:
    return builder.bitcast(values[0], I32)


def bits_float(context: Any, builder: Any, sig: Any, values: tuple) -> Any:
    return builder.bitcast(values[0], F32)


def bf16_low(context: Any, builder: Any, sig: Any, values: tuple) -> Any:
    return builder.bitcast(builder.shl(values[0], ir.Constant(I32, 16)), F32)


def bf16_high(context: Any, builder: Any, sig: Any, values: tuple) -> Any:
    return builder.bitcast(builder.and_(values[0], ir.Constant(I32, 0xFFFF0000)), F32)


REINTERPRETED = {f.__name__: f for f in (float_bits, bits_float, bf16_low, bf16_high)}
"""Instructions on bits alone, which the compiler may fold: plain LLVM instead of assembly."""


def made(instruction: Instruction) -> Any:
    """The instruction as a numba.cuda intrinsic."""
    lower = REINTERPRETED.get(instruction.name) or assembly(instruction)

    def define(context: Any, *given: types.Type) -> tuple[Any, Callable]:
        return signature(instruction, given), lower

    names = ["context", *(f"operand{i}" for i in range(len(instruction.operands)))]
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    define.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    define.__name__, define.__doc__ = instruction.name, instruction.doc
    return intrinsic(define)


INTRINSICS = {name: made(instruction) for name, instruction in INSTRUCTIONS.items()}
"""Every instruction of the dialect for numba.cuda, by name."""
