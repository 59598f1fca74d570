"""From a Program to PTX and machine code, with no GPU needed: numba-cuda and NVVM, then ptxas.

NVVM runs with ``fma=False``: no product and sum become one rounding unless the source says fma (spec numerics §1).
"""

from __future__ import annotations

import ast
import copy
import hashlib
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba
import numpy as np

from .cache import cache_folder, write_once
from .dialect import Instruction
from .errors import KernelError, SetupError
from .frontend import Program

Capability = tuple[int, int]
NVVM_OPTIONS = {"fastmath": False, "opt": 3, "fma": False}
REGISTERS = 65536
"""Registers of an SM: those of all threads of a block."""


class UnsignedIndices(ast.NodeTransformer):
    """Array indices as uint64: the dialect has no negative ones, and numba would count a signed one from the end."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Attribute):  # array.shape[axis]
            return node
        many = isinstance(node.slice, ast.Tuple)
        parts = [self.unsigned(i) for i in (node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice])]
        node.slice = ast.Tuple(parts, ast.Load()) if many else parts[0]
        return ast.fix_missing_locations(node)

    def unsigned(self, index: ast.expr) -> ast.expr:
        if isinstance(index, ast.Constant):
            return index
        return ast.copy_location(ast.Call(ast.Name("uint64", ast.Load()), [index], []), index)


@cache
def python_function(program: Program) -> Any:
    """The program as a Python function that numba-cuda compiles: its names stand for numba.cuda's things."""
    from numba import cuda

    from .ptx import INTRINSICS

    names: dict[str, Any] = {"uint64": numba.uint64}
    for name, value in program.env.items():
        if isinstance(value, Program):
            names[name] = cuda.jit(device=True, inline="always")(python_function(value))
        elif isinstance(value, Instruction):
            names[name] = INTRINSICS[name]
        else:
            names[name] = cuda if name == "cuda" else value
    module = ast.Module([UnsignedIndices().visit(copy.deepcopy(program.tree))], [])
    exec(compile(module, program.filename, "exec"), names)
    return names[program.name]


@cache
def source(program: Program) -> str:
    """The program's source and that of all it calls, as they are compiled."""
    return "\n".join([ast.unparse(program.tree), *(source(p) for p in program.devices)])


