"""The memory of a traced block as a picture: the cache's pages, the slots of shared memory, the other arrays as strips."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels_numba import prompt_attention as prompt
from kernels_numba.machine.trace import DYNAMIC, Memory, Op, Spans, Step, Trace
from refengine.contract.caches import Cache
from refengine.lab.cache_picture import STRIP, CachePicture, busiest_stream
from refengine.lab.kernel_case import Launchable
from refengine.lab.svg import WIDTH, Label, Rect, tidy

CACHE_ARRAYS = ("arena", "pages", "streams")
"""The kernel's names of a cache's arrays."""
ROW = STRIP + 26.0
LEAST = 1.5
"""Width of what is lit, so that one element shows."""
MOST_LIT = 160
"""Rectangles that a strip lights in one step; beyond, neighbours are joined."""
PALETTE, RULE = re.compile(r"^ *svg \{([^}]*)\}\n", re.MULTILINE), re.compile(r"([^{}]+)\{([^}]*)\}")
VARIABLE, USE = re.compile(r"(--\w+): ([^;]+);"), re.compile(r"var\((--\w+)\)")
"""In a style: where variables are set, a rule, one that is set, one that is used."""
Lookup = tuple[int, int, int, str, str]
"""Entry of a page table, the page that it names, how often a thread looked it up, who did, and the line that asked."""


@dataclass(frozen=True)
class Region:
    """A named part of the dynamic shared memory, in bytes."""

    name: str
    first: int
    last: int


@dataclass(frozen=True)
class Lit:
    """What a step lights. lookups: in order."""

    rects: list[Rect]
    labels: list[Label]
    lookups: list[Lookup]

    @property
    def second(self) -> bool:
        """Whether the step looks a second page up."""
        return len({entry for entry, *_ in self.lookups}) > 1


@dataclass(frozen=True)
class Held:
    """What a region holds since a copy. text: its item. source: elements of the array that it came from. entries: of the page
    table that were looked up for it.
    """

    text: str
    group: int
    array: str
    source: Spans
    entries: Sequence[int]


class Strip:
    """An array as a strip from ``top`` on. contents: of its regions, by name."""

    def __init__(self, memory: Memory, nbytes: int, top: float, regions: Sequence[Region] = ()):
        self.memory, self.nbytes, self.top, self.regions = memory, max(1, nbytes), top, regions
        self.contents: dict[str, Held] = {}

    def drawn(self) -> Iterator[Rect | Label]:
        memory = self.memory
        shape = f"{memory.dtype} [{', '.join(map(str, memory.shape))}]"
        name = "dynamic shared memory" if memory.name == DYNAMIC else f"{memory.space} {memory.name}"
        yield Label(0, self.top - 5, f"{name}: {shape}, {self.nbytes:,} bytes", "title")
        for region in self.regions or [Region("", 0, self.nbytes)]:
            x, width = self.x(region.first), self.x(region.last) - self.x(region.first)
            yield Rect(tidy(x), self.top, tidy(width), STRIP, memory.space, region.name)
            if region.name:
                yield Label(tidy(x + width / 2), self.top + STRIP + 11, region.name, "label middle")

    def x(self, byte: float) -> float:
        return byte / self.nbytes * WIDTH

    def lit(self, found: Spans, itemsize: int, look: str) -> Iterator[Rect]:
        for start, stop in joined(found, MOST_LIT):
            x, end = self.x(start * itemsize), self.x(stop * itemsize)
            yield Rect(tidy(x), self.top - 1, max(LEAST, tidy(end - x)), STRIP + 2, look)

    def within(self, found: Spans) -> Iterator[str]:
        """The regions that elements lie in."""
        size = self.memory.itemsize
        for region in self.regions:
            if any(start * size < region.last and stop * size > region.first for start, stop in found):
                yield region.name

    def fill(self, op: Op, entries: Sequence[int]) -> None:
        """A copy has begun: the regions that it writes hold its item. entries: that its step looked up."""
        for name in self.within(op.target):
            self.contents[name] = Held(item_of(op) or "copied", op.group, op.array, op.source, entries)

    def states(self, landed: int) -> Iterator[Label]:
        """What each region holds; copies of groups from ``landed`` on are on their way."""
        for region in self.regions:
            if region.name in self.contents:
                held = self.contents[region.name]
                state = "landed" if held.group < landed else "on its way"
                middle = (self.x(region.first) + self.x(region.last)) / 2
                yield Label(tidy(middle), self.top + 12, f"{held.text}, {state}", "label middle over")


def item_of(op: Op) -> str:
    """``item 3``: what a copy fetches, as the innermost function that was given an item has it; empty where none was."""
    items = [
        value
        for spot, turns in zip(op.path, op.turns)
        for name, value in turns
        if name == "item" and name in spot.program.params
    ]
    return f"item {items[-1]}" if items else ""


def fetched(step: Step) -> str:
    """The item that a step's copies fetch; empty where its turn says so already."""
    found = next((item_of(op) for op in step.ops.values() if op.into and item_of(op)), "")
    return "" if tuple(found.split()) in step.turns else found


