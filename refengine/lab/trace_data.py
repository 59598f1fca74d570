"""A trace as data: what the page's script, the report and the table on the terminal are made of."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kernels_numba.machine.place import Spot, Turns
from kernels_numba.machine.trace import Op, Step, Trace
from refengine.contract.attention import AttentionCase
from refengine.lab.kernel_case import Launchable
from refengine.lab.trace_picture import MemoryPicture, fetched

MOST_STEPS = 3000
"""Steps that a page keeps; the counters have all."""
COUNTERS = ("warps", "global_bytes", "shared_bytes", "lookups", "conflicts")
"""Of a line, what it calls included. warps: that came to a memory operation, a barrier, a shuffle or an mma there."""
LOOKS = (
    ("mma", "mma"), ("copy", "copy"), ("shuffle", "fold"), ("global store", "store"), ("wait", "wait"), ("barrier", "wait"),
    ("commit", "wait"),
)  # fmt: skip
"""What a step looks like on the timeline: by the first of these kinds that it has; else "load"."""


@dataclass
class Function:
    """The source of the kernel or of a device function. first: line of the file. counts: line -> counters."""

    name: str
    file: str
    first: int
    lines: list[str]
    counts: dict[int, dict[str, int]] = field(default_factory=dict)


@dataclass
class Traced:
    """A trace with its source and its picture. functions: the kernel first, then as they come."""

    trace: Trace
    found: Launchable
    functions: dict[tuple[str, str], Function] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kernel = self.trace.program
        self.function(Spot(kernel, kernel.tree.lineno))
        for op in self.trace.ops:
            for spot in dict.fromkeys(op.path):
                counts = self.function(spot).counts.setdefault(spot.line, dict.fromkeys(COUNTERS, 0))
                for name, amount in counted(op).items():
                    counts[name] += amount

    def function(self, spot: Spot) -> Function:
        key = (spot.program.filename, spot.program.name)
        if key not in self.functions:
            self.functions[key] = source_of(spot)
        return self.functions[key]

    def number(self, spot: Spot) -> list[int]:
        """(number of the function, line)."""
        return [list(self.functions).index((spot.program.filename, spot.program.name)), spot.line]

    @property
    def totals(self) -> dict[str, int]:
        """Counters of the whole block."""
        ops = self.trace.ops
        found = dict.fromkeys([*COUNTERS, "straddles", "mma", "barriers"], 0)
        for op in ops:
            for name, amount in counted(op).items():
                found[name] += amount
            found["straddles"] += op.lanes if (op.kind, op.array) == ("count", "straddles") else 0
            found["mma"] += op.warps if op.kind == "mma" else 0
            found["barriers"] += op.times if op.kind == "barrier" else 0
        return found


def counted(op: Op) -> dict[str, int]:
    """What an op adds to its lines' counters."""
    return {
        "warps": op.warps if op.kind != "count" else 0,
        "global_bytes": op.global_bytes,
        "shared_bytes": op.shared_bytes,
        "lookups": op.lanes if (op.kind, op.array) == ("count", "lookups") else 0,
        "conflicts": op.conflicts,
    }


def source_of(spot: Spot) -> Function:
    """The function's source, from its file."""
    program = spot.program
    first, last = program.tree.lineno, program.tree.end_lineno or program.tree.lineno
    lines = [linecache.getline(program.filename, n).rstrip() for n in range(first, last + 1)]
    return Function(program.name, module_file(program.filename), first, lines)


def module_file(filename: str) -> str:
    """A module's file as its package has it: ``kernels_numba/prompt_attention.py``."""
    names = [name for name, m in list(sys.modules.items()) if getattr(m, "__file__", None) == filename]
    return f"{min(names, key=len).replace('.', '/')}.py" if names else filename.rpartition("/")[2]


# --- For the page -----------------------------------------------------------------------------------------------------


