"""The runs of equalities 3, 5b and 6, which take the scheduler, and what they say. Spec serving §5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from backends.base import Backend, Sizes, backend_class
from backends.paged import PagedBackend
from refengine.model import cache_shape
from refengine.serve.forward import Forward
from refengine.serve.prompt_cache import PromptCache
from refengine.serve.prompt_files import load_entries, save_entries
from refengine.serve.requests import Request, capacity
from refengine.serve.session import Session
from refengine.verify.equalities import FAILED, WINDOW_ROWS, Check, Form, check
from refengine.verify.plan import OVERCOMMITTED, WINDOW, Engine, Key, Plan, Planned, sizes_of
from refengine.verify.service import Preemption, Served, Service
from refengine.verify.transcripts import Progress, Transcript, alone

NEXT_TOKENS = 9
"""Tokens of a second turn, behind the first turn's prompt and reply."""
SHARE = 3
"""Of what they claim together, the pool of equality 6 has a third."""
FINGERPRINT = "one run"
"""Of files that a run writes and reads itself."""
PAGE_MARKS, HISTORY_MARKS = "kept to a page's edge", "kept whole"


def service(engine: Engine, made: Backend, rows: int, cache: PromptCache | None = None) -> Service:
    """Requests through a backend."""
    return Service(Forward(engine.model, made, engine.device), rows, cache)


def built(plan: Plan, engine: Engine, form: Form, context: int, streams: int, rows: int = 1, **more: Any) -> Backend:
    """A backend of the form; more: other sizes."""
    sizes: Sizes = replace(sizes_of(plan, form, context, streams, rows), **more)
    return backend_class(form.backend)(cache_shape(engine.model.spec), sizes, engine.device.xp)


def served_check(
    place: tuple[str, str, int, str], served: Served, wanted: Sequence[Transcript], untested: str | None
) -> Check:
    """Hold every life of every request against what it gets alone."""
    if served.broken:
        return Check(*place, FAILED, served.broken)
    lives = [(n, one) for n, lives in enumerate(served.lives) for one in lives]
    pairs = [(n, one.first(len(one.tokens)), wanted[n].first(len(one.tokens))) for n, one in lives]
    return check(*place, pairs, untested)


# --- 3: turns that resume ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resumption:
    """Where first turns are kept, and where second turns resume. marks: which part of a prompt is kept."""

    kept_in: Form
    resumed_in: Form
    marks: str

    def __str__(self) -> str:
        return f"{self.kept_in} to {self.resumed_in}" if self.kept_in != self.resumed_in else str(self.kept_in)


def resumptions(plan: Plan) -> list[Resumption]:
    """In each form, kept in both ways; and from one form to another."""
    forms = [WINDOW, *plan.paged, *[Form("paged-p256")] * (256 in plan.page_sizes), Form("mixed", plan.page_sizes[0])]
    same = [Resumption(form, form, marks) for form in forms for marks in (PAGE_MARKS, HISTORY_MARKS)]
    first, last = plan.paged[0], plan.paged[-1]
    moves = dict.fromkeys([(WINDOW, first), (first, WINDOW), (first, last), (last, first)])
    return same + [Resumption(a, b, HISTORY_MARKS) for a, b in moves if a != b]


def context_of(plan: Plan, engine: Engine) -> int:
    """Positions of the longest second turn."""
    return len(engine.prompts[0]) + NEXT_TOKENS + 2 * plan.turn_tokens + WINDOW_ROWS


def second_turn(plan: Plan, number: int, prompt: Sequence[int], reply: Sequence[int]) -> list[int]:
    """A stream's next prompt: all that was said, and something new."""
    rng = np.random.default_rng([plan.seed, number])
    return [*prompt, *reply, *rng.integers(0, 256, NEXT_TOKENS).tolist()]


def cold(plan: Plan, engine: Engine, done: Progress) -> list[Transcript]:
    """Each stream's second turn by itself in a window, read from its first token on."""
    made, context = built(plan, engine, WINDOW, context_of(plan, engine), 1), context_of(plan, engine)
    streams = engine.prompts[: plan.counts[-1]]
    firsts = alone(
        [Session(engine.model, made, engine.device, [prompt], context) for prompt in streams], plan.turn_tokens, done
    )
    prompts = [second_turn(plan, n, prompt, first.tokens) for n, (prompt, first) in enumerate(zip(streams, firsts))]
    return alone(
        [Session(engine.model, made, engine.device, [prompt], context) for prompt in prompts], plan.turn_tokens, done
    )


