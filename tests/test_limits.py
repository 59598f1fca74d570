"""Gate 5: what does not fit fails, what differs from its record is reported, and a record is what a later run accepts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from kernels_numba.machine import compiler, cuda, float32, kernel, shared_memory
from kernels_numba.machine.errors import SetupError
from kernels_numba.machine.modes import Noted
from kernels_numba.machine.records import ARCHITECTURES
from refengine.commands import contract
from refengine.commands import limits as command
from refengine.contract import limit_records, limits
from refengine.contract.entries.norms import NormCase, RmsNorm
from refengine.contract.limit_records import Figures, KernelRecord, Launch, read_records, text_of, write_records
from refengine.contract.limits import SHARED_A_BLOCK, Finding, Measured, judged, measure
from refengine.contract.registry import product_kernels
from refengine.errors import UserError
from refengine.verify.launches import LaunchName, engine_launches, named

try:
    compiler.find_tool("ptxas", "nvidia-cuda-nvcc")
except SetupError as missing:
    pytest.skip(str(missing), allow_module_level=True)

FLOATS = np.zeros(4, np.float32)
KIB = 1024
SMS = [compiler.architecture(cc) for cc in ARCHITECTURES]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REFENGINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@kernel
def staged(out, x, *, WORDS):
    """Reversed by way of WORDS words of static shared memory; float32 [n]."""
    memory = cuda.shared.array(WORDS, float32)
    lane = cuda.threadIdx.x
    memory[lane] = x[lane]
    cuda.syncthreads()
    out[lane] = memory[31 - lane]


def noted(words=64, threads=128, dynamic=0):
    """A launch of the kernel above."""
    return Noted(staged.at(WORDS=words).program, compiler.signature((FLOATS, FLOATS)), threads, dynamic)


NAME = LaunchName("staged", "WORDS=64")
SMALL = Figures(registers=40, static_shared=256, stack=0, spill_stores=0, spill_loads=0)


def launch(threads=128, dynamic_shared=0, **figures):
    """A launch with the same figures on every architecture."""
    return Launch(threads, dynamic_shared, dict.fromkeys(SMS, replace(SMALL, **figures)))


def of(one, compiler="ptxas 1"):
    """The launch as it was measured."""
    return Measured(compiler, {NAME: one})


def texts(findings):
    return [str(one) for one in findings]


# --- Against the hardware ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "over", "says"),
    [
        (launch(threads=1024), launch(threads=1056), "1,056 threads a block, at most 1,024"),
        (launch(registers=255), launch(registers=256), "256 registers a thread, at most 255"),
        (
            launch(registers=128, threads=512),
            launch(registers=129, threads=512),
            "69,632 registers a block, at most 65,536",
        ),
        (launch(stack=512 * KIB), launch(stack=512 * KIB + 8), "524,296 bytes of stack a thread, at most 524,288"),
    ],
    ids=["threads", "registers", "registers of a block", "stack"],
)
def test_a_figure_past_the_hardware_fails(most, over, says):
    """What fits is no problem; one step more is one on every architecture, though the record says the same."""
    assert judged(of(most), of(most).records, [NAME.kernel]).problems == []
    found = judged(of(over), of(over).records, [NAME.kernel])
    assert texts(found.problems) == [f"staged WORDS=64: {sm}: {says}" for sm in SMS] and found.changes == []


def test_shared_memory_is_static_and_dynamic_against_each_architecture():
    """Each architecture's own maximum, met to the byte and passed by four."""
    for sm, most in SHARED_A_BLOCK.items():
        one = launch(static_shared=1024, dynamic_shared=most - 1024)
        wide = launch(static_shared=1024, dynamic_shared=most - 1020)
        failing = [{p.text.split(":")[0] for p in judged(of(o), {}, []).problems} for o in (one, wide)]
        assert sm not in failing[0] and sm in failing[1]
    assert SHARED_A_BLOCK.keys() == set(SMS)


def test_a_launch_that_is_too_wide_for_some_is_named_for_these():
    """100 KiB: compiled, then refused on the architectures that have 99."""
    found = judged(measure({NAME: noted(dynamic=100 * KIB)}), {}, [])
    past = [p for p in found.problems if "not in the records" not in p.text]
    says = "102,656 bytes of shared memory a block, at most 101,376"
    assert texts(past) == [f"staged WORDS=64: {sm}: {says}" for sm in ("sm_86", "sm_89", "sm_120", "sm_121")]


