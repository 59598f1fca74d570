"""What a server is asked for, and what of it fits: a plan of the memory, and the line that says it. Spec serving §1, §2.

Windows are reserved for every stream, so ``parallel`` streams fit or the plan is refused. Pages are taken as streams need them,
so ``parallel`` is a cap: the pool gets what is left, and a request waits, or is refused alone, where that is not enough.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np

from backends.arena import Arena, CacheShape, part_words
from backends.base import Backend, Sizes, backend_class
from backends.paged import PagedBackend
from kernels_numba.decode_plan import MOST_ROWS
from kernels_numba.fp8 import KV_TYPES
from refengine.errors import UserError
from refengine.model import cache_shape
from refengine.registry import ModelSpec

GIB, MIB = 1 << 30, 1 << 20
RESERVE_PERCENT = 10
"""Of the memory, which nothing is planned in."""
WEIGHT_BYTES = 2
"""Of an element of the model's tensors: bf16."""
SUGGESTED_PAGE = 256


@dataclass(frozen=True)
class Settings:
    """parallel: streams at once. context: positions of one, at most. memory_gib: of the device, all in all.

    kv_pages: None or 0: a window a stream; n: pages of n positions. kv_pages_all: "1": every stream takes pages; anything else:
    the first stream keeps a window. kv: "bf16" or "fp8". window_rows: rows of one stream's decode pass. prompt_rows: of a prompt
    pass. kept_prompts: how many prompts the pool has room for beside its streams, for a prompt cache.
    """

    parallel: int
    context: int
    memory_gib: float
    kv_pages: int | None = None
    kv_pages_all: str | None = None
    kv: str = "bf16"
    window_rows: int = 1
    prompt_rows: int = 4096
    kept_prompts: int = 0

    @property
    def pages(self) -> int:
        """Positions a page; 0: there are no pages."""
        return self.kv_pages or 0

    @property
    def backend(self) -> str:
        """The form of cache, by name."""
        if not self.pages:
            return "window"
        if self.kv_pages_all != "1":
            return "mixed"
        return "paged-p256" if self.pages == 256 else "paged"

    def check(self, spec: ModelSpec) -> None:
        """Raise UserError for settings that make no sense, naming the flag."""
        least_one = {"--parallel": self.parallel, "--context": self.context, "--prompt-rows": self.prompt_rows}
        for flag, value in least_one.items():
            if value < 1:
                raise UserError(f"{flag} {value}: at least 1")
        for flag, value in {"--kv-pages": self.pages, "kept_prompts": self.kept_prompts}.items():
            if value < 0:
                raise UserError(f"{flag} {value}: at least 0")
        if not 1 <= self.window_rows <= MOST_ROWS:
            raise UserError(f"window_rows {self.window_rows}: 1 to {MOST_ROWS}")
        if self.context > spec.max_positions:
            raise UserError(f"--context {self.context}: {spec.name} has {spec.max_positions} positions; ask for fewer")
        if self.kv not in KV_TYPES:
            raise UserError(f"--kv {self.kv}: use one of {', '.join(KV_TYPES)}")
        if not 0 < self.memory_gib < 2**30:
            raise UserError(f"--memory-gib {self.memory_gib}: more than 0, and fewer than {2**30}")


@dataclass(frozen=True)
class Plan:
    """Settings that fit. model, reserve, left: bytes; left: for caches, when the other two are taken."""

    settings: Settings
    sizes: Sizes
    shape: CacheShape
    model: int
    reserve: int
    left: int

    @property
    def backend(self) -> str:
        """The form of cache, by name."""
        return self.settings.backend

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part of the arena, and of the page tables."""
        return parts_bytes(self.backend, self.shape, self.sizes)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page; of a stream's window where there are no pages."""
        return 4 * self.shape.page_words(self.settings.pages or self.settings.context, self.sizes.kv)

    @property
    def window_bytes(self) -> int:
        """Bytes of a stream's window and of its run beside it."""
        return 4 * (self.shape.page_words(self.settings.context, self.sizes.kv) + self.shape.run_words)

    @property
    def run_pages(self) -> int:
        """Pages of the pool that a stream holds from start to end, for its recurrent state."""
        return paged_class(self.backend).pages_a_run(self.shape, self.sizes) if self.settings.pages else 0

    def build(self, xp: Any = np, arena: type[Arena] = Arena) -> Backend:
        """The backend that was planned."""
        return backend_class(self.backend)(self.shape, self.sizes, xp, arena)


