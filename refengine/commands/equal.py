"""``refengine equal``: read the request, run the serving equalities, show what held. Spec serving §5."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from backends.base import backend_class
from backends.stream import ATTENTION
from kernels_numba.fp8 import KV_TYPES
from kernels_numba.machine import KernelError, SetupError
from refengine.checkpoint import Checkpoint, load_mtp, load_weights
from refengine.commands.inputs import check_attention, check_pages, find_model, machine_gib
from refengine.commands.report import check_report, progress_bar, show, write_report
from refengine.device import Device, open_device
from refengine.errors import UserError
from refengine.model import cache_shape, check_dims, open_head, open_model
from refengine.names import known_name
from refengine.registry import ModelSpec
from refengine.serve.side_by_side import cores, run_all
from refengine.verify.equalities import FAILED, HELD, TITLES, UNCHECKED, WINDOW_ROWS, Check, count, drafters, verdict
from refengine.verify.equality_runs import checks, jobs
from refengine.verify.plan import WINDOW, Engine, Key, Plan, Planned, sizes_of
from refengine.verify.planted import FAULTS, LONG_REPLY
from refengine.verify.predictable import predictable
from refengine.verify.scheduled_runs import NEXT_TOKENS

MOST_PROMPT_TOKENS = 4096
"""Rows of a prompt pass, at most: equality 5a needs every prompt in one."""
MOST_STREAMS = 64
QUIET = 2.0**-3
"""What is left of the branches of generated weights in equality 4, so that the head's drafts are accepted."""


@dataclass(frozen=True)
class Request:
    """The equalities as the command line asks for them. only: the number of one, all of them where it is None."""

    model: str
    kv: str
    attention: str
    streams: str
    page_sizes: str
    tokens: int
    prompt_tokens: int
    prompt_rows: str
    only: str | None
    device: str
    seed: int
    controls: bool = False


def run(request: Request, json: Path | None) -> int:
    """Run the equalities; the exit status: 0 all held, 1 otherwise. Raises UserError for a request that makes no sense."""
    plan = plan_of(request)
    check_report(json)
    device = open_device(request.device)
    spec, folder, checkpoint = find_model(request.model, request.seed)
    check_room(request, spec)
    check_dims(spec)
    check_pages("--page-sizes", plan.page_sizes, spec)
    check_attention(plan.attention, spec)
    check_memory(plan, spec, context(request), device)
    engines = engines_of(request, plan, spec, checkpoint(), folder is None, device)
    if request.controls:
        return run_controls(plan, engines, json)
    try:
        found, caption = results(plan, engines)
    except SetupError:
        raise
    except KernelError as stopped:
        print(f"UNCHECKED a kernel was stopped: {stopped}")
        print("EQUALITIES 0 held, 0 failed, 1 unchecked")
        return 1
    line, well = verdict(found)
    show(table(found, caption))
    for one in found:
        if one.outcome != HELD:
            print(one)
    if json is not None:
        body = {"request": asdict(request), "device": device.title, "verdict": line}
        write_report(json, {"claims": claims(found), **body, "checks": [summary(one) for one in found]})
    print(line)
    return 0 if well else 1


# --- The request ------------------------------------------------------------------------------------------------------


def plan_of(request: Request) -> Plan:
    """What is asked for. Raises UserError for what makes no sense."""
    known_name("--kv", request.kv, KV_TYPES)
    known_name("--attention", request.attention, ATTENTION)
    equalities = tuple(TITLES) if request.only is None else (known_name("--only", request.only, tuple(TITLES)),)
    counts = tuple(sorted(numbers("--streams", request.streams, MOST_STREAMS)))
    if request.tokens < 2:
        raise UserError(f"--tokens {request.tokens}: at least 2")
    if not 0 <= request.seed < 2**64:
        raise UserError(f"--seed {request.seed}: 0 to {2**64 - 1}")
    if not 1 <= request.prompt_tokens <= MOST_PROMPT_TOKENS:
        raise UserError(f"--prompt-tokens {request.prompt_tokens}: 1 to {MOST_PROMPT_TOKENS}")
    if "2" in equalities and counts[-1] < 2:
        raise UserError(
            f"--streams {request.streams}: equality 2 takes 2 or more streams; add one, or name others with --only"
        )
    chunks = numbers("--prompt-rows", request.prompt_rows, MOST_PROMPT_TOKENS)
    pages = numbers("--page-sizes", request.page_sizes, 1 << 20)
    return Plan(equalities, counts, pages, request.tokens, chunks, request.kv, request.attention, request.seed)