def signature(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The numba types of launch arguments: arrays C-contiguous, scalars as they are."""
    return tuple(argument_type(a) for a in args)


def argument_type(value: Any) -> Any:
    scalar = numba.from_dtype(np.dtype(value.dtype))
    return numba.types.Array(scalar, value.ndim, "C") if value.ndim else scalar


@cache
def tools() -> str:
    """What the compiled code depends on besides its source."""
    from . import ptx

    packages = ("numba-cuda", "nvidia-nvvm")
    return inspect.getsource(ptx) + numba.__version__ + "".join(f"{p}{_version(p)}" for p in packages)


def _version(package: str) -> str:
    try:
        return version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cache_key(program: Program, types: tuple[Any, ...], capability: Capability) -> str:
    """A name for the code of a program: everything it depends on, hashed."""
    whole = "\n".join([source(program), str(types), str(capability), tools(), str(NVVM_OPTIONS)])
    return f"{program.name}_{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


def compile_ptx(program: Program, types: tuple[Any, ...], capability: Capability) -> str:
    """The PTX of a kernel for argument types and a compute capability, from the cache or from NVVM.

    Raises KernelError when numba-cuda is missing or refuses the kernel.
    """
    path = ptx_path(program, types, capability)
    if path.exists():
        return path.read_text()
    return write_once(path, _nvvm(program, types, capability)).read_text()


def ptx_path(program: Program, types: tuple[Any, ...], capability: Capability) -> Path:
    """Where the cache keeps a kernel's PTX, if it has it."""
    return cache_folder("ptx") / f"{cache_key(program, types, capability)}.ptx"


def _nvvm(program: Program, types: tuple[Any, ...], capability: Capability) -> str:
    try:
        from numba.cuda.compiler import compile_cuda, kernel_fixup  # type: ignore[attr-defined]
    except ImportError as missing:
        raise SetupError(
            f"{program.name}: compiling for a GPU needs numba-cuda (pip install 'numba-cuda[cu13]')"
        ) from missing
    try:
        compiled = compile_cuda(
            python_function(program), numba.types.void, types, nvvm_options=NVVM_OPTIONS, cc=capability
        )
    except numba.core.errors.NumbaError as reason:
        raise KernelError(f"{program.name}: {place(program, reason)}: CUDA: {first_line(reason)}") from reason
    check_float64(program, types, compiled.fndesc.typemap)
    library = compiled.library
    function = library.get_function(compiled.fndesc.llvm_func_name)
    library._entry_name = compiled.fndesc.llvm_func_name
    kernel_fixup(function, False)
    (text,) = library.get_asm_strs(cc=capability)
    return renamed(text, program.name)


def check_float64(program: Program, types: tuple[Any, ...], typed: dict[str, Any]) -> None:
    """Raise KernelError where numba made a variable float64 that neither the source nor an argument has.

    typed: numba's types by its own names: a variable's, behind those of the calls that were inlined to reach it.
    """
    if "float64" in source(program) + str(types):
        return
    wide = [re.sub(r"^.*_v\d+_", "", name).split(".")[0] for name, kind in typed.items() if kind == numba.float64]
    for name in variables(program) & set(wide):
        raise KernelError(
            f"{program.name}: {program.filename}: CUDA: {name} becomes float64, which nobody asked for: it takes int64 and "
            "uint64, or a float and an int; convert one of them"
        )


@cache
def variables(program: Program) -> frozenset[str]:
    """The names that the program and what it calls assign."""
    own = (n.id for n in ast.walk(program.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return frozenset(own).union(*map(variables, program.devices))


def renamed(ptx: str, name: str) -> str:
    """The PTX without numba's names, which count compilations: the entry has the kernel's; the Env is dropped."""
    mangled = ptx.split(".entry", 1)[1].split("(", 1)[0].strip()
    ptx = re.sub(rf"\b{mangled}(?=\b|_param_)", name, ptx)
    return re.sub(r"^\.common .*NumbaEnv.*\n", "", ptx, flags=re.MULTILINE)


def place(program: Program, reason: Exception) -> str:
    """file:line of numba's error."""
    at = re.search(r'File "([^"]+)", line (\d+)', str(reason))
    return f"{at[1]}:{at[2]}" if at else program.filename


def first_line(reason: Exception) -> str:
    """The telling line of numba's message."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(reason))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    own = re.search(r"\w+: operand \d+ is .*", plain) or re.search(r"Variable '\w+' is not defined", plain)
    return own[0] if own else next((x for x in lines if x.startswith("No ")), lines[0] if lines else repr(reason))


# --- ptxas ------------------------------------------------------------------------------------------------------------


def find_tool(name: str, package: str) -> str:
    """A CUDA tool: from its Python package, else $CUDA_HOME, else the PATH. Raises SetupError naming the package."""
    found = importlib.util.find_spec("nvidia")
    places = [Path(p) for p in (found.submodule_search_locations or [])] if found else []
    candidates = [c for place in places for c in place.glob(f"*/bin/{name}")]
    if home := os.environ.get("CUDA_HOME"):
        candidates.append(Path(home) / "bin" / name)
    for candidate in candidates:
        if candidate.exists():
            return str(candidate)
    if on_path := shutil.which(name):
        return on_path
    raise SetupError(f"{name} was not found: pip install {package}")


def architecture(capability: Capability) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def compile_cubin(ptx: str, capability: Capability, threads: int = 0) -> tuple[Path, str]:
    """(machine code file, ptxas' report) of a PTX text, from the cache or from ptxas.

    threads: of a block; more than 256 share an SM's registers, so each gets fewer. Raises KernelError when it fails.
    """
    ptxas = find_tool("ptxas", "nvidia-cuda-nvcc")
    limit = [f"--maxrregcount={REGISTERS // threads // 8 * 8}"] if threads > 256 else []
    made_of = "\n".join([ptx, ptxas_version(ptxas), architecture(capability), *limit])
    key = hashlib.sha256(made_of.encode()).hexdigest()[:24]
    cubin, report = (cache_folder("cubin") / f"{key}.{end}" for end in ("cubin", "txt"))
    if not (cubin.exists() and report.exists()):
        with tempfile.TemporaryDirectory() as folder:
            text, out = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
            text.write_text(ptx)
            command = [ptxas, "-v", "-O3", f"-arch={architecture(capability)}", *limit, str(text), "-o", str(out)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise KernelError(f"ptxas: {(done.stderr or done.stdout).strip().splitlines()[0]}")
            write_once(report, done.stderr)
            write_once(cubin, out.read_bytes())
    return cubin, report.read_text()


@cache
def ptxas_version(ptxas: str) -> str:
    """ptxas' own version line."""
    text = subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout
    return next((line.strip() for line in text.splitlines() if "release" in line), "")
