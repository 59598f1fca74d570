"""Sparse attention through whole backends: pages give the window's bytes, rows lie within their bound, nothing else is written;
and each planted fault shows. The recorded bytes of the real layout are the bytes that this machine gives."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from refengine.device import open_device
from refengine.registry import load_model
from refengine.verify.hashes import array_hash
from refengine.verify.sparse_bits import (
    WINDOW,
    Case,
    Form,
    Session,
    SparseBench,
    Step,
    misplaced_scores,
    projected_rows,
    unequal,
    worst_of,
)
from refengine.verify.sparse_controls import CONTROLS, GUARDS, Reference, run_controls

ROOT = Path(__file__).parent.parent
RECORDED = json.loads((ROOT / "benchmarks/flash_next_cpu.json").read_text())
CASE = Case(97, 6)
"""Of a budget of 16 blocks: the first stream chooses its keys, the second begins to."""
FORMS = [Form("paged", 16), Form("paged", 48), Form("paged-p256"), Form("mixed", 20)]


@cache
def bench() -> SparseBench:
    return SparseBench(load_model("flash-next-tiny"), 200, open_device("cpu"))


def run(form: Form, kv: str, shuffle: int = 0, meddle: Callable[[Session], None] | None = None) -> Session:
    """A filled session of the case; ``meddle`` may change it."""
    session = Session(bench(), form, kv, CASE, shuffle)
    session.fill()
    if meddle is not None:
        meddle(session)
    return session


@cache
def reference(kv: str) -> Reference:
    session = run(WINDOW, kv)
    filled = tuple(stream.save() for stream in session.streams)
    return Reference(tuple(session.steps()), tuple(stream.save() for stream in session.streams), filled)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_gives_the_windows_bytes_and_writes_nothing_else(form, kv):
    session = run(form, kv, shuffle=3)
    for step, wanted in zip(session.steps(), reference(kv).steps, strict=True):
        assert unequal(step, wanted) == []
    if form.backend != "mixed":
        assert session.strays() == 0


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_rows_are_sparse_and_dense_and_lie_within_their_bound(kv):
    found = reference(kv)
    for step in found.steps[:-1]:
        assert misplaced_scores(step) == 0
        if not step.name.startswith("drafts"):
            assert max(worst_of(step, step, found.kept, bench().shape)) <= 1
    dense = sum(step.dense for step in found.steps)
    assert 0 < dense < sum(len(step.positions) for step in found.steps)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_red_every_planted_fault_shows(kv):
    found = dict(run_controls(bench(), kv, CASE, reference(kv)))
    assert len(found) == len(CONTROLS) + len(GUARDS) + 1 and all(found.values()), found


def test_red_a_score_out_of_place_is_seen():
    step = reference("bf16").steps[0]
    for row, block, score in ((0, -1, 0.0), (1, 3, -1.0)):
        scores = step.arrays["scores"].copy()
        scores[row, block] = score
        assert misplaced_scores(Step("prompt", {"scores": scores}, step.owners, step.positions)) == 1


def test_red_rows_of_another_case_are_not_equal():
    changed = run(Form("paged", 16), "bf16", meddle=lambda session: session.bench.rows.__setitem__((91, 5), 0x3F80))
    try:
        assert {"q", "out"} <= set(unequal(next(changed.steps()), reference("bf16").steps[0]))
    finally:
        bench.cache_clear()


def test_rows_are_drawn_alike_however_many_there_are():
    """And are near normal numbers, finite ones."""
    many, few = (projected_rows(np, rows, 96) for rows in (700, 40))
    np.testing.assert_array_equal(many[:40], few)
    values = (many.astype(np.uint32) << 16).view(np.float32)
    assert np.isfinite(values).all() and abs(values.mean()) < 0.02 and 1.1 < values.std() < 1.2


# --- Recorded -----------------------------------------------------------------------------------------------------------


def test_the_report_has_every_form_equal_and_every_control_red():
    value = {claim["name"]: claim["value"] for claim in RECORDED["claims"]}
    assert value["flash_next/unequal_cases"] == value["flash_next/controls_missed"] == 0
    assert value["flash_next/equal_cases"] >= 264 and all(RECORDED["controls"].values())
    assert value["flash_next/sparse_rows"] > 0 and value["flash_next/largest_part_of_the_bound"] <= 1


def test_the_h200_has_met_every_hash_of_the_cpu():
    report = json.loads((ROOT / "benchmarks/flash_next_h200.json").read_text())
    assert report["device"] == "NVIDIA H200" and not report["missed"] and not report["unequal"]
    assert all(report["hashes"][name] == digest for name, digest in RECORDED["hashes"].items())
    value = {claim["name"]: claim["value"] for claim in report["claims"]}
    assert value["flash_next/equal_cases"] > 3000 and value["flash_next/controls_missed"] == 0


def test_a_window_gives_the_recorded_bytes():
    case, real = Case(37, 4), SparseBench(load_model("qwen3.8-flash-next"), 99, open_device("cpu"))
    for kv in ("bf16", "fp8"):
        session = Session(real, WINDOW, kv, case, 0)
        session.fill()
        for step in session.steps():
            for name, array in step.arrays.items():
                assert array_hash(array) == RECORDED["hashes"][f"{kv} L=37 {step.name}: {name}"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--lengths", "3"], "--lengths 3: at least 4"),
        (["--pages", "18"], "--pages 18: a page holds whole blocks; take a multiple of 4"),
        (["--repeats", "0"], "--repeats 0: at least 1"),
        (["--against", "setup.cfg"], "--against setup.cfg: is no report of flash_next.py"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, says):
    done = subprocess.run(
        [sys.executable, "benchmarks/flash_next.py", *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and says in done.stderr and not done.stdout


@pytest.mark.gpu
def test_this_gpu_gives_the_recorded_bytes():
    command = [sys.executable, "benchmarks/flash_next.py", "--quick", "--device", "cuda"]
    done = subprocess.run(
        [*command, "--against", "benchmarks/flash_next_cpu.json"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and " 0 unequal; " in done.stdout, done.stdout + done.stderr
