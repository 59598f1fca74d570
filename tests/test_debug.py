"""The debugger stops at a kernel's own lines, and shows what threads hold there; pdb is driven through stdin."""

from __future__ import annotations

import io
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kernels_numba.machine import KernelError, cuda, device, float32, int64, kernel
from kernels_numba.machine.checked import CheckedLaunch
from kernels_numba.machine.one_block import one_block
from refengine.cli import app, status_of
from refengine.commands import debug
from refengine.contract.controls import mutants, mutated
from refengine.contract.registry import entry_named
from refengine.lab import kernel_case
from refengine.lab.kernel_case import Wish
from refengine.lab.kernel_pdb import KernelPdb
from refengine.lab.lane_view import bf16, runs, summary


@device
def doubled(value, turn):
    """value · 2, in two lines."""
    twice = value + value
    return twice + float32(turn)


@kernel
def small(out, x, *, N):
    """out, x: float32 [N, 64]. Launch: grid 2, 64 threads."""
    t = int64(cuda.threadIdx.x)
    mine = cuda.local.array((2, 2), float32)
    seen = cuda.shared.array(64, float32)
    for turn in range(N):
        mine[1, 0] = x[turn, t]
        if t < 40:
            out[turn, t] = doubled(
                mine[1, 0],
                turn,
            )
        seen[t] = float32(turn)
    cuda.syncthreads()
    if t == 0:
        out[0, 0] = seen[63]


@kernel
def racing(out):
    """Without its barrier. out: float32 [64]. Launch: grid 1, 64 threads."""
    seen = cuda.shared.array(64, float32)
    t = int64(cuda.threadIdx.x)
    seen[t] = float32(t)
    out[t] = seen[63 - t]


X = np.arange(128, dtype=np.float32).reshape(2, 64)


def session(*commands: str, block=(0, 0, 0), stops=(), lane=None) -> list[str]:
    """What the debugger answers, prompt by prompt; first what it says before the first one."""
    written = io.StringIO()
    debugger = KernelPdb(lane, stops, io.StringIO("\n".join(commands) + "\n"), written)
    with one_block("small", block, around=debugger.around):
        small.at(N=2)[2, 64](np.zeros((2, 64), np.float32), X)
    return [part.strip() for part in written.getvalue().split("(kernel) ")]


def lines(answers: list[str]) -> list[str]:
    """The source lines that it stopped at."""
    return [line.strip() for answer in answers for line in re.findall(r"^-> (.*)$", answer, re.MULTILINE)]


# --- Where it stops -------------------------------------------------------------------------------------------------


def test_next_goes_statement_by_statement_through_every_turn():
    turn = ["for turn in range(N):", "mine[1, 0] = x[turn, t]", "if t < 40:", "out[turn, t] = doubled(",
            "seen[t] = float32(turn)"]  # fmt: skip
    wanted = [
        "t = int64(cuda.threadIdx.x)", "mine = cuda.local.array((2, 2), float32)", "seen = cuda.shared.array(64, float32)",
        *turn, *turn, "for turn in range(N):", "cuda.syncthreads()", "if t == 0:", "out[0, 0] = seen[63]",
    ]  # fmt: skip
    answers = session(*["next"] * len(wanted))
    assert lines(answers) == wanted and answers[-1] == "the block has run to its end"


def test_step_goes_into_device_functions_and_no_further():
    answers = session("step", "step", "step", "quit", stops=[str(line_of("out[turn, t] = doubled("))])
    assert lines(answers)[-4:] == [
        "out[turn, t] = doubled(",
        "twice = value + value", "return twice + float32(turn)", "seen[t] = float32(turn)",
    ]  # fmt: skip


def line_of(text: str) -> int:
    source = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(source, 1) if line.strip() == text)


def test_breakpoints_by_line_function_and_condition():
    at = line_of("seen[t] = float32(turn)")
    answers = session(f"break {at}, turn == 1", "continue", "p turn", "break doubled", "quit")
    assert answers[3] == "1" and f":{line_of('twice = value + value')}" in answers[4]


