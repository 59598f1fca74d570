"""A package that was made known is found as an installed one is, and by this process alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from backends.base import BackendError, backend_class, backend_names
from refengine.lab.plugins import make_known

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "paged_p64"


def test_a_package_is_known_to_this_process_alone(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(BackendError, match="paged-p64"):
        backend_class("paged-p64")
    assert "paged-p64 = paged_p64:PagedP64Backend" in make_known(EXAMPLE)
    assert "paged-p64" in backend_names() and backend_class("paged-p64").name == "paged-p64"
    other = "from backends.base import backend_names; print(*backend_names())"
    assert "paged-p64" not in subprocess.run([sys.executable, "-c", other], capture_output=True, text=True).stdout
