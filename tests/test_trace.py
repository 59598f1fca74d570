"""A trace says what one block did: the counters of checked mode, each at its own line, and changes no result."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kernels_numba.machine import checked, count, cuda, device, float32, int64, kernel
from kernels_numba.machine.banks import requests_and_passes
from kernels_numba.machine.trace import spans, traced
from refengine.cli import app, status_of
from refengine.contract.controls import mutants, mutated
from refengine.contract.registry import entry_named
from refengine.lab import kernel_case
from refengine.lab.kernel_case import Wish, kernel_names, run_in
from refengine.lab.trace_data import Traced, case_words, second_lookups, turns_and_item
from refengine.lab.trace_page import html, still_svg
from refengine.lab.trace_picture import MemoryPicture, askers
from refengine.verify.attention_bits import Heads

ROOT = Path(__file__).parents[1]
MOST_BYTES = 2_000_000


def trace_of(name: str, **flags) -> Traced:
    wish = Wish(name, **flags)
    found, trace = run_in(wish, lambda: traced(name, wish.block_number), lambda one: one.mode is not None)
    return Traced(trace, found)


@pytest.fixture
def narrow(monkeypatch):
    """prompt_attention's example with heads of 64 dims: the same walk, less arithmetic."""
    case = kernel_case.EXAMPLES["prompt_attention"]
    monkeypatch.setitem(kernel_case.EXAMPLES, "prompt_attention", replace(case, geometry=Heads(6, 1, 64)))


@pytest.fixture(scope="module")
def paged():
    return trace_of("prompt_attention")


# --- A small kernel, every event known ------------------------------------------------------------------------------


@device
def exchange(shared, turn, t):
    """Each thread takes what the thread 32 further on stored."""
    cuda.syncthreads()
    return shared[(t + 32 * turn) % 64]


@kernel
def rounds(out, x):
    """out, x: float32 [64]. Launch: grid 1, 64 threads."""
    shared = cuda.shared.array(64, float32)
    t = int64(cuda.threadIdx.x)
    shared[t] = x[t]
    for turn in range(2):
        value = exchange(shared, turn, t)
        if t < 32:
            count("kept")
            out[turn * 32 + t] = value


def run_rounds() -> np.ndarray:
    out, x = np.zeros(64, np.float32), np.arange(64, dtype=np.float32)
    rounds.at()[1, 64](out, x)
    return out


@pytest.fixture(scope="module")
def small():
    with traced("rounds") as trace:
        run_rounds()
    return trace


def line_of(text: str) -> int:
    source = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(source, 1) if line.strip() == text)


def test_events_stand_at_their_lines_and_turns(small):
    found = [(step.spot.line, step.turns, [op.kind for op in step.ops.values()]) for step in small.steps]
    load, call, tick, store = map(line_of, (
        "shared[t] = x[t]", "value = exchange(shared, turn, t)", 'count("kept")', "out[turn * 32 + t] = value",
    ))  # fmt: skip
    assert found == [(load, (), ["global load", "shared store"])] + [
        step
        for turn in ("0", "1")
        for step in (
            (call, (("turn", turn),), ["barrier", "shared load"]),
            (tick, (("turn", turn),), ["count"]),
            (store, (("turn", turn),), ["global store"]),
        )
    ]


def test_an_event_in_a_device_function_has_the_path_to_it(small):
    op = next(op for op in small.steps[-3].ops.values() if op.kind == "shared load")
    assert [spot.program.name for spot in op.path] == ["rounds", "exchange"]
    assert op.path[1].line == line_of("return shared[(t + 32 * turn) % 64]")
    assert op.turns == ((("turn", "1"),), (("turn", "1"),))


@kernel
def turns_of_one_line(out):
    """out: float32 [64]. Launch: grid 1, 32 threads."""
    for turn in range(2):
        out[turn * 32 + cuda.threadIdx.x] = float32(turn)


def test_each_turn_is_a_step_of_its_own():
    with traced("turns_of_one_line") as trace:
        turns_of_one_line.at()[1, 32](np.zeros(64, np.float32))
    assert [step.turns for step in trace.steps] == [(("turn", "0"),), (("turn", "1"),)]


def test_lanes_bytes_and_addresses_are_those_of_the_kernel(small):
    ops = {(op.kind, step.turns): op for step in small.steps for op in step.ops.values()}
    store = ops["global store", (("turn", "1"),)]
    assert (store.lanes, store.warps, store.global_bytes, store.target) == (32, 1, 128, [(32, 64)])
    load = ops["shared load", (("turn", "0"),)]
    assert (load.lanes, load.warps, load.shared_bytes, load.source) == (64, 2, 256, [(0, 64)])


