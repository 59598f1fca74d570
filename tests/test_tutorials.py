"""A tutorial has its parts, its solution passes, its stub and every wrong answer do not, and what a learner reads is plain."""

from __future__ import annotations

import ast
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from refengine.cli import app, status_of
from refengine.commands import tutorial as tutorial_command
from refengine.errors import UserError
from refengine.lab import execute, notebook, tutorials
from refengine.lab.answers_apart import check_apart
from refengine.lab.changes import changed, edited
from refengine.lab.exercises import OK, TO_DO, WRONG, Outcome, check_answers, expect, expect_bits, expect_close
from refengine.lab.sources import DocsError, excerpt
from refengine.lab.tutorials import SECTIONS, Tutorial, find_tutorial

ALL = tutorials.tutorials()
EACH = pytest.mark.parametrize("tutorial", [pytest.param(t, id=t.number) for t in ALL])
LEAST_LINES, MOST_LINES = 120, 350
"""Of text and code, without blank ones."""


# --- The parts of a tutorial ----------------------------------------------------------------------------------------------


@EACH
def test_it_has_its_sections_in_order(tutorial):
    assert [section for section in tutorial.sections if section in SECTIONS] == list(SECTIONS)
    assert tutorial.cells[0][1].startswith(f"# {tutorial.number} · "), "the first cell is its title"
    assert tutorial.question and tutorial.question.count("?") >= 1
    written = [line for _, text in tutorial.cells for line in text.splitlines() if line.strip()]
    assert LEAST_LINES <= len(written) <= MOST_LINES


@EACH
def test_it_computes_shows_real_code_and_draws(tutorial):
    tree = ast.parse(tutorial.code)
    called = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert called.count("show") >= 2 and {"picture", "page_walk"} & set(called)
    assert sum(isinstance(node, ast.Assert) for node in ast.walk(tree)) >= 5
    assert f"refengine tutorial check {tutorial.number}" in tutorial.prose


@EACH
def test_what_it_shows_is_there(tutorial):
    """Calls of ``show`` with plain strings, without running the rest."""
    for node in ast.walk(ast.parse(tutorial.code)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "show":
            file, *names = map(ast.literal_eval, node.args)
            cut = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
            assert all(excerpt(file, name, **cut).lines for name in names)


@EACH
def test_no_code_of_the_engine_is_pasted(tutorial):
    """No four lines in a row, ten words or more, that stand in a kernel or a backend."""
    own = [line.strip() for line in tutorial.path.read_text(encoding="utf-8").splitlines()]
    engine = {run for file in engine_files() for run in runs(file.read_text(encoding="utf-8").splitlines())}
    assert [run for run in runs(own) if run in engine] == []


def engine_files() -> list[Path]:
    return [file for folder in ("kernels_numba", "backends") for file in (tutorials.ROOT / folder).rglob("*.py")]


def runs(lines: list[str]) -> list[tuple[str, ...]]:
    """Four code lines in a row, ten words or more; imports do not count."""
    code = [line.strip() for line in lines if line.strip() and not re.match(r"\s*(from|import|#)\b", line)]
    found = [tuple(code[i : i + 4]) for i in range(len(code) - 3)]
    return [run for run in found if len(re.findall(r"\w+", " ".join(run))) >= 10]


@EACH
def test_links_lead_somewhere(tutorial):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", tutorial.prose)
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (tutorial.path.parent / link).exists() and not to_come(link)] == []


def to_come(link: str) -> bool:
    """A link of "Next" to a tutorial of a number that is not there yet."""
    return bool(re.fullmatch(r"\d\d_\w+\.py", link)) and link[:2] not in {t.number for t in ALL}


# --- Exercises --------------------------------------------------------------------------------------------------------------


@EACH
def test_stub_and_solution_have_one_interface(tutorial):
    stub, solution = (functions(tutorial.exercise(kind)) for kind in ("stub", "solution"))
    shared = {name: node for name, node in solution.items() if not name.startswith("_")}
    assert list(stub) == list(shared) and len(stub) >= 2
    for name, node in stub.items():
        assert ast.unparse(node.args) == ast.unparse(shared[name].args)
        assert first_line(node) == first_line(shared[name])
        assert isinstance(node.body[-1], ast.Raise) and ast.unparse(node.body[-1]) == "raise NotImplementedError"
        assert f"`{name}`" in tutorial.prose, "the tutorial says what it is for"


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def first_line(node: ast.FunctionDef) -> str:
    return (ast.get_docstring(node) or "").splitlines()[0]


@EACH
def test_the_solution_passes(tutorial):
    outcomes = check_answers(tutorial.exercise("solution"), tutorial.tests)
    assert len(outcomes) >= 2
    assert [o for o in outcomes if o.state != OK] == []