def page_data(traced: Traced, picture: MemoryPicture, title: str) -> dict[str, Any]:
    """Everything that the page's script shows."""
    steps = traced.trace.steps
    paths: dict[tuple, int] = {}
    shown = [step_data(traced, picture, step, paths) for step in steps[:MOST_STEPS]]
    functions = [
        {"name": f.name, "file": f.file, "first": f.first, "lines": f.lines,
         "counts": {line: [c[name] for name in COUNTERS] for line, c in f.counts.items()}}
        for f in traced.functions.values()
    ]  # fmt: skip
    second = [n for n, one in enumerate(shown) if one["second"]]
    return {
        "title": title, "facts": facts(traced), "open": second[0] if second else 0, "counters": list(COUNTERS),
        "functions": functions, "steps": shown, "paths": [list(map(list, path)) for path in paths],
        "left_out": max(0, len(steps) - MOST_STEPS), "totals": traced.totals,
    }  # fmt: skip


def facts(traced: Traced) -> list[str]:
    """The launch in words."""
    mode = traced.trace.mode
    assert mode is not None and mode.grid is not None
    grid = " × ".join(map(str, mode.grid))
    block = ", ".join(map(str, mode.block))
    return [*case_words(traced.found.case), f"block ({block}) of a grid of {grid}", f"{mode.threads} threads"]


def case_words(case: Any) -> list[str]:
    """A case in words; one that is not of attention as it names itself."""
    if not isinstance(case, AttentionCase):
        return [f"case {case}"]
    heads = case.geometry
    forms = {
        "window": "a window",
        "paged": f"pages of {case.ptok}",
        "paged_p256": "pages of 256, known to the compiler",
    }
    rows = [f"{counted_word(rows, 'new row')} after {committed} positions" for rows, committed in case.streams]
    return [
        f"{counted_word(heads.heads, 'query head')} and {counted_word(heads.kv_heads, 'KV head')} of {heads.head_dim} numbers",
        f"{forms.get(case.layout, f'layout {case.layout}')}{' of 8-bit numbers' * (case.kv == 'fp8')}",
        f"{rows[0]} in the cache" if len(rows) == 1 else f"{len(rows)} texts: {', '.join(rows)}",
    ]


def counted_word(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def second_lookups(traced: Traced) -> list[int]:
    """The steps that look a second page up, from 1 on."""
    picture = MemoryPicture(traced.trace, traced.found)
    return [n for n, step in enumerate(traced.trace.steps, 1) if picture.lit(step).second]


def turns_and_item(step: Step) -> str:
    """Where a step stands in the kernel's loops, and the item that it fetches."""
    item = fetched(step)
    return ", ".join(filter(None, (shown_turns(step.turns), f"fetches {item}" if item else "")))


def step_data(traced: Traced, picture: MemoryPicture, step: Step, paths: dict[tuple, int]) -> dict[str, Any]:
    lit = picture.lit(step)
    return {
        "at": traced.number(step.spot),
        "turns": shown_turns(step.turns),
        "place": turns_and_item(step),
        "look": look_of(step),
        "ops": [op_data(traced, op, paths) for op in step.ops.values()],
        "lit": [rect.data() for rect in lit.rects],
        "labels": [label.data() for label in lit.labels],
        "lookups": lit.lookups,
        "second": lit.second,
    }


def op_data(traced: Traced, op: Op, paths: dict[tuple, int]) -> list[Any]:
    """[kind, array, number of its path, turns, times, warps, lanes, global bytes, shared bytes, conflicts]."""
    path = tuple(tuple(traced.number(spot)) for spot in op.path)
    number = paths.setdefault(path, len(paths))
    array = f"{op.array} → {op.into}" if op.into else op.array
    return [op.kind, array, number, inner_turns(op), op.times, op.warps, op.lanes, op.global_bytes, op.shared_bytes,
            op.conflicts]  # fmt: skip


def inner_turns(op: Op) -> str:
    """The turns that device functions were passed; their own loops are added up in an op."""
    passed = [t for spot, turns in zip(op.path[1:], op.turns[1:]) for t in turns if t[0] in spot.program.params]
    return shown_turns(dict(passed).items())


def shown_turns(turns: Turns | Iterable[tuple[str, str]]) -> str:
    return " · ".join(f"{name} {value}" for name, value in turns)


def look_of(step: Step) -> str:
    kinds = {op.kind for op in step.ops.values()}
    return next((look for kind, look in LOOKS if kind in kinds), "load")
