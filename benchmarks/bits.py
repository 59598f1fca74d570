"""The bits of both machines: attention through every backend for many shapes, and the whole of ``compare``.

    python benchmarks/bits.py --device cpu  --json tests/data/bits_cpu.json            record a CPU's bits
    python benchmarks/bits.py --device cuda --json benchmarks/bits_h200.json --full --against tests/data/bits_cpu.json

Exit status 1 when a paged backend differs from the window, or a hash from the recorded one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from backends.base import DECODE, PROMPT
from refengine.commands.compare import Request, run
from refengine.commands.report import write_report
from refengine.device import open_device
from refengine.verify.attention_bits import Bench, Heads, equal_backends

SCRIPT = Path(__file__).resolve()
ROOT = SCRIPT.parent.parent
HEADS = (Heads(24, 4), Heads(16, 4), Heads(16, 2))
ROWS = (1, 15, 16, 17, 63, 64, 65, 129, 257)
COMMITTED = (0, 48, 255, 256, 257, 511, 512, 513)
FAR = tuple(product((1, 17, 65), (2047, 2048)))
PAGE_SIZES = (1, 16, 48, 64, 256, 544)
WINDOWS = (1, 2, 15, 16)
"""Rows of a decode window."""
EVERY_SIZE = ((17, 48), (65, 255), (129, 513))
USUAL = (("paged", 48), ("paged-p256", 256))
RECORDED = (
    (PROMPT, 17, 5),
    (PROMPT, 100, 300),
    (PROMPT, 257, 511),
    (DECODE, 1, 513),
    (DECODE, 5, 511),
    (DECODE, 1, 2100),
)
"""What a CPU records: small enough to run there, every branch of the kernels taken."""
BACKENDS = ("window", "paged", "paged-p256")
DEMO = Request("qwen3.5-tiny", BACKENDS, 48, "@docs/prompt.txt", None, 32, 1, 256, None, None, "auto", 0)
DEMOS = {"compare": DEMO, "compare flash-next-tiny": replace(DEMO, model="flash-next-tiny")}
"""The main job's runs."""


def cases(full: bool) -> list[tuple[str, int, int, tuple]]:
    """(phase, rows, committed, paged backends) to hold against the window."""
    out = [(*r, USUAL) for r in RECORDED]
    if full:
        every = tuple(("paged", size) for size in PAGE_SIZES)
        out += [(PROMPT, w, p, USUAL) for w, p in (*product(ROWS, COMMITTED), *FAR)]
        out += [(DECODE, w, p, USUAL) for w, p in product(WINDOWS, (*COMMITTED, 2047, 2048))]
        out += [(PROMPT, w, p, every) for w, p in EVERY_SIZE]
        out += [(DECODE, min(w, 16), p, every) for w, p in EVERY_SIZE]
    return out


def attention(heads: Heads, device: str, full: bool) -> dict[str, Any]:
    """Every case of one head geometry: how many were equal, which were not, the hashes."""
    bench, hashes, unequal, held = Bench(heads, 2400, open_device(device)), {}, [], 0
    for phase, rows, committed, paged in cases(full):
        for case, equal, digest in equal_backends(bench, phase, rows, committed, paged):
            held += equal
            hashes[f"{heads.heads}/{heads.kv_heads} {phase} W={rows} p0={committed}"] = digest
            if not equal:
                unequal.append(str(case))
    return {"held": held, "unequal": unequal, "hashes": hashes}


def demo(name: str, device: str) -> dict[str, Any]:
    """The report of one of the main job's runs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "compare.json"
        run(replace(DEMOS[name], device=device), path)
        return json.loads(path.read_text())


def apart(part: str, arguments: argparse.Namespace) -> subprocess.Popen:
    """A part in its own process: compiling is most of the time."""
    command = [sys.executable, str(SCRIPT), "--part", part, "--device", arguments.device]
    return subprocess.Popen(command + (["--full"] if arguments.full else []), stdout=subprocess.PIPE, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--full", action="store_true", help="the whole table, for a GPU")
    parser.add_argument("--against", type=Path, help="a recorded file whose hashes must be met")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part in DEMOS:
        print("\n" + json.dumps(demo(arguments.part, arguments.device)))
        return 0
    if arguments.part:
        heads = next(h for h in HEADS if f"{h.heads}/{h.kv_heads}" == arguments.part)
        print("\n" + json.dumps(attention(heads, arguments.device, arguments.full)))
        return 0
    return report(arguments)


def report(arguments: argparse.Namespace) -> int:
    """Run every part, join them, hold them against the recorded hashes."""
    names = [f"{h.heads}/{h.kv_heads}" for h in HEADS]
    running = {name: apart(name, arguments) for name in (*names, *DEMOS)}
    found = {name: json.loads(process.communicate()[0].splitlines()[-1]) for name, process in running.items()}
    hashes = {key: value for name in names for key, value in found[name]["hashes"].items()}
    for name in DEMOS:
        hashes[f"{name} logits"] = found[name]["arms"][0]["logits_hash"]
        hashes[f"{name} tokens"] = found[name]["arms"][0]["token_hash"]
    verdicts = {name: found[name]["verdict"] for name in DEMOS}
    unequal = [f"{name}: {case}" for name in names for case in found[name]["unequal"]]
    recorded = json.loads(arguments.against.read_text())["hashes"] if arguments.against else {}
    missed = [f"{k}: {hashes.get(k)} here, {v} recorded" for k, v in recorded.items() if hashes.get(k) != v]
    held = sum(found[name]["held"] for name in names)
    body = {
        "claims": [
            {"name": "bits/backends_equal_cases", "value": held, "unit": "cases"},
            {"name": "bits/unequal_cases", "value": len(unequal), "unit": "cases"},
            {"name": "bits/hashes_of_the_other_machine_met", "value": len(recorded) - len(missed), "unit": "hashes"},
            {"name": "bits/hashes_of_the_other_machine_missed", "value": len(missed), "unit": "hashes"},
        ],
        "device": open_device(arguments.device).title, "verdicts": verdicts, "hashes": hashes, "unequal": unequal,
        "missed": missed, **{name: found[name] for name in DEMOS},
    }  # fmt: skip
    if arguments.json:
        write_report(arguments.json, body)
    print(*(f"{name}: {verdict}" for name, verdict in verdicts.items()), sep="\n")
    print(*unequal, *missed, sep="\n")
    met = len(recorded) - len(missed)
    against = (
        f"{met} recorded hashes met, {len(missed)} missed" if recorded else "held against nothing (--against FILE)"
    )
    print(f"BITS {held} cases equal, {len(unequal)} unequal; {against}")
    return 1 if unequal or missed or not all(v.startswith("EQUAL") for v in verdicts.values()) else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
