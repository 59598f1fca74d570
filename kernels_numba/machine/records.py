"""What a kernel compiles to, without a GPU: a record for each architecture, PTX, machine code, float arithmetic."""

from __future__ import annotations

import hashlib
import os
import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .compiler import Capability, architecture, compile_cubin, compile_ptx, find_tool, ptxas_version
from .errors import KernelError
from .frontend import Program

Signature = tuple[Any, ...]
"""A numba type for each parameter: ``compiler.signature`` makes them of arguments."""
PTX_TARGET: Capability = (8, 0)
"""The oldest supported architecture; ptxas makes every other one's machine code of its PTX."""
ARCHITECTURES: tuple[Capability, ...] = (
    (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)
)  # fmt: skip
"""sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, sm_121."""


@dataclass(frozen=True)
class Record:
    """One kernel on one architecture.

    registers: a thread. shared_bytes: static shared memory a block; the launch's dynamic bytes come on top.
    stack_bytes, spill_store_bytes, spill_load_bytes: a thread. ptx_bytes, ptx_instructions: of the PTX all share.
    code_bytes, code_hash: the machine code alone, without names (SHA-256, 16 hex digits). compiler: its versions.
    """

    kernel: str
    sm: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    ptx_bytes: int
    ptx_instructions: int
    code_bytes: int
    code_hash: str
    compiler: str


def records(
    program: Program, signature: Signature, architectures: Iterable[Capability] = ARCHITECTURES, threads: int = 0
) -> list[Record]:
    """The kernel's record on each architecture.

    threads: of a block, where it may exceed 256 (registers are then fewer).
    Raises KernelError when a tool is missing (naming its package) or the kernel does not compile.
    """
    ptx, targets = ptx_text(program, signature), list(architectures)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(lambda cc: compile_cubin(ptx, cc, threads), targets))
    count = sum(1 for _ in instructions(ptx))
    return [record(program.name, ptx, count, cc, *made) for cc, made in zip(targets, compiled, strict=True)]


def record(name: str, ptx: str, count: int, cc: Capability, cubin: Path, report: str) -> Record:
    """The record of one machine code. count: the PTX's instructions. cubin, report: what ``compile_cubin`` gives."""
    code = machine_code(cubin.read_bytes())
    stack, stores, loads = report_numbers(report, r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes")
    (registers,) = report_numbers(report, r"Used (\d+) registers")
    shared = re.search(r"(\d+) bytes smem", report)
    return Record(
        kernel=name,
        sm=architecture(cc),
        registers=registers,
        shared_bytes=int(shared[1]) if shared else 0,
        stack_bytes=stack,
        spill_store_bytes=stores,
        spill_load_bytes=loads,
        ptx_bytes=len(ptx),
        ptx_instructions=count,
        code_bytes=len(code),
        code_hash=hashlib.sha256(code).hexdigest()[:16],
        compiler=compiler_version(),
    )


@cache
def compiler_version() -> str:
    """Versions of what makes the PTX and the machine code."""
    release = re.search(r"V[\d.]+", ptxas_version(find_tool("ptxas", "nvidia-cuda-nvcc")))
    return f"numba-cuda {version('numba-cuda')}, ptxas {release[0] if release else 'unknown'}"


def report_numbers(report: str, pattern: str) -> list[int]:
    """The numbers of a line of ptxas's report."""
    found = re.search(pattern, report)
    if not found:
        raise KernelError(f"{compiler_version()} reports in a form not known here: no {pattern!r}")
    return [int(n) for n in found.groups()]


def ptx_text(program: Program, signature: Signature) -> str:
    """The kernel's PTX."""
    return compile_ptx(program, signature, PTX_TARGET)


def sass_text(program: Program, signature: Signature, cc: Capability, threads: int = 0) -> str:
    """The kernel's machine code on an architecture, disassembled. Raises KernelError when cuobjdump is missing."""
    cubin, _ = compile_cubin(ptx_text(program, signature), cc, threads)
    command = [find_tool("cuobjdump", "nvidia-cuda-cuobjdump"), "--dump-sass", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise KernelError(f"cuobjdump: {(done.stderr or done.stdout).strip().splitlines()[0]}")
    return done.stdout


# --- Machine code -----------------------------------------------------------------------------------------------------


def machine_code(cubin: bytes) -> bytes:
    """The instructions of a cubin: its sections .text.*, end to end. A cubin is a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + size * i) for i in range(count)]
    strings = headers[names][4]
    return b"".join(
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in headers
        if cubin.startswith(b".text.", strings + name)
    )


# --- The arithmetic of a PTX ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FloatOperations:
    """The float arithmetic of a PTX, opcodes counted.

    written: by an instruction of the dialect (inline assembly). generated: by the compiler from Python's operators.
    """

    written: Counter[str]
    generated: Counter[str]

    @property
    def unwanted(self) -> dict[str, int]:
        """Opcodes that may round otherwise than the source says: contracted, approximate, or of no stated rounding."""
        loose = {op: n for op, n in (self.written + self.generated).items() if not exact(op)}
        fused = {op: n for op, n in self.generated.items() if op.startswith(("fma", "mad"))}
        return {**loose, **fused}


INEXACT = ("add", "sub", "mul", "fma", "mad", "div", "sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
"""Float operations whose result may be inexact."""
NAMED = ("max", "min", "abs", "neg", "cvt", "copysign", "mma")
"""Float operations that round as their name says, or not at all."""


def exact(opcode: str) -> bool:
    """Whether an opcode is rounded once, to nearest even, subnormals kept."""
    parts = opcode.split(".")
    loose = {"approx", "ftz", "full", "sat"} & set(parts)
    return not loose and ("rn" in parts or parts[0] not in INEXACT)


def float_operations(ptx: str) -> FloatOperations:
    """Count the float arithmetic of a PTX, what the source wrote apart from what the compiler made of its operators."""
    written, generated = Counter[str](), Counter[str]()
    for opcode, assembly in instructions(ptx):
        if opcode.split(".")[0] in INEXACT + NAMED and re.search(r"\.(f16|bf16|f32|f64)", opcode):
            (written if assembly else generated)[opcode] += 1
    return FloatOperations(written, generated)


def instructions(ptx: str) -> Iterator[tuple[str, bool]]:
    """Every instruction's opcode, and whether it is inline assembly."""
    assembly = False
    for line in ptx.splitlines():
        assembly = "begin inline asm" in line or (assembly and "end inline asm" not in line)
        found = re.match(r"\s+(?:@!?%p\d+\s+)?([a-z]\w*(?:\.[\w:]+)*)\b[^;]*;", line)
        if found:
            yield found[1], assembly