def test_a_traced_block_computes_what_a_plain_one_does(small):
    plain, out, x = run_rounds(), np.zeros(64, np.float32), np.arange(64, dtype=np.float32)
    with traced("rounds"):
        rounds.at()[1, 64](out, x)
    assert plain.any() and out.tobytes() == plain.tobytes()


def test_nothing_runs_after_the_traced_block():
    with traced("rounds"):
        run_rounds()
        raise AssertionError("ran on")


def test_spans_are_the_runs_of_numbers():
    assert spans([np.array([5, 3, 4]), np.array([9, 3])]) == [(3, 6), (9, 10)] and spans([]) == []


# --- Bank conflicts -------------------------------------------------------------------------------------------------

LANES = np.arange(32)


@pytest.mark.parametrize(
    ("byte", "width", "wanted"),
    [
        (4 * LANES, 4, (1, 1)),
        (8 * LANES, 4, (1, 2)),
        (128 * LANES, 4, (1, 32)),
        (0 * LANES, 4, (1, 1)),
        (4 * LANES ^ 64, 4, (1, 1)),
        (LANES, 1, (1, 1)),
        (8 * LANES, 8, (2, 2)),
        (16 * LANES, 16, (4, 4)),
        (128 * LANES, 16, (4, 32)),
        (128 * LANES + 16 * (LANES % 8), 16, (4, 4)),
    ],
    ids=["words", "every second", "one bank", "one word", "permuted", "bytes", "pairs", "pieces", "rows", "swizzled rows"],
)  # fmt: skip
def test_conflicts_of_known_patterns(byte, width, wanted):
    assert requests_and_passes(LANES, byte.astype(np.int64), width) == wanted


def test_two_warps_do_not_conflict_with_each_other():
    assert requests_and_passes(np.arange(64), np.zeros(64, np.int64), 4) == (2, 2)


def test_the_prompt_kernels_swizzle_leaves_no_conflict(paged):
    assert paged.totals["shared_bytes"] > 0 and paged.totals["conflicts"] == 0


# --- The page walk --------------------------------------------------------------------------------------------------


def test_counters_are_those_of_checked_mode(paged):
    with checked(sample=lambda grid: (0, 0, 0)) as report:
        paged.found.launch()
    assert {name: paged.totals[name] for name in report.counters} == dict(report.counters)
    assert {"lookups", "straddles", "global_bytes"} <= set(report.counters)


def staged(result: Traced) -> dict[str, list]:
    """The page lookups of each item that the prologue stages."""
    picture = MemoryPicture(result.trace, result.found)
    lit = [(step, picture.lit(step)) for step in result.trace.steps]
    return {
        dict(step.turns)["item"]: one.lookups for step, one in lit if one.lookups and "tile" not in dict(step.turns)
    }


def test_a_straddling_item_is_looked_up_twice_from_two_lines(paged):
    items = staged(paged)
    pages = paged.found.inputs["cache"].pages
    assert [(entry, page) for entry, page, *_ in items["0"]] == [(0, pages[4])]
    assert [(entry, page) for entry, page, *_ in items["1"]] == [(0, pages[4]), (1, pages[5])]
    first, second = (where for *_, where in items["1"])
    assert first.startswith("stage_item:") and second.startswith("stage_item:") and first != second


def test_a_step_names_the_item_that_it_fetches(paged):
    """Where it is not the loop's own: the items of tile 0 make room for those of items 2 to 5."""
    places = [turns_and_item(step) for step in paged.trace.steps]
    assert places.count("item 1") > 0 and not any("item 1, fetches item 1" in place for place in places)
    named = [place.split("fetches ")[1] for place in places if place.startswith("tile 0") and "fetches" in place]
    assert named == ["item 2", "item 3", "item 4", "item 5"]


def test_the_command_names_the_steps_of_second_lookups(paged):
    picture = MemoryPicture(paged.trace, paged.found)
    wanted = [n for n, step in enumerate(paged.trace.steps, 1) if len(picture.lit(step).lookups) == 2]
    assert second_lookups(paged) == wanted and len(wanted) == paged.totals["straddles"]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([256], "256 threads"), ([1], "1 thread"), ([256, 256], "256 threads, 2 rows each"),
        ([128, 64], "192 times by up to 128 threads"),
    ],
)  # fmt: skip
def test_who_looked_an_entry_up(events, said):
    assert askers(events) == said


