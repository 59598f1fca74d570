"""Where arrays live: NumPy on the CPU machine, CuPy on a GPU. Kernels launch where their arrays are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from refengine.errors import UserError


@dataclass(frozen=True)
class Device:
    """A place for arrays. name: "cpu" or "cuda". xp: numpy or cupy. title: for people."""

    name: str
    xp: Any
    title: str

    def put(self, array: np.ndarray) -> Any:
        """A host array on the device."""
        return self.xp.asarray(array)

    def get(self, array: Any) -> np.ndarray:
        """A device array on the host."""
        return array.get() if hasattr(array, "get") else array

    def synchronize(self) -> None:
        """Wait for everything launched."""
        if self.name == "cuda":
            self.xp.cuda.Device().synchronize()


def open_device(name: str) -> Device:
    """The device of ``--device auto|cpu|cuda``; auto takes a GPU where there is one.

    Raises UserError when cuda is asked for and cupy or a GPU is missing.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {name}: use auto, cpu or cuda")
    if name != "cpu":
        gpu = _gpu()
        if isinstance(gpu, Device):
            return gpu
        if name == "cuda":
            raise UserError(f"--device cuda: {gpu}; use --device cpu")
    return Device("cpu", np, "CPU machine")


def _gpu() -> Device | str:
    """The first GPU, or why there is none."""
    try:
        import cupy
    except ImportError:
        return "cupy is not installed (.venv/bin/python -m pip install -e '.[gpu]')"
    try:
        properties = cupy.cuda.runtime.getDeviceProperties(0)
    except cupy.cuda.runtime.CUDARuntimeError:
        return "no GPU was found"
    return Device("cuda", cupy, properties["name"].decode())
