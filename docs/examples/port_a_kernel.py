"""A kernel ported from CUDA C: the sum of squares of each row, held against NumPy bit for bit, then without its barrier.

.venv/bin/python docs/examples/port_a_kernel.py
"""

from pathlib import Path

import numpy as np

from kernels_numba.machine import KernelError, checked, cuda, device, float32, int64, kernel, shfl_xor

THREADS = 128


@kernel
def row_squares(out, x, *, barrier):
    """out[row] = sum of x[row]². out: float32 [rows]; x: float32 [rows, n]. Launch: grid rows, 128 threads.

    Order: thread t adds elements t, t + 128, ..; lanes of a warp by exchanges at distance 16, 8, 4, 2, 1; then the four warps.
    """
    sums = cuda.shared.array(4, float32)  # [warp]
    row, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
    part = float32(0.0)
    for i in range(thread, x.shape[1], THREADS):
        part = part + x[row, i] * x[row, i]
    part = warp_sum(part)
    if thread % 32 == 0:
        sums[thread // 32] = part
    if barrier:
        cuda.syncthreads()
    if thread == 0:
        out[row] = (sums[0] + sums[1]) + (sums[2] + sums[3])


@device
def warp_sum(part):
    """The sum over a warp: in every lane, the same bits."""
    part = part + shfl_xor(part, 16)
    part = part + shfl_xor(part, 8)
    part = part + shfl_xor(part, 4)
    part = part + shfl_xor(part, 2)
    return part + shfl_xor(part, 1)


def in_order(x: np.ndarray) -> np.ndarray:
    """The same sums in NumPy, every one in the kernel's order. x: float32 [rows, n]; returns float32 [rows]."""
    rows, n = x.shape
    part = np.zeros((rows, THREADS), np.float32)
    for first in range(0, n, THREADS):
        piece = x[:, first : first + THREADS]
        part[:, : piece.shape[1]] += piece * piece
    lanes = np.arange(32)
    warps = part.reshape(rows, 4, 32)
    for distance in (16, 8, 4, 2, 1):
        warps = warps + warps[..., lanes ^ distance]
    sums = warps[..., 0]
    return (sums[:, 0] + sums[:, 1]) + (sums[:, 2] + sums[:, 3])


def main() -> None:
    x = np.random.default_rng(0).standard_normal((5, 1000)).astype(np.float32)
    out = np.zeros(5, np.float32)
    row_squares.at(barrier=True)[5, THREADS](out, x)
    print("NumPy in the same order:", "the same bits" if out.tobytes() == in_order(x).tobytes() else "other bits")
    print(
        "NumPy in its own order:", "the same bits" if out.tobytes() == (x * x).sum(axis=1).tobytes() else "other bits"
    )
    row_squares.at(barrier=False)[5, THREADS](out, x)
    print("without the barrier, plain:", "right" if out.tobytes() == in_order(x).tobytes() else "wrong")
    for barrier in (False, True):
        try:
            with checked():
                row_squares.at(barrier=barrier)[5, THREADS](out, x)
            print(f"checked, barrier={barrier}: sound")
        except KernelError as problem:
            print(f"checked, barrier={barrier}: {str(problem).replace(f'{Path.cwd()}/', '')}")


if __name__ == "__main__":
    main()