def test_a_case_is_told_in_words(paged):
    assert case_words(paged.found.case) == [
        "6 query heads and 1 KV head of 256 numbers", "pages of 48", "17 new rows after 300 positions in the cache",
    ]  # fmt: skip
    assert case_words("x") == ["case x"]


def test_a_still_needs_no_css_variables(paged):
    picture = still_svg(paged, None)
    assert "var(" not in picture and "--" not in picture
    for scheme in (picture.split("@media")[0], picture.split("@media")[1].split("</style>")[0]):
        assert {look for look in ("read", "write", "used") if re.search(rf"rect\.{look} {{ fill: #", scheme)} == {
            "read",
            "write",
            "used",
        }


@pytest.mark.parametrize(
    ("name", "flags"), [("prompt_attention", {"page_size": 7}), ("decode_rows", {"page_size": 40}), ("fn_qsa_scores_kernel", {})]
)  # fmt: skip
def test_the_lookups_of_a_step_are_as_many_as_its_threads_made(name, flags, narrow):
    result = trace_of(name, **flags)
    picture = MemoryPicture(result.trace, result.found)
    shown, counted = [], []
    for step in result.trace.steps:
        shown.append(sum(times for _, _, times, *_ in picture.lit(step).lookups))
        counted.append(sum(op.lanes for op in step.ops.values() if (op.kind, op.array) == ("count", "lookups")))
    assert shown == counted and sum(counted) == result.totals["lookups"] > 0


def test_its_rows_are_lit_in_both_pages(paged):
    picture = MemoryPicture(paged.trace, paged.found)
    lit = [one for one in map(picture.lit, paged.trace.steps) if len(one.lookups) == 2][0]
    read = {rect.look for rect in lit.rects if rect.look.startswith("read")}
    frames = [rect.look for rect in lit.rects if rect.look.startswith("frame")]
    assert read == {"read first", "read second"} and frames == ["frame first", "frame second"]
    rows = sum(rect.width for rect in lit.rects if rect.look.startswith("read") and rect.y >= picture.cache.pool_top)
    assert rows == pytest.approx(32 * picture.cache.slot)


@pytest.mark.parametrize(
    ("flags", "lookups", "straddles"),
    [({"layout": "window"}, 0, 0), ({"layout": "paged-p256"}, 5120, 0), ({"page_size": 64}, 5120, 0)],
)
def test_layouts_where_nothing_straddles(flags, lookups, straddles, narrow):
    totals = trace_of("prompt_attention", **flags).totals
    assert (totals["lookups"], totals["straddles"]) == (lookups, straddles)


def test_slots_say_which_item_they_hold_and_whether_it_has_landed(paged):
    picture = MemoryPicture(paged.trace, paged.found)
    lit = list(map(picture.lit, paged.trace.steps))
    texts = [[label.text for label in one.labels] for one in lit]
    assert ["copied, on its way", "item 0, on its way"] in texts
    assert ["copied, landed", "item 0, landed", "item 1, on its way"] in texts


def test_a_read_of_a_slot_lights_the_rows_that_it_came_from(paged):
    picture = MemoryPicture(paged.trace, paged.found)
    lit = list(map(picture.lit, paged.trace.steps))
    copied = next(one for one in lit if len(one.lookups) == 2)
    used = next(one for one in lit if any(rect.look == "used second" for rect in one.rects))
    rows = [[replace(r, look="") for r in one.rects if r.look in looks] for one, looks in (
        (copied, ("read first", "read second")), (used, ("used first", "used second")),
    )]  # fmt: skip
    assert rows[0] == rows[1] and len(rows[0]) == 4


# --- The page -------------------------------------------------------------------------------------------------------


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


@pytest.mark.parametrize("name", kernel_names())
def test_every_kernel_has_a_page(name):
    result = trace_of(name)
    page, picture = html(result), still_svg(result, None)
    data = data_of(page)
    assert len(page.encode()) < MOST_BYTES and picture.startswith("<svg ")
    assert len(data["steps"]) == len(result.trace.steps) > 0
    for one in data["functions"]:
        source = (ROOT / one["file"]).read_text().splitlines()
        assert one["lines"] == source[one["first"] - 1 :][: len(one["lines"])]
        assert all(one["first"] <= int(line) < one["first"] + len(one["lines"]) for line in one["counts"])


def test_the_picture_of_the_documentation_is_current(paged):
    wanted = still_svg(paged, None)
    command = "run: .venv/bin/refengine trace prompt_attention --svg docs/walk.svg"
    assert (ROOT / "docs" / "walk.svg").read_text(encoding="utf-8") == wanted, command


def test_the_page_needs_nothing_else(paged):
    page = html(paged)
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["data:,"]
    assert "@import" not in page and "url(" not in page and str(ROOT) not in page


