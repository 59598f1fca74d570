"""``refengine equal`` holds on the engine as it is; each equality fails when its fault is planted. Spec serving §5."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from backends.base import DECODE, PROMPT, Backend, backend_class
from backends.mixed import MixedBackend
from backends.paged import PagedBackend
from refengine.checkpoint import open_cached
from refengine.commands import equal
from refengine.errors import UserError
from refengine.registry import load_model
from refengine.serve.prompt_cache import PromptCache
from refengine.serve.windows import Window
from refengine.verify import equalities
from refengine.verify.equalities import FAILED, HELD, UNCHECKED, Form, check, drafted_decodes, verdict
from refengine.verify.launches import one_of_each_kind
from refengine.verify.planted import FAULTS, Fault
from refengine.verify.scheduled_runs import built
from refengine.verify.transcripts import Transcript, difference

SPEC = one_of_each_kind(load_model("qwen3.5-tiny"))
REQUEST = equal.Request("small", "bf16", "tiles", "1,2", "16", 5, 40, "7", None, "cpu", 1)
"""Two streams of 40 and 8 tokens over pages of 16."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The model is one of a layer of each kind, and no process is forked."""
    monkeypatch.setattr(equal, "find_model", lambda model, seed: (SPEC, None, lambda: open_cached(SPEC, seed)))
    monkeypatch.setattr(equal, "cores", lambda: 1)


def run(capsys, json=None, **changes) -> tuple[int, list[str]]:
    """The exit status, and the lines that are no part of the table."""
    status = equal.run(replace(REQUEST, **changes), json)
    lines = capsys.readouterr().out.splitlines()
    return status, [line for line in lines if re.match(r"EQUALITIES|FAILED|UNCHECKED", line)]


def failures(capsys, only: str, **changes) -> list[str]:
    """What a run says that must come out red."""
    status, lines = run(capsys, only=only, **changes)
    counts = re.fullmatch(r"EQUALITIES (\d+) held, (\d+) failed, (\d+) unchecked", lines[-1])
    failed = [line for line in lines if line.startswith("FAILED")]
    assert status == 1 and counts and len(failed) == int(counts[2]) > 0
    return failed


# --- As it is ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_the_engine_as_it_is(capsys, tmp_path, kv):
    """Equality 1 and 5a for 1 and 2 streams, 2 on windows, pages and both, 4 for four drafters, greedy and seeded; 3 in each form
    and from one to another, 5b preempted and waiting, 6 on pages and on both."""
    status, lines = run(capsys, tmp_path / "report.json", kv=kv, tokens=9)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (status, lines) == (0, ["EQUALITIES 45 held, 0 failed, 0 unchecked"]), lines
    assert [c["value"] for c in report["claims"]] == [45, 0, 0] and len(report["checks"]) == 45
    assert all(c["drafts"] > 0 for c in report["checks"] if c["equality"] == "4")
    by_hash = {tuple(h["logits"] for h in c["hashes"]) for c in report["checks"] if c["equality"] in "12"}
    assert len(by_hash) == 2


# --- Planted faults ---------------------------------------------------------------------------------------------------


def test_red_1_when_an_entry_of_a_page_table_names_another_page(capsys, monkeypatch):
    """From the second decode step on."""
    enter = PagedBackend.enter

    def wrong(self, stream, pages):
        enter(self, stream, pages)
        if stream.committed == 41:
            first = stream.slot * self.columns
            self.pages[first + 1] = self.pages[first]

    monkeypatch.setattr(PagedBackend, "enter", wrong)
    words = r"paged 16, \d streams: stream 0, decode row \d, token \d+: 0x[0-9a-f]{8} against 0x[0-9a-f]{8}"
    assert all(re.search(words, line) for line in failures(capsys, "1"))


def test_red_2_when_a_stream_reads_another_s_pages(capsys, monkeypatch):
    """Beside a window, too. What it keeps there, the other stream reads in the step after."""
    address = PagedBackend.address

    def first_s(self, stream):
        return address(self, stream) if stream.committed < 8 else (0, (stream.slot - stream.slot % 2) * self.columns)

    monkeypatch.setattr(PagedBackend, "address", first_s)
    failed = failures(capsys, "2")
    assert {re.search(r": (\w+) 16, 2 streams", line)[1] for line in failed} == {"paged", "mixed"}
    assert all(re.search(r"stream [01], decode row [12], token", line) for line in failed)


def test_red_2_when_a_row_depends_on_its_neighbour(capsys, monkeypatch):
    layer_states = Backend.layer_states

    def neighbour(self, layer, batch):
        states, histories = layer_states(self, layer, batch)
        if batch.phase == DECODE and len(batch.members) > 1:
            states[batch.runs[1]] += states[batch.runs[0]]
        return states, histories

    monkeypatch.setattr(Backend, "layer_states", neighbour)
    assert all("stream 1" in line for line in failures(capsys, "2"))


def test_red_2_when_a_pass_takes_scalar_attention_for_all_its_rows(capsys):
    """A stream in a window has other bits beside one on pages than alone."""
    failed = failures(capsys, "2", attention="scalar-batch")
    assert any("mixed 16, 2 streams: stream 0, decode row" in line for line in failed)