def resumed(plan: Plan, engine: Engine, how: Resumption, done: Progress) -> dict[int, Served]:
    """Second turns of the first n streams together, for each n, that resume where the first turns were kept."""
    prompts, context = engine.prompts[: plan.counts[-1]], context_of(plan, engine)
    made = roomy(plan, engine, how.kept_in, context, len(prompts))
    first_cache = cache_of(made)
    first = service(engine, made, plan.chunks[-1], first_cache)
    marks = [None if how.marks == PAGE_MARKS else (len(prompt),) for prompt in prompts]
    requests = [
        Request(prompt, plan.turn_tokens, number=n, marks=m) for n, (prompt, m) in enumerate(zip(prompts, marks))
    ]
    broken = first.serve(requests).broken
    second = first
    if how.kept_in != how.resumed_in:
        there = roomy(plan, engine, how.resumed_in, context, len(prompts))
        second = service(engine, there, plan.chunks[-1], moved(first_cache, cache_of(there)))
    kept = [first_cache.marks(one.prompt) if one.marks is None else one.marks for one in requests]
    nexts = [second_turn(plan, n, one.prompt, one.reply) for n, one in enumerate(requests)]
    done()
    found = {}
    for count in plan.counts if how.kept_in == how.resumed_in else plan.counts[-1:]:
        turns = [Request(prompt, plan.turn_tokens, number=n, marks=()) for n, prompt in enumerate(nexts[:count])]
        found[count] = second.serve(turns)
        found[count].broken = broken or found[count].broken or too_few(found[count].resumed, kept)
        done()
    found[plan.counts[-1]].broken = found[plan.counts[-1]].broken or second.close() or first.close()
    return found


def too_few(resumed: Sequence[int], kept: Sequence[Sequence[int]]) -> str | None:
    """Which turn did not resume where the turn before was kept, if one did not."""
    for number, (positions, marks) in enumerate(zip(resumed, kept)):
        if positions < max(marks, default=0):
            return f"stream {number}: resumed {positions} positions of {max(marks)} that were kept"
    return None


def roomy(plan: Plan, engine: Engine, form: Form, context: int, streams: int) -> Backend:
    """A backend with room for streams and, in pages of their own, for what is kept of each."""
    return built(plan, engine, form, context, streams, pool=pool_for(plan, engine, form, context, 2 * streams))


def pool_for(plan: Plan, engine: Engine, form: Form, context: int, streams: int) -> int | None:
    """Pages for so many streams; None where there are none."""
    kind, sizes = backend_class(form.backend), sizes_of(plan, form, context, streams, WINDOW_ROWS)
    return kind.pool_pages(cache_shape(engine.model.spec), sizes) if issubclass(kind, PagedBackend) else None


def cache_of(made: Backend) -> PromptCache:
    """A prompt cache; a window's is kept to where pages of 16 would end, so that short prompts have marks, too."""
    return PromptCache(made, None if made.paged else 16)


def moved(source: PromptCache, target: PromptCache) -> PromptCache:
    """The entries of a cache in another, whose backend has another form: by way of files."""
    with TemporaryDirectory() as folder:
        save_entries(source, folder, "equality 3", FINGERPRINT)
        load_entries(target, folder, FINGERPRINT, lambda line: None)
    return target


def resumed_is_fresh(how: Resumption, found: Mapping[int, Served], wanted: Sequence[Transcript]) -> Iterator[Check]:
    """Equality 3, for each number of streams."""
    for streams, served in found.items():
        if not any(served.resumed):
            served.broken = served.broken or "nothing was resumed"
        yield served_check(("3", str(how), streams, how.marks), served, wanted, None)


# --- 5b: preempted, or waited -----------------------------------------------------------------------------------------


