"""``refengine pool`` tells the source documents' story, its books add up after every pass, and what it cannot read it refuses."""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from backends.paged import PagedBackend
from backends.pool import PoolBroken
from refengine import cli, debug
from refengine.commands import pool
from refengine.errors import UserError
from refengine.lab.pool_books import STATES, Held
from refengine.lab.pool_picture import MOST_POINTS, Panel, drawn, thinned
from refengine.lab.pool_requests import Entry, Shared, arrivals, prompt_of, read_requests
from refengine.lab.pool_run import Simulation, Story, outcomes
from refengine.registry import load_model
from refengine.serve.settings import MIB, Plan, Settings, memory_for, model_bytes, planned

TINY = load_model("qwen3.5-tiny")
PAGE, ROW = 16 * TINY.kv_bytes_per_token(), TINY.kv_bytes_per_token()
"""Bytes of a page of 16 positions, and of one position."""
RUN_PAGES = -(-TINY.state_bytes // PAGE)
SMALL = ("pool", "qwen3.5-tiny", "--context", "2000", "--parallel", "4", "--page-sizes", "16")


@pytest.fixture
def refengine(monkeypatch, capsys, tmp_path):
    """Call the command in an empty folder: (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["refengine", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code, *capsys.readouterr()

    yield call
    debug.on = False


def plan(left: int, parallel: int = 4, context: int = 2000, pages: int = 16, every: str = "1", **more) -> Plan:
    """A plan for caches of ``left`` bytes."""
    return planned(TINY, Settings(parallel, context, memory_for(model_bytes(TINY) + left), pages, every, **more))


def simulated(made: Plan, entries: list[Entry], cached: bool = True) -> Story:
    """Its run, the books checked after every pass."""
    simulation = Simulation(made, arrivals(entries, TINY.vocabulary, 0), cached)
    simulation.scheduler.checked = True
    story = simulation.run()
    check_whole(simulation)
    return story


def check_whole(simulation: Simulation) -> None:
    """Every request is over, and without the kept prompts the pool is as it was in the beginning."""
    backend = simulation.backend
    if simulation.cache is not None:
        simulation.cache.clear()
    assert not simulation.active and not simulation.scheduler.live and not backend.streams
    backend.check()
    if isinstance(backend, PagedBackend):
        assert backend.pool.free == backend.pool.available == backend.pool.count


# --- The story --------------------------------------------------------------------------------------------------------


def test_windows_refuse_16_streams_and_pages_serve_them_in_turns(refengine, tmp_path):
    """16 prompts of 109k tokens beside 88 GiB, as in the source documents."""
    status, out, err = refengine("pool", "--page-sizes", "256", "--json", "report.json")
    lines = out.splitlines()
    assert (status, err) == (0, "") and lines[-1] == "POOL 16 requests: 16 finished, 4 waited, 0 refused"
    assert lines[0] == (
        "window: refused: --parallel 16 needs 130.29 GiB for its streams at a 131072-token window, and 88.00 GiB are left: use "
        "--parallel 10 (or --kv-pages 256, which waits instead)"
    )
    report = json.loads((tmp_path / "report.json").read_text())
    figures = report["arms"][1]["figures"]
    stream = -(-(109000 + 48) // 256) + 10
    assert figures["pool_pages"] == 5630 and figures["streams_at_most"] == 5630 // stream == 12
    assert figures["positions_read"] == 16 * 109000 and figures["positions_resumed"] == 0
    waits = [one["waited"] for one in report["arms"][1]["requests"]]
    assert waits[:12] == [0] * 12 and waits[12:] == sorted(waits[12:]) and waits[12] > 109000 // 4096


def test_windows_serve_as_many_as_the_refusal_names(refengine):
    call = ("pool", "--kv-pages", "0", "--requests", "12x900+3", "--parallel")
    status, out, _ = refengine(*call, 10)
    assert status == 0 and out.splitlines()[-1] == "POOL 12 requests: 12 finished, 2 waited, 0 refused"
    status, out, err = refengine(*call, 11)
    assert status == 2 and out.splitlines()[-1] == "POOL 12 requests: 0 finished, 0 waited, 12 refused"
    assert (
        err.startswith("refengine: no form of cache could run a request: --parallel 11 needs") and err.count("\n") == 1
    )


def test_a_request_that_never_fits_is_refused_alone(refengine):
    """Before it is queued; so nobody waits behind it."""
    status, out, err = refengine(*SMALL, "--requests", "1x2000+1,3x100+5,2x1990+10,1x3000+1")
    assert (status, err) == (0, "") and out.splitlines()[-1] == "POOL 7 requests: 5 finished, 1 waited, 2 refused"
    assert "request 1: paged: a stream of 2001 positions: the context is 2000" in out
    assert "request 7: paged: a stream of 3001 positions" in out


def test_a_request_that_the_pool_never_holds_is_refused_with_the_number_that_would_do():
    """The pool has a run and nine pages: 144 positions are served, 145 are not."""
    made = plan((RUN_PAGES + 9 + 1) * PAGE + 20000)
    assert made.sizes.pool == RUN_PAGES + 9
    story = simulated(made, [Entry(140, 5), Entry(140, 4)])
    assert "ask for at most 144 positions" in story.lives[1].reason and story.lives[1].outcome == "refused"
    assert story.lives[2].outcome == "done" and story.lives[2].waited == 0


def test_nothing_that_fits_is_status_2(refengine):
    status, out, err = refengine(*SMALL, "--requests", "2x3000+1")
    assert status == 2 and out.splitlines()[-1] == "POOL 2 requests: 0 finished, 0 waited, 2 refused"
    assert (
        err.count("\n") == 1 and "the context is 2000; give it at most 2000 tokens" in err and "(1 more like it)" in err
    )


def test_the_example_of_the_help_runs_by_default(refengine):
    status, out, _ = refengine("pool", "--help")
    assert status == 0 and "refengine pool qwen3.8-27b --requests 16x109000+48" in " ".join(out.split())


# --- Figures ----------------------------------------------------------------------------------------------------------


def test_waste_is_counted_by_hand():
    """A prompt of 20 and a reply of 30: 2 pages of 4 are taken, 12 slots of them empty. It is cancelled before it takes more."""
    made = plan(64 * MIB)
    story = simulated(made, [Entry(20, 30, cancel=6)], cached=False)
    books = story.peak.books
    assert (books.streams, books.promised, books.tail) == (2 * PAGE, 2 * PAGE, 12 * ROW)
    assert (books.runs, books.rounding) == (RUN_PAGES * PAGE, RUN_PAGES * PAGE - TINY.state_bytes)
    assert story.unused == 2 * PAGE and story.count("cancelled") == 1 and story.read == 20 and story.rounds == 6


def test_a_windows_waste_is_what_it_reserves_beyond_its_positions():
    story = simulated(plan(64 * MIB, pages=0), [Entry(20, 6)])
    books = story.peak.books
    assert (books.streams, books.tail) == (25 * ROW, (2000 - 25) * ROW) and books.promised == books.tail
    assert books.free == 3 * (2000 * ROW + TINY.state_bytes)


def test_a_reply_that_is_written_whole_wastes_no_promise():
    assert simulated(plan(64 * MIB), [Entry(20, 30)]).unused == 0


def test_waits_are_rounds_in_the_line():
    """One place: the second request comes in round 3, when the first has two rounds to go."""
    story = simulated(
        plan(64 * MIB, 1), [Entry(10, 4), Entry(10, 2, arrive=3), Entry(10, 9, arrive=3, cancel=4)], False
    )
    first, second, third = story.lives.values()
    assert (first.admitted, first.over, first.waited) == (1, 3, 0)
    assert (second.joined, second.admitted, second.waited) == (3, 4, 1)
    assert (third.outcome, third.admitted, third.waited) == ("cancelled", 0, 1) and story.waits == [1, 1]


def test_rounds_in_which_nobody_is_there_are_passed_over():
    story = simulated(plan(64 * MIB), [Entry(10, 2), Entry(10, 2, arrive=10**9)])
    assert story.rounds == 10**9 and len(story.moments) == 2 and story.count("done") == 2


@pytest.mark.parametrize("every", ["1", "0"], ids=["paged", "mixed"])
def test_prompts_that_begin_alike_share_pages(every):
    """Later ones read only what is their own; 3 of them share the 5 full pages of 90 tokens, and copy the sixth."""
    made = plan(64 * MIB, every=every, kept_prompts=4)
    entries = [Entry(100, 40, shared=Shared("manual", 90)), Entry(120, 40, 3, Shared("manual", 90), arrive=3)]
    story = simulated(made, entries)
    assert story.resumed == (3 * 90 if every == "1" else 0) and story.read == 100 + 3 * 120 - story.resumed
    assert story.shared_pages == (5 if every == "1" else 0)
    cold = simulated(made, entries, cached=False)
    assert (cold.resumed, cold.shared_pages, cold.read) == (0, 0, 460)


def test_a_window_resumes_from_pages():
    """Place 0 keeps a window, and a prompt that a stream on pages has read is there when the place is free again."""
    shared = Shared("manual", 64)
    entries = [Entry(10, 2), Entry(100, 5, shared=shared), Entry(100, 5, shared=shared, arrive=3)]
    story = simulated(plan(64 * MIB, 2, every="0", kept_prompts=4), entries)
    assert story.resumed == 64 and story.count("done") == 3


# --- Books ------------------------------------------------------------------------------------------------------------

FORMS = {"window": (0, "1"), "paged 1": (1, "1"), "paged 16": (16, "1"), "p256": (256, "1"), "mixed 48": (48, "0")}


def random_list(seed: int) -> list[Entry]:
    """Requests of many lengths, some that begin alike, come late or are cancelled; a few that never fit."""
    pick = random.Random(seed)
    found = []
    for _ in range(12):
        prompt, arrive = pick.choice([1, 15, 16, 17, 100, 255, 256, 500, 900, 1999, 2500]), pick.randint(1, 30)
        shared = Shared(pick.choice("ab"), pick.randint(1, prompt)) if pick.random() < 0.6 else None
        cancel = arrive + pick.randint(1, 40) if pick.random() < 0.3 else None
        found.append(Entry(prompt, pick.randint(1, 60), pick.randint(1, 2), shared, arrive, cancel))
    return found


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("seed", range(4))
def test_the_books_add_up_after_every_pass(form, seed):
    """What streams, kept prompts and promises take, and what is free, is always all there is; in the end all is free."""
    made = plan(41 * MIB if form[0] == 0 else 22 * MIB, 4, 2000, *form, prompt_rows=300, kept_prompts=3)
    story = simulated(made, random_list(seed))
    pages = (made.sizes.pool or 0) * made.page_bytes if form[0] else 0
    windows = {"window": 4 * made.window_bytes, "mixed": 2000 * ROW}.get(made.backend, 0)
    assert {sum(getattr(one.books, state) for state in STATES) for one in story.moments} == {pages + windows}
    assert all(min(getattr(one.books, part.name) for part in fields(Held)) >= 0 for one in story.moments)
    assert sum(count for _, count in outcomes(story)) == len(story.lives) == sum(e.count for e in random_list(seed))
    assert story.count("failed") == 0 and story.count("done") > 5 and story.waits


def test_two_runs_are_alike(refengine, tmp_path):
    call = (*SMALL, "--requests", "9x700+9", "--memory-gib", "0.05", "--seed", "5", "--json", "report.json")
    reports = []
    for _ in range(2):
        assert refengine(*call)[0] == 0
        reports.append((tmp_path / "report.json").read_text())
    assert reports[0] == reports[1]


def test_debug_looks_through_the_books(refengine, monkeypatch):
    """A stream that forgets to give its pages back is found at once; without --debug nobody looks."""

    def leaky(backend, stream):
        backend.forget(stream)
        backend.pool.claims.remove(stream.claim)
        stream.pages, stream.claim = [], None

    monkeypatch.setattr(PagedBackend, "freed", leaky)
    call = (*SMALL, "--requests", "2x40+3", "--no-prompt-cache")
    assert refengine(*call)[0] == 0
    status, _, err = refengine(*call, "--debug")
    assert status == 2 and PoolBroken.__name__ in err and "1 holders on the books, 0 in fact" in err


# --- The list ---------------------------------------------------------------------------------------------------------


def test_short_lists():
    assert read_requests("16x109000+512") == [Entry(109000, 512, 16)]
    assert read_requests("2x3+4, 5+6") == [Entry(3, 4, 2), Entry(5, 6, 1)]


def test_a_file_says_what_a_list_can(tmp_path):
    path = tmp_path / "list.yaml"
    shared = "- {count: 8, prompt: 90, tokens: 6, shared: {with: manual, tokens: 80}, arrive: 3}"
    path.write_text(f"{shared}\n- {{prompt: 1, tokens: 4, cancel: 9}}\n")
    assert read_requests(str(path)) == [Entry(90, 6, 8, Shared("manual", 80), 3), Entry(1, 4, cancel=9)]


LISTS = [
    ("", "list.yaml: must be a list of requests"),
    ("[]", "list.yaml: is empty"),
    ("prompt: 3", "list.yaml: must be a list of requests"),
    ("- 3", "list.yaml: [0]: must be a mapping, not 3"),
    ("- {prompt: 3}", "list.yaml: [0].tokens: missing key"),
    ("- {prompt: 3, tokens: 4}\n- {promt: 3, tokens: 4}", "list.yaml: [1].promt: unknown key; did you mean prompt?"),
    ("- {prompt: 3, tokens: 4, tokens: 5}", "list.yaml: line 1: tokens: repeated key"),
    ("- {prompt: '3', tokens: 4}", 'list.yaml: [0].prompt: must be a whole number, not the text "3"'),
    ("- {prompt: 3.0, tokens: 4}", "list.yaml: [0].prompt: must be a whole number, not 3.0"),
    ("- {prompt: true, tokens: 4}", "list.yaml: [0].prompt: must be a whole number, not true"),
    ("- {prompt: 0, tokens: 4}", "list.yaml: [0].prompt: 0; at least 1"),
    ("- {prompt: 3, tokens: 0}", "list.yaml: [0].tokens: 0; at least 1"),
    ("- {prompt: 3, tokens: 4, count: -1}", "list.yaml: [0].count: -1; at least 1"),
    ("- {prompt: 3, tokens: 4, arrive: 0}", "list.yaml: [0].arrive: 0; at least 1"),
    ("- {prompt: 3, tokens: 4, arrive: 5, cancel: 5}", "list.yaml: [0].cancel: round 5; it arrives in round 5"),
    ("- {prompt: 3, tokens: 4, shared: manual}", "list.yaml: [0].shared: must be a mapping"),
    ("- {prompt: 3, tokens: 4, shared: {tokens: 2}}", "list.yaml: [0].shared.with: missing key"),
    ("- {prompt: 3, tokens: 4, shared: {with: 7, tokens: 2}}", "list.yaml: [0].shared.with: must be text, not 7"),
    (
        "- {prompt: 3, tokens: 4, shared: {name: a, tokens: 2}}",
        "[0].shared.name: unknown key; known keys: with, tokens",
    ),
    ("- {prompt: 3, tokens: 4, shared: {with: a, tokens: 4}}", "[0].shared.tokens: 4; the prompt has 3"),
    ("- {prompt: 3, tokens: 4, shared: {with: a, tokens: 0}}", "[0].shared.tokens: 0; the prompt has 3"),
    ("- {prompt: 3, tokens: 4, count: 5000}", "list.yaml: 5000 requests; at most 4096"),
    ("- {prompt: 99999999, tokens: 4}", "list.yaml: 100000003 tokens of prompts and replies; at most"),
    ("- {prompt: 3", "list.yaml: line 1: expected"),
]


@pytest.mark.parametrize(("text", "named"), LISTS, ids=[named for _, named in LISTS])
def test_a_list_that_is_none_is_refused_by_key(refengine, tmp_path, text, named):
    (tmp_path / "list.yaml").write_text(text)
    status, out, err = refengine(*SMALL, "--requests", "list.yaml")
    assert (status, out) == (2, "") and err.startswith("refengine: ") and err.count("\n") == 1 and named in err


REFUSED = [
    (("--requests", "16x"), "--requests 16x: no such file"),
    (("--requests", "0x5+5"), "--requests 0x5+5: no such file"),
    (("--requests", "3x5+0"), "--requests 3x5+0: no such file"),
    (("--requests", ""), "--requests"),
    (("--requests", "."), "--requests .: no such file"),
    (("--requests", "y" * 5000), ": no such file"),
    (("--page-sizes", "9" * 5000), "whole numbers, commas between them"),
    (("--requests", "9000x1+1"), "--requests 9000x1+1: 9000 requests; at most 4096"),
    (("--page-sizes", "16,16"), "16 stands twice"),
    (("--page-sizes", "0"), "--page-sizes 0"),
    (("--page-sizes", "16,,48"), "--page-sizes 16,,48: ''"),
    (("--page-sizes", "9999999"), "--page-sizes 9999999: at most"),
    (("--kv-pages", "-1"), "--kv-pages -1: at least 0"),
    (("--parallel", "0"), "--parallel 0: at least 1"),
    (("--parallel", "5000"), "--parallel 5000: at most 4096"),
    (("--context", "0"), "--context 0: at least 1"),
    (("--context", "300000"), "--context 300000: qwen3.5-tiny has 262144 positions"),
    (("--kv", "fp4"), "--kv fp4"),
    (("--memory-gib", "0"), "--memory-gib 0"),
    (("--prompt-rows", "0"), "--prompt-rows 0"),
    (("--seed", "-1"), "--seed -1"),
    (("--plot", "picture.pdf"), "--plot picture.pdf: name a file that ends in .svg or .png"),
    (("--plot", "missing/picture.svg"), "--plot missing/picture.svg: cannot be written"),
    (("--json", "missing/report.json"), "--json missing/report.json"),
]


@pytest.mark.parametrize(("arguments", "named"), REFUSED, ids=[" ".join(a)[:40] for a, _ in REFUSED])
def test_refusal_is_one_line_before_anything_runs(refengine, monkeypatch, tmp_path, arguments, named):
    monkeypatch.setattr(Simulation, "run", lambda *_: pytest.fail("it ran"))
    status, out, err = refengine(*SMALL, *arguments)
    assert (status, out) == (2, "") and list(tmp_path.iterdir()) == []
    assert err.startswith("refengine: ") and err.count("\n") == 1 and named in err


def test_an_unknown_model_is_refused(refengine):
    status, _, err = refengine("pool", "qwen3.8-72b")
    assert status == 2 and "qwen3.8-27b" in err and err.count("\n") == 1


def test_tables_too_long_to_simulate_are_refused(refengine):
    status, out, err = refengine("pool", "--page-sizes", "1", "--parallel", "4000")
    assert status == 2 and "at most 4194304 are simulated" in err and "POOL 16 requests: 0 finished" in out


def test_prompts_of_a_name_begin_alike_and_others_do_not():
    long, short = Entry(50, 1, shared=Shared("a", 40)), Entry(30, 1, shared=Shared("a", 20))
    one, two = prompt_of(long, 1, 1000, 0), prompt_of(short, 2, 1000, 0)
    assert one[:20] == two[:20] and one[20:30] != two[20:30]
    assert prompt_of(Entry(50, 1, shared=Shared("b", 40)), 1, 1000, 0)[:20] != one[:20]
    assert prompt_of(long, 1, 1000, 0) == one != prompt_of(long, 1, 1000, 1)


# --- Report and picture -----------------------------------------------------------------------------------------------


def test_the_report_has_claims_and_the_table_says_the_same(refengine, tmp_path):
    call = (*SMALL, "--requests", "6x1000+9", "--memory-gib", "0.04", "--json", "report.json", "--kv-pages-all", "no")
    status, out, _ = refengine(*call)
    report = json.loads((tmp_path / "report.json").read_text())
    claims = {one["name"]: one["value"] for one in report["claims"]}
    assert (
        status == 0 and report["verdict"] == out.splitlines()[-1] and {"command", "versions", "claims"} <= set(report)
    )
    assert all(set(one) == {"name", "value", "unit"} for one in report["claims"])
    row = next(line for line in out.splitlines() if line.startswith("│ mixed 16"))
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[1] == f"{claims['pool/mixed 16/pool_pages']:,}" and cells[2] == str(
        claims["pool/mixed 16/streams_at_most"]
    )
    assert cells[3] == str(claims["pool/mixed 16/waited"]) != "0" and cells[8] == "6,000"


@pytest.mark.parametrize(("name", "start"), [("p.svg", b"<?xml"), ("p.png", b"\x89PNG")])
def test_the_picture_is_written_with_a_panel_a_form(refengine, tmp_path, name, start):
    call = (*SMALL, "--requests", "6x1000+9", "--memory-gib", "0.04", "--page-sizes", "16,48", "--plot", name)
    assert refengine(*call)[0] == 0
    data = (tmp_path / name).read_bytes()
    assert data.startswith(start) and [path.name for path in tmp_path.iterdir()] == [name]
    if name == "p.svg":
        text = data.decode()
        for words in (
            "window",
            "paged 16",
            "paged 48",
            "refused: --parallel 4 needs",
            "memory for caches, GiB",
            ">round<",
        ):
            assert words in text, words
        assert refengine(*call)[0] == 0 and (tmp_path / name).read_bytes() == data


@pytest.mark.parametrize("panels", [1, 2, 3, 4, 7])
def test_nothing_of_the_picture_is_cut_off(panels):
    figure = drawn("Who holds the memory, and who waits? " * 3, [Panel("window", None, "no room " * 20)] * panels)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for part in (*figure.legends, *figure.texts, *(text for axes in figure.axes for text in axes.texts)):
        inside = part.get_window_extent(canvas.get_renderer())
        assert inside.x0 >= 0 and inside.y0 >= 0, part
        assert inside.x1 <= figure.bbox.x1 and inside.y1 <= figure.bbox.y1, part


def test_a_picture_is_whole_or_absent(refengine, monkeypatch, tmp_path):
    """A disk that fills at the last moment leaves no file behind."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    status, _, err = refengine(*SMALL, "--requests", "1x10+2", "--plot", "p.svg")
    assert status == 2 and "--plot p.svg" in err and "No space" in err and list(tmp_path.iterdir()) == []


def test_a_long_run_is_drawn_by_its_fullest_rounds():
    story = simulated(plan(64 * MIB), [Entry(10, 1500), Entry(10, 1500, arrive=1400)], False)
    points = thinned(story.moments)
    assert len(story.moments) > MOST_POINTS >= len(points) and story.peak.books in [one.books for one in points]
    assert re.match("POOL 2 requests: 2 finished", pool.verdict_line([pool.Arm(story.plan.settings, story)], 2))


def test_a_bad_call_reads_no_list():
    with pytest.raises(UserError, match="name a YAML file, or write COUNTxPROMPT"):
        read_requests("109000")