@EACH
def test_the_stub_passes_nothing(tutorial):
    assert {o.state for o in check_answers(tutorial.exercise("stub"), tutorial.tests)} == {TO_DO}


@EACH
def test_every_test_finds_a_wrong_answer(tutorial, tmp_path):
    solution = tutorial.exercise("solution").read_text(encoding="utf-8")
    found = set()
    for number, wrong in enumerate(yaml.safe_load(tutorial.wrong.read_text(encoding="utf-8"))):
        assert solution.count(wrong["replace"]) == 1, wrong["replace"]
        path = tmp_path / f"wrong_{number}.py"
        path.write_text(solution.replace(wrong["replace"], wrong["by"]), encoding="utf-8")
        outcomes = {o.name: o for o in check_answers(path, tutorial.tests)}
        assert outcomes[wrong["test"]].state == WRONG, f"{wrong['test']} takes {wrong['by']!r}"
        assert outcomes[wrong["test"]].why
        found.add(wrong["test"])
    assert found == set(outcomes), "each test must have a wrong answer that it finds"


# --- The command ------------------------------------------------------------------------------------------------------------


def refengine(capsys, *arguments: str) -> tuple[int, str, str]:
    """(status, stdout, stderr) of a command."""
    status = status_of(lambda: app(list(arguments), prog_name="refengine", standalone_mode=False), debug=False)
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.fixture
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_start_then_check(here, capsys):
    status, out, _ = refengine(capsys, "tutorial", "start", "1")
    assert status == 0 and "refengine tutorial check 01" in out
    assert (here / "answers/t01.py").read_bytes() == find_tutorial("01").exercise("stub").read_bytes()
    status, out, _ = refengine(capsys, "tutorial", "check", "1")
    assert status == 1 and out.splitlines()[-1] == "TUTORIAL 01 0 of 6 passed"
    (here / "answers/t01.py").write_bytes(find_tutorial("01").exercise("solution").read_bytes())
    status, out, _ = refengine(capsys, "tutorial", "check", "1")
    assert status == 0 and out.splitlines()[-1] == "TUTORIAL 01 6 of 6 passed"


def test_check_of_the_solution(here, capsys):
    assert refengine(capsys, "tutorial", "check", "01", "--solution")[0] == 0


def test_answers_in_another_folder(here, capsys):
    _, out, _ = refengine(capsys, "tutorial", "start", "01", "mine")
    assert "--answers mine" in out and (here / "mine/t01.py").exists()
    assert refengine(capsys, "tutorial", "check", "01", "--answers", "mine")[0] == 1
    assert "start 01 'my own'" in refengine(capsys, "tutorial", "check", "01", "--answers", "my own")[2]
    assert "--answers 'my own'" in refengine(capsys, "tutorial", "start", "01", "my own")[1]


