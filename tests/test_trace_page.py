"""The trace page in a real browser: no errors, every way to step, the straddling item, light and dark, a narrow window.

``make browser`` installs headless Chromium from the npm registry into tests/browser; without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels_numba.machine.trace import traced
from refengine.lab.kernel_case import Wish, run_in
from refengine.lab.trace_data import Traced
from refengine.lab.trace_page import html
from refengine.lab.trace_picture import MemoryPicture

FOLDER = Path(__file__).parent / "browser"
MISSING = [
    *([] if shutil.which("node") else ["node"]),
    *([] if (FOLDER / "node_modules/puppeteer-core").is_dir() else ["tests/browser/node_modules (make browser)"]),
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no browser here: {', '.join(MISSING)} missing")
LEAST_CONTRAST = 4.5
"""WCAG AA, of text."""


@pytest.fixture(scope="module")
def page():
    """(what a browser saw, how many steps there are, the first step that looks two pages up)."""
    name = "prompt_attention"
    found, trace = run_in(Wish(name), lambda: traced(name), lambda one: one.mode is not None)
    result = Traced(trace, found)
    picture = MemoryPicture(trace, found)
    twice = next(n for n, step in enumerate(trace.steps, 1) if len(picture.lit(step).lookups) > 1)
    return html(result), len(trace.steps), twice


@pytest.fixture(scope="module")
def seen(page, tmp_path_factory):
    text, _, twice = page
    folder = tmp_path_factory.mktemp("page")
    (folder / "page.html").write_text(text, encoding="utf-8")
    command = ["node", str(FOLDER / "drive.mjs"), str(folder / "page.html"), str(twice)]
    unpacked = FOLDER / "node_modules" / ".unpacked"
    unpacked.mkdir(exist_ok=True)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "TMPDIR": str(unpacked)}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_browser_ran_and_met_no_error(seen):
    assert "Chrome" in seen["browser"] and seen["errors"] == []


def test_nothing_is_fetched_but_the_page(seen):
    assert seen["requests"] and all(url.startswith("file:") and "page.html" in url for url in seen["requests"])


def test_keys_step(seen, page):
    last = page[1]
    assert seen["count"] == last and seen["steps"]["opened"] == 1
    assert seen["steps"]["keys"] == [
        ["ArrowRight", 2], ["j", 3], ["ArrowLeft", 2], ["k", 1], ["k", 1], ["End", last], ["j", last], ["Home", 1],
    ]  # fmt: skip


def test_buttons_the_timeline_and_the_slider_step(seen, page):
    last = page[1]
    assert seen["steps"]["buttons"] == [["next", 2], ["next", 3], ["back", 2], ["last", last], ["first", 1]]
    assert seen["disabled"] == [True, True, False, False]
    assert seen["steps"]["timeline"] > 1 and seen["steps"]["slider"] == 7


def test_the_straddling_item_shows_its_second_lookup(seen, page):
    twice = seen["twice"]
    assert twice["status"].startswith(f"step {page[2]} of")
    assert "lookup 1: entry 0" in twice["lookups"] and "lookup 2: entry 1" in twice["lookups"]
    assert re.search(r"entry 1 → page \d+, 512 times by its threads", twice["lookups"])
    looks = [look for look, width in twice["lit"] if width > 2]
    assert {"read first", "read second", "lookup first", "lookup second", "frame first", "frame second"} <= set(looks)


def test_the_lines_of_the_step_are_marked_and_in_sight(seen):
    twice = seen["twice"]
    assert twice["here"] == 1 and twice["visible"] and twice["current"] == 1 and twice["rows"] > 3
    assert "stage_item(" in twice["lines"] and any("layout.locate" in line for line in twice["lines"])


def test_every_control_has_a_name_and_focus_shows(seen):
    assert seen["twice"]["unnamed"] == 0
    tag, outline = seen["focus"]
    assert tag != "BODY" and outline == "solid"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(seen, scheme):
    assert seen["schemes"][scheme]["contrast"] >= LEAST_CONTRAST


def test_the_schemes_differ(seen):
    assert seen["schemes"]["light"]["background"] != seen["schemes"]["dark"]["background"]


def test_a_narrow_window_has_one_column_and_no_overflow(seen):
    narrow = seen["narrow"]
    assert narrow["overflow"] <= 0 and narrow["lefts"] == 1 and narrow["tops"] == narrow["sections"] == 4
    assert seen["steps"]["narrow"] == 1
