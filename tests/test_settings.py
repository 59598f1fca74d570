"""A plan's bytes are the arena's, what it refuses does not fit, and what it names instead does."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from refengine.errors import UserError
from refengine.registry import load_model
from refengine.serve.settings import GIB, MIB, Plan, Settings, fits, memory_for, model_bytes, planned, startup_line

TINY, LARGE = load_model("qwen3.5-tiny"), load_model("qwen3.8-27b")
PAGES = [
    {},
    {"kv_pages": 1},
    {"kv_pages": 48},
    {"kv_pages": 48, "kv_pages_all": "1"},
    {"kv_pages": 256, "kv_pages_all": "1"},
]
IDS = ["window", "mixed 1", "mixed 48", "paged 48", "paged-p256"]


def plan(left: float, parallel: int = 3, context: int = 200, spec=TINY, **more) -> Plan:
    """A plan for caches of ``left`` bytes."""
    return planned(spec, Settings(parallel, context, memory_for(model_bytes(spec) + int(left)), **more))


def refusal(*arguments, **more) -> str:
    with pytest.raises(UserError) as caught:
        plan(*arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def number(flag: str, text: str) -> int:
    """What a refusal says would do."""
    return int(re.search(rf"use [^(]*{flag} (\d+)", text)[1])


# --- Whose semantics --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pages", "every", "backend"),
    [(p, a, "window") for p in (None, 0) for a in (None, "", "0", "1", "2")]
    + [(p, a, "mixed") for p in (1, 48, 256) for a in (None, "", "0", "2", "01", " 1", "true")]
    + [(1, "1", "paged"), (48, "1", "paged"), (255, "1", "paged"), (256, "1", "paged-p256")],
)
def test_pages_are_opt_in_and_windows_go_only_at_exactly_1(pages, every, backend):
    made = plan(64 * MIB, kv_pages=pages, kv_pages_all=every)
    assert made.backend == made.build().name == backend
    assert made.build().positions == (pages or 200)


def test_parallel_is_a_reservation_with_windows_and_a_cap_with_pages():
    """Sixteen windows do not fit; sixteen streams on pages are a plan, of which some will wait."""
    left = 4 * plan(GIB, 1).window_bytes
    assert "use --parallel 3 " in refusal(left, 16)
    assert plan(left, 16, kv_pages=48, kv_pages_all="1").sizes.streams == 16


# --- Bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("form", PAGES, ids=IDS)
@pytest.mark.parametrize(("parallel", "context", "rows"), [(1, 1, 1), (3, 200, 1), (2, 97, 4), (4, 96, 128)])
def test_the_planned_bytes_are_the_arenas(form, kv, parallel, context, rows):
    made = plan(256 * MIB, parallel, context, kv=kv, window_rows=rows, kept_prompts=2, **form)
    backend, parts = made.build(), dict(made.parts)
    assert backend.pages.nbytes == parts.pop("tables")
    assert backend.arena.words.nbytes == sum(parts.values()) <= made.left == 256 * MIB
    assert {name: 4 * start for name, start in backend.arena.starts.items()} == {
        "cache": 0, "runs": parts["cache"], "records": parts["cache"] + parts["runs"],
    }  # fmt: skip


@pytest.mark.parametrize("form", PAGES[1:], ids=IDS[1:])
def test_the_pool_is_what_is_left_and_not_a_page_more(form):
    made = plan(20 * MIB, 5, 3000, **form)
    more = replace(made.sizes, pool=made.sizes.pool + 1)
    assert fits(made.left, made.shape, made.settings, made.sizes) and not fits(
        made.left, made.shape, made.settings, more
    )
    assert made.build().pool.count == made.sizes.pool


def test_the_pool_is_no_larger_than_streams_and_kept_prompts_can_need():
    """A stream of 200 positions takes 5 pages of 48 and a run; so does a kept prompt, and a window no pages but its run."""
    made = plan(GIB, 3, kv_pages=48, kv_pages_all="1")
    run = made.run_pages
    assert run == -(-TINY.state_bytes // TINY.bytes_a_page(48)) and made.sizes.pool == 3 * (5 + run)
    assert plan(GIB, 3, kv_pages=48, kv_pages_all="1", kept_prompts=2).sizes.pool == 5 * (5 + run)
    assert plan(GIB, 3, kv_pages=48).sizes.pool == 2 * 5 + 3 * run


@pytest.mark.parametrize("spec", [TINY, LARGE], ids=["tiny", "27b"])
@pytest.mark.parametrize("left", [1, 2, 3, 5, MIB, 88 * GIB])
def test_a_tenth_is_reserved_and_the_model_taken(spec, left):
    """``memory_for`` has no byte to spare: what is left is what was asked for, rounding of the reserve aside."""
    made = plan(left, 1, 1, spec, kv_pages=0) if left > MIB else None
    memory = round(memory_for(model_bytes(spec) + left) * GIB)
    assert memory - memory // 10 - model_bytes(spec) == left
    assert memory - 1 - (memory - 1) // 10 - model_bytes(spec) <= left
    assert made is None or (made.left, made.reserve) == (left, memory // 10)


# --- What does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [6 * MIB, 20 * MIB, 33 * MIB + 1])
def test_the_number_of_windows_that_is_named_fits_and_no_other(left):
    streams = number("--parallel", refusal(left, 40))
    assert plan(left, streams).sizes.streams == streams >= 1
    assert f"--parallel {streams + 1} needs" in refusal(left, streams + 1)


@pytest.mark.parametrize("form", [{}, {"kv_pages": 48}], ids=["window", "mixed"])
def test_the_context_that_is_named_fits_and_no_longer_one(form):
    """Where not even one window of the context does."""
    context = number("--context", refusal(6 * MIB, 4, 5000, **form))
    plan(6 * MIB, 1, context, **form)
    assert f"use --parallel 1 --context {context}" in refusal(6 * MIB, 1, context + 1, **form)


@pytest.mark.parametrize("form", PAGES, ids=IDS)
def test_the_memory_that_is_named_fits(form):
    """Where no context would do, since there is not even room for a recurrent state."""
    text = refusal(MIB, 2, 5000, **form)
    gib = float(re.search(r"use --memory-gib ([\d.]+) or more", text)[1])
    assert planned(TINY, Settings(2, 5000, gib, **form)).backend
    assert refusal(MIB, 1, 1, **form)


def test_a_model_that_does_not_fit_is_refused_with_the_memory_that_would_do():
    text = "--memory-gib 24: the model takes 50.10 GiB, and a reserve 2.40 GiB: use --memory-gib 55.67 or more"
    with pytest.raises(UserError, match=f"^{re.escape(text)}$"):
        planned(LARGE, Settings(1, 1, 24))
    with pytest.raises(UserError, match="--parallel 1 needs"):
        planned(LARGE, Settings(1, 1, 55.67))


def test_pages_are_offered_only_where_they_fit():
    assert "(or --kv-pages 256, which waits instead)" in refusal(88 * GIB, 16, 131072, LARGE, kv_pages_all="1")
    assert "kv-pages" not in refusal(MIB, 1, 5000)
    assert "(or --kv-pages-all 1, which reserves no window)" in refusal(6 * MIB, 4, 5000, kv_pages=48)
    assert "kv-pages-all" not in refusal(MIB, 4, 5000, kv_pages=48) + refusal(
        MIB, 4, 5000, kv_pages=48, kv_pages_all="1"
    )


def test_windows_of_the_source_documents_are_refused():
    """16 streams of 131072 positions, 88 GiB left: windows do not fit, and the refusal counts those that do."""
    text = (
        "--parallel 16 needs 130.29 GiB for its streams at a 131072-token window, and 88.00 GiB are left: use --parallel 10 "
        "(or --kv-pages 256, which waits instead)"
    )
    assert refusal(88 * GIB, 16, 131072, LARGE) == text
    assert plan(88 * GIB, 10, 131072, LARGE) and "--parallel 11 needs" in refusal(88 * GIB, 11, 131072, LARGE)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"parallel": 0}, "--parallel 0: at least 1"),
        ({"context": 0}, "--context 0: at least 1"),
        ({"context": 262145}, "--context 262145: qwen3.5-tiny has 262144 positions"),
        ({"kv_pages": -1}, "--kv-pages -1: at least 0"),
        ({"kv": "fp4"}, "--kv fp4: use one of bf16, fp8"),
        ({"window_rows": 0}, "window_rows 0: 1 to 128"),
        ({"window_rows": 129}, "window_rows 129: 1 to 128"),
        ({"prompt_rows": 0}, "--prompt-rows 0: at least 1"),
        ({"memory_gib": 0}, "--memory-gib 0: more than 0"),
        ({"memory_gib": float("nan")}, "--memory-gib nan: more than 0"),
        ({"memory_gib": float("inf")}, "--memory-gib inf: more than 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_flag(given, named):
    with pytest.raises(UserError, match=f"^{re.escape(named)}"):
        planned(TINY, Settings(**{"parallel": 1, "context": 10, "memory_gib": 1.0} | given))


def test_the_longest_context_is_the_models():
    assert plan(2 * GIB, 1, TINY.max_positions).sizes.context == TINY.max_positions


# --- The line ---------------------------------------------------------------------------------------------------------

LINES = [
    ({}, "4 streams at once, 2.64 GiB each at a 40960-token window"),
    (
        {"kv_pages": 256, "kv_pages_all": "1"},
        "up to 4 streams at once, taking 680 pages of 256 positions (10.62 GiB) as they need them, 10 pages fixed each",
    ),
    (
        {"kv_pages": 1},
        "up to 4 streams at once, the first at a 40960-token window (2.50 GiB), up to 3 more taking 132276 pages of 1 position "
        "(8.07 GiB) as they need them, 2349 pages fixed each",
    ),
    ({"parallel": 1, "kv_pages": 256}, "1 stream at once, at a 40960-token window (2.50 GiB), and 10 pages fixed"),
    ({"parallel": 1}, "1 stream at once, 2.64 GiB each at a 40960-token window"),
]


@pytest.mark.parametrize(("form", "streams"), LINES, ids=["window", "paged", "mixed", "mixed alone", "window alone"])
def test_the_startup_line_whole(form, streams):
    line = startup_line(plan(88 * GIB, **{"parallel": 4, "context": 40960, "spec": LARGE} | form))
    assert line == (
        f"model 50.10 GiB; {streams}, of 88.00 GiB left after a 15.34 GiB reserve; prompts in passes of up to 4096 rows"
    )
