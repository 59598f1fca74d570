"""Seconds of one prompt_attention launch on the CPU machine: D 256, 24/4 heads, 256 rows, window and pages of 48.

    python benchmarks/prompt_attention_cpu.py

Exit status 1 when the two differ in a bit.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from backends.base import PROMPT
from refengine.commands.report import write_report
from refengine.device import open_device
from refengine.verify.attention_bits import Bench, Case, Heads

ROOT = Path(__file__).parent.parent
HEADS, ROWS = Heads(24, 4), 256
CASES = (Case("window", 256, PROMPT, ROWS, 0), Case("paged", 48, PROMPT, ROWS, 0))


def seconds_of(bench: Bench, case: Case, runs: int) -> tuple[list[float], np.ndarray]:
    """Seconds of each run after a first one that compiles, and the output: bf16 [256, 24, 256]."""
    backend = bench.build(case)
    batch = backend.batch(PROMPT, [(backend.open(), ROWS)])
    q = backend.store(0, bench.rows, bench.norms, bench.rope, batch)
    out, seconds = backend.attend(0, q, batch), []
    for run in range(runs):
        began = time.perf_counter()
        out = backend.attend(0, q, batch)
        seconds.append(time.perf_counter() - began)
        print(f"{case.backend}: run {run + 1} of {runs}: {seconds[-1]:.3f} s", file=sys.stderr)
    return seconds, out


def claims(seconds: dict[str, float]) -> list[dict[str, Any]]:
    """Figures that can be quoted; the first is the slower backend's."""
    figures = {"cpu/prompt_attention_w256_seconds": max(seconds.values())}
    figures |= {f"cpu/prompt_attention_w256_seconds_{name}": value for name, value in seconds.items()}
    return [{"name": name, "value": round(value, 4), "unit": "s"} for name, value in figures.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "prompt_attention_cpu.json")
    arguments = parser.parse_args()
    bench = Bench(HEADS, ROWS, open_device("cpu"))
    found = {case.backend: seconds_of(bench, case, arguments.runs) for case in CASES}
    seconds = {name: median(times) for name, (times, _) in found.items()}
    equal = len({out.tobytes() for _, out in found.values()}) == 1
    body = {"device": f"CPU machine, {os.cpu_count()} cores", "runs": arguments.runs, "backends_equal": equal}
    write_report(arguments.json, {"claims": claims(seconds), **body})
    for name, value in seconds.items():
        print(f"prompt_attention, {ROWS} rows, {name}: {value:.3f} s (median of {arguments.runs})")
    print("EQUAL" if equal else "DIFFERENT")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
