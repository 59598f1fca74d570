"""``refengine pool``: a list of requests through windows and pages of several sizes; who waits, and what is wasted."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from refengine.commands.inputs import check_pages, find_model
from refengine.commands.report import check_report, progress_bar, show, write_report, write_whole
from refengine.errors import UserError
from refengine.lab.pool_picture import Panel, picture
from refengine.lab.pool_requests import Entry, arrivals, read_requests
from refengine.lab.pool_run import REFUSED, Progress, Simulation, Story, outcomes
from refengine.model import check_dims
from refengine.registry import ModelSpec
from refengine.serve.requests import DONE, FAILED
from refengine.serve.settings import GIB, Plan, Settings, amount, memory_for, model_bytes, planned, startup_line

LEFT_GIB = 88
"""Beside the model and the reserve, where --memory-gib does not say."""
MOST_STREAMS, MOST_PAGE, MOST_ENTRIES = 4096, 1 << 20, 1 << 22
"""The last: of all page tables, which are the memory that a simulation does take."""
FORMS = (".svg", ".png")


@dataclass(frozen=True)
class Request:
    """A simulation as the command line asks for it."""

    model: str
    requests: str
    parallel: int
    context: int
    kv_pages: int | None
    kv_pages_all: str
    page_sizes: str
    kv: str
    memory_gib: float | None
    prompt_rows: int
    prompt_cache: bool
    seed: int


@dataclass(frozen=True, eq=False)
class Arm:
    """A form of cache. story: None where the settings do not fit, for the reason."""

    settings: Settings
    story: Story | None
    reason: str = ""

    @property
    def name(self) -> str:
        """As a table and claims say it."""
        return name_of(self.settings)


def run(request: Request, plot: Path | None, json: Path | None) -> int:
    """Run the simulation; the exit status: 0, or 2 where nothing could run at all. Raises UserError for a bad call."""
    check(request)
    check_plot(plot)
    check_report(json)
    spec, _, _ = find_model(request.model, request.seed)
    check_dims(spec)
    flag = "--page-sizes" if request.kv_pages is None else "--kv-pages"
    check_pages(flag, page_sizes(request), spec)
    entries = read_requests(request.requests)
    arms = run_arms(spec, request, entries)
    verdict = verdict_line(arms, sum(entry.count for entry in entries))
    if plot is not None:
        panels = [Panel(arm.name, arm.story, arm.reason) for arm in arms]
        write_whole(plot, picture(question(request, entries), panels, plot.suffix[1:]), "--plot")
    if json is not None:
        body = {"request": asdict(request), "requests": [asdict(entry) for entry in entries], "verdict": verdict}
        write_report(json, {"claims": claims(arms), **body, "arms": [summary(arm) for arm in arms]})
    say(arms)
    print(verdict)
    if any(arm.story is not None and arm.story.moments for arm in arms):
        return 0
    print(
        f"refengine: no form of cache could run a request: {next(reasons(arms[-1]), 'nobody was left in the line')}",
        file=sys.stderr,
    )
    return 2


def name_of(settings: Settings) -> str:
    """A form of cache, and the positions of its pages."""
    return f"{'mixed' if settings.backend == 'mixed' else 'paged'} {settings.pages}" if settings.pages else "window"


# --- The request ----------------------------------------------------------------------------------------------------------


def check(request: Request) -> None:
    """Refuse what planning does not look at."""
    if request.parallel > MOST_STREAMS:
        raise UserError(f"--parallel {request.parallel}: at most {MOST_STREAMS}")
    if request.seed < 0:
        raise UserError(f"--seed {request.seed}: at least 0")
    for flag, size in [("--kv-pages", request.kv_pages or 0), *(("--page-sizes", n) for n in page_sizes(request))]:
        if size > MOST_PAGE:
            raise UserError(f"{flag} {size}: at most {MOST_PAGE} positions a page")


def page_sizes(request: Request) -> list[int]:
    """Positions a page of each arm; 0: windows. Raises UserError for what is no list of sizes."""
    if request.kv_pages is not None:
        return [request.kv_pages]
    found = [0]
    for part in (part.strip() for part in request.page_sizes.split(",")):
        if not (part.isascii() and part.isdigit() and len(part) < 10 and int(part)):
            raise UserError(
                f"--page-sizes {request.page_sizes}: {part or repr(part)}: whole numbers, commas between them"
            )
        if int(part) in found:
            raise UserError(f"--page-sizes {request.page_sizes}: {part} stands twice; name it once")
        found.append(int(part))
    return found


def check_plot(path: Path | None) -> None:
    """Refuse a picture of no known form, or that cannot be written, before the work."""
    if path is not None and path.suffix not in FORMS:
        raise UserError(f"--plot {path}: name a file that ends in {' or '.join(FORMS)}")
    check_report(path, "--plot")


def settings(spec: ModelSpec, request: Request, page_size: int) -> Settings:
    """The settings of an arm. A pool has room for as many kept prompts as there are streams."""
    memory = memory_for(model_bytes(spec) + LEFT_GIB * GIB) if request.memory_gib is None else request.memory_gib
    return Settings(
        request.parallel, request.context, memory, page_size, request.kv_pages_all, request.kv,
        prompt_rows=request.prompt_rows, kept_prompts=request.parallel if request.prompt_cache else 0,
    )  # fmt: skip


# --- The runs -------------------------------------------------------------------------------------------------------------


def run_arms(spec: ModelSpec, request: Request, entries: Sequence[Entry]) -> list[Arm]:
    """Every arm's run, with a progress bar. Raises UserError for settings that make no sense in any."""
    forms = [settings(spec, request, size) for size in page_sizes(request)]
    for form in forms:
        form.check(spec)
    rows = sum(entry.count * (entry.prompt + entry.tokens) for entry in entries)
    with progress_bar() as bar:
        tasks = [bar.add_task(name_of(form), total=rows) for form in forms]
        bars = [partial(bar.advance, task) for task in tasks]
        return [run_arm(spec, request, entries, form, advance) for form, advance in zip(forms, bars)]