def test_what_does_not_compile_is_a_problem_of_its_launch(monkeypatch):
    """Static memory past ptxas's own limit on each architecture; a kernel that is refused once; others are measured."""
    monkeypatch.setattr(shared_memory, "MAX_STATIC_BYTES", 100 * KIB)
    wide, refused = LaunchName("staged", "WORDS=16384"), LaunchName("staged", "a float too few")
    torn = replace(noted(), signature=compiler.signature((FLOATS, np.float32(0))))
    found = measure({wide: noted(words=16384), refused: torn, NAME: noted()})
    first, *_, last = texts(found.problems)
    assert len(found.problems) == len(SMS) + 1 and first.startswith("staged a float too few: staged: ")
    assert last.startswith("staged WORDS=16384: sm_121: ptxas: ") and "shared" in last
    assert judged(found, found.records, []).problems == found.problems
    assert list(found.launches[NAME].sm) == SMS and found.launches[wide].sm == found.launches[refused].sm == {}


@pytest.mark.parametrize(
    "missing", ["refengine.commands.limits.compiler_version", "kernels_numba.machine.records.compile_cubin"]
)
def test_a_missing_compiler_is_not_a_pass(monkeypatch, missing):
    """Without ptxas nothing is known, whoever meets that first: one problem that says what to install."""
    monkeypatch.setattr(missing, lambda *_: compiler.find_tool("no_such_tool", "nvidia-cuda-nvcc"))
    found = command.fits(["rms_norm_kernel"], {})
    assert texts(found.problems) == ["limits: not checked: no_such_tool was not found: pip install nvidia-cuda-nvcc"]


# --- Against the records ----------------------------------------------------------------------------------------------


def test_figures_are_the_compilers():
    """Every architecture; static shared memory from ptxas, dynamic and threads from the launch."""
    found = measure({NAME: noted(dynamic=4096)}).launches[NAME]
    assert list(found.sm) == SMS and (found.threads, found.dynamic_shared) == (128, 4096)
    assert all(f.static_shared == 256 and 0 < f.registers < 64 and f.stack == 0 for f in found.sm.values())


@pytest.mark.parametrize("what", ["registers", "static_shared", "stack", "spill_stores", "spill_loads"])
def test_a_record_changed_by_hand_is_reported(what):
    """A line that names launch, architecture and figure, before and after; the run does not fail for it."""
    before = launch()
    sm_90 = before.sm["sm_90"]
    before.sm["sm_90"] = replace(sm_90, **{what: 17})
    found = judged(of(launch()), of(before).records, [NAME.kernel])
    assert texts(found.changes) == [f"staged WORDS=64: sm_90: {what} 17 -> {getattr(sm_90, what)}"]
    assert found.problems == []


def test_a_changed_launch_is_reported():
    """Threads and dynamic shared memory belong to the record; an architecture that it lacks is a change in each figure."""
    before = launch(threads=64, dynamic_shared=16)
    del before.sm["sm_121"]
    found = judged(of(launch()), of(before).records, [NAME.kernel])
    lines = texts(found.changes)
    assert lines[:2] == ["staged WORDS=64: threads 64 -> 128", "staged WORDS=64: dynamic_shared 16 -> 0"]
    assert lines[2] == "staged WORDS=64: sm_121: registers none -> 40" and len(lines) == 7 and found.problems == []


def test_another_compiler_is_named_with_the_change():
    found = judged(of(launch(), "ptxas 2"), of(launch(registers=50)).records, [NAME.kernel])
    assert found.problems == [] and len(found.changes) == len(SMS)
    assert str(found.changes[0]) == ("staged WORDS=64: sm_80: registers 50 -> 40 (recorded with ptxas 1, now ptxas 2)")
    assert judged(of(launch(), "ptxas 2"), of(launch()).records, [NAME.kernel]).changes == []


def test_launch_and_record_without_each_other_fail():
    """A launch that nobody recorded, a record that nothing launches any more, a kernel that the engine never launches."""
    gone = {
        "staged": KernelRecord("ptxas 1", {"WORDS=32": launch()}),
        "old": KernelRecord("ptxas 1", {"(none)": launch()}),
    }
    found = judged(of(launch()), gone, ["staged", "idle"])
    assert [re.match(r"(.*?): (.{12})", line).groups() for line in texts(found.problems)] == [
        ("staged WORDS=64", "is not in th"),
        ("staged WORDS=32", "is recorded "),
        ("old (none)", "is recorded "),
        ("idle", "the engine l"),
    ]


# --- The files --------------------------------------------------------------------------------------------------------


def test_a_file_is_sorted_and_has_a_line_an_architecture():
    record = KernelRecord("ptxas 1", {"b": launch(), "a": launch()})
    lines = text_of(record).splitlines()
    assert lines[:6] == [
        "compiler: ptxas 1",
        "launches:",
        "  a:",
        "    threads: 128",
        "    dynamic_shared: 0",
        "    sm:",
    ]
    assert lines[6] == "      sm_80: {registers: 40, static_shared: 256, stack: 0, spill_stores: 0, spill_loads: 0}"
    assert len(lines) == 2 + 2 * (4 + len(SMS))


