"""The bits recorded in tests/data/bits_cpu.json, which an H200 has met, are the bits this machine gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from backends.base import DECODE, PROMPT
from refengine.device import open_device
from refengine.verify.attention_bits import Bench, Case, Heads
from refengine.verify.hashes import array_hash

ROOT = Path(__file__).parent.parent
RECORDED = json.loads((ROOT / "tests/data/bits_cpu.json").read_text())["hashes"]
H200 = json.loads((ROOT / "benchmarks/bits_h200.json").read_text())
CASES = [(16, 2, PROMPT, 100, 300), (24, 4, PROMPT, 17, 5), (16, 4, DECODE, 5, 511), (24, 4, DECODE, 1, 513)]


@pytest.fixture(scope="module")
def benches():
    made = {}
    return lambda heads: made.setdefault(heads, Bench(heads, 2400, open_device("cpu")))


@pytest.mark.parametrize(("heads", "kv_heads", "phase", "rows", "committed"), CASES)
@pytest.mark.parametrize("backend", ["window", "paged", "paged-p256"])
def test_a_backend_gives_the_recorded_bits(benches, backend, heads, kv_heads, phase, rows, committed):
    found = benches(Heads(heads, kv_heads)).attend(Case(backend, 48, phase, rows, committed))
    name = f"{heads}/{kv_heads} {phase} W={rows} p0={committed}"
    assert array_hash(found.view("uint16")) == RECORDED[name]


def test_the_h200_has_met_every_recorded_hash():
    assert len(RECORDED) == 22 and all(H200["hashes"][name] == digest for name, digest in RECORDED.items())
    assert not H200["unequal"] and not H200["missed"] and H200["device"] == "NVIDIA H200"


@pytest.mark.gpu
def test_this_gpu_gives_the_recorded_bits():
    command = [sys.executable, "benchmarks/bits.py", "--device", "cuda", "--against", "tests/data/bits_cpu.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "0 unequal; 22 recorded hashes met, 0 missed" in done.stdout, (
        done.stdout + done.stderr
    )
