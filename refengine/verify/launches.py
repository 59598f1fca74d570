"""Which kernels the engine launches for a model and a backend, found by running the engine with nothing executed.

The forward pass, the backend and the loader are the engine's own; the weights have their shapes and no values, a layer
of each kind stands for all of that kind, and every launch is noted in place of running.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from backends.base import DECODE, PROMPT, Backend, Sizes, backend_class
from backends.page_copies import copy_page
from backends.stream import SCALAR_BATCH, TILES
from kernels_numba.machine import Kernel
from kernels_numba.machine.frontend import Program
from kernels_numba.machine.modes import Noted, recorded
from refengine.checkpoint import Checkpoint, load_mtp, load_weights
from refengine.device import open_device
from refengine.model import MtpHead, Qwen35, cache_shape
from refengine.registry import ModelSpec, load_model
from refengine.serve.sampling import Sampling, draw
from refengine.serve.session import Session

PROMPT_ROWS, PAGE_SIZE = 512, 48
LONG, MANY = [[0] * (PROMPT_ROWS + 16)], [[0]] * 33
"""Prompts whose runs take every branch: a whole chunk of committed keys and a short last pass; more decode rows than a
narrow matrix product takes."""
DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}
Form = tuple[str, str, str]
"""(backend, kv, attention)."""
TINY, LARGE = "qwen3.5-tiny", "qwen3.8-27b"
WINDOW, PAGED, P256 = ((name, "bf16", TILES) for name in ("window", "paged", "paged-p256"))
NARROW: Form = ("paged", "fp8", TILES)
OTHERS: tuple[Form, ...] = (
    ("paged-p256", "fp8", TILES), ("mixed", "bf16", TILES), ("paged", "bf16", SCALAR_BATCH), ("mixed", "fp8", SCALAR_BATCH),
)  # fmt: skip
RUNS: dict[tuple[str, int | None], tuple[Form, ...]] = {
    (TINY, None): (WINDOW, PAGED, P256, NARROW, *OTHERS),
    (LARGE, None): (WINDOW, PAGED, P256, NARROW),
    (TINY, 64): (PAGED, NARROW),
    (TINY, 128): (PAGED, NARROW),
}
"""(model, head_dim in place of its own): between them every kernel, the smallest and the largest heads, every head_dim, every
type of cache and kind of address."""
TREE = [-1, 0, 0]
"""Parents of a drafted window."""


def launches(spec: ModelSpec, backend: type[Backend], kv: str = "bf16", attention: str = TILES) -> list[Noted]:
    """Every different launch of prompt passes, decode steps, drafted passes and kept states, the MTP head's too, in order."""
    small = one_of_each_kind(spec)
    weights = load_weights(BlankCheckpoint(small), small)
    with recorded() as recording:
        for prompts in (LONG, MANY):
            sizes = Sizes(len(prompts[0]) + 4, len(prompts), PAGE_SIZE, len(TREE), kv=kv, attention=attention)
            rehearse(small, weights, backend, sizes, prompts)
    return recording.launches


def rehearse(
    spec: ModelSpec, weights: Any, backend: type[Backend], sizes: Sizes, prompts: Sequence[Sequence[int]]
) -> None:
    """The prompts in passes, a decode step, drafts, a draw; then passes of the MTP head, if the model has one."""
    device = open_device("cpu")
    model = Qwen35(spec, weights, device, sizes.context)
    for _ in Session(model, backend(cache_shape(spec), sizes), device, prompts, PROMPT_ROWS).run(2):
        pass
    rehearse_drafts(model, backend(cache_shape(spec), sizes), len(prompts))
    rehearse_copies(backend(cache_shape(spec), sizes))
    draw(np.zeros((1, spec.vocabulary), np.float32), [Sampling(temperature=1.0)], [0], device)
    if spec.mtp_layers:
        head = MtpHead(spec, load_mtp(BlankCheckpoint(spec), spec), model, device)
        rehearse_head(head, backend(cache_shape(spec, mtp=True), sizes), len(prompts))


def rehearse_drafts(model: Qwen35, backend: Backend, streams: int) -> None:
    """A tree of drafts of each stream, of which a branch is kept."""
    work = [(backend.open(), len(TREE)) for _ in range(streams)]
    batch = backend.batch(DECODE, work, [TREE] * streams)
    model.forward(np.zeros(batch.rows, np.int32), backend, batch, np.arange(batch.rows))
    model.finish(backend, batch, [len(TREE) - 1] * streams)