def test_what_is_written_is_read(tmp_path):
    """Files of kernels that are gone go, others stay."""
    records = {k: KernelRecord("ptxas 1", {"D=64 layout=paged": launch(), "(none)": launch(stack=8)}) for k in "abc"}
    write_records(records, [], tmp_path / "records")
    assert read_records(tmp_path / "records") == records
    write_records({"b": records["b"]}, ["a"], tmp_path / "records")
    assert read_records(tmp_path / "records") == {"b": records["b"], "c": records["c"]}
    assert sorted(p.name for p in (tmp_path / "records").iterdir()) == ["b.yaml", "c.yaml"]


def test_files_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """A disk that fills at the second file changes none."""
    records = {k: KernelRecord("ptxas 1", {"(none)": launch()}) for k in "abc"}
    write_records(records, [], tmp_path)
    write = Path.write_text

    def full(path, text, **options):
        if path.name == "b.yaml":
            raise OSError(28, "No space left on device")
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match="--record: .*No space left"):
        write_records({k: replace(r, compiler="ptxas 2") for k, r in records.items()}, ["c"], tmp_path)
    assert read_records(tmp_path) == records and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("compiler: x\n", "launches: missing key"),
        ("compiler: x\nlaunches: {a: {threads: 1, dynamic_shared: 0, sm: {sm_80: {registers: many}}}}", "registers"),
        ("compiler: x\nlaunches: {a: {threads: 1, dynamic_shared: 0, sm: {}, spils: 3}}", "spils: unknown key"),
        ("compiler: [", "line 1"),
    ],
)
def test_a_file_that_is_no_record_is_refused(tmp_path, text, says):
    (tmp_path / "k.yaml").write_text(text)
    with pytest.raises(UserError, match="k.yaml: ") as refused:
        read_records(tmp_path)
    assert says in str(refused.value) and "\n" not in str(refused.value)


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of records of the test's own."""
    monkeypatch.setattr(limit_records, "RECORDS", tmp_path / "records")
    return tmp_path / "records"


def asked(**options):
    """A request for the smallest entry: one case, in this process."""
    return contract.Request(**({"kernels": ("rms_norm",), "device": "cpu", "full": False, "mutate": False, "seed": 0,
                                "processes": 1} | options))  # fmt: skip


@pytest.fixture
def one_case(monkeypatch):
    """RMSNorm's entry with one case and nothing planted."""
    monkeypatch.setattr(RmsNorm, "cases", lambda *_: [NormCase(5, 2)])
    monkeypatch.setattr(RmsNorm, "control_cases", lambda *_: [NormCase(5, 2)])
    monkeypatch.setattr(RmsNorm, "controls", lambda _: [])
    monkeypatch.setattr("refengine.contract.runner.mutants", lambda _: [])


def test_record_writes_what_a_later_run_accepts(folder, one_case, capsys, tmp_path):
    """Without records the run fails by name; recorded it passes; with a figure changed by hand it says so and passes."""
    assert contract.run(asked(), None) == 1
    out = capsys.readouterr().out.splitlines()
    assert any(line.startswith("limits: rms_norm_kernel (none): is not in the records") for line in out)
    assert out[-1].endswith("0 missed; 1 limit problems")

    assert contract.run(asked(record=True), tmp_path / "r.json") == 0
    out = capsys.readouterr().out.splitlines()
    assert out == ["new: rms_norm_kernel (none)",
                   "RECORDED 1 kernels, 1 launches: 0 figures changed, 1 launches new, 0 gone; 0 limit problems"]  # fmt: skip
    assert [path.name for path in folder.iterdir()] == ["rms_norm_kernel.yaml"]
    assert json.loads((tmp_path / "r.json").read_text())["limits"]["problems"] == []

    assert contract.run(asked(), None) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1].endswith("1 pass gates 1-4, 0 fail; 0 controls: 0 red, 0 missed; 0 limit problems")
    assert not [line for line in out if line.startswith(("limits: rms", "changed"))]

    path = folder / "rms_norm_kernel.yaml"
    path.write_text(re.sub(r"(sm_86: {registers: )\d+", r"\g<1>7", path.read_text()))
    assert contract.run(asked(), None) == 0
    out = capsys.readouterr().out
    changed = re.search(r"^changed: (rms_norm_kernel \(none\): sm_86: registers 7 -> \d+)$", out, re.MULTILINE)
    assert changed and "1 figures changed since the records" in out
    assert contract.run(asked(record=True), None) == 0
    assert f"changed: {changed[1]}" in capsys.readouterr().out


def test_record_of_one_kernel_leaves_the_others(folder, capsys):
    """Only the entry's files are written; another kernel's stays, even where nothing launches it."""
    write_records({"other": KernelRecord("ptxas 1", {"(none)": launch()})}, [], folder)
    assert contract.run(asked(record=True), None) == 0
    assert sorted(p.stem for p in folder.iterdir()) == ["other", "rms_norm_kernel"]