# --- Planning -------------------------------------------------------------------------------------------------------------


def planned(spec: ModelSpec, settings: Settings) -> Plan:
    """The plan. Raises UserError for settings that do not fit, with the numbers that would."""
    settings.check(spec)
    memory, model = int(settings.memory_gib * GIB), model_bytes(spec)
    reserve = memory * RESERVE_PERCENT // 100
    left = memory - reserve - model
    if left <= 0:
        raise UserError(
            f"--memory-gib {settings.memory_gib:.6g}: the model takes {amount(model)}, and a reserve {amount(reserve)}: "
            f"use --memory-gib {memory_text(model + 1)} or more"
        )
    sizes = Sizes(
        settings.context, settings.parallel, settings.pages or Sizes.page_size, settings.window_rows, kv=settings.kv
    )
    fitted = fit_pages if settings.pages else fit_windows
    return fitted(Plan(settings, sizes, cache_shape(spec), model, reserve, left))


def fit_windows(plan: Plan) -> Plan:
    """The plan, if every stream's window fits. Raises UserError that names how many do."""
    parallel, context = plan.settings.parallel, plan.settings.context
    if fits(plan.left, plan.shape, plan.settings, plan.sizes):
        return plan
    need = sum(plan.parts.values())
    streams = most(lambda n: fits(plan.left, plan.shape, plan.settings, replace(plan.sizes, streams=n)), parallel)
    would = f"--parallel {streams}" if streams else smaller(plan, need)
    raise UserError(
        f"--parallel {parallel} needs {amount(need)} for {'its streams' if parallel > 1 else 'its stream'} at a "
        f"{context}-token window, and {amount(plan.left)} are left: use {would}{pages_instead(plan)}"
    )


def pages_instead(plan: Plan) -> str:
    """That pages would do, if they would."""
    text = f" (or --kv-pages {SUGGESTED_PAGE}, which waits instead)"
    return text if pages_fit(plan, replace(plan.settings, kv_pages=SUGGESTED_PAGE)) else ""


def no_window(plan: Plan) -> str:
    """That pages for every stream would do, if they would."""
    text = " (or --kv-pages-all 1, which reserves no window)"
    return text if pages_fit(plan, replace(plan.settings, kv_pages_all="1")) else ""


def pages_fit(plan: Plan, settings: Settings) -> bool:
    """Whether other settings, with pages, are a plan."""
    other = replace(plan, settings=settings, sizes=replace(plan.sizes, page_size=settings.pages))
    return pool_that_fits(other, other.sizes) >= least_pool(other)


def fit_pages(plan: Plan) -> Plan:
    """The plan with as large a pool as fits; no larger than the streams and the kept prompts can need together.

    Raises UserError where the pool would not hold even a stream's run, and a page beside it if that has no window.
    """
    pool = pool_that_fits(plan, plan.sizes)
    if pool >= least_pool(plan):
        return replace(plan, sizes=replace(plan.sizes, pool=pool))
    settings = plan.settings
    need = sum(parts_bytes(plan.backend, plan.shape, replace(plan.sizes, pool=max(0, least_pool(plan)))).values())
    streams = most(
        lambda n: pool_that_fits(plan, replace(plan.sizes, streams=n)) >= least_pool(plan), settings.parallel
    )
    would = f"--parallel {streams}" if streams else smaller(plan, need)
    raise UserError(
        f"--parallel {settings.parallel} --context {settings.context} --kv-pages {settings.pages} needs {amount(need)} before "
        f"the first request can run, and {amount(plan.left)} are left: use {would}{no_window(plan)}"
    )


