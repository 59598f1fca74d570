"""The contract's gates can fail: each, alone, finds a fault that is planted for it, and says where."""

from __future__ import annotations

import configparser
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from refengine.commands import contract as command
from refengine.commands.contract import Request, run
from refengine.contract import controls
from refengine.contract.caches import poison_unheld
from refengine.contract.controls import Mutant, mutants, plant_mutant
from refengine.contract.gates import BOUND, EXACT, GUARDS, REPEATS, Trial, judge, this_device
from refengine.contract.registry import entries, entry_named, uncovered
from refengine.contract.workbench import NAN, bits
from refengine.errors import UserError

CPU = this_device("cpu")
PLUGIN = Path(__file__).parent.parent / "tutorials" / "two_level"
NORMS = "kernels_numba.norms"
RMS = entries()["rms_norm"]
NORM_CASE = RMS.control_cases()[0]
PROMPT = entries()["prompt_attention"]
PROMPT_CASE = PROMPT.control_cases()[0]


def verdict_of(entry, case, old=None, new=None, module=None, **trial):
    """The verdict of a case, with a text of a module replaced."""
    if old is not None:
        mutant = Mutant(entry.name, "a test's", module or entry.modules[0], old, new, (BOUND,))
        trial["modules"] = controls.mutated(entry, mutant)
    return judge(entry, case, Trial(CPU, **trial))


@pytest.mark.parametrize("name", list(entries()))
def test_what_is_right_passes(name):
    entry = entry_named(name)
    verdict = judge(entry, entry.control_cases()[0], Trial(CPU, watched=True))
    assert verdict.problems == {} and 0 <= verdict.fraction <= 1 and len(verdict.digest) == 16


# --- Gate by gate -------------------------------------------------------------------------------------------------------


def test_the_bound_finds_what_the_other_gates_cannot():
    found = verdict_of(PROMPT, PROMPT_CASE, "s[n, at] * scale if", "s[n, at] if").problems
    assert "of its bound" in found[BOUND]
    twinless = verdict_of(
        RMS, replace(NORM_CASE, rows=1), "(bf16_low(word) * inverse) * gain_low", "bf16_low(word) * inverse"
    )
    assert set(twinless.problems) == {BOUND}


def test_a_nan_passes_no_bound():
    def poisoned(inputs):
        bits(inputs["x"])[0, 0] = 0x7FC0

    assert "inf of its bound" in judge(RMS, NORM_CASE, Trial(CPU, plant=poisoned)).problems[BOUND]


def test_equal_bits_find_what_is_far_below_the_bound():
    problems = verdict_of(PROMPT, PROMPT_CASE, plant=PROMPT.controls()[0].plant).problems
    assert problems[EXACT].startswith(
        "differs from each stream alone on a window of bf16, in a longer pass: out at row "
    )
    assert ", head " in problems[EXACT] and "0x" in problems[EXACT] and problems[EXACT].endswith(" differ")
    many = PROMPT.control_cases()[-1]
    found = verdict_of(PROMPT, many, "(w04 + w26) + (w15 + w37)", "((w04 + w26) + w15) + w37")
    assert set(found.problems) == {EXACT} and found.fraction < 1


def test_a_record_of_another_machine_is_met_or_named():
    digest = judge(RMS, NORM_CASE, Trial(CPU)).digest
    name = f"rms_norm {NORM_CASE}"
    assert judge(RMS, NORM_CASE, Trial(CPU, recorded={name: digest})).passed
    problem = judge(RMS, NORM_CASE, Trial(CPU, recorded={name: "0" * 16})).problems[EXACT]
    assert problem == f"outputs hash to {digest}, recorded {'0' * 16}"