def test_a_wrong_answer_is_said_in_a_line(here, capsys):
    (here / "answers").mkdir()
    text = find_tutorial("01").exercise("solution").read_text(encoding="utf-8")
    (here / "answers/t01.py").write_text(text.replace("* 2 * head_dim", "* head_dim"), encoding="utf-8")
    status, out, err = refengine(capsys, "tutorial", "check", "01")
    assert status == 1 and err == "" and "Traceback" not in out
    title, why = out.splitlines()[:2]
    assert title == "wrong  1. cache_bytes: one token"
    assert why == "       cache_bytes(16, 4, 256, 1) gives 32,768, not 65,536"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def cache_bytes(:\n", "line 1: "),
        ("import no_such_module\n", "line 1: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_answers_that_cannot_be_imported(here, capsys, text, said):
    (here / "answers").mkdir()
    (here / "answers/t01.py").write_text(text)
    status, out, err = refengine(capsys, "tutorial", "check", "01")
    assert status == 2 and out == "" and f"answers/t01.py: {said}" in err and len(err.splitlines()) == 1


def test_an_answer_that_raises_is_named_by_its_line(here, capsys):
    (here / "answers").mkdir()
    (here / "answers/t01.py").write_text("def cache_bytes(*args):\n    return 1 // 0\n")
    status, out, _ = refengine(capsys, "tutorial", "check", "01")
    assert status == 1 and "       line 2: ZeroDivisionError: " in out
    assert "       answers/t01.py has no function attend\n" in out, "a function that is gone is named, too"


def test_an_endless_loop_is_one_line_and_the_next_test_runs(here, capsys):
    text = find_tutorial("01").exercise("solution").read_text(encoding="utf-8")
    (here / "t01.py").write_text(
        text + "\n\ndef cache_bytes(*args):\n    while True:\n        pass\n", encoding="utf-8"
    )
    assert tutorial_command.check("01", here, solution=False, limit=2) == 1
    out = capsys.readouterr().out.splitlines()
    late = [n for n, line in enumerate(out) if line == "       took longer than 2 s: does a loop end?"]
    assert late and all(out[n - 1].startswith("wrong  ") and "cache_bytes" in out[n - 1] for n in late)
    assert out[-1] == f"TUTORIAL 01 {6 - len(late)} of 6 passed"


TESTS = '''
def test_one(answers):
    """The first."""
    answers.one()


def test_two(answers):
    """The second."""
    assert answers.two() == 2, "two() is wrong"
'''


@pytest.mark.parametrize(
    ("one", "why"),
    [
        ("while True: pass", "took longer than 1 s: does a loop end?"),
        ("raise SystemExit(3)", "ended Python, with exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "ended Python, with signal 9"),
    ],
)
def test_an_answer_that_does_not_come_back(tmp_path, one, why):
    answers, tests = tmp_path / "answers.py", tmp_path / "tests.py"
    answers.write_text(f"def one():\n    {one}\n\n\ndef two():\n    return 3\n")
    tests.write_text(TESTS)
    assert list(check_apart(answers, tests, limit=1)) == [
        Outcome("test_one", "The first", WRONG, why),
        Outcome("test_two", "The second", WRONG, "two() is wrong"),
    ]


def test_answers_whose_import_does_not_end(tmp_path):
    answers, tests = tmp_path / "answers.py", tmp_path / "tests.py"
    answers.write_text("while True:\n    pass\n")
    tests.write_text(TESTS)
    with pytest.raises(UserError, match="answers.py: its import took longer than 1 s: does a loop end"):
        list(check_apart(answers, tests, limit=1))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["start", "99"], "tutorial 99: there is none; there are 01"),
        (["check", "x"], "tutorial x: there is none"),
        (["check", "01"], "/answers; begin with: refengine tutorial start 01"),
        (["check", "01", "--answers", "mine"], "begin with: refengine tutorial start 01 mine"),
        (["begin", "01"], "begin"),
    ],
)
def test_a_bad_call_is_one_line_and_status_2(here, capsys, arguments, said):
    status, out, err = refengine(capsys, "tutorial", *arguments)
    assert status == 2 and out == "" and said in err and len(err.splitlines()) == 1


def test_start_overwrites_nothing(here, capsys):
    refengine(capsys, "tutorial", "start", "01")
    (here / "answers/t01.py").write_text("mine")
    status, _, err = refengine(capsys, "tutorial", "start", "01")
    assert status == 2 and "is there already" in err and (here / "answers/t01.py").read_text() == "mine"


# --- What tests of exercises say --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (lambda: expect("f(1)", 1200, 1300), "f(1) gives 1,200, not 1,300"),
        (lambda: expect("f(1)", 1.0, 1), "f(1) gives 1.0, not 1"),
        (lambda: expect("f(1)", None, (1, 2)), "f(1) gives None, not (1, 2)"),
        (
            lambda: expect("f()", [*range(100)], [*range(80), 7, *range(81, 100)]),
            "f() gives [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16..., "
            "not [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16...: the first that differs is [80], 80, not 7",
        ),
        (
            lambda: expect("f()", [*range(50)], [*range(49)]),
            "f() gives [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16..., "
            "not [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16...: the first that differs is [49], 49, not the end",
        ),
        (
            lambda: expect("f()", "ab" * 40, "ab" * 38 + "cd"),
            f"f() gives {'ab' * 28}a..., not {'ab' * 28}a...: after 76 characters abab, not cd",
        ),
        (lambda: expect("f()", np.array([1, 2]), np.array([1, 3])), "f()[1] is 2, not 3"),
        (
            lambda: expect_close("f(x) with scores of 2,000", np.zeros(2), np.ones(2), 0.1),
            "f(x) with scores of 2,000: [0] is 0.0, not 1.0",
        ),
        (lambda: expect("f()", [1], np.array([1])), "f() gives list, not an array"),
        (lambda: expect_close("f()", np.zeros(2), np.zeros(3), 1.0), "f() has shape (2,), not (3,)"),
        (lambda: expect_close("f()", np.array([np.nan]), np.zeros(1), 1.0), "f()[0] is nan, not 0.0"),
        (
            lambda: expect_bits("f()", np.float32(1), np.nextafter(np.float32(1), np.float32(2))),
            "f() is 1.0 (0x3F800000), not 1.0000001 (0x3F800001)",
        ),
        (lambda: expect_bits("f()", np.float32(-0.0), np.float32(0)), "f() is -0.0 (0x80000000), not 0.0 (0x00000000)"),
        (lambda: expect_bits("f()", 1.0, np.float32(1)), "f() gives float, not float32"),
    ],
)
def test_a_failure_reads_as_a_sentence(check, said):
    with pytest.raises(AssertionError) as failure:
        check()
    assert str(failure.value) == said