def interrupted(
    plan: Plan, engine: Engine, form: Form, done: Progress
) -> dict[tuple[int, str], tuple[Served, str | None]]:
    """With the fewest and the most streams, preempted twice each; with the most, waiting for half of the room. With each, why it
    proves nothing.
    """
    found, context = {}, len(engine.prompts[0]) + plan.tokens + WINDOW_ROWS
    for count in dict.fromkeys([plan.counts[0], plan.counts[-1]]):
        preemption, made = Preemption(), built(plan, engine, form, context, count, WINDOW_ROWS)
        served = service(engine, made, plan.chunks[-1]).serve_all(requests_of(plan, engine, count), preemption)
        everyone = preemption.everyone(count)
        found[count, "preempted"] = (
            served,
            None if everyone else "not everyone was preempted twice; ask for more --tokens",
        )
        done()
    if plan.side_by_side:
        made = cramped(plan, engine, form, context, count, 2)
        served = service(engine, made, plan.chunks[-1]).serve_all(requests_of(plan, engine, count))
        found[count, "waited"] = served, None if served.waited else "nobody waited"
    done()
    return found


def requests_of(plan: Plan, engine: Engine, streams: int) -> list[Request]:
    return [Request(prompt, plan.tokens, number=n) for n, prompt in enumerate(engine.prompts[:streams])]


def cramped(plan: Plan, engine: Engine, form: Form, context: int, streams: int, share: int) -> Backend:
    """A backend with room for one of the ``share`` parts of what streams claim together, and for the largest of them."""
    kind, sizes = backend_class(form.backend), sizes_of(plan, form, context, streams, WINDOW_ROWS)
    if not issubclass(kind, PagedBackend):
        return built(plan, engine, form, context, max(1, streams // share), WINDOW_ROWS)
    run_pages = kind.pages_a_run(cache_shape(engine.model.spec), sizes)
    ends = [capacity(request.positions, sizes) for request in requests_of(plan, engine, streams)]
    claims = [kind.pages_for(end, sizes) + run_pages for end in ends]
    return built(plan, engine, form, context, streams, WINDOW_ROWS, pool=max(max(claims), sum(claims) // share))


def interrupted_is_not(form: Form, found: Mapping[Any, Any], wanted: Sequence[Transcript]) -> Iterator[Check]:
    """Equality 5b, for each kind of interruption."""
    for (streams, what), (served, untested) in found.items():
        yield served_check(("5b", str(form), streams, what), served, wanted, untested)


# --- 6: more than there is --------------------------------------------------------------------------------------------


def overcommitted(plan: Plan, engine: Engine, form: Form, done: Progress) -> Served:
    """Sixteen streams whose claims are three times the pool; what they read is kept as long as there is room."""
    context = len(engine.prompts[0]) + plan.tokens + WINDOW_ROWS
    made = cramped(plan, engine, form, context, OVERCOMMITTED, SHARE)
    served = service(engine, made, plan.chunks[-1], PromptCache(made)).serve_all(
        requests_of(plan, engine, OVERCOMMITTED)
    )
    done()
    return served


def overcommitted_is_alone(form: Form, served: Served, wanted: Sequence[Transcript]) -> Iterator[Check]:
    """Equality 6."""
    untested = None if served.waited else "nobody waited"
    yield served_check(("6", str(form), len(served.lives), ""), served, wanted, untested)


# --- All of them ------------------------------------------------------------------------------------------------------


def scheduled_jobs(plan: Plan, engine: Engine) -> Planned:
    """Every run, by a key, with its number of steps."""
    found: Planned = {}
    if "3" in plan.equalities:
        for how in resumptions(plan):
            found["resumed", how] = 1 + len(plan.counts), partial(resumed, plan, engine, how)
        found["cold",] = 2 * plan.counts[-1], partial(cold, plan, engine)
    if "5b" in plan.equalities:
        for form in [WINDOW, *plan.paged]:
            found["interrupted", form] = 2 + bool(plan.side_by_side), partial(interrupted, plan, engine, form)
    if "6" in plan.equalities:
        for form in plan.overcommitted:
            found["overcommitted", form] = 1, partial(overcommitted, plan, engine, form)
    return found


def scheduled_checks(results: Mapping[Key, Any]) -> Iterator[Check]:
    """What the runs say. results: with ("alone",), each stream by itself."""
    for key, found in results.items():
        if key[0] == "resumed":
            yield from resumed_is_fresh(key[1], found, results["cold",])
        if key[0] == "interrupted":
            yield from interrupted_is_not(key[1], found, results["alone",])
        if key[0] == "overcommitted":
            yield from overcommitted_is_alone(key[1], found, results["alone",])