def test_a_kernel_that_does_not_repeat_is_told_from_one_that_reads_poison():
    class Restless(type(RMS)):
        """Its second launch and those after see another input."""

        launches = 0

        def launch(self, case, inputs, bench, modules):
            self.launches += 1
            if self.launches > 1:
                inputs["x"] = inputs["x"] * inputs["x"].dtype.type(1 + self.launches)
            super().launch(case, inputs, bench, modules)

    problems = judge(Restless(), NORM_CASE, Trial(CPU)).problems
    assert problems[REPEATS].startswith("another run differs: out at row ") and GUARDS not in problems


GUARDED = [
    ("if row + 8 < rows:\n        store_row", "if row + 8 < rows + 8:\n        store_row", "outside|past an end"),
    ("if row + 8 < rows:\n        store_row", "if row + 9 < rows:\n        store_row", r"out\[.*not written"),
    ("present = key0 + row < keys", "present = key0 + row <= keys", "reads what nobody wrote: with 0x7F bytes there"),
    ("    cp_wait(slots(D) - 1)\n", "", "may still be bringing"),
]


@pytest.mark.parametrize("old, new, says", GUARDED, ids=["past the end", "not written", "reads poison", "checked mode"])
def test_the_guards_find(old, new, says):
    case = replace(PROMPT_CASE, streams=((15, 48),)) if "row + 9" in new else PROMPT_CASE
    assert re.search(says, verdict_of(PROMPT, case, old, new, watched=True).problems[GUARDS])


def test_the_guards_find_an_input_that_was_written():
    old = "    store_normed(out, x, gain, row, block_sum(squares), eps)\n"
    problems = verdict_of(RMS, NORM_CASE, old, old + "    x[row, 0] = x[row, 1]\n").problems
    assert problems[GUARDS].startswith("x[0, ") and "written, and may not be" in problems[GUARDS]


def test_a_poison_that_changes_nothing_is_refused():
    held = np.zeros(16, bool)
    with pytest.raises(AssertionError, match="changed nothing"):
        poison_unheld(np.full(4, NAN.word, np.uint32), held, NAN)


# --- What is planted ----------------------------------------------------------------------------------------------------


def test_a_planted_fault_that_no_gate_finds_is_missed():
    same = Mutant(
        "rms_norm",
        "no fault",
        NORMS,
        "squares = float32(0.0)\n    for first in range(0, x",
        "squares = float32(0)\n    for first in range(0, x",
        (EXACT,),
    )
    planted = plant_mutant(RMS, same, Trial(CPU))
    assert not planted.red and planted.gate == EXACT


@pytest.mark.parametrize("name", [n for n in entries() if mutants(entry_named(n))])
def test_every_mutant_can_be_planted(name):
    entry = entry_named(name)
    for mutant in mutants(entry):
        assert set(controls.mutated(entry, mutant)) == set(entry.modules)


@pytest.mark.parametrize(
    "text, says",
    [
        ("- name: a\n", "needs name, replace, by and gates"),
        ("- {name: a, replace: b, by: c, gates: [bounds]}\n", "gates \\['bounds'\\]: use some of"),
        ("- {name: a, replace: b, by: c, gates: [guards]}\n", "needs says"),
        ("- {name: a, replace: b, by: c, gates: [bound], file: x}\n", "no key file"),
        ("- {name: a, replace: b, by: c, gates: [bound], module: x}\n", "module x: use one of"),
        ("name: a\n", "a list of mutants is wanted"),
    ],
)
def test_a_bad_file_of_mutants_is_refused_by_file_and_item(tmp_path, text, says):
    (tmp_path / "rms_norm.yaml").write_text(text)
    with pytest.raises(UserError, match=rf"rms_norm\.yaml: .*{says}"):
        mutants(RMS, tmp_path)


def test_a_mutant_whose_text_is_gone_is_missed_and_says_why():
    old = Mutant("rms_norm", "old", NORMS, "no such text", "", (BOUND,))
    with pytest.raises(UserError, match="'no such text' stands 0 times in kernels_numba.norms, not once"):
        controls.mutated(RMS, old)
    planted = plant_mutant(RMS, old, Trial(CPU))
    assert not planted.red and planted.name.startswith("old: cannot be planted: 'no such text' stands 0 times")