def test_a_page_survives_source_that_looks_like_markup(paged):
    changed = Traced(paged.trace, paged.found)
    kernel_function = next(iter(changed.functions.values()))
    kernel_function.lines[0] = "</script><!-- <script>"
    assert data_of(html(changed))["functions"][0]["lines"][0] == "</script><!-- <script>"


# --- The command ----------------------------------------------------------------------------------------------------


def refengine(*arguments) -> int:
    return status_of(lambda: app(list(map(str, arguments)), standalone_mode=False), debug=False)


def test_the_command_writes_a_page_a_still_and_a_report(tmp_path, capsys):
    files = [tmp_path / name for name in ("page.html", "still.svg", "report.json")]
    assert refengine("trace", "--out", files[0], "--svg", files[1], "--json", files[2]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("TRACED prompt_attention: 85 steps, 414,720 global bytes")
    assert last.endswith("; second lookups at steps 12, 19, 38, 44, 55, 61")
    assert all(file.stat().st_size > 1000 for file in files)
    report = json.loads(files[2].read_text())
    assert report["totals"]["straddles"] == 6 and "lookup 2: entry 1" in files[1].read_text()


def test_a_kernel_with_a_fault_is_named(tmp_path, capsys, monkeypatch):
    entry = entry_named("rms_norm")
    fault = next(m for m in mutants(entry) if "barrier" in m.says or "barrier" in m.name)
    monkeypatch.setattr(kernel_case, "product_modules", lambda one: mutated(entry, fault))
    assert refengine("trace", "rms_norm_kernel", "--out", tmp_path / "page.html") == 1
    assert re.search(r"^FAULT rms_norm_kernel: .*no barrier", capsys.readouterr().out, re.MULTILINE)


def test_an_entry_of_the_contract_stands_for_its_first_kernel(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert refengine("trace", "rms_norm") == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("open trace-rms_norm_kernel.html")
    assert (tmp_path / "trace-rms_norm_kernel.html").exists()


def test_a_kernel_that_leaves_its_array_is_a_finding(tmp_path, capsys, monkeypatch):
    entry = entry_named("rms_norm")
    fault = replace(
        mutants(entry)[0], old="add_squares(squares, x[row, word])", new="add_squares(squares, x[row + 99, word])"
    )
    monkeypatch.setattr(kernel_case, "product_modules", lambda one: mutated(entry, fault))
    assert refengine("trace", "rms_norm_kernel", "--out", tmp_path / "page.html") == 1
    assert re.search(
        r"^FAULT rms_norm_kernel: .*index 99 is outside global array x", capsys.readouterr().out, re.MULTILINE
    )
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["promt_attention"], "KERNEL promt_attention: unknown; did you mean prompt_attention or"),
        (["--block", "a"], "--block a: write x,y,z"),
        (["--block", "9,9,9"], "block (9, 9, 9): its grid is (1, 3, 1)"),
        (["rms_norm_kernel", "--page-size", "16"], "--page-size: rms_norm_kernel reads no pages"),
        (["--page-size", "0"], "--page-size 0: at least 1"),
        (["--layout", "window", "--page-size", "16"], "--page-size 16: window has no choice of it"),
        (["--layout", "tiled"], "--layout tiled: unknown"),
        (["--rows", "0"], "--rows 0: at least 1"),
        (
            ["decode_scalar", "--rows", "1000"],
            "--rows 1000: no launch of decode_scalar can be made with that: a window of",
        ),
        (["keep_kernel", "--rows", "1"], "--rows 1: no launch of keep_kernel can be made with that"),
        (["mix_kernel", "--rows", "5"], "--rows: mix_kernel takes no rows of a stream here"),
        (["rope_record_kernel", "--layout", "paged"], "--layout: rope_record_kernel reads no pages here"),
        (["rope_record_kernel", "--page-size", "8"], "--page-size: rope_record_kernel reads no pages here"),
        (["--svg", "x", "--out", "x"], "--svg x: is the file of --out"),
        (["--json", "./x", "--out", "x"], "--json x: is the file of --out"),
        (["--step", "3"], "--step 3: is for the still"),
        (["--svg", "s.svg", "--step", "999"], "--step 999: the trace has 97 steps"),
    ],
)
def test_bad_calls_are_one_line(arguments, named, tmp_path, capsys, monkeypatch, narrow):
    monkeypatch.chdir(tmp_path)
    assert refengine("trace", *arguments) == 2
    error = capsys.readouterr().err
    assert named in error and len(error.splitlines()) == 1