def test_red_4_when_the_recurrent_states_are_not_replayed(capsys, monkeypatch):
    monkeypatch.setattr("refengine.model.blocks.delta_trees.replay", lambda *_: None)
    failures(capsys, "4", streams="1")


def test_red_4_when_a_row_too_many_is_accepted(capsys, monkeypatch):
    kept = Window.kept

    def one_more(self, draws, stop):
        path = kept(self, draws, stop)
        return path + [row for row in self.asked if self.parents[row] == path[-1]][:1]

    monkeypatch.setattr(Window, "kept", one_more)
    failures(capsys, "4", streams="1")


def test_red_4_when_a_draw_is_keyed_by_its_row(capsys, monkeypatch):
    """Greedy draws have no key, so they hold."""
    monkeypatch.setattr(Window, "depth", lambda self, row: row)
    monkeypatch.setattr("refengine.serve.forward.choose", keyed_by_row)
    failed = failures(capsys, "4", streams="1", tokens=9)
    assert all("seeded" in line for line in failed)


def keyed_by_row(logits, samplings, positions, device):
    from refengine.serve.sampling import choose

    return choose(logits, samplings, range(len(positions)), device)


def test_red_5a_when_a_pass_forgets_the_convolution_s_history(capsys, monkeypatch):
    tables = Backend.tables

    def forgetful(self, phase, members, table, parents=None):
        if phase == PROMPT:
            for history in (stream.state(layer)[1] for stream in members for layer in self.shape.linear_layers):
                history[:] = 0
        return tables(self, phase, members, table, parents)

    monkeypatch.setattr(Backend, "tables", forgetful)
    assert all("7 rows a pass: stream 0, prompt pass 1" in line for line in failures(capsys, "5a"))


def test_red_3_when_nothing_is_resumed(capsys, monkeypatch):
    monkeypatch.setattr(PromptCache, "find", lambda self, prompt: None)
    assert all("resumed 0 positions of" in line for line in failures(capsys, "3", streams="1"))


def test_red_6_when_a_stream_s_pages_are_not_all_given_back(capsys, monkeypatch):
    forget = PagedBackend.forget

    def leaking(self, stream):
        forget(self, stream)
        self.pool.share(stream.pages[:1])

    monkeypatch.setattr(PagedBackend, "forget", leaking)
    assert all("holders on the books" in line for line in failures(capsys, "6", streams="1"))


def test_every_fault_that_controls_plant_is_red(capsys, tmp_path):
    status, _ = run(capsys, tmp_path / "controls.json", controls=True, tokens=9, prompt_tokens=100)
    report = json.loads((tmp_path / "controls.json").read_text())
    assert status == 0 and report["verdict"] == f"CONTROLS {len(FAULTS)} red, 0 missed"
    assert {fault.equality for fault in FAULTS} == set(equalities.TITLES)
    assert all(one["found"].startswith(f"FAILED {one['equality']} ") for one in report["controls"])


def test_a_control_that_is_missed_is_a_finding(capsys, monkeypatch):
    monkeypatch.setattr(equal, "FAULTS", [Fault("1", "none", nullcontext)])
    assert run(capsys, controls=True, only="1")[0] == 1


# --- Unchecked --------------------------------------------------------------------------------------------------------


def test_unchecked_when_no_draft_is_accepted(capsys, monkeypatch):
    monkeypatch.setattr(Window, "child", lambda self, parent, token: None)
    status, lines = run(capsys, only="4", streams="1")
    assert status == 1 and lines[-1] == "EQUALITIES 0 held, 0 failed, 8 unchecked"
    assert lines[0].endswith(
        "paged 16, 1 streams, greedy, n-gram chain: no draft was accepted; more --tokens give more chances"
    )


@pytest.mark.parametrize(
    ("only", "changes", "reason"),
    [
        ("1", {"page_sizes": "64"}, "one page only; prompts of more than 64 tokens take more"),
        ("5a", {"prompt_rows": "40"}, "no prompt is longer than 40 tokens"),
        ("5b", {"tokens": 3}, "not everyone was preempted twice; ask for more --tokens"),
    ],
)
def test_unchecked_when_a_run_proves_nothing(capsys, only, changes, reason):
    status, lines = run(capsys, only=only, streams="1", **changes)
    assert (
        status == 1
        and re.fullmatch("EQUALITIES 0 held, 0 failed, [12] unchecked", lines[-1])
        and lines[0].endswith(reason)
    )


def test_unchecked_when_nobody_waits(capsys, monkeypatch):
    monkeypatch.setattr("refengine.verify.scheduled_runs.cramped", lambda *place: built(*place[:-1]))
    status, lines = run(capsys, only="6", streams="1")
    assert (
        status == 1 and lines[-1].endswith("2 unchecked") and all(line.endswith("nobody waited") for line in lines[:-1])
    )


def test_unchecked_when_pages_are_handed_out_in_order(capsys, monkeypatch):
    monkeypatch.setattr("backends.paged.page_order", lambda pages, shuffle: list(range(pages)))
    assert "the page tables are ascending" in run(capsys, only="1", streams="1")[1][0]