def run_arm(spec: ModelSpec, request: Request, entries: Sequence[Entry], form: Settings, advance: Progress) -> Arm:
    """One run, of requests made anew."""
    try:
        plan = planned(spec, form)
        check_tables(plan)
    except UserError as refusal:
        return Arm(form, None, str(refusal))
    coming = arrivals(entries, spec.vocabulary, request.seed)
    return Arm(form, Simulation(plan, coming, request.prompt_cache, advance).run())


def check_tables(plan: Plan) -> None:
    """Refuse a plan whose page tables are too long to simulate."""
    entries = plan.parts["tables"] // 4
    if entries > MOST_ENTRIES:
        raise UserError(
            f"--parallel {plan.settings.parallel} --context {plan.settings.context} in pages of {plan.settings.pages} makes page "
            f"tables of {entries} entries: at most {MOST_ENTRIES} are simulated; ask for fewer, or larger pages"
        )


# --- The report -----------------------------------------------------------------------------------------------------------


def say(arms: Sequence[Arm]) -> None:
    """What fits, the table, and why something was refused."""
    for arm in arms:
        print(f"{arm.name}: {startup_line(arm.story.plan) if arm.story else f'refused: {arm.reason}'}")
    show(table(arms))
    for arm in arms:
        if arm.story is not None:
            for reason in reasons(arm):
                print(f"{arm.name}: {reason}")


def reasons(arm: Arm) -> Iterator[str]:
    """Why the arm, or requests of it, were refused or failed; the first of those that are refused alike, and how many."""
    if arm.story is None:
        yield arm.reason
        return
    alike: dict[str, list[str]] = {}
    for life in arm.story.lives.values():
        if life.reason:
            alike.setdefault(life.reason.partition(": ")[2], []).append(life.reason)
    for first, *more in alike.values():
        yield f"{first}{f' ({len(more)} more like it)' if more else ''}"


COLUMNS = ("cache", "pool pages", "streams at most", "waited", "rounds: mean, most", "finished", "refused", "rounds", "read",
           "resumed", "shared pages", "waste: tail", "unused", "rounding")  # fmt: skip
CAPTION = (
    "rounds: in the line, of those who waited. waste, when streams held most: slots of last pages that are not written, "
    "pages that are promised and never taken, what rounds recurrent states up to pages"
)


