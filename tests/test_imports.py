"""Imports run one way, refengine -> backends -> kernels_numba, and numba's CUDA is known to the machine alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "kernels_numba": {"kernels_numba"},
    "backends": {"backends", "kernels_numba"},
    "refengine": {"refengine", "backends", "kernels_numba"},
}
INSIDE = ["cli", "commands", "verify", "serve", "text", "model", "checkpoint", "registry"]
"""The parts of refengine from the command line down: a part imports those below it."""


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, relative imports in full, and with them what is taken from it."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_nothing_above_it(package):
    assert len(modules(package)) > 5
    for path in modules(package):
        above = {name.split(".")[0] for name in imported(path)} & (set(ALLOWED) - ALLOWED[package])
        assert not above, f"{path} imports {above}"


def test_a_part_of_the_engine_imports_nothing_above_it():
    for path in modules("refengine"):
        part = path.relative_to(ROOT / "refengine").with_suffix("").parts[0]
        if part in INSIDE:
            above = {f"refengine.{p}" for p in INSIDE[: INSIDE.index(part)]}
            wrong = [name for name in imported(path) if ".".join(name.split(".")[:2]) in above]
            assert not wrong, f"{path} imports {wrong}"


def is_numba_cuda(name: str) -> bool:
    return name.startswith(("numba.cuda", "numba_cuda"))


def test_numba_cuda_stands_in_the_machine_alone():
    users = {path for package in ALLOWED for path in modules(package) if any(map(is_numba_cuda, imported(path)))}
    machine = ROOT / "kernels_numba" / "machine"
    assert users and all(path.parent == machine for path in users), users


def test_the_check_sees_each_form_of_import(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "backends" / "inner").mkdir(parents=True)
    path = tmp_path / "backends" / "inner" / "wrong.py"
    path.write_text("import refengine.cli\nfrom numba import cuda\nfrom .. import arena\nfrom ...refengine import x\n")
    assert list(imported(path)) == ["refengine.cli", "numba.cuda", "backends.arena", "refengine.x"]
