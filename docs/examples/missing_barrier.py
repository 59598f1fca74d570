"""A kernel that lacks a barrier: plain runs do not show it, checked mode names both lines.

.venv/bin/python docs/examples/missing_barrier.py
"""

from pathlib import Path

import numpy as np

from kernels_numba.machine import KernelError, checked, cuda, float32, kernel


@kernel
def reverse(out, x, *, barrier):
    """out[t] = x[63 - t], by way of shared memory. out, x: float32 [64]. Launch: one block of 64 threads."""
    shared = cuda.shared.array(64, float32)  # [64]
    t = cuda.threadIdx.x
    shared[t] = x[t]
    if barrier:
        cuda.syncthreads()
    out[t] = shared[63 - t]


def main() -> None:
    x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    reverse.at(barrier=False)[1, 64](out, x)
    print("plain:", "right" if (out == x[::-1]).all() else "wrong")
    for barrier in (False, True):
        try:
            with checked():
                reverse.at(barrier=barrier)[1, 64](out, x)
            print(f"checked, barrier={barrier}: sound")
        except KernelError as problem:
            print(f"checked, barrier={barrier}: {from_here(problem)}")


def from_here(problem: KernelError) -> str:
    """The message, with the file's path as from this folder."""
    return str(problem).replace(f"{Path.cwd()}/", "")


if __name__ == "__main__":
    main()