def table(arms: Sequence[Arm]) -> Table:
    """A row a form of cache."""
    shown = Table(*COLUMNS, caption=CAPTION)
    for column in shown.columns[1:]:
        column.justify = "right"
    for arm in arms:
        if arm.story is None:
            shown.add_row(arm.name, "refused")
            continue
        f = figures(arm.story)
        shown.add_row(
            arm.name, f"{f['pool_pages']:,}" if arm.settings.pages else "", str(f["streams_at_most"]), str(f["waited"]),
            f"{f['mean_wait']:.1f}, {f['longest_wait']}", str(f["finished"]), str(f["refused"]), f"{f['rounds']:,}",
            f"{f['positions_read']:,}", f"{f['positions_resumed']:,}", f"{f['shared_pages']:,}",
            *(amount(f[name]) for name in ("waste_tail", "waste_unused", "waste_rounding")),
        )  # fmt: skip
    return shown


UNITS = {
    "pool_pages": "pages", "streams_at_most": "streams", "waited": "requests", "mean_wait": "rounds", "longest_wait": "rounds",
    "finished": "requests", "refused": "requests", "rounds": "rounds", "positions_read": "positions",
    "positions_resumed": "positions", "shared_pages": "pages", "waste_tail": "bytes", "waste_unused": "bytes",
    "waste_rounding": "bytes",
}  # fmt: skip
"""Of the figures of an arm."""


def figures(story: Story) -> dict[str, Any]:
    """What a run comes to, by the names of UNITS."""
    waits, peak = story.waits, story.peak
    return {
        "pool_pages": story.plan.sizes.pool or 0, "streams_at_most": story.most_streams, "waited": len(waits),
        "mean_wait": sum(waits) / len(waits) if waits else 0.0, "longest_wait": max(waits, default=0),
        "finished": story.count(DONE), "refused": story.count(REFUSED), "rounds": story.rounds,
        "positions_read": story.read, "positions_resumed": story.resumed, "shared_pages": story.shared_pages,
        "waste_tail": peak.books.tail if peak else 0, "waste_unused": story.unused,
        "waste_rounding": peak.books.rounding if peak else 0,
    }  # fmt: skip


def claims(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Figures that can be quoted."""
    return [
        {"name": f"pool/{arm.name}/{name}", "value": value, "unit": UNITS[name]}
        for arm in arms
        if arm.story is not None
        for name, value in figures(arm.story).items()
    ]


def summary(arm: Arm) -> dict[str, Any]:
    """An arm for the JSON report."""
    if arm.story is None:
        return {"cache": arm.name, "page_size": arm.settings.pages, "refused": arm.reason}
    story = arm.story
    lives = [{"number": number, **asdict(life), "waited": life.waited} for number, life in story.lives.items()]
    return {
        "cache": arm.name, "page_size": arm.settings.pages, "startup": startup_line(story.plan), "plan": plan_summary(story.plan),
        "figures": figures(story), "outcomes": dict(outcomes(story)), "requests": lives,
    }  # fmt: skip


def plan_summary(plan: Plan) -> dict[str, Any]:
    """A plan's bytes."""
    taken: Mapping[str, int] = {"model": plan.model, "reserve": plan.reserve, "left": plan.left, **plan.parts}
    return {"backend": plan.backend, "pool": plan.sizes.pool, "bytes": dict(taken)}


def verdict_line(arms: Sequence[Arm], count: int) -> str:
    """The last line: finished in every form of cache that fits; waited, and refused or failed, in at least one of them."""
    lives = [arm.story.lives for arm in arms if arm.story is not None]
    numbers = range(1, count + 1)
    finished = sum(bool(lives) and all(one[n].outcome == DONE for one in lives) for n in numbers)
    waited = sum(any(one[n].waited for one in lives) for n in numbers)
    refused = count if not lives else sum(any(one[n].outcome in (REFUSED, FAILED) for one in lives) for n in numbers)
    return f"POOL {count} requests: {finished} finished, {waited} waited, {refused} refused"


def question(request: Request, entries: Sequence[Entry]) -> str:
    """The picture's title."""
    count = sum(entry.count for entry in entries)
    return (
        f"Who holds the memory, and who waits? {count} requests to {request.model}, "
        f"--parallel {request.parallel} --context {request.context}"
    )