# --- The command --------------------------------------------------------------------------------------------------------


def request(kernel="rms_norm", **how):
    return Request((kernel,) if kernel else (), "cpu", full=False, mutate=False, seed=0, processes=1, **how)


def test_the_command_ends_with_the_summary(capsys):
    assert run(request(), None) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"CONTRACT 1 kernels: 1 pass gates 1-4, 0 fail; (\d+) controls: \1 red, 0 missed", line)


def test_every_kernel_has_an_entry():
    assert uncovered() == []


def test_a_kernel_without_an_entry_fails_the_run_by_name(capsys, monkeypatch):
    monkeypatch.setattr(command, "uncovered", lambda: ["new_kernel"])
    monkeypatch.setattr(command, "chosen", lambda kernel: ("rms_norm",))
    monkeypatch.setattr(command, "kernels_of", lambda request: ["rms_norm_kernel"])
    monkeypatch.setattr(command, "of_request", lambda request, records: {"rms_norm_kernel": records["rms_norm_kernel"]})
    assert run(request(kernel=None), None) == 1
    out = capsys.readouterr().out
    assert "no contract entry: new_kernel" in out and "CONTRACT 2 kernels: 1 pass gates 1-4, 1 fail" in out


def test_a_missed_control_fails_the_run(capsys, monkeypatch):
    entry = entry_named("rms_norm")
    harmless = replace(entry.controls()[0], name="nothing planted", plant=lambda inputs: None)
    monkeypatch.setattr(type(entry), "controls", lambda self: [harmless])
    assert run(request(), None) == 1
    out = capsys.readouterr().out
    assert "rms_norm: control not found by exact: nothing planted" in out and ", 1 missed" in out


def test_a_kernel_that_nobody_knows_is_refused():
    with pytest.raises(UserError, match="KERNEL rms_nrm"):
        run(request("rms_nrm"), None)


# --- A plug-in ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_level(tmp_path, monkeypatch):
    """The example plug-in as pip would install it."""
    setup = configparser.ConfigParser()
    setup.read(PLUGIN / "setup.cfg")
    info = tmp_path / "two_level-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: two-level\nVersion: 1\n")
    points = setup["options.entry_points"]["refengine.backends"].strip()
    (info / "entry_points.txt").write_text(f"[refengine.backends]\n{points}\n")
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("two_level", None)


def test_the_example_plug_in_passes_and_its_broken_twin_does_not(two_level):
    for backend, right in (("two-level", True), ("two-level-broken", False)):
        entry = entry_named(f"backend {backend}")
        for case in entry.control_cases():
            assert judge(entry, case, Trial(CPU)).passed is right
        for planted in (controls.plant_control(entry, c, Trial(CPU)) for c in entry.controls()):
            assert planted.red or not right


def test_a_broken_backend_fails_the_run(two_level, capsys, tmp_path):
    assert run(request(kernel=None, backend="two-level-broken"), tmp_path / "report.json") == 1
    assert "backend two-level-broken prompt" in capsys.readouterr().out
    bits = json.loads((tmp_path / "report.json").read_text())["bits"]
    assert len(bits) == len(entry_named("backend two-level").cases(False)) + 1
    assert all(name.startswith("backend two-level-broken ") for name in bits)


def test_a_backend_that_nobody_registered_is_refused():
    with pytest.raises(UserError, match="--backend two-levels"):
        run(request(kernel=None, backend="two-levels"), None)


@pytest.mark.parametrize(("name", "kernels"), [("prompt_attention", 1), ("decode_attention", 3), ("decode_scalar", 1)])
def test_attention_kernels_have_eight_mutants_each_and_controls_among_them(name, kernels):
    listed = mutants(entry_named(name))
    assert len(listed) >= 8 * kernels and len({m.name for m in listed}) == len(listed)
    assert any(m.control and GUARDS not in m.gates for m in listed)
    assert any(m.control and GUARDS in m.gates for m in listed)
