"""The CPU machine against numba's CUDA simulator, in one run: one kernel text, softmax attention with barriers.

    python benchmarks/simulator_softmax.py

The simulator is numba's own, in a process of its own (NUMBA_ENABLE_CUDASIM=1). It has no warp instructions, so the
kernel has none. Hot arithmetic is @lanewise, as in the engine's kernels, so the CPU machine compiles it. Exit status 1
when the results differ or the CPU machine is less than 100 times as fast on 16 blocks.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
if SIMULATED:
    cuda, float32 = import_module("numba.cuda"), np.float32
    kernel, lanewise = cuda.jit, cuda.jit(device=True)

    def exp(x: np.float32) -> np.float32:
        return float32(math.exp(x))

else:
    from kernels_numba.machine import cuda, float32, kernel, lanewise
    from kernels_numba.portable_math import exp

ROOT = Path(__file__).parent.parent
THREADS, DIMS, KEYS, TILE = 64, 32, 64, 16
LOWEST = -1e30
BLOCKS = (16, 1)
LEAST_RATIO = 100
TOLERANCE = 1e-5


@kernel
def softmax_attention(out, q, k, v, scale):
    """A block attends 64 queries, one a thread, to 64 keys in shared tiles of 16; two barriers a tile.

    out, q: float32 [blocks, 64, 32]; k, v: float32 [blocks, 64, 32]; scale: float32. Launch: grid blocks, 64 threads.
    """
    keys = cuda.shared.array(TILE * DIMS, float32)
    values = cuda.shared.array(TILE * DIMS, float32)
    o = cuda.local.array(DIMS, float32)
    block, thread = cuda.blockIdx.x, cuda.threadIdx.x
    top, total = float32(LOWEST), float32(0.0)
    for d in range(DIMS):
        o[d] = float32(0.0)
    for tile in range(KEYS // TILE):
        for first in range(0, TILE * DIMS, THREADS):
            row, d = (first + thread) // DIMS, (first + thread) % DIMS
            keys[first + thread] = k[block, tile * TILE + row, d]
            values[first + thread] = v[block, tile * TILE + row, d]
        cuda.syncthreads()
        for row in range(TILE):
            s = score(q, block, thread, keys, row) * scale
            new = s if s > top else top
            alpha, p = exp(top - new), exp(s - new)
            total = total * alpha + p
            add_value(o, alpha, p, values, row)
            top = new
        cuda.syncthreads()
    for d in range(DIMS):
        out[block, thread, d] = o[d] / total


@lanewise
def score(q, block, thread, keys, row):
    """q · key: float32. q: float32 [blocks, 64, 32]; keys: shared float32 [16 · 32]."""
    s = float32(0.0)
    for d in range(DIMS):
        s = s + q[block, thread, d] * keys[row * DIMS + d]
    return s


@lanewise
def add_value(o, alpha, p, values, row):
    """o = o · alpha + p · value. o: local float32 [32]; values: shared float32 [16 · 32]."""
    for d in range(DIMS):
        o[d] = o[d] * alpha + p * values[row * DIMS + d]


def inputs(blocks: int) -> list[np.ndarray]:
    """q, k, v: float32 [blocks, 64, 32]."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((blocks, n, DIMS), dtype=np.float32) for n in (THREADS, KEYS, KEYS)]


def measure(runs: int) -> dict[str, np.ndarray]:
    """For each number of blocks: seconds of each run, and the output. Whichever machine this process has."""
    found = {}
    for blocks in BLOCKS:
        q, k, v = inputs(blocks)
        out, seconds = np.full_like(q, np.nan), []
        launch = partial(softmax_attention[blocks, THREADS], out, q, k, v, np.float32(DIMS**-0.5))
        if not SIMULATED:
            launch()  # compiles; the simulator does not
        for run in range(runs):
            began = time.perf_counter()
            launch()
            seconds.append(time.perf_counter() - began)
            print(f"{name()}: {blocks} blocks, run {run + 1} of {runs}: {seconds[-1]:.4f} s", file=sys.stderr)
        found[f"seconds_{blocks}"], found[f"out_{blocks}"] = np.array(seconds), out
    return found


def name() -> str:
    return "simulator" if SIMULATED else "CPU machine"


def simulate(runs: int) -> dict[str, np.ndarray]:
    """The same in a process of the simulator."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "simulated.npz"
        command = [sys.executable, __file__, "--runs", str(runs), "--child", str(path)]
        subprocess.run(command, env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}, check=True)
        return dict(np.load(path))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=int, default=3, help="of the simulator; the CPU machine does three times as many"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "simulator_softmax.json")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        np.savez(arguments.child, **measure(arguments.runs))
        return 0
    return report(arguments.json, measure(3 * arguments.runs), simulate(arguments.runs))


def report(path: Path, ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> int:
    """Print and write the ratios; the exit status."""
    from refengine.commands.report import write_report

    seconds = {b: [median(found[f"seconds_{b}"].tolist()) for found in (ours, theirs)] for b in BLOCKS}
    ratios = {b: simulator / machine for b, (machine, simulator) in seconds.items()}
    apart = max(float(np.abs(ours[f"out_{b}"] - theirs[f"out_{b}"]).max()) for b in BLOCKS)
    write_report(path, {"claims": claims(seconds, ratios, apart), "device": f"CPU machine, {os.cpu_count()} cores"})
    for blocks, ratio in ratios.items():
        machine, simulator = seconds[blocks]
        print(f"{blocks:2} blocks: simulator {simulator:.3f} s, CPU machine {machine:.4f} s: {ratio:.0f} x")
    print(f"results: largest difference {apart:.2e}")
    return 0 if apart <= TOLERANCE and ratios[BLOCKS[0]] >= LEAST_RATIO else 1


def claims(seconds: dict[int, list[float]], ratios: dict[int, float], apart: float) -> list[dict[str, Any]]:
    """Figures that can be quoted; the first is of 16 blocks."""
    out = [("cpu/lockstep_ratio_to_numba_simulator", round(ratios[BLOCKS[0]], 1), "x"),
           ("cpu/lockstep_ratio_to_numba_simulator_one_block", round(ratios[BLOCKS[1]], 1), "x")]  # fmt: skip
    for blocks, (machine, simulator) in seconds.items():
        out += [(f"cpu/lockstep_seconds_{blocks}_blocks", round(machine, 5), "s"),
                (f"cpu/numba_simulator_seconds_{blocks}_blocks", round(simulator, 3), "s")]  # fmt: skip
    out.append(("cpu/lockstep_difference_to_numba_simulator", apart, "absolute"))
    return [{"name": n, "value": value, "unit": unit} for n, value, unit in out]


if __name__ == "__main__":
    sys.exit(main())
