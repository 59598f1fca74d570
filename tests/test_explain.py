"""Two runs that differ are explained: where they part, the key whose rows differ, and folds that are the kernels' own."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict

import numpy as np
import pytest

from backends.base import DECODE, PROMPT
from kernels_numba.machine.modes import within
from refengine.checkpoint import load_weights, open_cached
from refengine.cli import app, status_of
from refengine.commands.compare import Request, build_all, summary
from refengine.commands.recorded import recorded
from refengine.contract.attention import AttentionCase
from refengine.contract.entries.decode import DecodeCase
from refengine.contract.entries.scalar import ScalarCase
from refengine.contract.entry import product_modules
from refengine.contract.gates import this_device
from refengine.contract.registry import entry_named
from refengine.contract.workbench import BF16, NAN, Workbench
from refengine.model import Qwen35
from refengine.registry import load_model
from refengine.verify.attention_bits import Heads
from refengine.verify.compare import first_difference
from refengine.verify.explain import Place, Side, first_place, parting, read_at
from refengine.verify.fold_watch import Element, FoldWatch
from refengine.verify.planted import FAULTS

LAST_HEAD = load_model("qwen3.5-tiny").attention.heads - 1
"""Of the last KV head."""
PROMPT_TOKENS, TOKENS, PAGE = 24, 2, 8
ENTRY = (PROMPT_TOKENS - 1) // PAGE
"""The last that the prompt takes."""


# --- Folds are the kernels' own -------------------------------------------------------------------------------------


def folds_of(name: str, case, row: int, head: int, dim: int):
    """(folds of an element, the outputs of the launch)."""
    entry, heads = entry_named(name), case.geometry
    inputs, bench = entry.inputs(case, NAN, 0), Workbench(this_device("cpu"), NAN)
    watch = FoldWatch(Element(row, head, dim, heads.heads // heads.kv_heads, heads.head_dim))
    with within(watch):
        entry.launch(case, inputs, bench, product_modules(entry))
    return watch.folds, bench.finish()[0]


PROMPTS = AttentionCase(Heads(12, 2, 64), "paged", 48, ((17, 100), (140, 30)))
WINDOWS = DecodeCase(Heads(6, 1, 64), "paged", 48, ((2, 70), (3, 575)))
SCALAR = ScalarCase(Heads(6, 1, 64), "paged", 48, ((2, 70), (3, 575)))
ELEMENTS = [(0, 0, 0), (3, 5, 63), (16, 11, 9), (17, 7, 34), (17 + 139, 10, 21), (17 + 70, 2, 50)]


@pytest.mark.parametrize(("row", "head", "dim"), ELEMENTS)
def test_the_last_state_of_a_prompt_row_is_its_output(row, head, dim):
    (fold,), outputs = folds_of("prompt_attention", PROMPTS, row, head, dim)
    last = fold.states[-1]
    assert np.float32(last.o / last.l).astype(BF16).tobytes() == outputs["out"][row, head, dim].tobytes()
    assert fold.states[0].key is None and [s.key for s in fold.states[1:]] == list(
        range(0, fold.states[-1].key + 1, 64)
    )


@pytest.mark.parametrize(("row", "head", "dim"), [(0, 0, 0), (1, 5, 63), (2, 1, 9), (4, 3, 34), (4, 4, 17)])
@pytest.mark.parametrize(("name", "case"), [("decode_attention", WINDOWS), ("decode_scalar", SCALAR)])
def test_the_last_states_of_a_decode_row_are_its_partials(name, case, row, head, dim):
    folds, outputs = folds_of(name, case, row, head, dim)
    assert len(folds) == (1 if row < 2 else 2)
    for slot, fold in enumerate(folds):
        last = fold.states[-1]
        wanted = [outputs[part][slot, row, head] for part in ("pm", "pl")] + [outputs["po"][slot, row, head, dim]]
        assert [x.tobytes() for x in (last.m, last.l, last.o)] == [np.float32(x).tobytes() for x in wanted]


def test_keys_of_several_programs_follow_each_other():
    folds, _ = folds_of("decode_attention", WINDOWS, 4, 0, 0)
    assert [fold.kernel for fold in folds] == ["decode_rows", "decode_partial"]
    assert [state.key for fold in folds for state in fold.states[1:]] == list(range(0, 578, 64))


# --- Two runs of a model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def side():
    """Makes the sides of a comparison, all on one model."""
    device, spec = this_device("cpu"), load_model("qwen3.5-tiny")
    context = PROMPT_TOKENS + TOKENS
    model = Qwen35(spec, load_weights(open_cached(spec, 0), spec), device, context)
    prompt = np.random.default_rng(0).integers(0, 256, PROMPT_TOKENS).tolist()

    def make(name: str, kv: str = "bf16", attention: str = "tiles", planted=nullcontext) -> Side:
        request = Request(
            "qwen3.5-tiny", (name,), PAGE, None, PROMPT_TOKENS, TOKENS, 1, 256, None, None, "cpu", 0, kv, attention
        )
        return Side(
            name, lambda: build_all(spec, request, context, device)[0], model, device, [prompt], 256, TOKENS, planted
        )

    return make


@pytest.fixture(scope="module")
def window(side):
    one = side("window")
    return one, one.run()


def test_a_wrong_entry_is_found_with_page_and_slot(side, window):
    other = side("paged", planted=FAULTS[0].planted)
    arm = other.run()
    place = first_place(window[1], arm)
    assert first_difference(window[1], arm).startswith(f"pass 1 (prompt), layer {place.layer}, row {place.row}, ")
    a, b = read_at(window[0], place), read_at(other, place)
    found = parting(a, b)
    key, owner = found.key
    pages = [int(text.split()[1]) for text in (row.where for row in b.keys)]
    assert not found.queries_differ and found.plane == "K" and key.position == owner.position <= place.row
    assert key.where == f"slot {key.position} of the window"
    assert owner.where == f"page {pages[key.position]} slot {key.position % PAGE} (entry {key.position // PAGE})"
    wrong = f"entry {ENTRY} of the page table names page {pages[PAGE * (ENTRY - 1)]}, "
    assert b.wrong_entry.startswith(wrong) and a.wrong_entry == ""
    assert found.step == 0 and a.states[0][1].key == b.states[0][1].key == 0


def test_equal_rows_and_two_kernels(side, window):
    paged = side("paged", attention="scalar-batch")
    place = first_place(window[1], paged.run())
    a, b = read_at(window[0], place), read_at(paged, place)
    found = parting(a, b)
    assert not found.queries_differ and found.key is None and found.step == 0
    assert (a.states[0][0], b.states[0][0]) == ("prompt_attention", "decode_scalar")


@pytest.mark.parametrize("phase", [PROMPT, DECODE])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_equal_runs_read_equal_rows_and_fold_alike(side, phase, kv):
    place = Place(0, PROMPT, 3, 20, LAST_HEAD, 5) if phase == PROMPT else Place(1, DECODE, 3, 0, LAST_HEAD, 5)
    a, b = read_at(side("window", kv), place), read_at(side("paged", kv), place)
    found = parting(a, b)
    assert (found.queries_differ, found.key, found.step) == (False, None, None)
    assert len(a.keys) == len(b.keys) == (21 if phase == PROMPT else PROMPT_TOKENS + 1)
    assert attended(b, place.dim) == pytest.approx(float(b.states[-1][1].o / b.states[-1][1].l), rel=0.02)


def attended(reading, dim: int) -> float:
    """Attention in float64, of the query and the rows that were read."""
    k, v = (np.array([getattr(row, name) for row in reading.keys], np.float64) for name in ("k", "v"))
    scores = k @ reading.q.astype(np.float64) * len(reading.q) ** -0.5
    weights = np.exp(scores - scores.max())
    return float(weights @ v[:, dim] / weights.sum())


def test_a_changed_row_is_the_key_that_differs(side, window):
    place = Place(0, PROMPT, 3, 20, 1, 5)
    a, b = read_at(window[0], place), read_at(window[0], place)
    b.keys[15].v[3] += 1
    b.keys[18].k[0] += 1
    found = parting(a, b)
    assert found.key[0].position == 15 and found.plane == "V" and found.step is None


# --- The command ----------------------------------------------------------------------------------------------------


def refengine(*arguments) -> int:
    return status_of(lambda: app(list(map(str, arguments)), standalone_mode=False), debug=False)


@pytest.fixture(scope="module")
def reports(tmp_path_factory, side, window):
    """A report of compare for each way to attend, the arms as compare writes them."""
    folder = tmp_path_factory.mktemp("reports")
    for attention in ("tiles", "scalar-batch"):
        names = ("window", "paged")
        request = Request(
            "qwen3.5-tiny", names, PAGE, None, PROMPT_TOKENS, TOKENS, 1, 256, None, None, "cpu", 0, "bf16", attention
        )
        arms = [window[1], side("paged", attention=attention).run()]
        body = {"request": asdict(request), "arms": [summary(arm) for arm in arms]}
        (folder / f"{attention}.json").write_text(json.dumps(body))
    return folder


def test_the_command_explains_two_ways_to_sum(reports, tmp_path, capsys):
    out = tmp_path / "explained.json"
    assert refengine("explain", reports / "scalar-batch.json", "--json", out) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("PARTED pass 1 (prompt), layer 3, row ")
    assert last.endswith("query and keys are equal: prompt_attention and decode_scalar sum them in different orders")
    body = json.loads(out.read_text())
    assert body["step"] == 0 and body["verdict"] == last and body["place"]["layer"] == 3


def test_the_arm_that_differs_is_taken(reports, tmp_path):
    body = json.loads((reports / "scalar-batch.json").read_text())
    body["arms"].insert(1, body["arms"][0] | {"backend": "paged-p256"})
    (tmp_path / "three.json").write_text(json.dumps(body))
    first = recorded(str(tmp_path / "three.json"), None)
    assert (first.backend, recorded(str(tmp_path / "three.json"), first).backend) == ("window", "paged")


def test_a_report_may_have_a_colon_in_its_name(reports, tmp_path):
    path = tmp_path / "10:30.json"
    path.write_bytes((reports / "tiles.json").read_bytes())
    first = recorded(str(path), None)
    assert (first.backend, recorded(str(path), first).backend) == ("window", "paged")
    assert recorded(f"{path}:paged", None).backend == "paged"


def test_the_command_says_when_nothing_parts(reports, capsys):
    assert refengine("explain", f"{reports / 'tiles.json'}:window", f"{reports / 'scalar-batch.json'}:window") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("EQUAL ")


def test_a_run_that_does_not_repeat_is_unchecked(reports, tmp_path, capsys):
    body = json.loads((reports / "tiles.json").read_text())
    body["arms"][1]["attention_hash"] = "0" * 16
    (tmp_path / "old.json").write_text(json.dumps(body))
    assert refengine("explain", tmp_path / "old.json") == 1
    assert "UNCHECKED" in (said := capsys.readouterr().out) and "old.json:paged does not repeat here" in said


@pytest.mark.parametrize(
    ("change", "arguments", "named"),
    [
        ({}, ["missing.json"], "missing.json: No such file"),
        ({"arms": []}, ["new.json"], "new.json: is no report of compare"),
        ({"tokens": "two"}, ["new.json"], "new.json: is no report of compare"),
        ({"model": 5}, ["new.json"], "new.json: is no report of compare"),
        ({"page_size": "48"}, ["new.json"], "new.json: is no report of compare"),
        ({}, ["tiles.json:window", "tiles.json:window"], "tiles.json:window: is the same run twice"),
        ({}, ["new.json:windw"], "backend windw: unknown; did you mean window?"),
        ({"seed": 1}, ["tiles.json", "new.json"], "--seed: 0 in "),
        ({}, ["tiles.json", "--plant", "nothing like it"], "--plant nothing like it: in the names of 0 faults"),
    ],
)
def test_bad_calls_are_one_line(reports, tmp_path, monkeypatch, capsys, change, arguments, named):
    body = json.loads((reports / "tiles.json").read_text())
    (tmp_path / "tiles.json").write_text(json.dumps(body))
    body["request"] |= {key: value for key, value in change.items() if key != "arms"}
    body |= {key: value for key, value in change.items() if key == "arms"}
    (tmp_path / "new.json").write_text(json.dumps(body))
    monkeypatch.chdir(tmp_path)
    assert refengine("explain", *arguments) == 2
    error = capsys.readouterr().err
    assert named in error and len(error.splitlines()) == 1
