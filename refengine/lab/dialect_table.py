"""The table of docs/dialect.md: every instruction of the kernel dialect, from its declaration."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from kernels_numba.machine.dialect import INSTRUCTIONS, Const, Global, Instruction, Same, Shared, Special, cuda

WORDS = {Shared: "shared array", Global: "global array", Const: "constant int", Same: "any 32-bit"}


def type_name(operand: Any) -> str:
    """An operand's or result's type in words."""
    return WORDS.get(type(operand), str(operand))


def types(operands: Iterable[Any]) -> str:
    """Operand types in order, equal neighbours counted: ``6 × uint32``."""
    runs = [(name, len(list(run))) for name, run in groupby(map(type_name, operands))]
    return ", ".join(name if n == 1 else f"{n} × {name}" for name, n in runs) or "none"


def meaning(instruction: Instruction) -> str:
    """The docstring's first line."""
    return instruction.doc.splitlines()[0].replace("``", "`").replace("|", "\\|").replace("*", "\\*")


def row(instruction: Instruction) -> str:
    name = f"`{instruction.name}`" + (" †" if instruction.collective else "")
    operands, results = types(instruction.operands), types(instruction.results)
    return f"| {name} | {operands} | {results} | `{instruction.ptx}` | {meaning(instruction)} |"


def dialect_table() -> str:
    """The instructions as a Markdown table."""
    head = ["| instruction | operands | results | PTX | meaning |", "|---|---|---|---|---|"]
    return "\n".join(head + [row(instruction) for instruction in INSTRUCTIONS.values()])


def cuda_names() -> list[str]:
    """Every name of ``cuda`` that the dialect has: ``threadIdx.x``, ``syncthreads``, ..."""
    parts = list(vars(cuda).values())
    nested = [value for part in parts if not isinstance(part, Special) for value in vars(part).values()]
    return sorted(part.name for part in [*parts, *nested] if isinstance(part, Special))
