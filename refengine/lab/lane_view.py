"""What a kernel's variables hold, as NumPy shows it: of one thread, or of all threads of the block."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import ml_dtypes
import numpy as np

from kernels_numba.machine.arrays import GlobalArray, LocalArray, SharedArray
from kernels_numba.machine.frontend import Program
from kernels_numba.machine.kernel import Device, Kernel
from kernels_numba.machine.place import statement_line


def view(held: Any, lane: int | None) -> Any:
    """A variable's value. lane: of the block; None: an array with a first axis of all lanes, where they may differ.

    Shared and global arrays are the block's, in their own shapes. The machine's own memory: look, do not write.
    """
    if isinstance(held, tuple):
        return tuple(view(one, lane) for one in held)
    if isinstance(held, GlobalArray):
        return held.flat.reshape(tuple(map(int, held.shape)))
    if isinstance(held, SharedArray):
        return held.rows[0].reshape(tuple(map(int, held.shape)))
    if isinstance(held, LocalArray):
        return np.moveaxis(held.data, -1, 0) if lane is None else held.data[..., lane]
    if isinstance(held, np.ndarray) and held.ndim:
        return held if lane is None else held[lane]
    return held


def bf16(words: Any) -> np.ndarray:
    """Words of two bf16 as float32, the last axis twice as long."""
    return np.ascontiguousarray(words, np.uint32).reshape(-1).view(ml_dtypes.bfloat16).astype(np.float32)


def variables(frame: FrameType, lane: int | None) -> dict[str, Any]:
    """The kernel's own variables in a lock-step frame; None: no thread has assigned it yet."""
    return {name: view(held, lane) for name, held in frame.f_locals.items() if not name.startswith("__")}


def names(frame: FrameType, lane: int | None) -> dict[str, Any]:
    """What an expression may say: the variables, compile-time arguments, the names of the kernel's module, np, bf16, active."""
    program: Program = frame.f_globals["__lockstep__"]
    around = {**module_names(program), "np": np, "bf16": bf16, **compile_time(program), "active": active(frame)}
    return {**around, **variables(frame, lane)}


def active(frame: FrameType) -> np.ndarray:
    """Which lanes run the statement that a lock-step frame stands at: bool [lanes]."""
    program, launch = frame.f_globals["__lockstep__"], frame.f_locals["__x"]
    masks: dict[int, str] = frame.f_globals["__masks__"]
    mask = frame.f_locals.get(masks.get(statement_line(program, frame.f_lineno), "__m"), True)
    return np.zeros(launch.size, np.bool_) if mask is None else launch.active(mask)


def module_names(program: Program) -> dict[str, Any]:
    """The names of the module that defines a kernel or device function."""
    found = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == program.filename]
    return dict(vars(found[0])) if found else {}


def compile_time(program: Program) -> dict[str, Any]:
    """The compile-time arguments that a program was made with."""
    maker = module_names(program).get(program.name)
    if isinstance(maker, Kernel):
        return next((b.bound for b in maker.bound.values() if b.program is program), {})
    if isinstance(maker, Device):
        return next((dict(key) for key, made in maker.bound.items() if made is program), {})
    return {}


def summary(value: Any) -> str:
    """A value in one line."""
    if not isinstance(value, np.ndarray) or value.ndim == 0:
        return "not assigned" if value is None else str(value)
    what = f"{value.dtype} [{', '.join(map(str, value.shape))}]"
    if not value.size or value.dtype.kind == "f" and np.isnan(value).all():
        return f"{what}, nothing written" if value.size else what
    with np.errstate(invalid="ignore"):
        least, most = np.nanmin(value), np.nanmax(value)
    return f"{what}, {least} everywhere" if least == most else f"{what}, {least} to {most}"


def runs(lanes: np.ndarray) -> str:
    """Which lanes, as ``0-31, 64-95``."""
    at = np.flatnonzero(lanes)
    edges = np.flatnonzero(np.diff(at) != 1)
    firsts, lasts = at[np.concatenate([[0], edges + 1])], at[np.concatenate([edges, [len(at) - 1]])]
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in zip(firsts, lasts))