def numbers(flag: str, value: str, most: int) -> tuple[int, ...]:
    """The numbers of a list with commas. Raises UserError for what is none, too small or large, or stands twice."""
    found: list[int] = []
    for part in (part.strip() for part in value.split(",")):
        if not (part.isascii() and part.isdigit() and 1 <= int(part) <= most):
            raise UserError(
                f"{flag} {value}: {part or repr(part)}: whole numbers from 1 to {most}, commas between them"
            )
        if int(part) in found:
            raise UserError(f"{flag} {value}: {part} stands twice; name it once")
        found.append(int(part))
    return tuple(found)


def check_room(request: Request, spec: ModelSpec) -> None:
    """Refuse what is longer than the model."""
    if (most := context(request)) > spec.max_positions:
        raise UserError(
            f"--prompt-tokens {request.prompt_tokens}: with --tokens and drafts {most} positions, {spec.name} has "
            f"{spec.max_positions}; ask for fewer"
        )


def check_memory(plan: Plan, spec: ModelSpec, positions: int, device: Device) -> None:
    """Refuse caches that this machine has no room for: those of the runs that are side by side, and where each begins again."""
    if device.name != "cpu":
        return
    shape, streams = cache_shape(spec, mtp=bool(spec.mtp_layers)), plan.most_streams
    for form in dict.fromkeys([WINDOW, *plan.paged, *plan.forms]):
        sizes = sizes_of(plan, form, positions, streams, WINDOW_ROWS)
        gib = 2 * cores() * backend_class(form.backend).arena_bytes(shape, sizes) / 2**30
        if gib > machine_gib():
            raise UserError(
                f"--page-sizes: {form} takes {gib:.4g} GiB for {streams} streams, this machine has {machine_gib():.4g}; "
                "ask for smaller pages, or fewer with --streams"
            )


def context(request: Request) -> int:
    """Positions of the longest stream: two turns, or one reply, and a window."""
    return request.prompt_tokens + max(request.tokens, NEXT_TOKENS + 2 * LONG_REPLY) + WINDOW_ROWS


# --- The runs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Engines:
    """The engine of equality 4, and that of the others; each None where it is not asked for. caption: what there is to say of the
    weights."""

    plain: Engine | None
    drafting: Engine | None
    device: Device
    caption: str

    @property
    def drafters(self) -> list[str]:
        """The names of the drafters that equality 4 has."""
        one = self.drafting
        return list(drafters(one is not None and one.head is not None, one is not None and one.drafts_trees))


def engines_of(
    request: Request, plan: Plan, spec: ModelSpec, checkpoint: Checkpoint, generated: bool, device: Device
) -> Engines:
    """The engines that the plan takes. generated: the weights are, so that equality 4 may quiet them."""
    weights, prompts, plain, drafting = load_weights(checkpoint, spec), random_prompts(request, plan, spec), None, None
    caption = "weights as they are"
    if set(plan.equalities) - {"4"}:
        plain = Engine(open_model(spec, weights, device, context(request)), None, device, prompts)
    if "4" in plan.equalities:
        if generated:
            weights, caption = predictable(weights, QUIET), "equality 4: generated weights with quieter branches"
        model = open_model(spec, weights, device, context(request))
        head = open_head(spec, load_mtp(checkpoint, spec), model, device) if has_mtp(checkpoint, spec) else None
        drafting = Engine(model, head, device, prompts)
    return Engines(plain, drafting, device, caption)


def results(plan: Plan, engines: Engines, title: str = "equalities") -> tuple[list[Check], str]:
    """Every check, and what there is to say of the weights."""
    chosen = set(plan.equalities)
    plain = engines.plain if chosen - {"4"} else None
    planned = jobs(plan, plain, engines.drafting if "4" in chosen else None)
    return checks(plan, run_jobs(planned, engines.device, title), engines.drafters), engines.caption