def test_what_is_right_passes():
    expect("f()", np.int64(3), 3)
    expect("f()", np.array([1, 2]), np.array([1, 2]))
    expect_close("f()", np.array([1.0]), np.array([1.1]), 0.2)
    expect_bits("f()", np.float32(1), np.float32(1))


# --- What tutorials are made with -------------------------------------------------------------------------------------------


def test_show_prints_the_source_with_its_lines(capsys):
    notebook.show("backends/layout.py", "locate_window", "Layout")
    lines = capsys.readouterr().out.splitlines()
    text = (tutorials.ROOT / "backends/layout.py").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "backends/layout.py"
    numbered = [re.match(r" *(\d+)(?:  (.*))?$", line) for line in lines[2:] if line]
    assert len(numbered) > 10 and all(text[int(m[1]) - 1] == (m[2] or "") for m in numbered if m)
    assert any("@device" in line for line in lines) and any("class Layout" in line for line in lines)


def test_show_takes_a_part_and_a_method():
    part = excerpt("kernels_numba/prompt_attention.py", "prompt_attention", "m_low, m_high = -", "l_low, l_high =")
    assert len(part.lines) == 2 and part.lines[0].lstrip().startswith("m_low")
    assert "take_run" not in excerpt("backends/pool.py", "PagePool.lowest").text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("backends/layout.py", "locate_nothing"), "has no function or class locate_nothing"),
        (("backends/pool.py", "PagePool.nothing"), "has no function or class PagePool.nothing"),
        (("backends/layout.py", "locate_paged", "no such text"), "has no line with 'no such text'"),
    ],
)
def test_show_refuses_what_is_gone(arguments, said):
    with pytest.raises(DocsError, match=re.escape(said)):
        excerpt(*arguments)


def test_a_table_prints_numbers_to_the_right(capsys):
    notebook.table(["name", "count"], [["a", 1200], ["long name", 7]])
    assert capsys.readouterr().out.splitlines()[:3] == [
        "name        count", "a           1,200", "long name       7",
    ]  # fmt: skip


def test_a_changed_kernel_is_launched_and_then_the_right_one_again():
    from backends import attention

    right = attention.prompt_attention
    with changed("kernels_numba.prompt_attention", {"(w04 + w26) + (w15 + w37)": "((w04 + w26) + w15) + w37"}):
        assert attention.prompt_attention is not right
    assert attention.prompt_attention is right


def test_a_change_of_what_is_not_there_is_refused():
    from kernels_numba import prompt_attention

    with pytest.raises(Exception, match="stands 0 times in kernels_numba.prompt_attention"):
        edited(prompt_attention, {"no such text": ""})


def test_an_unknown_number_stops_make_tutorials():
    done = subprocess.run([sys.executable, "-m", "refengine.lab.execute", "99"], capture_output=True, text=True)
    assert done.returncode == 2 and "tutorial 99: there is none" in done.stderr


@pytest.mark.parametrize(
    ("text", "limit", "said"),
    [
        ("# %%\nassert 1 == 1\n", 60, ""),
        ("# %%\nx = 1\nassert x == 2, 'x is not two'\n", 60, "in the cell 'x = 1': AssertionError: x is not two"),
        ("# %%\n\n\n1 / 0\n", 60, "in the cell '1 / 0': ZeroDivisionError: division by zero"),
        ("# %%\nimport time\n\ntime.sleep(600)\n", 4, "took longer than 4 s"),
    ],
)
def test_executing(text, limit, said, tmp_path):
    pytest.importorskip("jupytext")
    pytest.importorskip("ipykernel")
    path = tmp_path / "98_x.py"
    path.write_text(text)
    assert execute.execute(path, tmp_path, limit).problem == said
    assert (tmp_path / "98_x.ipynb").exists()


def test_a_tutorial_is_read_in_cells(tmp_path):
    path = tmp_path / "97_x.py"
    path.write_text('# %% [markdown]\n"""\n# 97 · X\n\n## The question\n\nWhy\nso?\n\nNo.\n"""\n\n# %%\nx = 1\n')
    tutorial = Tutorial("97", path)
    assert tutorial.cells == [("markdown", "# 97 · X\n\n## The question\n\nWhy\nso?\n\nNo."), ("code", "x = 1")]
    assert (tutorial.title, tutorial.question, tutorial.sections) == ("X", "Why so?", ["The question"])
