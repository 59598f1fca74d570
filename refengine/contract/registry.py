"""Which entries there are, and which kernels have none."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import kernels_numba
from kernels_numba.machine import Kernel
from refengine.contract.backend import PREFIX, BackendEntry
from refengine.contract.entry import ENTRIES, Entry

OWN_BACKENDS = ("window", "paged", "paged-p256", "mixed")


@cache
def entries() -> dict[str, Entry]:
    """Every entry by name: the kernels', then the engine's own backends'."""
    package = importlib.import_module("refengine.contract.entries")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return {**dict(sorted(ENTRIES.items())), **{PREFIX + name: BackendEntry(name) for name in OWN_BACKENDS}}


def entry_named(name: str) -> Entry:
    """An entry by name; ``backend NAME`` is that of any registered backend."""
    found = entries().get(name)
    return found if found is not None else BackendEntry(name.removeprefix(PREFIX))


@cache
def product_kernels() -> dict[str, str]:
    """Every kernel of kernels_numba, and the module that defines it."""
    found = {}
    for info in pkgutil.walk_packages(kernels_numba.__path__, "kernels_numba."):
        for name, value in vars(importlib.import_module(info.name)).items():
            if isinstance(value, Kernel) and value.fn.__module__ == info.name:
                found[name] = info.name
    return found


def uncovered() -> list[str]:
    """Kernels that have no entry."""
    covered = {name for entry in entries().values() for name in entry.kernels}
    return sorted(set(product_kernels()) - covered)
