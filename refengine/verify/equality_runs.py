"""The runs that the equalities take, and how one serves several: a stream alone in a window is held against many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from backends.base import Backend, Sizes, backend_class
from refengine.device import Device
from refengine.model import MtpHead, Qwen35, cache_shape
from refengine.serve.session import Session
from refengine.serve.sampling import GREEDY, Sampling
from refengine.verify.equalities import (
    CHUNKED_TOKENS,
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
from refengine.verify.transcripts import Progress, Together, Transcript, alone, together

SPARE_PAGES = 5
"""Pages that no stream owns: poison among the pages that are read."""
WINDOW = Form("window")
SAMPLINGS = {"greedy": GREEDY, "seeded": Sampling(0.4, 20, 0.95)}


@dataclass(frozen=True, eq=False)
class Engine:
    """A model on a device, and the prompts of its streams. head: None where equality 4 is not asked for, or has none."""

    model: Qwen35
    head: MtpHead | None
    device: Device
    prompts: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Plan:
    """What is asked for. equalities: by number. counts: of streams, ascending. chunks: rows a pass of equality 5a. seed: of
    the page order and the draws."""

    equalities: tuple[str, ...]
    counts: tuple[int, ...]
    page_sizes: tuple[int, ...]
    tokens: int
    chunks: tuple[int, ...]
    kv: str
    attention: str
    seed: int

    @property
    def paged(self) -> list[Form]:
        """Pages of each size."""
        return [Form("paged", size) for size in self.page_sizes]

    @property
    def side_by_side(self) -> list[int]:
        """The numbers of streams that have company."""
        return [count for count in self.counts if count > 1]

    @property
    def forms(self) -> list[Form]:
        """The forms whose streams are run together: windows, pages, and pages beside a window."""
        forms = list(self.paged) if {"1", "2", "5a"} & set(self.equalities) else []
        if {"1", "2"} & set(self.equalities):
            forms = [WINDOW, *forms, *[Form("paged-p256")] * (256 in self.page_sizes)]
        if "2" in self.equalities and self.side_by_side:
            forms.append(Form("mixed", self.page_sizes[0]))
        return forms


Key = tuple[Any, ...]
Job = Callable[[Progress], Any]


def jobs(plan: Plan, engine: Engine | None, drafting: Engine | None) -> dict[Key, tuple[int, Job]]:
    """Every run that the plan takes, by a key, with its number of steps; the longest first.

    drafting: the engine of equality 4, engine: of the others; each None where it is not asked for.
    """
    found: dict[Key, tuple[int, Job]] = {}
    if drafting is not None:
        for form in plan.paged:
            for name, sampling in SAMPLINGS.items():
                names = list(drafters(drafting.head is not None))
                steps = sum(2 + len(turns(names, count)) for count in plan.counts)
                found["drafted", form, name] = steps, partial(drafted, plan, drafting, form, sampling, names)
    if engine is not None:
        for form in plan.forms:
            found["run", form] = 2 * len(plan.counts), partial(run, plan, engine, form)
        if "5a" in plan.equalities:
            for form in plan.paged:
                for chunk in plan.chunks:
                    found["chunked", form, chunk] = 2 * len(plan.counts), partial(chunked, plan, engine, form, chunk)
        if "2" in plan.equalities and plan.side_by_side:
            found["alone",] = plan.counts[-1], partial(each_alone, plan, engine)
    return found


def checks(plan: Plan, results: Mapping[Key, Any], names: Sequence[str]) -> Iterator[Check]:
    """What the runs' results say. names: of the drafters of equality 4."""
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


# --- The runs ---------------------------------------------------------------------------------------------------------


def backend(plan: Plan, engine: Engine, form: Form, streams: int, window_rows: int = 1, head: bool = False) -> Backend:
    """A backend of the form with room for the longest prompt, its reply and a window; its pages shuffled."""
    sizes = sizes_of(plan, form, len(engine.prompts[0]) + plan.tokens + window_rows, streams, window_rows)
    return backend_class(form.backend)(cache_shape(engine.model.spec, mtp=head), sizes, engine.device.xp)


def sizes_of(plan: Plan, form: Form, context: int, streams: int, window_rows: int) -> Sizes:
    """What a backend of the form is built for."""
    return Sizes(
        context, streams, form.page_size, window_rows, SPARE_PAGES, plan.seed, kv=plan.kv, attention=plan.attention
    )


def each_alone(plan: Plan, engine: Engine, done: Progress) -> list[Transcript]:
    """Each stream by itself, in the same window one after the other, its prompt in one pass."""
    made, whole = backend(plan, engine, WINDOW, 1), len(engine.prompts[0])
    sessions = [Session(engine.model, made, engine.device, [prompt], whole) for prompt in engine.prompts]
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
    most = max(drafters(engine.head is not None).values(), key=lambda drafter: drafter.guesses)
    session = Session(
        engine.model, made, engine.device, engine.prompts, len(engine.prompts[0]), samplings,
        [most] * len(engine.prompts), engine.head,
    )  # fmt: skip
    return together(session, plan.counts, plan.tokens, done, partial(drafted_decodes, names))


def seeded(sampling: Sampling, seed: int) -> Sampling:
    """The sampling with another seed."""
    return replace(sampling, seed=seed % 2**64)
