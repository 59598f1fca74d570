"""The pages are true: generated parts are current, links lead somewhere, commands parse, the example backend is equal."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import typer.main

from kernels_numba.machine import __all__ as machine_names
from refengine.cli import app
from refengine.device import open_device
from refengine.lab.dialect_table import cuda_names
from refengine.lab.docs import DocsError, pages, renewed, source, whole
from refengine.lab.exercises import load
from refengine.lab.links import broken
from refengine.model import check_dims
from refengine.registry import load_model
from refengine.verify.attention_bits import Bench, Heads, equal_backends

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "examples" / "paged_p64"
PAGES = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages()]


@pytest.mark.parametrize("page", PAGES)
def test_generated_parts_are_current(page):
    text = page.read_text(encoding="utf-8")
    assert renewed(text) == text, "run: .venv/bin/python -m refengine.lab.docs"


def test_the_demo_shows_the_recorded_bits():
    hashes = json.loads((ROOT / "tests/data/bits_cpu.json").read_text())["hashes"]
    line = re.search(r"^EQUAL 3 backends, .*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert line and line[0].endswith(f"logits {hashes['compare logits']}, tokens {hashes['compare tokens']}")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_anchors(page):
    assert broken(page) == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page):
    group = typer.main.get_command(app)
    for line in re.findall(r"^ +\.venv/bin/refengine (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        name, *arguments = shlex.split(line)
        command = group.commands[name]
        command.make_context(name, [a for a in arguments if a != "--help"])


def test_the_dialect_page_names_all_that_kernels_may_use():
    text = (ROOT / "docs" / "dialect.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", text))
    wanted = {name.rpartition(".")[0] or name for name in cuda_names() if not name.endswith(".array")}
    for_hosts = {"BoundKernel", "Device", "Kernel", "KernelError", "SetupError", "checked"}
    types = {"boolean", "float32", "float64", "int8", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
    assert (wanted | set(machine_names)) - for_hosts - types - words == set()


# --- Citations of docs/spec ---------------------------------------------------------------------------------------------

SPEC = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "spec").glob("*.md")}
SECTION = r"§(\d+(?:\.\d+)*)"
NEXT = re.compile(rf"(?:, | and )(?:({'|'.join(SPEC)}) )?{SECTION}")
CITING = ("kernels_numba", "backends", "refengine", "tests", "benchmarks", "docs", "tutorials")


def cited(text: str) -> set[tuple[str, str]]:
    """(page, section) of every ``Spec numerics §4 and §5, attention §5``, which may go on in the next line."""
    text = re.sub(r"\s+(?:# )?", " ", text)
    found = set()
    for first in re.finditer(rf"\b[Ss]pec ([a-z-]+) {SECTION}", text):
        item, page = first, first[1]
        while item:
            page = item[1] or page
            found.add((page, item[2]))
            item = NEXT.match(text, item.end())
    return found


def unresolved(text: str) -> list[tuple[str, str]]:
    """The citations that name no heading of a page in docs/spec."""
    headings = {(n, s) for n, page in SPEC.items() for s in re.findall(r"^#+ (\d[\d.]*?)\.? ", page, re.MULTILINE)}
    return sorted(cited(text) - headings)


def test_citations_lead_to_sections():
    sources = [path for top in CITING for path in (ROOT / top).rglob("*.py")]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sources}
    assert sum(len(cited(text)) for text in texts.values()) > 20
    assert {name: missing for name, text in texts.items() if (missing := unresolved(text))} == {}


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (f"Spec numerics §1 and §{99}.", [("numerics", "99")]),
        (f"Spec numerics §4, attention §{99}", [("attention", "99")]),
        (f"    # Spec\n    # attention §{99}", [("attention", "99")]),
        (f"spec {'nope'} §1", [("nope", "1")]),
        (f"Spec flash-next §{99}", [("flash-next", "99")]),
        ("Spec numerics §2. Spec attention §5", []),
    ],
)
def test_a_citation_that_leads_nowhere_is_found(text, missing):
    assert unresolved(text) == missing


# --- The generator ------------------------------------------------------------------------------------------------------


def test_a_changed_part_is_made_anew():
    page = "<!-- source backends/layout.py locate_window -->\nold\n<!-- /source -->"
    assert "def locate_window(" in renewed(page) and "old" not in renewed(page)


def test_text_outside_markers_stays():
    assert renewed("a <!-- demo --> b\n") == "a <!-- demo --> b\n"


def test_decorators_belong_to_a_source():
    assert source("backends/layout.py", "locate_window").startswith("```python\n@device\ndef locate_window(")


def test_a_whole_file_is_fenced_by_its_language():
    assert whole("docs/examples/small.yaml").startswith("```yaml\n# A layout of one's own")


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("<!-- nope -->\n<!-- /nope -->", "nope"),
        ("<!-- source backends/layout.py nope -->\n<!-- /source -->", "nope"),
        ("<!-- run docs/examples/nope.py -->\n<!-- /run -->", "nope.py"),
    ],
)
def test_a_part_that_cannot_be_made_is_named(part, named):
    with pytest.raises(DocsError, match=named):
        renewed(part)


# --- The example backend ------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The example backend as pip would install it."""
    setup = configparser.ConfigParser()
    setup.read(EXAMPLE / "setup.cfg")
    entry_points = setup["options.entry_points"]["refengine.backends"].strip()
    info = tmp_path / "paged_p64-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paged-p64\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[refengine.backends]\n{entry_points}\n")
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("paged_p64", None)


@pytest.mark.parametrize(("phase", "rows", "committed"), [("prompt", 17, 60), ("decode", 3, 127)])
def test_the_example_backend_equals_the_window(installed, phase, rows, committed):
    bench = Bench(Heads(8, 2), 160, open_device("cpu"))
    ((_, equal, _),) = equal_backends(bench, phase, rows, committed, (("paged-p64", 64),))
    assert equal


# --- The examples of the guides -----------------------------------------------------------------------------------------


def test_the_cuda_kernel_compiles():
    """With NVRTC, which needs no GPU."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    text = (ROOT / "docs" / "examples" / "row_squares.cu").read_bytes()
    _, program = nvrtc.nvrtcCreateProgram(text, b"row_squares.cu", 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, 2, [b"-arch=compute_80", b"-fmad=false"])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(program, ptx)
    assert b"shfl.sync.bfly" in ptx and b"bar.sync" in ptx and b"fma.rn.f32" not in ptx


def test_the_port_keeps_its_order_of_sums():
    port = load(ROOT / "docs" / "examples" / "port_a_kernel.py")
    for n in (1, 31, 128, 129, 1000):
        x = np.random.default_rng(n).standard_normal((3, n)).astype(np.float32)
        out = np.zeros(3, np.float32)
        port.row_squares.at(barrier=True)[3, port.THREADS](out, x)
        assert out.tobytes() == port.in_order(x).tobytes()


def test_the_layout_of_the_guide_can_be_run():
    check_dims(load_model(ROOT / "docs" / "examples" / "small.yaml"))
