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
from kernels_numba.flash_next.attention import attend_listed
from kernels_numba.flash_next.pool import fn_qsa_pool
from kernels_numba.flash_next.prep import fn_attn_prep
from kernels_numba.flash_next.turns import Media
from kernels_numba.machine import Kernel
from kernels_numba.machine.frontend import Program
from kernels_numba.machine.modes import Noted, recorded
from refengine.checkpoint import Checkpoint, load_mtp, load_weights
from refengine.device import open_device
from refengine.model import Head, Model, cache_shape, open_head, open_model
from refengine.registry import ModelSpec, load_model
from refengine.serve.sampling import Sampling, draw
from refengine.serve.session import Session

PROMPT_ROWS, PAGE_SIZE = 512, 48
LONG, MANY = [[0] * (PROMPT_ROWS + 16)], [[0]] * 33
"""Prompts whose runs take every branch: a whole chunk of committed keys and a short last pass; more decode rows than a
narrow matrix product takes."""
DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "I64": np.int64}
Form = tuple[str, str, str]
"""(backend, kv, attention)."""
TINY, LARGE, EXPERTS = "qwen3.5-tiny", "qwen3.8-27b", "qwen3.6-35b-a3b"
FLASH_TINY, FLASH = "flash-next-tiny", "qwen3.8-flash-next"
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
    (EXPERTS, None): (WINDOW, PAGED),
    (FLASH, None): (WINDOW, PAGED, P256, NARROW),
    (FLASH_TINY, None): (("mixed", "bf16", TILES), ("paged-p256", "fp8", TILES)),
}
"""(model, head_dim in place of its own): between them every kernel, the smallest and the largest heads, every head_dim, every
type of cache and kind of address."""
TREE, CHAIN = [-1, 0, 0], [-1, 0, 1]
"""Parents of a drafted window, and of one that may not branch."""
SECTIONS = (11, 11, 10)
"""Rotary pairs of time, height and width, of media."""


def launches(spec: ModelSpec, backend: type[Backend], kv: str = "bf16", attention: str = TILES) -> list[Noted]:
    """Every different launch of prompt passes, decode steps, drafted passes and kept states, the MTP head's too, in order."""
    small = one_of_each_kind(spec)
    weights = load_weights(BlankCheckpoint(small), small)
    with recorded() as recording:
        for prompts in (long_prompt(small), MANY):
            sizes = Sizes(len(prompts[0]) + 4, len(prompts), PAGE_SIZE, len(TREE), kv=kv, attention=attention)
            rehearse(small, weights, backend, sizes, prompts)
    return recording.launches


def rehearse(
    spec: ModelSpec, weights: Any, backend: type[Backend], sizes: Sizes, prompts: Sequence[Sequence[int]]
) -> None:
    """The prompts in passes, a decode step, drafts, a draw; then passes of the MTP head, if the model has one."""
    device = open_device("cpu")
    model = open_model(spec, weights, device, sizes.context)
    for _ in Session(model, backend(cache_shape(spec), sizes), device, prompts, PROMPT_ROWS).run(2):
        pass
    rehearse_drafts(model, backend(cache_shape(spec), sizes), len(prompts))
    rehearse_copies(backend(cache_shape(spec), sizes))
    if spec.indexer is not None:
        rehearse_variants(backend(cache_shape(spec), sizes), model.rope)
    draw(np.zeros((1, spec.vocabulary), np.float32), [Sampling(temperature=1.0)], [0], device)
    if spec.mtp_layers:
        head = open_head(spec, load_mtp(BlankCheckpoint(spec), spec), model, device)
        rehearse_head(head, backend(cache_shape(spec, mtp=True), sizes), len(prompts))


def rehearse_drafts(model: Model, backend: Backend, streams: int) -> None:
    """A tree of drafts of each stream, or a chain, of which a branch is kept."""
    parents = TREE if model.spec.drafts_trees else CHAIN
    work = [(backend.open(), len(parents)) for _ in range(streams)]
    batch = backend.batch(DECODE, work, [parents] * streams)
    model.forward(np.zeros(batch.rows, np.int32), backend, batch, np.arange(batch.rows))
    model.finish(backend, batch, [len(parents) - 1] * streams)


def rehearse_copies(backend: Backend) -> None:
    """A stream saved and restored; a page copied, where there are pages."""
    stream = backend.open()
    backend.finish(backend.batch(PROMPT, [(stream, 1)]))
    kept = stream.save()
    stream.release()
    backend.restore(kept)
    if backend.paged:
        copy_page(backend, 0, 1, 1)


def rehearse_variants(backend: Backend, rope: Any) -> None:
    """Forms of sparse attention's kernels that the engine has no use for: rows that turn by media, keys brought ahead."""
    shape, layer = backend.shape, backend.shape.attention_layers[0]
    batch = backend.batch(PROMPT, [(backend.open(), backend.sizes.context)])
    plan, streams = batch.plan.slices[0].plan, backend.layer_streams(layer, batch)
    columns = 2 * (shape.heads + shape.kv_heads) * shape.head_dim + (shape.index_heads + 1) * shape.index_dim
    projection = np.zeros((batch.rows, columns), ml_dtypes.bfloat16)
    q, index_q = (
        np.zeros((batch.rows, *heads), ml_dtypes.bfloat16)
        for heads in ((shape.heads, shape.head_dim), (shape.index_heads, shape.index_dim))
    )
    gain, index_gain = np.ones(shape.head_dim, np.float32), np.ones(shape.index_dim, np.float32)
    media = Media(np.zeros((1, 3), np.int64), np.zeros((1, 3), np.int32), SECTIONS)
    cache, layout, kv = (backend.arena.words, backend.pages, streams), backend.layout, backend.sizes.kv
    gains = (gain, gain, index_gain)
    fn_attn_prep(q, index_q, projection, *cache, batch.owners, *gains, rope, 1e-6, shape.kv_heads, layout, kv, media)
    fn_qsa_pool(*cache, batch.rows, index_gain, rope, 1e-6, layout, media)
    q, listed = q[: plan.rows], np.zeros(plan.lists, np.int32)
    rows, scale = batch.owners[: plan.rows], np.float32(1)
    attend_listed(np.empty_like(q), q, *cache, rows, scale, listed, batch.scratch, plan, layout, kv, ahead=True)


def rehearse_head(head: Head, backend: Backend, streams: int) -> None:
    """The head over a prompt pass of PROMPT_ROWS rows of one stream, or a row of each of several, and a decode step."""
    work = [(backend.open(), PROMPT_ROWS if streams == 1 else 1) for _ in range(streams)]
    for phase, passed in ((PROMPT, work), (DECODE, [(stream, 1) for stream, _ in work])):
        batch = backend.batch(phase, passed)
        hidden = np.zeros((batch.rows, head.spec.stream_width), ml_dtypes.bfloat16)
        head.forward(np.zeros(batch.rows, np.int32), hidden, backend, batch, np.arange(streams))
        backend.finish(batch)


def one_of_each_kind(spec: ModelSpec) -> ModelSpec:
    """The model with one layer of each kind, and a small table of n-grams."""
    kinds = tuple(dict.fromkeys(spec.layer_types))
    ngrams = None if spec.ngrams is None else replace(spec.ngrams, base=1000)
    return replace(spec, layers=len(kinds), layer_types=kinds, ngrams=ngrams)


def long_prompt(spec: ModelSpec) -> list[list[int]]:
    """LONG, or a prompt with some rows of sparse attention beyond the switch."""
    return LONG if spec.indexer is None else [[0] * (spec.indexer.budget + PROMPT_ROWS)]


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