def test_a_breakpoint_is_met_once_a_turn():
    answers = session(f"break {line_of('out[turn, t] = doubled(')}", "continue", "continue", "continue")
    assert lines(answers)[1:] == ["out[turn, t] = doubled("] * 2 and answers[-1] == "the block has run to its end"


def test_stops_are_run_to_at_once():
    answers = session("where", "quit", stops=["doubled"])
    assert lines(answers)[-1] == "twice = value + value"


# --- What it shows --------------------------------------------------------------------------------------------------


def test_a_lanes_values_and_those_of_all_lanes():
    stop = str(line_of("seen[t] = float32(turn)"))
    answers = session(
        "lane 5", "p t, turn", "p mine[1, 0]", "p x[1, 2]", "lanes", "p t.shape, t[5]", "p mine.shape, mine[5, 1, 0]",
        "quit", stops=[stop],
    )  # fmt: skip
    assert answers[1:8] == [
        "lane 5: warp 0, its lane 5", "(np.int64(5), 0)", "np.float32(5.0)", "np.float32(66.0)", "all lanes",
        "((64,), np.int64(5))", "((64, 2, 2), np.float32(5.0))",
    ]  # fmt: skip


def test_where_says_block_lanes_turns_and_the_path():
    answers = session("continue", "where", "up", "p turn", "quit", block=(1, 0, 0), stops=["doubled"])
    told = answers[2].splitlines()
    assert told[0] == "block (1, 0, 0) of a grid of (2, 1, 1); lanes 0-39 of 64 here"
    assert re.fullmatch(r"  small:\d+ \[turn 1\] out\[turn, t\] = doubled\(", told[1])
    assert re.fullmatch(r"> doubled:\d+ \[turn 1\] twice = value \+ value", told[2])
    assert answers[4] == "1"


def test_lanes_outside_a_branch_do_not_count():
    answers = session("p active.sum()", "quit", stops=[str(line_of("out[turn, t] = doubled("))])
    assert answers[1] == "np.int64(40)"


def test_compile_time_arguments_and_the_modules_names_are_known():
    answers = session("p N, X.shape", "vars", "args", "quit", stops=[str(line_of("cuda.syncthreads()"))])
    assert answers[1] == "(2, (2, 64))"
    assert "turn = 1" in answers[2] and "seen = float32 [64], 1.0 everywhere" in answers[2]
    assert "x = float32 [2, 64], 0.0 to 127.0" in answers[3]


def test_a_lane_that_the_block_does_not_have_is_refused():
    assert session("lane 64", "lane x", "quit")[1:3] == ["*** lane 64: 0 to 63", "*** lane x: 0 to 63"]


def test_debugging_changes_no_result():
    plain, debugged = np.zeros((2, 64), np.float32), np.zeros((2, 64), np.float32)
    small.at(N=2)[1, 64](plain, X)
    debugger = KernelPdb(None, (), io.StringIO("next\n" * 12 + "continue\n"), io.StringIO())
    with one_block("small", around=debugger.around):
        small.at(N=2)[1, 64](debugged, X)
    assert plain.any() and debugged.tobytes() == plain.tobytes()


def test_a_race_is_shown_where_it_happens():
    written = io.StringIO()
    debugger = KernelPdb(None, (), io.StringIO("continue\nwhere\np t[0]\nquit\n"), written)
    watched = type("Watched", (CheckedLaunch,), {"counters": Counter()})
    with pytest.raises(KernelError, match="no barrier"), one_block("racing", make=watched, around=debugger.around):
        racing.at()[1, 64](np.zeros(64, np.float32))
    said = written.getvalue()
    assert "stopped by: reads word 63" in said and re.search(r"> racing:\d+ \[\] out\[t\] = seen\[63 - t\]", said)


def test_words_of_bf16_can_be_read():
    assert bf16(np.array([0x40003F80], np.uint32)).tolist() == [1.0, 2.0]


def test_summaries_and_runs():
    assert runs(np.array([1, 1, 0, 1], bool)) == "0-1, 3"
    assert summary(None) == "not assigned" and summary(np.full(3, np.nan, np.float32)) == "float32 [3], nothing written"


# --- The command ----------------------------------------------------------------------------------------------------


