"""``refengine compare``: read the request, run each backend, show the table, say the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from backends.base import Backend, Sizes, backend_class, backend_names
from backends.stream import ATTENTION, TILES
from kernels_numba.fp8 import KV_TYPES
from kernels_numba.machine import KernelError, SetupError
from refengine.checkpoint import load_weights
from refengine.commands.inputs import check_attention, check_pages, find_model, given_bytes, machine_gib
from refengine.commands.report import check_report, progress_bar, show, write_report
from refengine.device import Device, open_device
from refengine.errors import UserError
from refengine.model import Model, cache_shape, check_dims, open_model
from refengine.names import known_name
from refengine.registry import ModelSpec
from refengine.serve.side_by_side import cores
from refengine.serve.side_by_side import run_all as side_by_side
from refengine.verify.compare import Arm, run_arm, verdict

MOST_PROMPT_ROWS = 4096
RANDOM_TOKENS = 600
"""Of a prompt that nobody gave."""
SPARE_PAGES = 5
"""Pages that no stream owns: poison among the pages that are read."""
SHUFFLED, REVERSED = "shuffled", "reversed"
FEWER = "allow more, or ask for fewer with --parallel, --tokens or --context"


@dataclass(frozen=True)
class Request:
    """A comparison as the command line asks for it."""

    model: str
    backends: tuple[str, ...]
    page_size: int
    prompt: str | None
    prompt_tokens: int | None
    tokens: int
    parallel: int
    prompt_rows: int
    context: int | None
    memory_gib: float | None
    device: str
    seed: int
    kv: str = "bf16"
    attention: str = TILES
    page_order: str = SHUFFLED


def run(request: Request, json: Path | None) -> int:
    """Run a comparison; the exit status: 0 equal, 1 a finding. Raises UserError for a request that makes no sense."""
    check(request)
    check_report(json)
    device = open_device(request.device)
    spec, _, checkpoint = find_model(request.model, request.seed)
    check_dims(spec)
    check_pages("--page-size", [request.page_size], spec)
    check_attention(request.attention, spec)
    prompt = prompt_of(request, spec)
    context = room(request, len(prompt), spec)
    built = build_all(spec, request, context, device)
    weights = load_weights(checkpoint(), spec)
    prompts = rotated(prompt, request.parallel)
    try:
        arms = run_all(built, open_model(spec, weights, device, context), device, prompts, request)
    except SetupError:
        raise
    except KernelError as stopped:
        print(f"UNCHECKED a kernel was stopped: {stopped}")
        return 1
    line, equal = verdict(arms)
    show(table(arms))
    if json is not None:
        body = {"request": asdict(request), "device": device.title, "verdict": line, "arms": [summary(a) for a in arms]}
        write_report(json, {"claims": claims(arms, equal), **body})
    print(line)
    return 0 if equal else 1


# --- The request ----------------------------------------------------------------------------------------------------


def check(request: Request) -> None:
    """Refuse what can be refused before anything is read."""
    check_backends(request.backends)
    known_name("--kv", request.kv, KV_TYPES)
    known_name("--attention", request.attention, ATTENTION)
    known_name("--page-order", request.page_order, (SHUFFLED, REVERSED))
    least = {"--page-size": request.page_size, "--tokens": request.tokens, "--parallel": request.parallel,
             "--prompt-tokens": request.prompt_tokens, "--context": request.context}  # fmt: skip
    for flag, value in least.items():
        if value is not None and value < 1:
            raise UserError(f"{flag} {value}: at least 1")
    if not 1 <= request.prompt_rows <= MOST_PROMPT_ROWS:
        raise UserError(f"--prompt-rows {request.prompt_rows}: 1 to {MOST_PROMPT_ROWS}")
    if request.memory_gib is not None and not request.memory_gib > 0:
        raise UserError(f"--memory-gib {request.memory_gib}: more than 0")
    if request.seed < 0:
        raise UserError(f"--seed {request.seed}: at least 0")


def check_backends(names: Sequence[str]) -> None:
    """Refuse a list of backends that is empty, or names one that is unknown or named before."""
    if not names:
        raise UserError(f"--backends: name one or more of {', '.join(backend_names())}")
    for place, name in enumerate(names):
        known_name("--backends", name, backend_names())
        if name in names[:place]:
            raise UserError(f"--backends {name}: named twice; nothing is proved by comparing it with itself")


def prompt_of(request: Request, spec: ModelSpec) -> list[int]:
    """The prompt's token ids: bytes of --prompt, or random ones."""
    wanted = request.prompt_tokens
    if request.prompt is None:
        count = RANDOM_TOKENS if wanted is None else wanted
        if count > spec.max_positions:
            raise UserError(f"--prompt-tokens {count}: {spec.name} has {spec.max_positions} positions; ask for fewer")
        return np.random.default_rng(request.seed).integers(0, min(256, spec.vocabulary), count).tolist()
    ids = list(given_bytes("--prompt", request.prompt))
    if not ids:
        raise UserError("--prompt: is empty; give at least one character")
    if wanted is not None and wanted > len(ids):
        raise UserError(f"--prompt-tokens {wanted}: the prompt has {len(ids)} tokens; ask for at most that many")
    return ids[:wanted]


