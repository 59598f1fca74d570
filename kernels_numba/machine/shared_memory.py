"""The shared memory that a kernel declares: static arrays, each with a place of its own, and the launch's dynamic memory.

A static array belongs to the place in the kernel that declares it. A device function is inlined, so each call has its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import numpy as np

from .errors import KernelError
from .program import Program

MAX_STATIC_BYTES = 48 * 1024
"""Static shared memory that a block can have on any GPU."""


def calls(program: Program) -> Iterator[ast.Call]:
    return (n for n in ast.walk(program.tree) if isinstance(n, ast.Call))


def declarations(program: Program) -> list[ast.Call]:
    """The ``cuda.shared.array`` calls in the function's own source."""
    return [n for n in calls(program) if ast.unparse(n.func) == "cuda.shared.array"]


def callees(program: Program) -> list[Program]:
    """The device function of each call in the function's own source."""
    called = [program.env.get(n.func.id) for n in calls(program) if isinstance(n.func, ast.Name)]
    return [target for target in called if isinstance(target, Program)]


@cache
def declares_shared(program: Program) -> bool:
    """Whether the function, or one that it calls, declares a shared array."""
    return bool(declarations(program)) or any(map(declares_shared, callees(program)))


@cache
def static_bytes(program: Program) -> int:
    """Bytes of static shared memory a block."""
    return sum(map(array_bytes, declarations(program))) + sum(map(static_bytes, callees(program)))


def array_bytes(node: ast.Call) -> int:
    """Bytes of one declared array; 0 for the dynamic memory."""
    shape, kind = map(ast.unparse, node.args)
    return int(np.prod(ast.literal_eval(shape))) * np.dtype(kind.replace("boolean", "bool")).itemsize


def check_static(program: Program) -> int:
    """Bytes of a kernel's static arrays. Raises KernelError for more than a block can have."""
    wanted = static_bytes(program)
    if wanted > MAX_STATIC_BYTES:
        raise KernelError(
            f"{program.name}: {wanted} bytes of static shared memory a block, at most {MAX_STATIC_BYTES}: declare "
            "shape 0 and give the bytes at launch, kernel[grid, threads, stream, shared_bytes]"
        )
    return wanted
