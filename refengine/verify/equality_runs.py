"""The runs that the equalities take, and how one serves several: a stream alone in a window is held against many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from backends.base import Backend, backend_class
from refengine.model import cache_shape
from refengine.serve.sampling import Sampling
from refengine.serve.session import Session
from refengine.verify.equalities import (
    CHUNKED_TOKENS,
    TITLES,
    WINDOW_ROWS,
    Check,
    Form,
    Run,
    chunked_is_one_pass,
    drafted_decodes,
    drafted_is_plain,
    drafters,
    paged_is_window,
    together_is_alone,
    turns,
)
from refengine.verify.plan import SAMPLINGS, WINDOW, Engine, Key, Plan, Planned, sizes_of
from refengine.verify.scheduled_runs import scheduled_checks, scheduled_jobs
from refengine.verify.transcripts import Progress, Together, Transcript, alone, together


def jobs(plan: Plan, engine: Engine | None, drafting: Engine | None) -> Planned:
    """Every run that the plan takes, by a key, with its number of steps; the longest first.

    drafting: the engine of equality 4, engine: of the others; each None where it is not asked for.
    """
    found: Planned = {}
    if drafting is not None:
        for form in plan.paged:
            for name, sampling in SAMPLINGS.items():
                names = list(drafters(drafting.head is not None, drafting.drafts_trees))
                steps = sum(2 + len(turns(names, count)) for count in plan.counts)
                found["drafted", form, name] = steps, partial(drafted, plan, drafting, form, sampling, names)
    if engine is not None:
        found |= scheduled_jobs(plan, engine)
        for form in plan.forms:
            found["run", form] = 2 * len(plan.counts), partial(run, plan, engine, form)
        if "5a" in plan.equalities:
            for form in plan.paged:
                for chunk in plan.chunks:
                    found["chunked", form, chunk] = 2 * len(plan.counts), partial(chunked, plan, engine, form, chunk)
        if plan.alone:
            found["alone",] = plan.alone, partial(each_alone, plan, engine)
    return found


def checks(plan: Plan, results: Mapping[Key, Any], names: Sequence[str]) -> list[Check]:
    """What the runs' results say, by the equalities' numbers. names: of the drafters of equality 4."""
    return sorted(found_checks(plan, results, names), key=lambda one: list(TITLES).index(one.equality))


def found_checks(plan: Plan, results: Mapping[Key, Any], names: Sequence[str]) -> Iterator[Check]:
    """The same as they come."""
    runs: list[Run] = [results["run", form] for form in plan.forms]
    if "1" in plan.equalities:
        for one in runs:
            if one.form.backend in ("paged", "paged-p256"):
                yield from paged_is_window(results["run", WINDOW], one)
    if "2" in plan.equalities and plan.side_by_side:
        for one in runs:
            yield from together_is_alone(results["alone",], one)
    for key, found in results.items():
        if key[0] == "drafted":
            yield from drafted_is_plain(key[1], key[2], names, found)
    for key, found in results.items():
        if key[0] == "chunked":
            yield from chunked_is_one_pass(results["run", key[1]], key[2], found)
    yield from scheduled_checks(results)


# --- The runs ---------------------------------------------------------------------------------------------------------


def backend(plan: Plan, engine: Engine, form: Form, streams: int, window_rows: int = 1, head: bool = False) -> Backend:
    """A backend of the form with room for the longest prompt, its reply and a window; its pages shuffled."""
    sizes = sizes_of(plan, form, len(engine.prompts[0]) + plan.tokens + window_rows, streams, window_rows)
    return backend_class(form.backend)(cache_shape(engine.model.spec, mtp=head), sizes, engine.device.xp)


def each_alone(plan: Plan, engine: Engine, done: Progress) -> list[Transcript]:
    """Each stream by itself, in the same window one after the other, its prompt in one pass."""
    made, whole = backend(plan, engine, WINDOW, 1), len(engine.prompts[0])
    sessions = [Session(engine.model, made, engine.device, [prompt], whole) for prompt in engine.prompts[: plan.alone]]
    return alone(sessions, plan.tokens, done)


def run(plan: Plan, engine: Engine, form: Form, done: Progress) -> Run:
    """The streams together, for each number of them, their prompts in one pass."""
    made = backend(plan, engine, form, plan.counts[-1])
    session = Session(engine.model, made, engine.device, engine.prompts, len(engine.prompts[0]))
    found = together(session, plan.counts, plan.tokens, done)
    held = [-(-(len(prompt) + plan.tokens - 1) // form.page_size) for prompt in engine.prompts]
    return Run(form, found, [stream.pages[:pages] for stream, pages in zip(session.streams, held)])


def chunked(plan: Plan, engine: Engine, form: Form, chunk: int, done: Progress) -> Together:
    """The same with the prompts in chunks."""
    made = backend(plan, engine, form, plan.counts[-1])
    session = Session(engine.model, made, engine.device, engine.prompts, chunk)
    return together(session, plan.counts, min(plan.tokens, CHUNKED_TOKENS), done)


def drafted(
    plan: Plan, engine: Engine, form: Form, sampling: Sampling, names: Sequence[str], done: Progress
) -> Together:
    """Plain decode and decode with each drafter, behind the same prompts; each stream draws by a seed of its own."""
    made = backend(plan, engine, form, plan.counts[-1], WINDOW_ROWS, head=engine.head is not None)
    samplings = [seeded(sampling, plan.seed + n) for n in range(len(engine.prompts))]
    most = max(drafters(engine.head is not None, engine.drafts_trees).values(), key=lambda drafter: drafter.guesses)
    session = Session(
        engine.model, made, engine.device, engine.prompts, len(engine.prompts[0]), samplings,
        [most] * len(engine.prompts), engine.head,
    )  # fmt: skip
    return together(session, plan.counts, plan.tokens, done, partial(drafted_decodes, names))


def seeded(sampling: Sampling, seed: int) -> Sampling:
    """The sampling with another seed."""
    return replace(sampling, seed=seed % 2**64)