def rotated(prompt: list[int], streams: int) -> list[list[int]]:
    """A prompt for each stream: the n-th is rotated by n tokens, so that no two streams are alike."""
    return [prompt[n % len(prompt) :] + prompt[: n % len(prompt)] for n in range(streams)]


def room(request: Request, prompt: int, spec: ModelSpec) -> int:
    """Positions a stream has room for. Raises UserError when the request does not fit."""
    need = prompt + request.tokens
    context = need if request.context is None else request.context
    if context < need:
        raise UserError(f"--context {context}: the prompt and --tokens take {need} positions; use --context {need}")
    if context > spec.max_positions:
        flag = f"--tokens {request.tokens}" if request.context is None else f"--context {context}"
        raise UserError(f"{flag}: makes {context} positions, {spec.name} has {spec.max_positions}; ask for fewer")
    return context


# --- The backends ---------------------------------------------------------------------------------------------------


def build_all(spec: ModelSpec, request: Request, context: int, device: Device) -> list[Backend]:
    """The backends, no page table in order. Raises UserError when they take more memory than there may be."""
    sizes = Sizes(
        context,
        request.parallel,
        request.page_size,
        spare_pages=SPARE_PAGES,
        shuffle=request.seed if request.page_order == SHUFFLED else None,
        reverse=request.page_order == REVERSED,
        kv=request.kv,
        attention=request.attention,
    )
    shape, kinds = cache_shape(spec), [backend_class(name) for name in request.backends]
    for kind in kinds:
        check_memory(kind.name, kind.arena_bytes(shape, sizes) / 2**30, request, context, device)
    try:
        return [kind(shape, sizes, device.xp) for kind in kinds]
    except MemoryError as full:
        raise UserError(f"the caches do not fit into the memory of {device.title}; {FEWER}") from full


def check_memory(name: str, gib: float, request: Request, context: int, device: Device) -> None:
    """Refuse a backend of more than --memory-gib, or than this machine has; a GPU refuses by itself."""
    limit, flag = (machine_gib() if device.name == "cpu" else inf), "this machine's memory"
    if request.memory_gib is not None and request.memory_gib < limit:
        limit, flag = request.memory_gib, "--memory-gib"
    if gib > limit:
        raise UserError(
            f"{flag} {limit:.4g} GiB: {name} takes {gib:.4f} GiB for {request.parallel} x {context} positions; {FEWER}"
        )


def run_all(
    built: Sequence[Backend], model: Model, device: Device, prompts: list[list[int]], request: Request
) -> list[Arm]:
    """Every backend's run, with a progress bar; on the CPU machine side by side, as many as there are cores."""
    passes = len(prompts) * -(-len(prompts[0]) // request.prompt_rows) + request.tokens - 1
    jobs = [partial(run_arm, b, model, device, prompts, request.prompt_rows, request.tokens) for b in built]
    with progress_bar() as bar:
        tasks = [bar.add_task(backend.name, total=passes) for backend in built]
        return side_by_side(jobs, lambda n: bar.advance(tasks[n]), cores() if device.name == "cpu" else 1)


# --- The report -----------------------------------------------------------------------------------------------------


def table(arms: Sequence[Arm]) -> Table:
    """A row a backend."""
    counted = ("lookups", "sparse", "dense") if arms[0].sparse + arms[0].dense else ("lookups", "straddles")
    shown = Table("backend", "prompt pass hashes", "token hash", *counted, "KV bytes", "seconds")
    for column in shown.columns[3:]:
        column.justify = "right"
    for arm in arms:
        counts = (f"{n:,}" for n in (*(getattr(arm, name) for name in counted), arm.kv_bytes))
        shown.add_row(arm.name, " ".join(arm.prompt_hashes), arm.token_hash, *counts, f"{arm.seconds:.1f}")
    return shown


def summary(arm: Arm) -> dict[str, Any]:
    """An arm for the JSON report."""
    return {
        "backend": arm.name, "page_size": arm.page_size, "prompt_hashes": arm.prompt_hashes,
        "logits_hash": arm.logits_hash, "token_hash": arm.token_hash, "attention_hash": arm.attention_hash,
        "tokens": arm.replies, "lookups": arm.lookups, "straddles": arm.straddles, "kv_bytes": arm.kv_bytes,
        "sparse_rows": arm.sparse, "dense_rows": arm.dense,
        "seconds": round(arm.seconds, 3),
    }  # fmt: skip


def claims(arms: Sequence[Arm], equal: bool) -> list[dict[str, Any]]:
    """Figures that can be quoted."""
    return [
        {"name": "compare/backends_equal", "value": len(arms) if equal else 0, "unit": "backends"},
        {"name": "compare/logits_hash", "value": arms[0].logits_hash, "unit": "sha256/16"},
    ]
