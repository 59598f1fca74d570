"""Kernels and device functions: binding compile-time arguments, launching on the machine where the arrays live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from . import cpu, modes
from .errors import KernelError
from .frontend import Program, specialise
from .shared_memory import check_static

MAX_THREADS = 1024
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_SHARED_BYTES = 232448
"""Shared memory a block can ask for on the largest supported GPU (227 KiB)."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Device:
    """A device function: inlined where a kernel calls it. Made by ``@device`` or ``@lanewise``."""

    def __init__(self, fn: Callable[..., Any], lanewise: bool):
        self.fn, self.lanewise, self.__doc__, self.__name__ = fn, lanewise, fn.__doc__, fn.__name__
        self.bound: dict[tuple, Program] = {}

    def program(self, **bound: Any) -> Program:
        """The function with its compile-time arguments bound."""
        key = tuple(sorted(bound.items()))
        if key not in self.bound:
            self.bound[key] = specialise(self.fn, "device", self.lanewise, bound)
        return self.bound[key]

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise KernelError(f"{self.__name__} is a device function: only a kernel can call it")


class Kernel:
    """A kernel with its compile-time arguments open: ``kernel.at(D=256)`` binds them. Made by ``@kernel``."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn, self.__doc__, self.__name__ = fn, fn.__doc__, fn.__name__
        self.bound: dict[tuple, BoundKernel] = {}

    def at(self, **bound: Any) -> BoundKernel:
        """The kernel with its compile-time arguments bound.

        Raises KernelError when an argument is missing or unknown, the source is outside the dialect, or its static
        shared arrays are more than a block can have.
        """
        key = tuple(sorted(bound.items()))
        if key not in self.bound:
            self.bound[key] = BoundKernel(specialise(self.fn, "kernel", False, bound), bound)
        return self.bound[key]

    def __getitem__(self, launch: tuple) -> Callable[..., None]:
        return self.at()[launch]


class BoundKernel:
    """A kernel ready to launch: ``k[grid, block, stream, shared_bytes](*args)``, the last two optional."""

    def __init__(self, program: Program, bound: dict[str, Any]):
        self.program, self.bound, self.__name__ = program, bound, program.name
        self.static_bytes = check_static(program)

    def __getitem__(self, launch: tuple) -> Callable[..., None]:
        grid, block, stream, shared_bytes = (*launch, None, 0) if len(launch) == 2 else (*launch, 0)[:4]
        grid3, threads = dim3(grid), block_threads(block, self.__name__)
        check_limits(self.__name__, grid3, threads, int(shared_bytes), self.static_bytes)
        return lambda *args: self.launch(grid3, threads, stream, int(shared_bytes), args)

    def launch(self, grid: cpu.Dim3, threads: int, stream: Any, shared_bytes: int, args: tuple) -> None:
        """Launch on the machine where the arrays live. An empty grid launches nothing."""
        wanted = self.program.params
        if len(args) != len(wanted):
            raise KernelError(f"{self.__name__}: takes {len(wanted)} arguments ({', '.join(wanted)}), not {len(args)}")
        ready = tuple(argument(self.__name__, n, a) for n, a in zip(wanted, args))
        on_gpu = [hasattr(a, "__cuda_array_interface__") for a in ready if hasattr(a, "shape") and a.ndim]
        if any(on_gpu) and not all(on_gpu):
            raise KernelError(f"{self.__name__}: its arrays lie on two machines: move them to one")
        if 0 in grid:
            return
        if any(on_gpu):
            from . import gpu

            gpu.launch(self.program, grid, threads, stream, shared_bytes, ready)
            modes.current().beside_gpu(self.program, grid, threads, shared_bytes, ready)
        else:
            modes.current().run(self.program, grid, threads, shared_bytes, ready)


def kernel(fn: Callable[..., Any]) -> Kernel:
    """Mark a kernel; its keyword-only arguments are compile-time."""
    return Kernel(fn)


def device(fn: Callable[..., Any]) -> Device:
    """Mark a device function, inlined where it is called; its keyword-only arguments are compile-time."""
    return Device(fn, lanewise=False)


def lanewise(fn: Callable[..., Any]) -> Device:
    """Mark a device function in which a thread meets no other: no collectives, no barrier, no stores but to its own local
    arrays. The CPU machine compiles it; checked and debug modes run it statement by statement like any other."""
    return Device(fn, lanewise=True)


def dim3(size: Any) -> cpu.Dim3:
    """A grid size as three ints."""
    size = tuple(int(n) for n in size) if isinstance(size, (tuple, list)) else (int(size),)
    return (*size, 1, 1)[:3] if len(size) < 3 else size  # type: ignore[return-value]


def block_threads(block: Any, name: str) -> int:
    """Threads a block; blocks are one-dimensional."""
    threads, y, z = dim3(block)
    if y != 1 or z != 1:
        raise KernelError(f"{name}: block {block}: blocks of this dialect are one-dimensional")
    return threads


def check_limits(name: str, grid: cpu.Dim3, threads: int, shared_bytes: int, static: int) -> None:
    """The limits that a GPU has, on both machines. static: bytes of the kernel's static shared arrays."""
    if not 0 < threads <= MAX_THREADS or threads % 32:
        raise KernelError(f"{name}: {threads} threads a block: use a multiple of 32, at most {MAX_THREADS}")
    for axis, n, most in zip("xyz", grid, MAX_GRID):
        if not 0 <= n <= most:
            raise KernelError(f"{name}: grid.{axis} = {n}: at most {most}")
    if not 0 <= shared_bytes <= MAX_SHARED_BYTES or shared_bytes % 4:
        raise KernelError(f"{name}: {shared_bytes} bytes of shared memory: a multiple of 4, at most {MAX_SHARED_BYTES}")
    if shared_bytes + static > MAX_SHARED_BYTES:
        sizes = f"{shared_bytes} bytes of shared memory and {static} of static arrays"
        raise KernelError(f"{name}: {sizes}: together at most {MAX_SHARED_BYTES}")


def argument(kernel_name: str, name: str, value: Any) -> Any:
    """An argument as the kernel sees it: bfloat16 as words of two, ints as int64; NumPy scalars keep their type."""
    if isinstance(value, (bool, int)):
        return np.int64(value) if not isinstance(value, bool) else np.bool_(value)
    if isinstance(value, np.generic):
        return value
    if isinstance(value, float):
        raise KernelError(f"{kernel_name}: argument {name} is a Python float, which is float64: pass np.float32(...)")
    if not hasattr(value, "dtype"):
        raise KernelError(f"{kernel_name}: argument {name} is a {type(value).__name__}: pass an array or a number")
    if not value.flags.c_contiguous:
        raise KernelError(f"{kernel_name}: array {name} is not C-contiguous: copy it first")
    return words(kernel_name, name, value) if value.dtype == BFLOAT16 else value


def words(kernel_name: str, name: str, value: Any) -> Any:
    """A bfloat16 array as uint32 words, two elements a word, last axis halved."""
    if value.ndim == 0 or value.shape[-1] % 2:
        raise KernelError(f"{kernel_name}: bfloat16 array {name} has shape {value.shape}: its last axis must be even")
    return value.view(np.uint32)