def pool_that_fits(plan: Plan, sizes: Sizes) -> int:
    """Pages of the pool, runs among them, that what is left has room for, as far as they can be of use; negative: none."""
    kind, settings = paged_class(plan.backend), plan.settings
    prompt = kind.pages_for(settings.context, sizes) + kind.pages_a_run(plan.shape, sizes)
    useful = kind.pool_pages(plan.shape, replace(sizes, pool=None, spare_pages=settings.kept_prompts * prompt))
    fixed = sum(parts_bytes(plan.backend, plan.shape, replace(sizes, pool=0)).values())
    return min(useful, (plan.left - fixed) // plan.page_bytes)


def least_pool(plan: Plan) -> int:
    """Pages without which no stream could run."""
    return plan.run_pages + (plan.backend != "mixed")


def smaller(plan: Plan, need: int) -> str:
    """What would do where not even one stream fits: the longest context of one, or else more memory. need: bytes as asked."""
    settings, one = plan.settings, replace(plan.sizes, streams=1)

    def enough(context: int) -> bool:
        sizes = replace(one, context=context)
        if settings.pages:
            return pool_that_fits(replace(plan, settings=replace(settings, context=context)), sizes) >= least_pool(plan)
        return fits(plan.left, plan.shape, settings, sizes)

    if context := most(enough, settings.context):
        return f"--parallel 1 --context {context}"
    return f"--memory-gib {memory_text(plan.model + need)} or more"


def fits(left: int, shape: CacheShape, settings: Settings, sizes: Sizes) -> bool:
    """Whether caches of these sizes fit into ``left`` bytes."""
    return sum(parts_bytes(settings.backend, shape, sizes).values()) <= left


def most(enough: Callable[[int], bool], bound: int) -> int:
    """The largest number below ``bound`` that is enough, if every smaller one is; 0: none."""
    return bisect_left(range(1, bound), True, key=lambda n: not enough(n))


# --- Bytes ----------------------------------------------------------------------------------------------------------------


def parts_bytes(name: str, shape: CacheShape, sizes: Sizes) -> dict[str, int]:
    """Bytes of a backend's arena, part by part, and of its page tables."""
    kind = backend_class(name)
    words = part_words(shape, *kind.arena_sizes(shape, sizes))
    tables = sizes.streams * ceil(sizes.context / kind.page_positions(sizes))
    return {part: 4 * count for part, count in (words | {"tables": tables}).items()}


def model_bytes(spec: ModelSpec) -> int:
    """Bytes of the model's weights, without its MTP head."""
    return WEIGHT_BYTES * sum(tensor.size for tensor in spec.tensors())


def memory_for(taken: int) -> float:
    """GiB of a memory that has ``taken`` bytes beside its reserve, and no byte fewer."""
    nbytes = taken * 100 // (100 - RESERVE_PERCENT)
    while nbytes - nbytes * RESERVE_PERCENT // 100 < taken:
        nbytes += 1
    return nbytes / GIB


def memory_text(taken: int) -> str:
    """``memory_for`` with two decimals, rounded up."""
    return f"{ceil(memory_for(taken) * 100) / 100:.2f}"


def paged_class(name: str) -> type[PagedBackend]:
    """A backend with pages, by name."""
    kind = backend_class(name)
    assert issubclass(kind, PagedBackend), f"{name} has no pages"
    return kind


def amount(nbytes: int) -> str:
    """Bytes as one reads them."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB // 10 else f"{nbytes / MIB:.2f} MiB"


# --- The line -------------------------------------------------------------------------------------------------------------


def startup_line(plan: Plan) -> str:
    """One line of what fits."""
    return (
        f"model {amount(plan.model)}; {streams_text(plan)}, of {amount(plan.left)} left after a {amount(plan.reserve)} "
        f"reserve; prompts in passes of up to {plan.settings.prompt_rows} rows"
    )


def streams_text(plan: Plan) -> str:
    """How many streams there can be, and what they take."""
    parallel, window = plan.settings.parallel, f"at a {plan.settings.context}-token window"
    if not plan.settings.pages:
        return f"{counted(parallel, 'stream')} at once, {amount(plan.window_bytes)} each {window}"
    if plan.backend != "mixed":
        return f"up to {counted(parallel, 'stream')} at once, taking {pool_text(plan)}"
    first = f"{window} ({amount(plan.window_bytes - 4 * plan.shape.run_words)})"
    if parallel == 1:
        return f"1 stream at once, {first}, and {counted(plan.run_pages, 'page')} fixed"
    return f"up to {counted(parallel, 'stream')} at once, the first {first}, up to {parallel - 1} more taking {pool_text(plan)}"


def pool_text(plan: Plan) -> str:
    """The pool's pages, and those that a stream holds from start to end."""
    pages = plan.sizes.pool or 0
    size = f"{counted(pages, 'page')} of {counted(plan.settings.pages, 'position')} ({amount(pages * plan.page_bytes)})"
    return f"{size} as they need them, {counted(plan.run_pages, 'page')} fixed each"


def counted(number: int, noun: str) -> str:
    """A number and its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