# --- Controls ---------------------------------------------------------------------------------------------------------


def run_controls(plan: Plan, engines: Engines, json: Path | None) -> int:
    """Plant each fault and run its equality, with two streams on pages of one size; the exit status: 0 all red, 1 otherwise."""
    outcomes = []
    for fault in FAULTS:
        if fault.equality in plan.equalities:
            tokens = fault.tokens or plan.turn_tokens
            small = replace(
                plan, equalities=(fault.equality,), counts=(2,), page_sizes=plan.page_sizes[:1], turn_tokens=tokens
            )
            with fault.planted():
                found, _ = results(small, engines, f"{fault.equality}: {fault.name}")
            red = next((one for one in found if one.outcome == FAILED), None)
            outcomes.append({"equality": fault.equality, "fault": fault.name, "found": str(red) if red else None})
            print(
                f"{'RED' if red else 'MISSED'} {fault.equality} {fault.name}: {red.note if red else 'every check held'}"
            )
    missed = sum(one["found"] is None for one in outcomes)
    line = f"CONTROLS {len(outcomes) - missed} red, {missed} missed"
    if json is not None:
        claim = {"name": "equal/controls red", "value": len(outcomes) - missed, "unit": "faults"}
        write_report(json, {"claims": [claim], "verdict": line, "device": engines.device.title, "controls": outcomes})
    print(line)
    return 1 if missed else 0


def run_jobs(planned: Planned, device: Device, title: str) -> dict[Key, Any]:
    """The result of every run, with a progress bar; on the CPU machine side by side, as many as there are cores."""
    todo: Sequence[Callable[..., Any]] = [job for _, job in planned.values()]
    with progress_bar() as bar:
        task = bar.add_task(title, total=sum(steps for steps, _ in planned.values()))
        found: list[Any] = run_all(todo, lambda _: bar.advance(task), cores() if device.name == "cpu" else 1)
    return dict(zip(planned, found))


def has_mtp(checkpoint: Checkpoint, spec: ModelSpec) -> bool:
    """Whether there is a head to draft with; a checkpoint may leave it out."""
    return any(checkpoint.holds(tensor) for tensor in spec.mtp_tensors())


def lengths(request: Request, plan: Plan) -> list[int]:
    """Tokens of each stream's prompt: the first is the longest."""
    return [max(1, request.prompt_tokens // (4 * n + 1)) for n in range(max(plan.counts[-1], plan.alone))]


def random_prompts(request: Request, plan: Plan, spec: ModelSpec) -> list[list[int]]:
    """A prompt of random tokens for each stream."""
    rng = np.random.default_rng(request.seed)
    return [rng.integers(0, min(256, spec.vocabulary), n).tolist() for n in lengths(request, plan)]


# --- The report -------------------------------------------------------------------------------------------------------


def table(found: Sequence[Check], caption: str) -> Table:
    """A row for each equality, form of cache and kind of run."""
    shown = Table("equality", "cache", "run", "streams", HELD, FAILED, UNCHECKED, "drafts accepted", caption=caption)
    for column in shown.columns[4:]:
        column.justify = "right"
    rows: dict[tuple[str, str, str], list[Check]] = defaultdict(list)
    for one in found:
        rows[one.equality, one.form, one.what].append(one)
    for (equality, form, what), group in rows.items():
        counts = [str(count(group, outcome)) for outcome in (HELD, FAILED, UNCHECKED)]
        streams, drafts = ", ".join(str(one.streams) for one in group), sum(one.drafts for one in group)
        shown.add_row(f"{equality} {TITLES[equality]}", form, what, streams, *counts, str(drafts or ""))
    return shown


def summary(one: Check) -> dict[str, Any]:
    """A check for the JSON report; the hashes are of each stream's logits rows and tokens."""
    hashes = [{"logits": logits, "tokens": tokens} for logits, tokens in one.hashes]
    return {**asdict(one), "hashes": hashes}


def claims(found: Sequence[Check]) -> list[dict[str, Any]]:
    """Figures that can be quoted."""
    return [
        {"name": f"equal/{name}", "value": count(found, name), "unit": "equalities"}
        for name in (HELD, FAILED, UNCHECKED)
    ]