def rehearse_copies(backend: Backend) -> None:
    """A stream saved and restored; a page copied, where there are pages."""
    stream = backend.open()
    backend.finish(backend.batch(PROMPT, [(stream, 1)]))
    kept = stream.save()
    stream.release()
    backend.restore(kept)
    if backend.paged:
        copy_page(backend, 0, 1, 1)


def rehearse_head(head: MtpHead, backend: Backend, streams: int) -> None:
    """The head over a prompt pass of PROMPT_ROWS rows of one stream, or a row of each of several, and a decode step."""
    work = [(backend.open(), PROMPT_ROWS if streams == 1 else 1) for _ in range(streams)]
    for phase, passed in ((PROMPT, work), (DECODE, [(stream, 1) for stream, _ in work])):
        batch = backend.batch(phase, passed)
        hidden = np.zeros((batch.rows, head.spec.hidden), ml_dtypes.bfloat16)
        head.forward(np.zeros(batch.rows, np.int32), hidden, backend, batch, np.arange(streams))
        backend.finish(batch)


def one_of_each_kind(spec: ModelSpec) -> ModelSpec:
    """The model with one layer of each kind."""
    kinds = tuple(dict.fromkeys(spec.layer_types))
    return replace(spec, layers=len(kinds), layer_types=kinds)


# --- All that the engine launches -----------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class LaunchName:
    """A launch as reports and records name it. arguments: as ``arguments`` gives them, or (none)."""

    kernel: str
    arguments: str

    def __str__(self) -> str:
        return f"{self.kernel} {self.arguments}"


@cache
def engine_launches() -> dict[LaunchName, Noted]:
    """Every different launch of RUNS, by a name that is the same in every process."""
    found: dict[Noted, None] = {}
    for (model, head_dim), forms in RUNS.items():
        spec = with_heads(load_model(model), head_dim)
        for backend, kv, attention in forms:
            found.update(dict.fromkeys(launches(spec, backend_class(backend), kv, attention)))
    return named(found)


def with_heads(spec: ModelSpec, head_dim: int | None) -> ModelSpec:
    """The model with another head_dim, if one is given."""
    return spec if head_dim is None else replace(spec, attention=replace(spec.attention, head_dim=head_dim))


def named(found: Iterable[Noted]) -> dict[LaunchName, Noted]:
    """The launches by name; those that differ in types, threads or memory alone are numbered."""
    out, times = {}, Counter[LaunchName]()
    for one in found:
        name = LaunchName(one.program.name, arguments(one.program) or "(none)")
        times[name] += 1
        out[name if times[name] == 1 else replace(name, arguments=f"{name.arguments} ({times[name]})")] = one
    return out


# --- Weights that have shapes only ----------------------------------------------------------------------------------


class Blank(np.ndarray):
    """Zeros that nobody touches, so that they take no memory; joined, they give others."""

    def __array_function__(self, function: Any, types: Iterable[type], args: Any, kwargs: Any) -> Any:
        if function is not np.concatenate:
            return super().__array_function__(function, types, args, kwargs)
        (parts,) = args
        return np.zeros((sum(len(p) for p in parts), *parts[0].shape[1:]), parts[0].dtype)


class BlankCheckpoint(Checkpoint):
    """A checkpoint of the right names, shapes and types."""

    def __init__(self, spec: ModelSpec):
        super().__init__(Path(), spec, (*spec.tensors(), *spec.mtp_tensors()), {})

    def check_mtp(self) -> None:
        """It has whatever the layout has."""

    def by_role(self, role: str, layer: int | None = None) -> np.ndarray:
        tensor = self.tensors[role, layer]
        return np.zeros(tensor.shape, DTYPES[tensor.dtype]).view(Blank)


# --- What was bound -------------------------------------------------------------------------------------------------


def arguments(program: Program) -> str:
    """The compile-time arguments that a program was made with, as ``D=256 layout=paged``."""
    homes = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == program.filename]
    kernels = [k for m in homes if isinstance(k := getattr(m, program.name, None), Kernel)]
    bound = next((b.bound for k in kernels for b in k.bound.values() if b.program is program), {})
    return " ".join(f"{name}={shown(value)}" for name, value in bound.items())


def shown(value: Any) -> str:
    """A compile-time argument by its name, if it has one."""
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or value)
