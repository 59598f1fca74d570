"""The command line says in one line what is wrong and runs nothing, or says truly whether backends are equal."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from backends import paged
from backends.base import backend_class
from backends.paged import PagedBackend
from backends.window import WindowBackend
from kernels_numba.machine import KernelError, cpu, modes
from refengine import cli
from refengine.checkpoint import cached_checkpoint
from refengine.commands import compare, inspect, models
from refengine.registry import load_model
from refengine.verify.compare import Arm, unexercised
from refengine.verify.launches import arguments, launches

SMALL = ("compare", "--device", "cpu", "--backends", "window,paged", "--page-size", "16", "--prompt-tokens", "70",
         "--prompt-rows", "40", "--tokens", "2")  # fmt: skip
"""Two prompt passes and one decode step over five pages, every third item in two of them."""


@pytest.fixture
def refengine(monkeypatch, capsys, tmp_path):
    """Call the command in an empty folder: (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["refengine", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code, *capsys.readouterr()

    return call


# --- Refusals ---------------------------------------------------------------------------------------------------------

REFUSED = [
    (("nope",), "'nope'"),
    (("compare", "--nope"), "--nope"),
    (("compare", "--page-siz", "3"), "--page-size"),
    (("compare", "one", "two"), "two"),
    (("compare", "--tokens", "x"), "--tokens"),
    (("compare", "--json"), "--json"),
    (("compare", "qwen3.5-tny"), "qwen3.5-tiny"),
    (("compare", "flash-next-tiny", "--page-size", "18"), "--page-size 18: pages of 18 positions would cut the sparse"),
    (("generate", "flash-next-tiny", "--prompt", "a", "--page-size", "6"), "--page-size 6: pages of 6 positions"),
    (("pool", "flash-next-tiny", "--kv-pages", "6"), "--kv-pages 6: pages of 6 positions"),
    (
        ("compare", "flash-next-tiny", "--attention", "scalar-batch"),
        "--attention scalar-batch: flash-next-tiny has sparse",
    ),
    (
        ("equal", "flash-next-tiny", "--attention", "scalar-batch"),
        "--attention scalar-batch: flash-next-tiny has sparse",
    ),
    (("compare", "--page-order", "reverse"), "did you mean reversed"),
    (("generate", "flash-next-tiny", "--prompt", "a", "--drafts", "both"), "--drafts both: branches; flash-next-tiny"),
    (("compare", "."), "config.json"),
    (("compare", "--backends", "pagd"), "did you mean paged"),
    (("compare", "--backends", ","), "--backends"),
    (("compare", "--backends", "paged,paged"), "twice"),
    (("compare", "--page-size", "0"), "--page-size 0"),
    (("compare", "--tokens", "0"), "--tokens 0"),
    (("compare", "--parallel", "0"), "--parallel 0"),
    (("compare", "--parallel", "1000000000"), "--parallel"),
    (("compare", "--prompt-tokens", "0"), "--prompt-tokens 0"),
    (("compare", "--prompt-tokens", "300000"), "--prompt-tokens 300000"),
    (("compare", "--prompt-tokens", "4", "--prompt", "abc"), "--prompt-tokens 4"),
    (("compare", "--prompt-rows", "5000"), "--prompt-rows 5000"),
    (("compare", "--prompt-rows", "0"), "--prompt-rows 0"),
    (("compare", "--prompt", ""), "--prompt"),
    (("compare", "--prompt", "@missing"), "@missing"),
    (("compare", "--prompt", __file__), "to read it"),
    (("compare", "--context", "10"), "--context 632"),
    (("compare", "--context", "300000"), "--context 300000"),
    (("compare", "--tokens", "300000"), "--tokens 300000"),
    (("compare", "--memory-gib", "0.0001"), "--memory-gib 0.0001"),
    (("compare", "--memory-gib", "nan"), "--memory-gib nan"),
    (("compare", "--seed", "-1"), "--seed -1"),
    (("compare", "--device", "tpu"), "--device tpu"),
    (("compare", "--device", "cuda"), "--device cuda"),
    (("compare", "--json", "missing/report.json"), "--json missing/report.json"),
    (("compare", "--json", "."), "--json ."),
    (("models", "qwen3.5-tny"), "qwen3.5-tiny"),
    (("models", "--page-size", "0"), "--page-size 0"),
    (("models", "--check", "folder"), "--check folder"),
    (("models", "qwen3.5-tiny", "--check", "missing"), "--check missing"),
    (("models", "--json", "missing/report.json"), "--json missing/report.json"),
    (("inspect", "promt_attention"), "did you mean prompt_attention"),
    (("inspect", "--model", "qwen3.5-tny"), "qwen3.5-tiny"),
    (("inspect", "--backend", "windw"), "did you mean window"),
    (("inspect", "--sm", "75"), "80, 86, 89, 90, 100, 120, 121"),
    (("inspect", "--sm", "80,91"), "did you mean 90"),
    (("inspect", "--sm", ""), "--sm"),
    (("inspect", "--against", "missing.json"), "--against missing.json"),
    (("inspect", "--json", "missing/report.json"), "--json missing/report.json"),
    (("contract", "rms_nrm"), "did you mean rms_norm"),
    (("contract", "--device", "tpu"), "--device tpu"),
    (("contract", "--against", "missing.json"), "--against missing.json"),
    (("contract", "--against", "."), "--against ."),
    (("contract", "--against", __file__), "is no report of contract"),
    (("contract", "--json", "missing/report.json"), "--json missing/report.json"),
    (("contract", "--record", "--mutate"), "--record"),
    (("contract", "--record", "--against", "old.json"), "--against"),
    (("contract", "--seed", "-1"), "--seed -1"),
]


def test_missing_cupy_names_the_readmes_command(refengine, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    status, out, err = refengine("compare", "--device", "cuda")
    command = re.search(r"cupy is not installed \((.*)\); use --device cpu$", err.strip())
    assert (status, out) == (2, "") and command
    assert f"\n    {command[1]}\n" in (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("arguments", "named"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
def test_refusal_is_one_line(refengine, monkeypatch, tmp_path, arguments, named):
    """It names the flag or file, stdout stays empty, status 2, and nothing is written."""
    monkeypatch.setattr("refengine.device._gpu", lambda: "no GPU was found")
    status, out, err = refengine(*arguments)
    assert (status, out) == (2, "") and list(tmp_path.iterdir()) == []
    assert err.startswith("refengine: ") and err.count("\n") == 1 and named in err


def test_refused_report_costs_nothing(refengine, monkeypatch):
    """A path that cannot be written is refused before anything runs."""
    monkeypatch.setattr(compare, "run_all", lambda *_: pytest.fail("it ran"))
    assert refengine(*SMALL, "--json", "missing/report.json")[0] == 2


def test_report_is_whole_or_absent(refengine, monkeypatch, tmp_path):
    """A disk that fills at the last moment leaves no file behind."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    status, _, err = refengine("models", "--json", "report.json")
    assert status == 2 and "--json report.json" in err and "No space" in err and list(tmp_path.iterdir()) == []


def test_report_that_is_none_is_refused(refengine, tmp_path):
    """--against wants what inspect wrote."""
    (tmp_path / "other.json").write_text('{"kernels": 3}')
    status, _, err = refengine("inspect", "--against", "other.json")
    assert status == 2 and "--against other.json" in err and err.count("\n") == 1


def test_missing_compiler_is_one_line(refengine, monkeypatch):
    """Where numba-cuda is missing inspect says what to install."""
    monkeypatch.setattr(inspect, "find_spec", lambda _: None)
    status, out, err = refengine("inspect")
    assert (status, out) == (2, "") and "numba-cuda" in err and "pip install" in err and err.count("\n") == 1


@pytest.mark.parametrize("place", [0, 1, 3])
def test_debug_shows_a_traceback(refengine, place):
    """In any place of the call; the status stays."""
    arguments = ["compare", "--prompt", "@missing"]
    status, _, err = refengine(*arguments[:place], "--debug", *arguments[place:])
    assert status == 2 and err.startswith("Traceback") and "UserError: --prompt @missing" in err


def test_unforeseen_error_is_one_line(refengine, monkeypatch):
    """A fault of ours is no traceback either, and names --debug."""
    monkeypatch.setattr(models, "load_model", lambda _: 1 // 0)
    status, _, err = refengine("models")
    assert status == 2 and "ZeroDivisionError" in err and "--debug" in err and err.count("\n") == 1


def test_interrupt_leaves_quietly(refengine, monkeypatch):
    """Ctrl-C: the shell's status, no words."""

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "load_model", interrupt)
    status, out, err = refengine("models")
    assert (status, out, err.strip()) == (130, "", "")


def test_closed_pipe_leaves_quietly():
    """A reader that has gone is no error worth words."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "refengine.cli", "models"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.returncode != 0 and done.stderr == b""


@pytest.mark.parametrize(
    "command", [(), ("compare",), ("equal",), ("generate",), ("models",), ("inspect",), ("contract",)], ids=" ".join
)
def test_help_has_an_example(refengine, command):
    """Every help page shows a call that is one: its options exist."""
    status, out, _ = refengine(*command, "--help")
    assert status == 0 and re.search(rf"Example: refengine {' '.join(command)}", out)


def test_version_and_no_arguments(refengine):
    """--version prints it; a bare call shows the help."""
    assert refengine("--version")[:2] == (0, f"refengine {cli.__version__}\n")
    assert refengine()[:2] == refengine("--help")[:2]


# --- compare ----------------------------------------------------------------------------------------------------------


def last_line(out):
    return out.splitlines()[-1]


ROOT = Path(__file__).parent.parent
STORY = ("compare", "--device", "cpu", "--page-size", "48", "--prompt", f"@{ROOT / 'docs/prompt.txt'}", "--prompt-tokens", "90",
         "--prompt-rows", "60", "--tokens", "2", "--json", "report.json")  # fmt: skip
"""A recorded prompt, with which each mode of attention is tried."""


@pytest.mark.parametrize(
    "attention, kv, place, prompts_differ",
    [
        ("scalar-batch", "bf16", "pass 1 (prompt), layer 3", True),
        ("scalar-decode", "bf16", "pass 3 (decode), layer 3", False),
        ("scalar-decode", "fp8", "pass 3 (decode), layer 3", False),
        ("tiles", "bf16", None, False),
    ],
)
def test_a_path_taken_by_pages_alone_differs_from_the_first_layer_on(
    refengine, tmp_path, attention, kv, place, prompts_differ
):
    """The fault of the source system: with pages in the batch, rows take kernels that round otherwise."""
    status, out, err = refengine(*STORY, "--backends", "window,paged", "--attention", attention, "--kv", kv)
    window, pages = json.loads((tmp_path / "report.json").read_text())["arms"]
    assert (window["prompt_hashes"] != pages["prompt_hashes"]) == prompts_differ
    if place is None:
        assert status == 0 and last_line(out).startswith("EQUAL 2 backends, 2 prompt passes, 2 tokens")
    else:
        assert status == 1 and last_line(out).startswith(f"DIFFERENT paged from window: {place}, row ")


def test_a_window_takes_another_path_for_the_pages_beside_it(refengine):
    """scalar-batch: stream 0 has a window in both backends, and other bits where stream 1 is on pages."""
    two = ("--backends", "window,mixed", "--parallel", "2")
    status, out, _ = refengine(*STORY, *two, "--attention", "scalar-batch")
    assert status == 1 and "pass 3 (prompt), layer 3" in last_line(out)
    assert refengine(*STORY, *two)[0] == 0


def test_equal_backends(refengine, tmp_path):
    """The last line, and a report with claims, versions, the command and each arm's hashes."""
    status, out, err = refengine(*SMALL, "--json", "report.json")
    words = r"EQUAL 2 backends, 2 prompt passes, 2 tokens, logits ([0-9a-f]{16}), tokens [0-9a-f]{16}"
    found = re.fullmatch(words, last_line(out))
    report = json.loads((tmp_path / "report.json").read_text())
    assert (status, err) == (0, "") and found and report["verdict"] == last_line(out)
    claims = {c["name"]: c["value"] for c in report["claims"]}
    assert claims == {"compare/backends_equal": 2, "compare/logits_hash": found[1]}
    assert report["command"] == " ".join(["refengine", *SMALL, "--json", "report.json"])
    assert {"refengine", "python", "numba", "numpy"} <= set(report["versions"])
    window, pages = report["arms"]
    assert window["logits_hash"] == pages["logits_hash"] == found[1] and len(window["prompt_hashes"]) == 2
    assert window["lookups"] == 0 < pages["lookups"] and pages["kv_bytes"] == 5 * 16 * 4096


def different(refengine):
    """What a comparison says that must come out unequal: (pass, layer, row, head, dim)."""
    status, out, err = refengine(*SMALL)
    found = re.fullmatch(
        r"DIFFERENT paged from window: pass (\d) \(prompt\), layer (\d), row (\d+), head (\d+), dim (\d+): "
        r"(0x[0-9a-f]{4}) against (0x[0-9a-f]{4})",
        last_line(out),
    )
    assert status == 1 and err == "" and found and found[6] != found[7]
    return tuple(int(n) for n in found.groups()[:5])


def before_first_attend(monkeypatch, change):
    """Call change(backend, layer, batch) once, after the first rows have been stored."""
    attend, calls = PagedBackend.attend, []

    def faulty(self, layer, q, batch):
        if not calls:
            calls.append(change(self, layer, batch))
        return attend(self, layer, q, batch)

    monkeypatch.setattr(PagedBackend, "attend", faulty)


def test_swapped_page_table_differs(refengine, monkeypatch):
    """Two entries of the page table exchanged: row 0 reads another key at the first attention layer."""

    def swap(backend, layer, batch):
        backend.pages[[0, 1]] = backend.pages[[1, 0]]

    before_first_attend(monkeypatch, swap)
    assert different(refengine)[:4] == (1, 3, 0, 0)


def test_one_bf16_step_of_one_key_differs(refengine, monkeypatch):
    """The lowest bit of one element of the key at position 20: no row before it, and no other KV head, is touched."""
    position, kv_head, dim = 20, 1, 6

    def step(backend, layer, batch):
        shape, page = backend.shape, int(backend.pages[position // backend.positions])
        row = kv_head * backend.positions + position % backend.positions
        word = page * backend.page_words + backend.planes(layer)[0] + (row * shape.head_dim + dim) // 2
        backend.arena.words[word] ^= np.uint32(1)

    before_first_attend(monkeypatch, step)
    one, layer, row, head, _ = different(refengine)
    assert (one, layer) == (1, 3) and row >= position and head >= 6


def unchecked(refengine):
    """Why a comparison proves nothing."""
    status, out, _ = refengine(*SMALL)
    assert status == 1 and last_line(out).startswith("UNCHECKED ")
    return last_line(out)


def test_one_page_is_unchecked(refengine):
    """A page table of one entry is in order whatever the order of the pages."""
    status, out, _ = refengine(*SMALL, "--page-size", "80")
    assert status == 1 and last_line(out).startswith("UNCHECKED paged: used one page only; a prompt of more than 80 ")


def test_table_in_order_is_unchecked(refengine, monkeypatch):
    """Pages handed out lowest first would hide a backend that ignores its table."""
    monkeypatch.setattr(paged, "page_order", lambda pages, shuffle: list(range(pages)))
    assert "paged: its page tables are ascending; hand the pages out in" in unchecked(refengine)


class Pretender(WindowBackend):
    """A window that calls itself paged and shows a table that nobody reads."""

    name = "paged"
    paged = True

    def check_layout(self):
        """It keeps nothing of what its layout promises."""

    def open(self, capacity=None):
        stream = super().open(capacity)
        stream.pages = [1, 0]
        return stream


def test_no_lookup_is_unchecked(refengine, monkeypatch):
    """Equal bits from a backend that has looked up no page are no proof."""
    monkeypatch.setattr(compare, "backend_class", lambda name: Pretender if name == "paged" else backend_class(name))
    assert "paged: no page was looked up" in unchecked(refengine)


def test_stopped_kernel_is_unchecked(refengine, monkeypatch):
    """What the machine finds is a finding, not a bad call."""

    def stop(*_):
        raise KernelError("prompt_attention: prompt_attention.py:1: index 9 of 8")

    before_first_attend(monkeypatch, stop)
    assert "prompt_attention.py:1" in unchecked(refengine)


@pytest.mark.parametrize(
    ("arm", "reason"),
    [
        (Arm("paged", True, 48, [[3], [4]], lookups=9, straddles=9), "one page only; a prompt of more than 48 tokens"),
        (Arm("paged", True, 48, [[0, 1], [4]], lookups=9, straddles=9), "ascending"),
        (Arm("paged", True, 48, [[1, 0]], lookups=0, straddles=9), "no page was looked up"),
        (Arm("paged", True, 48, [[1, 0]], lookups=9, straddles=0), "no item lay in two pages"),
        (Arm("paged-p256", True, 256, [[1, 0]], lookups=9, straddles=1), "none can"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unexercised_arm_is_named(arm, reason):
    """Each reason for which a paged arm proves nothing."""
    assert reason in (unexercised(arm) or "")


@pytest.mark.parametrize(
    "arm",
    [
        Arm("paged", True, 48, [[1, 0]], lookups=1, straddles=1),
        Arm("paged", True, 64, [[1, 0]], lookups=1),
        Arm("paged-p256", True, 256, [[1, 0]], lookups=1),
        Arm("window", False, 99),
    ],
    ids=["paged 48", "paged 64", "p256", "window"],
)
def test_exercised_arm_passes(arm):
    """A page size that 32 divides needs no straddling item; a window needs nothing."""
    assert unexercised(arm) is None


# --- The checkpoint in the cache --------------------------------------------------------------------------------------


def test_a_damaged_cached_checkpoint_names_what_to_delete(refengine, tmp_path, monkeypatch):
    monkeypatch.setenv("REFENGINE_CACHE", str(tmp_path / "cache"))
    folder = cached_checkpoint(load_model("qwen3.5-tiny"))
    (folder / "model.safetensors").write_bytes(b"")
    status, out, err = refengine(*SMALL)
    assert (status, out) == (2, "") and "model.safetensors: damaged" in err
    assert err.endswith(f"; delete {folder} to have it made again\n")


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint():
    """The synthetic checkpoint of qwen3.5-tiny."""
    return cached_checkpoint(load_model("qwen3.5-tiny"))


@pytest.fixture
def damaged(checkpoint, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(checkpoint, tmp_path / "damaged")


def test_models_shows_the_registry(refengine, tmp_path):
    """A row a model with its bytes; one entry in full; the same in the report."""
    status, out, _ = refengine("models", "--page-size", "48")
    assert status == 0 and re.search(r"qwen3.5-tiny .* 12 / 2 .* 4,096 .* 196,608 .* 2,405,376", out)
    status, out, _ = refengine("models", "qwen3.5-tiny", "--page-size", "48", "--json", "report.json")
    assert status == 0 and "lllflllf" in out and "gated_delta_net.value_heads" in out and "196,608" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert {"name": "models/qwen3.5-tiny/kv_bytes_a_token", "value": 4096, "unit": "bytes"} in report["claims"]


def test_good_checkpoint_agrees(refengine, checkpoint):
    """The synthetic checkpoint is the entry's."""
    status, out, err = refengine("models", "qwen3.5-tiny", "--check", checkpoint)
    assert (status, err) == (0, "") and "agrees with qwen3.5-tiny" in out


def test_config_findings_are_a_line_each(refengine, damaged):
    """Every differing key is named, with both values."""
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5, "vocab_size": 321}))
    status, out, err = refengine("models", "qwen3.5-tiny", "--check", damaged)
    assert (status, out, err.count("\n")) == (2, "", 2)
    assert "config.json: vocab_size: 321 where qwen3.5-tiny has 320" in err and "rms_norm_eps" in err


def test_tensor_findings_are_a_line_each(refengine, damaged):
    """A missing tensor, a wrong shape and a wrong type."""
    tensors = load_file(damaged / "model.safetensors")
    names = sorted(tensors)
    del tensors[names[0]]
    tensors[names[1]] = tensors[names[1]].reshape(-1, 1, 2)
    tensors[names[2]] = tensors[names[2]].astype(np.float16)
    save_file(tensors, damaged / "model.safetensors")
    status, out, err = refengine("models", "qwen3.5-tiny", "--check", damaged)
    assert (status, out, err.count("\n")) == (2, "", 3)
    for name, what in zip(names, ("missing", "shape", "type"), strict=False):
        assert re.search(rf"{re.escape(name)}: {what}", err)


def test_unknown_tensor_is_found(refengine, damaged):
    """What only the loader sees is told as well."""
    tensors = load_file(damaged / "model.safetensors") | {"extra.weight": np.zeros(2, np.float32)}
    save_file(tensors, damaged / "model.safetensors")
    status, _, err = refengine("models", "qwen3.5-tiny", "--check", damaged)
    assert status == 2 and "extra.weight" in err and err.count("\n") == 1


def test_an_mtp_head_is_there_whole_or_not_at_all(refengine, damaged):
    """Checked like the model where the checkpoint has one, and not missed where it has none."""
    tensors = load_file(damaged / "model.safetensors")
    head = sorted(name for name in tensors if name.startswith("mtp."))
    _, out, _ = refengine("models", "qwen3.5-tiny", "--check", damaged)
    assert f"{len(head)} of its MTP head" in out and len(head) == 15
    save_file({name: value for name, value in tensors.items() if name != head[0]}, damaged / "model.safetensors")
    status, _, err = refengine("models", "qwen3.5-tiny", "--check", damaged)
    assert status == 2 and f"{head[0]}: missing" in err and err.count("\n") == 1
    save_file({name: value for name, value in tensors.items() if name not in head}, damaged / "model.safetensors")
    status, out, err = refengine("models", "qwen3.5-tiny", "--check", damaged)
    assert (status, err) == (0, "") and "no MTP head" in out


# --- inspect ----------------------------------------------------------------------------------------------------------


class Both(modes.Recording):
    """Notes each launch and runs it."""

    def run(self, program, grid, threads, shared_bytes, args):
        super().run(program, grid, threads, shared_bytes, args)
        cpu.run(program, cpu.fast(program), grid, threads, shared_bytes, args)


def names(found):
    return [n.program.name for n in found]


def test_recorded_launches_are_those_of_a_run(refengine):
    """All that a run launches is known without running; the rest needs longer prompts, more streams, drafts or kept states."""
    known = launches(load_model("qwen3.5-tiny"), PagedBackend)
    with modes.within(Both()) as seen:
        refengine(*SMALL, "--backends", "paged")
    assert "prompt_attention" in names(seen.launches) and set(seen.launches) <= set(known)
    rest = [f"{n.program.name} {arguments(n.program)}" for n in known if n not in seen.launches]
    assert [name.strip() for name in rest] == [
        "decode_rows D=256 G=6 layout=paged kv=bf16", "conv_path_kernel HK=2 HV=6", "step_tree_kernel HK=2 HV=6",
        "replay_kernel HK=2 HV=6", "commit_conv_path_kernel C=1280", "locate_kernel layout=paged",
        "copy_pages_kernel unit=uint32", "sample_kernel", "matmul_kernel TILES=8 SLAB=4 ROUNDED=False", "add_rounded_kernel",
    ]  # fmt: skip


def test_large_model_is_recorded_without_its_weights():
    """The 27B layout launches the same kernels, bound to its own heads."""
    small, large = (launches(load_model(name), PagedBackend) for name in ("qwen3.5-tiny", "qwen3.8-27b"))
    assert names(small) == names(large)
    bound = [{arguments(n.program) for n in found} for found in (small, large)]
    assert "HK=2 HV=6" in bound[0] - bound[1] and "HK=16 HV=48" in bound[1] - bound[0]


def test_inspect_reports_and_compares(refengine, tmp_path):
    """A record an architecture; the same code is unchanged, another hash a finding."""
    pytest.importorskip("numba_cuda")
    call = ("inspect", "argmax_kernel", "--sm", "80,90")
    status, out, _ = refengine(*call, "--json", "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert status == 0 and "argmax_kernel" in out and [k["sm"] for k in report["kernels"]] == ["sm_80", "sm_90"]
    assert all(k["registers"] > 0 and k["shared_bytes"] == 256 and k["threads"] == 1024 for k in report["kernels"])
    assert {"claims", "versions", "command"} <= set(report)
    status, out, _ = refengine(*call, "--against", "report.json")
    assert (status, last_line(out)) == (0, "0 of 2 changed")
    report["kernels"][1]["code_hash"] = "0" * 16
    (tmp_path / "report.json").write_text(json.dumps(report))
    status, out, _ = refengine(*call, "--against", "report.json")
    assert (status, last_line(out)) == (1, "1 of 2 changed") and "changed: argmax_kernel sm_90" in out


def test_inspect_prints_code(refengine):
    """--ptx and --sass print the kernel's own, and no table."""
    pytest.importorskip("numba_cuda")
    status, out, _ = refengine("inspect", "embed_kernel", "--sm", "90", "--ptx", "--sass")
    assert status == 0 and out.startswith("// embed_kernel") and ".entry embed_kernel" in out and "EXIT" in out