def test_the_command_stops_in_the_prompt_kernel(capsys):
    commands = io.StringIO("where\nlane 37\np slots(D), layout.name\nquit\n")
    request = debug.Request(Wish("prompt_attention"), None, ("stage_item",), True, False)
    assert debug.run(request, commands) == 0
    said = capsys.readouterr().out
    assert re.search(r"> stage_item:\d+ \[item 0\] thread = int64", said)
    assert "(kernel) lane 37: warp 1, its lane 5\n" in said and "(kernel) (2, 'paged')\n" in said


@pytest.mark.parametrize("stop", ["{line}", "norms.py:{line}", "rms_norm_kernel", "{line}, row == 0"])
def test_the_command_runs_to_a_line_or_a_name(stop, capsys):
    source = (Path(__file__).parents[1] / "kernels_numba" / "norms.py").read_text().splitlines()
    kernel_line = source.index("def rms_norm_kernel(out, x, gain, eps):") + 1
    line = next(n for n, text in enumerate(source, 1) if n > kernel_line and text.strip().startswith("row = "))
    request = debug.Request(Wish("rms_norm_kernel"), None, (stop.format(line=line),), True, False)
    assert debug.run(request, io.StringIO("quit\n")) == 0
    assert f"norms.py:{line} rms_norm_kernel" in capsys.readouterr().out


def test_a_block_cannot_begin_again(capsys):
    request = debug.Request(Wish("rms_norm_kernel"), None, (), True, False)
    assert debug.run(request, io.StringIO("restart\nrun\nquit\n")) == 0
    assert capsys.readouterr().out.count("a block runs once") == 2


def test_a_closed_stdin_ends_the_commands(capsys, monkeypatch):
    monkeypatch.setattr(debug.sys, "stdin", None)
    assert debug.run(debug.Request(Wish("rms_norm_kernel"), None, (), True, False)) == 0


def test_the_command_runs_for_an_editor(capsys):
    assert status_of(lambda: app(["debug", "rms_norm_kernel", "--no-prompt"], standalone_mode=False), debug=False) == 0
    assert capsys.readouterr().out == "rms_norm_kernel, block (0, 0, 0), no prompt\n"


def test_with_checked_a_planted_race_is_a_finding(capsys, monkeypatch):
    entry = entry_named("rms_norm")
    fault = next(m for m in mutants(entry) if "barrier" in m.says or "barrier" in m.name)
    monkeypatch.setattr(kernel_case, "product_modules", lambda one: mutated(entry, fault))
    call = ["debug", "rms_norm_kernel", "--no-prompt"]
    assert status_of(lambda: app(call, standalone_mode=False), debug=False) == 0
    assert status_of(lambda: app([*call, "--checked"], standalone_mode=False), debug=False) == 1
    assert re.search(r"^FAULT rms_norm_kernel: .*no barrier", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["rms_nrm_kernel"], "KERNEL rms_nrm_kernel: unknown; did you mean rms_norm_kernel"),
        (["rms_norm_kernel", "--lane", "-1"], "--lane -1: at least 0"),
        (["rms_norm_kernel", "--lane", "128"], "--lane 128: the block has 128 threads; name one below that"),
        (
            ["rms_norm_kernel", "--break", "nonsense"],
            "--break nonsense: no line of code of rms_norm_kernel, nor a function",
        ),
        (["rms_norm_kernel", "--break", "9999"], "--break 9999: no line"),
        (["rms_norm_kernel", "--break", "1, x > 0"], "--break 1, x > 0: no line"),
        (["rms_norm_kernel", "--break", "norms.py:2"], "--break norms.py:2: no line"),
        (["rms_norm_kernel", "--break", ""], "--break : no line"),
        (["rms_norm_kernel", "--no-prompt", "--lane", "1"], "--no-prompt: an editor stops it"),
        (["rms_norm_kernel", "--block", "77"], "block (77, 0, 0): its grid is (5, 1, 1)"),
    ],
)
def test_bad_calls_are_one_line(arguments, named, capsys):
    assert status_of(lambda: app(["debug", *arguments], standalone_mode=False), debug=False) == 2
    error = capsys.readouterr().err
    assert named in error and len(error.splitlines()) == 1
