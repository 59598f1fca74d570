"""Launches of kernels that no model runs yet: gate 5 takes those of their entries' control cases, with nothing executed."""

from __future__ import annotations

from functools import cache

from kernels_numba.machine.modes import Noted, recorded
from refengine.contract.entry import product_modules
from refengine.contract.registry import entries, product_kernels
from refengine.contract.workbench import NAN, Workbench
from refengine.device import open_device
from refengine.verify.launches import LaunchName, engine_launches, named


@cache
def all_launches() -> dict[LaunchName, Noted]:
    """The engine's launches, and those of kernels that it does not launch."""
    return {**engine_launches(), **entry_launches()}


def entry_launches() -> dict[LaunchName, Noted]:
    """What the entries launch of kernels that the engine launches nowhere: one of each kind."""
    idle = set(product_kernels()) - {name.kernel for name in engine_launches()}
    device = open_device("cpu")
    with recorded() as recording:
        for entry in entries().values():
            if idle & set(entry.kernels):
                for case in entry.control_cases():
                    entry.launch(case, entry.inputs(case, NAN, 0), Workbench(device, NAN), product_modules(entry))
    return {name: one for name, one in named(recording.launches).items() if name.kernel in idle}
