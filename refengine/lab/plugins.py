"""A package's entry points made known to this process alone, without installing it."""

from __future__ import annotations

import atexit
import configparser
import shutil
import sys
from importlib import invalidate_caches
from pathlib import Path
from tempfile import mkdtemp


def make_known(package: Path) -> str:
    """Do what ``pip install -e`` of a package does for this process: Python finds its modules and its entry points.

    package: a folder with a setup.cfg. Returns the entry points as Python reads them until this process ends.
    """
    setup = configparser.ConfigParser()
    setup.read(package / "setup.cfg", encoding="utf-8")
    name, version = setup["metadata"]["name"], setup["metadata"]["version"]
    points = "".join(f"[{group}]{lines}\n" for group, lines in setup["options.entry_points"].items())
    site = Path(mkdtemp(prefix="refengine-"))
    atexit.register(shutil.rmtree, site, ignore_errors=True)
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    sys.path += [str(package), str(site)]
    invalidate_caches()
    return points
