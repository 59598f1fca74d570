"""Kernels with a planted fault: the module's source with one place changed, for tests that must come out red."""

from __future__ import annotations

import inspect
import sys

from kernels_numba.machine import Kernel
from refengine.contract.controls import module_from

__all__ = ["module_from", "mutate"]


def mutate(kernel: Kernel, old: str, new: str) -> Kernel:
    """The kernel, from its module's source with the text ``old`` replaced by ``new``.

    Raises ValueError unless ``old`` stands in the module exactly once.
    """
    module = sys.modules[kernel.fn.__module__]
    source = inspect.getsource(module)
    if source.count(old) != 1:
        raise ValueError(f"{old!r} stands {source.count(old)} times in {module.__name__}, not once")
    return getattr(module_from(source.replace(old, new), module.__name__), kernel.fn.__name__)
