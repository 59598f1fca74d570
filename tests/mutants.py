"""Kernels with a planted fault: the module's source with one place changed, for tests that must come out red."""

from __future__ import annotations

import inspect
import itertools
import linecache
import sys
from types import ModuleType

from kernels_numba.machine import Kernel

_numbers = itertools.count()


def mutate(kernel: Kernel, old: str, new: str) -> Kernel:
    """The kernel, from its module's source with the text ``old`` replaced by ``new``.

    Raises ValueError unless ``old`` stands in the module exactly once.
    """
    module = sys.modules[kernel.fn.__module__]
    source = inspect.getsource(module)
    if source.count(old) != 1:
        raise ValueError(f"{old!r} stands {source.count(old)} times in {module.__name__}, not once")
    return getattr(module_from(source.replace(old, new), module.__name__), kernel.fn.__name__)


def module_from(source: str, origin: str) -> ModuleType:
    """The source as a module whose lines inspect and tracebacks can show."""
    filename = f"<mutant {next(_numbers)} of {origin}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = ModuleType(filename.strip("<>"))
    module.__file__ = filename
    exec(compile(source, filename, "exec"), module.__dict__)
    return module
