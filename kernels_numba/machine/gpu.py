"""The GPU machine: compiled by numba-cuda, loaded and launched by CuPy."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np

from .compiler import Capability, compile_cubin, compile_ptx, signature
from .errors import KernelError, SetupError
from .frontend import Program

OLDEST: Capability = (8, 0)
"""The first architecture with bf16 mma and cp.async; every card runs the PTX made for it."""
STATIC_LIMIT = 48 * 1024
"""Bytes of shared memory, static and dynamic, from which a kernel has to ask for the dynamic part."""


class Loaded:
    """A kernel on a device. allowed: bytes of dynamic shared memory that it may use."""

    def __init__(self, program: Program, args: tuple, device: Any, threads: int):
        import cupy

        cubin, _ = compile_cubin(compile_ptx(program, signature(args), OLDEST), capability(device), threads)
        self.kernel = cupy.RawModule(path=str(cubin)).get_function(program.name)
        self.allowed = STATIC_LIMIT - self.kernel.shared_size_bytes

    def allow(self, shared_bytes: int) -> None:
        """Ask for more dynamic shared memory where a launch needs it."""
        if shared_bytes > self.allowed:
            self.kernel.max_dynamic_shared_size_bytes = self.allowed = shared_bytes


_loaded: dict[tuple, Loaded] = {}


def capability(device: Any) -> Capability:
    """The architecture of a cupy device. Raises SetupError for one that lacks the dialect's instructions."""
    number = device.compute_capability
    found = int(number[:-1]), int(number[-1])
    if found < OLDEST:
        raise SetupError(f"this GPU is sm_{number}: the kernels need sm_80 or newer; use --device cpu")
    return found


def launch(program: Program, grid: tuple, threads: int, stream: Any, shared_bytes: int, args: tuple) -> None:
    """Launch on the current device, in its current stream or the given cupy stream.

    args: cupy arrays, C-contiguous, as the kernel sees them (bfloat16 as words), and NumPy scalars. The first launch
    with these types compiles. Raises KernelError when that or the launch fails.
    """
    import cupy

    device = cupy.cuda.Device()
    key = (program, device.id, max(threads, 256), tuple((a.dtype, a.ndim) for a in args))
    loaded = _loaded.get(key)
    if loaded is None:
        loaded = _loaded[key] = Loaded(program, args, device, threads)
    try:
        loaded.allow(shared_bytes)
        with stream if stream is not None else nullcontext():
            loaded.kernel(grid, (threads, 1, 1), flattened(args), shared_mem=shared_bytes)
    except cupy.cuda.driver.CUDADriverError as reason:
        raise KernelError(f"{program.name}: launch failed: {reason}") from reason


def flattened(args: tuple) -> tuple:
    """The parameters as numba's kernels take them, 8 bytes each but for scalars.

    An array is (0, 0, elements, bytes an element, address, *shape, *strides).
    """
    out: list[Any] = []
    for a in args:
        out += [a] if isinstance(a, np.generic) else [0, 0, a.size, a.itemsize, a.data.ptr, *a.shape, *a.strides]
    return tuple(out)