def askers(events: Sequence[int]) -> str:
    """Who looked an entry up. events: how many threads did, each time that any did."""
    threads = f"{max(events)} thread{'s' * (max(events) > 1)}"
    if len(events) == 1:
        return threads
    return f"{threads}, {len(events)} rows each" if len(set(events)) == 1 else f"{sum(events)} times by up to {threads}"


def joined(found: Spans, most: int) -> Spans:
    """The spans, the nearest ones joined until there are no more than ``most``."""
    if len(found) <= most:
        return found
    gaps = np.array([b[0] - a[1] for a, b in zip(found, found[1:])])
    kept = np.sort(np.argsort(-gaps, kind="stable")[: most - 1])
    firsts = [found[0][0], *(found[i + 1][0] for i in kept)]
    lasts = [*(found[i][1] for i in kept), found[-1][1]]
    return list(zip(firsts, lasts))


class MemoryPicture:
    """All memory that a trace touched. ``height``: of the picture; ``lit``: what each step lights, call it step by step."""

    def __init__(self, trace: Trace, found: Launchable):
        self.trace, self.top = trace, 22.0
        self.cache = self.cache_part(trace, found)
        self.strips: dict[str, Strip] = {}
        for memory in trace.memories.values():
            self.add(memory)
        self.height = self.top
        self.landed = 0

    def cache_part(self, trace: Trace, found: Launchable) -> CachePicture | None:
        """The cache, where the kernel is given one."""
        cache = found.inputs.get("cache")
        if not isinstance(cache, Cache) or "arena" not in trace.memories:
            return None
        assert trace.mode is not None
        given = trace.mode.scalars.get("stream")
        arena = [span for op in trace.ops if op.array == "arena" for span in (*op.source, *op.target)]
        picture = CachePicture(cache, int(given) if given is not None else busiest_stream(cache, arena), self.top)
        self.top = picture.bottom + 24.0
        return picture

    def add(self, memory: Memory) -> None:
        """A strip for an array; the cache's have their own picture, views of the dynamic memory share one."""
        if memory.name.startswith(f"{DYNAMIC} as ") or (self.cache and memory.name in CACHE_ARRAYS):
            return
        nbytes = memory.itemsize * int(np.prod(memory.shape))
        self.strips[memory.name] = Strip(memory, nbytes, self.top, regions(self.trace, memory))
        self.top += ROW + (12.0 if self.strips[memory.name].regions else 0.0)

    def drawn(self) -> Iterator[Rect | Label]:
        """The picture at rest."""
        if self.cache is not None:
            yield from self.cache.drawn()
        for strip in self.strips.values():
            yield from strip.drawn()

    def lit(self, step: Step) -> Lit:
        """What a step lights; steps come in order, for slots keep what earlier ones copied."""
        rects: list[Rect] = []
        lookups = list(self.lookups(step))
        entries = list(dict.fromkeys(entry for entry, *_ in lookups))
        if self.cache is not None:
            rects += self.cache.lit_entries(entries)
        for op in step.ops.values():
            rects += self.lit_by(op, entries)
        return Lit(
            list(dict.fromkeys(rects)),
            [s for strip in self.strips.values() for s in strip.states(self.landed)],
            lookups,
        )

    def lookups(self, step: Step) -> Iterator[Lookup]:
        for op in step.ops.values():
            if self.cache is not None and op.array == "pages" and op.kind == "global load":
                asks = op.path[-2:][0]
                for entry in self.cache.entries(op.source):
                    events = [int((asked == self.cache.first_entry + entry).sum()) for asked in op.sources]
                    who = askers([count for count in events if count])
                    yield entry, self.cache.table[entry], sum(events), who, f"{asks.program.name}:{asks.line}"

    def lit_by(self, op: Op, entries: list[int]) -> Iterator[Rect]:
        """What an op reads and writes. entries: of the page table that its step looked up."""
        if op.kind == "wait":
            self.landed = max(self.landed, op.group)
        memory = self.trace.memories.get(op.array)
        if memory is None:
            return
        if self.cache is not None and op.array == "arena":
            yield from self.cache.lit_rows(op.source, entries, "read")
            yield from self.cache.lit_rows(op.target if not op.into else [], entries, "write")
        elif (strip := self.strip_of(op.array)) is not None:
            yield from self.lit_origins(strip, op)
            yield from strip.lit(op.source, memory.itemsize, "read first")
            yield from strip.lit(op.target if not op.into else [], memory.itemsize, "write first")
        if op.into and (target := self.strip_of(op.into)) is not None:
            target.fill(op, entries)
            yield from target.lit(op.target, self.trace.memories[op.into].itemsize, "write first")

    def lit_origins(self, strip: Strip, op: Op) -> Iterator[Rect]:
        """The rows of the cache that a read of shared memory finds there."""
        for name in strip.within(op.source):
            held = strip.contents.get(name)
            if self.cache is not None and held is not None and held.array == "arena":
                yield from self.cache.lit_rows(held.source, held.entries, "used")

    def strip_of(self, name: str) -> Strip | None:
        return self.strips.get(DYNAMIC if name.startswith(f"{DYNAMIC} as ") else name)