def test_a_launch_past_the_hardware_is_recorded_and_fails(folder, one_case, monkeypatch, capsys):
    """The record is honest; recording it does not make it fit."""
    monkeypatch.setitem(SHARED_A_BLOCK, "sm_86", 8)
    monkeypatch.setattr(command, "uncached", lambda _: [])
    assert contract.run(asked(record=True), None) == 1 and (folder / "rms_norm_kernel.yaml").exists()
    assert contract.run(asked(), None) == 1
    assert (
        "limits: rms_norm_kernel (none): sm_86: 16 bytes of shared memory a block, at most 8" in capsys.readouterr().out
    )


def test_bits_of_another_run_are_held(folder, one_case, capsys, tmp_path):
    """--against: the bits of an earlier --json pass; with another digest the exact gate fails, and seeds are kept apart."""
    report, seeded = tmp_path / "report.json", tmp_path / "seeded.json"
    contract.run(asked(record=True), None)
    assert contract.run(asked(), report) == 0 and contract.run(asked(seed=3), seeded) == 0
    assert list(json.loads(seeded.read_text())["bits"]) == ["rms_norm rows=5 D=2 seed=3"]
    assert contract.run(asked(against=report), None) == 0
    assert "1 of 1 cases have recorded bits" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"--against {re.escape(str(report))}: has the bits of no case"):
        contract.run(asked(against=report, seed=3), None)
    report.write_text(
        report.read_text().replace(json.loads(report.read_text())["bits"]["rms_norm rows=5 D=2"], "0" * 16)
    )
    assert contract.run(asked(against=report), None) == 1
    assert re.search(
        r"^rms_norm rows=5 D=2: exact: outputs hash to \w+, recorded 0{16}$", capsys.readouterr().out, re.M
    )


# --- The engine's launches --------------------------------------------------------------------------------------------


def test_every_kernel_is_launched_and_recorded():
    """The recorded launches are the engine's, every kernel among them, and each fits."""
    recorded = read_records(limit_records.RECORDS)
    known = {LaunchName(k, a): one for k, r in recorded.items() for a, one in r.launches.items()}
    assert known.keys() == engine_launches().keys() and recorded.keys() == product_kernels().keys()
    assert [p for name, one in known.items() for p in limits.past_the_hardware(name, one)] == []
    assert all(list(one.sm) == SMS for one in known.values())
    heads = {(n.kernel, f"D={d}") for n in known for d in (64, 128, 256) if f"D={d} " in f"{n.arguments} "}
    attention = ("prompt_attention", "decode_rows", "decode_partial", "decode_merge")
    assert {(k, f"D={d}") for k in attention for d in (64, 128, 256)} <= heads


def test_launches_that_differ_in_memory_alone_have_names_of_their_own():
    found = named([noted(), noted(dynamic=16), noted(words=32)])
    assert list(found) == [NAME, replace(NAME, arguments="WORDS=64 (2)"), LaunchName("staged", "WORDS=32")]


ROOT = Path(__file__).parents[1]
CALLS = (
    "import sys; from refengine.cli import app; print(*[app(c.split(), standalone_mode=False) for c in sys.argv[1:]])"
)


def called(folder, *calls):
    """What the command prints for calls made in one new process with a new cache, and at last their exit statuses."""
    example = ROOT / "docs" / "examples" / "paged_p64"
    path = os.pathsep.join(map(str, (ROOT, folder, example)))
    environment = os.environ | {"PYTHONPATH": path, "REFENGINE_CACHE": str(folder / "cache")}
    command = [sys.executable, "-c", CALLS, *calls]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def test_adding_a_backend_leaves_the_window_kernels_code(tmp_path):
    """Registered and compiled first in the same process, the example backend changes no instruction of the window's kernels."""
    (plain := tmp_path / "plain").mkdir()
    (info := tmp_path / "with" / "paged_p64-1.dist-info").mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paged-p64\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[refengine.backends]\npaged-p64 = paged_p64:PagedP64Backend\n")
    window = "inspect rope_store_kernel --sm 80,90 --backend window"
    assert called(plain, f"{window} --json {tmp_path}/window.json")[-1] == "0"
    other = f"inspect rope_store_kernel --sm 80,90 --backend paged-p64 --against {tmp_path}/window.json"
    lines = called(info.parent, other, f"{window} --against {tmp_path}/window.json")
    assert [line for line in lines if line.endswith(" changed")] == ["2 of 2 changed", "0 of 2 changed"]
    assert lines[-1] == "1 0"


def test_a_finding_without_a_launch_names_the_kernel():
    assert str(Finding("k", "", "is idle")) == "k: is idle"