# --- Transcripts and checks -------------------------------------------------------------------------------------------


def transcript(decode=((1.0, 2.0), (3.0, 4.0)), tokens=(1, 1, 1), accepted=0) -> Transcript:
    return Transcript(np.ones((1, 2), np.float32), np.array(decode, np.float32), tokens, accepted)


def test_the_first_difference_is_named():
    assert difference(transcript(), transcript()) is None
    assert (
        difference(transcript(), transcript(((1, 2), (3, -4))))
        == "decode row 2, token 1: 0x40800000 against 0xc0800000"
    )
    assert difference(transcript(), transcript(tokens=(1, 1, 0))) == "tokens (1, 1, 1) against (1, 1, 0)"
    assert difference(transcript(), transcript(((1, 2),))) == "2 decode rows against 1"


def test_equal_nans_and_signed_zeros_prove_nothing():
    nan, zeros = transcript(((np.nan, 2), (3, 4))), [transcript(((z, 2), (3, 4))) for z in (0.0, -0.0)]
    assert check("1", "paged", 1, "", [(0, nan, nan)], None).outcome == UNCHECKED
    assert check("1", "paged", 1, "", [(0, *zeros)], None).outcome == FAILED


def test_the_verdict_counts_and_nothing_is_not_well():
    checks = [check("1", "paged", 1, "", [(0, transcript(), transcript())], why) for why in (None, None, "idle")]
    assert verdict(checks) == ("EQUALITIES 2 held, 0 failed, 1 unchecked", False)
    assert verdict(checks[:2])[1] and not verdict([])[1] and checks[0].outcome == HELD


@pytest.mark.parametrize("streams", [1, 2, 3, 4, 8])
def test_every_drafter_has_a_stream(streams):
    names = list(equalities.drafters(True, True))
    turns = drafted_decodes(names, [transcript()] * streams)
    assert all(len(turn.drafters) == streams for turn in turns)
    assert {d for turn in turns for d in turn.drafters} == set(equalities.drafters(True, True, (1, 1, 1)).values())


def test_a_second_page_that_no_token_reaches_proves_nothing(capsys):
    """The last token is generated and never stored."""
    status, lines = run(capsys, only="1", streams="1", page_sizes="16", prompt_tokens=8, tokens=9)
    assert status == 1 and "one page only" in lines[0] and lines[-1].endswith("1 unchecked")


def test_an_earlier_reply_is_right_in_parts():
    assert equalities.altered(range(10, 21)) == (10, 11, 12, 13, 13, 15, 16, 17, 18, 18, 20)
    assert equalities.altered((0, 0, 0, 0, 0, -1)) == (0, 0, 0, 0, 1), "tokens of the vocabulary, and none for -1"


# --- What the command line refuses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv": "fp4"}, "--kv fp4: unknown; did you mean fp8"),
        ({"attention": "tile"}, "--attention tile: unknown; did you mean tiles"),
        ({"only": "7"}, "--only 7: unknown; there are 1, 2, 3, 4, 5a, 5b, 6"),
        ({"streams": "1,x"}, "--streams 1,x: x: whole numbers from 1 to 64"),
        ({"streams": ""}, "--streams : '': whole numbers from 1 to 64"),
        ({"streams": "2,1,2"}, "--streams 2,1,2: 2 stands twice; name it once"),
        ({"streams": "1", "only": "2"}, "--streams 1: equality 2 takes 2 or more streams"),
        ({"page_sizes": "0"}, "--page-sizes 0: 0: whole numbers from 1"),
        ({"prompt_rows": "5000"}, "--prompt-rows 5000: 5000: whole numbers from 1 to 4096"),
        ({"tokens": 1}, "--tokens 1: at least 2"),
        ({"prompt_tokens": 5000}, "--prompt-tokens 5000: 1 to 4096"),
        ({"seed": -1}, "--seed -1: 0 to 18446744073709551615"),
        ({"seed": 2**64}, "--seed 18446744073709551616: 0 to"),
        ({"streams": "64", "page_sizes": "1048576"}, "--page-sizes: paged 1048576 takes"),
        ({"streams": "1"}, "--streams 1: equality 2 takes 2 or more streams; add one, or name others with --only"),
        ({"tokens": 300000}, "--prompt-tokens 40: with --tokens and drafts 300048 positions"),
    ],
)
def test_bad_input_is_one_line(changes, words):
    with pytest.raises(UserError, match=re.escape(words)):
        equal.run(replace(REQUEST, **changes), None)


def test_pages_that_would_cut_a_block_are_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr(equal, "find_model", lambda model, seed: (load_model("flash-next-tiny"), None, pytest.fail))
    with pytest.raises(UserError, match="--page-sizes 6: pages of 6 positions would cut the sparse"):
        equal.run(replace(REQUEST, page_sizes="48,6"), None)


def test_forms_have_names():
    assert [str(Form(*form)) for form in (("window",), ("paged", 48), ("mixed", 48), ("paged-p256", 256))] == [
        "window", "paged 48", "mixed 48", "paged-p256",
    ]  # fmt: skip
    assert backend_class("mixed") is MixedBackend