def regions(trace: Trace, memory: Memory) -> list[Region]:
    """The parts of the dynamic shared memory that a kernel carves, where its module says them."""
    if memory.name != DYNAMIC or trace.program.name != "prompt_attention":
        return []
    bound = compile_time(trace)
    D, kv = bound["D"], bound["kv"]
    at, size = 4 * prompt.query_words(D), 4 * prompt.staged_words(D, kv)
    names = [Region("queries", 0, at)] if at else []
    names += [Region(f"slot {n}", at + n * size, at + (n + 1) * size) for n in range(prompt.slots(D))]
    if kv == "fp8":
        wide, exponents = 4 * prompt.wide_at(D), 4 * prompt.exponents_at(D)
        names += [Region("widened", wide, exponents), Region("exponents", exponents, prompt.shared_bytes(D, kv))]
    return names


def compile_time(trace: Trace) -> dict[str, Any]:
    """The compile-time arguments that the traced program was made with."""
    kernel = getattr(prompt, trace.program.name)
    return next(b.bound for b in kernel.bound.values() if b.program is trace.program)


def plain_colours(style: str) -> str:
    """A style whose colours are written out, for programs that know no CSS variables: the light ones, then a dark scheme's."""
    light, dark = (dict(VARIABLE.findall(found[1])) for found in PALETTE.finditer(style))
    rules = PALETTE.sub("", style).replace("@media (prefers-color-scheme: dark) {\n}\n", "").strip()
    dark_rules = []
    for selector, body in RULE.findall(rules):
        coloured = "; ".join(part.strip() for part in body.split(";") if "var(" in part)
        dark_rules += [f"  {selector.strip()} {{ {coloured}; }}"] if coloured else []
    light_text, dark_text = (
        USE.sub(lambda found, colours=colours: colours[found[1]], text)  # type: ignore[misc]
        for text, colours in ((rules, light), ("\n".join(dark_rules), light | dark))
    )
    return f"{light_text}\n@media (prefers-color-scheme: dark) {{\n{dark_text}\n}}\n"


def still(picture: MemoryPicture, lit: Lit, style: str, title: str) -> str:
    """The picture at one step, as a file of its own. style: CSS."""
    shapes = [*picture.drawn(), *lit.rects, *lit.labels]
    inside = "\n".join(shape.svg() for shape in shapes)
    box = f"-6 -24 {WIDTH + 12:g} {picture.height + 30:g}"
    heading = Label(0, -8, title, "heading").svg()
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img">\n<title>{title}</title>\n'
            f"<style>{style}</style>\n{heading}\n{inside}\n</svg>\n")  # fmt: skip
