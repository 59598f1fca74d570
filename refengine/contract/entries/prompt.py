"""Prompt attention: bounded by float64, and the same bits on pages, in any pass, among any neighbours. Spec attention §1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import numpy as np

from kernels_numba.fp8 import KV_TYPES
from refengine.contract.attention import (
    COMMITTED,
    FORMS,
    GROUPS,
    MIXED,
    PAGE_SIZES,
    ROWS,
    AttentionCase,
    AttentionEntry,
    attention_controls,
    case_data,
    laid_out,
    queries,
    sampled,
)
from refengine.contract.entry import Bounds, Control, Inputs, Modules, Outputs, contract
from refengine.contract.workbench import BF16, NAN, Array, Poison, Workbench
from refengine.verify import bounds
from refengine.verify.attention_bits import Heads
from refengine.verify.attention_oracle import attend

PROMPT, FP8, LAYOUT = "kernels_numba.prompt_attention", "kernels_numba.fp8", "backends.layout"
FAR_PAGES = AttentionCase(Heads(1, 1, 64), "paged", 1, ((5, 70),), first_page=65_530)
"""Page ids on both sides of 2^16."""
REAL, SMALL = Heads(24, 4), Heads(12, 2)


@contract
class PromptAttention(AttentionEntry):
    """One launch a stream."""

    name = "prompt_attention"
    kernels = ("prompt_attention",)
    modules = (PROMPT, "kernels_numba.cache_rows", FP8, LAYOUT)
    axes = {"out": ("row", "head", "dim")}

    def cases(self, full: bool) -> Sequence[AttentionCase]:
        return list(full_table() if full else small_table())

    def control_cases(self) -> Sequence[AttentionCase]:
        return [
            AttentionCase(Heads(6, 1), "paged", 48, ((17, 48),)),
            AttentionCase(Heads(4, 1), "paged", 16, ((70, 130),)),
            AttentionCase(Heads(6, 1, 64), "paged", 48, ((17, 300), (9, 130))),
            FAR_PAGES,
            AttentionCase(Heads(6, 1), "paged", 48, ((17, 48),), kv="fp8"),
            *(AttentionCase(Heads(2, 2, D), "paged", 16, ((33, 70),), kv="fp8") for D in (64, 128)),
            AttentionCase(SMALL, "paged", 48, ((257, 300),)),
        ]

    def controls(self) -> Sequence[Control]:
        return attention_controls()

    def inputs(self, case: AttentionCase, poison: Poison, seed: int) -> Inputs:
        laid = laid_out(case, poison, seed, own_rows=True)
        return {"q": queries(case, seed), "cache": laid, "scale": case.geometry.scale, "seed": seed}

    def launch(self, case: AttentionCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        module, laid = modules[PROMPT], inputs["cache"]
        heads, kv_heads, D = case.geometry.heads, case.geometry.kv_heads, case.geometry.head_dim
        layout = modules[LAYOUT].LAYOUTS[case.layout]
        out, q = bench.output("out", inputs["q"].shape, BF16), bench.input("q", inputs["q"])
        place = [bench.input(n, getattr(laid, n)) for n in ("arena", "pages", "streams")]
        bound = module.prompt_attention.at(
            D=D, HPC=module.heads_per_block(heads // kv_heads), layout=layout, kv=case.cache_kv
        )
        for stream, (rows, _) in enumerate(case.streams):
            grid, threads, shared = module.launch_shape(rows, heads, kv_heads, D, case.cache_kv)
            bound[grid, threads, None, shared](out, q, *place, stream, heads, kv_heads, inputs["scale"])

    def exact(self, case: AttentionCase, inputs: Inputs) -> Bounds:
        value = np.zeros(inputs["q"].shape)
        limit = np.full(value.shape, np.inf)
        for (q, k, v), first, (rows, committed) in zip(
            case_data(case, inputs["seed"]), case.firsts, case.streams, strict=True
        ):
            chosen = sampled(rows)
            if len(chosen):
                keys, positions = committed + rows, committed + chosen
                visible = np.arange(keys) <= positions[:, None]
                found = attend(q[positions], k[:keys], v[:keys], visible, float(inputs["scale"]))
                value[first + chosen] = found.out
                limit[first + chosen] = bounds.prompt_attention(found, case.geometry.head_dim)
        return {"out": (value, limit)}

    def twins(
        self, case: AttentionCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        parts = [self.other_pass(case, n, inputs["seed"], run) for n in range(len(case.streams))]
        yield "each stream alone on a window of bf16, in a longer pass", {"out": np.concatenate(parts)}

    def other_pass(self, case: AttentionCase, stream: int, seed: int, run: Callable[[Any, Inputs], Outputs]) -> Array:
        """A stream's rows out of a window pass from three rows earlier to two rows later."""
        rows, committed = case.streams[stream]
        before = min(3, committed)
        streams = ((rows + before + 2, committed - before),)
        number = case.number + stream
        longer = AttentionCase(case.geometry, "window", 0, streams, number=number, kv=case.as_bf16)
        return run(longer, self.inputs(longer, NAN, seed))["out"][before : before + rows]


# --- The table --------------------------------------------------------------------------------------------------------


def one(geometry: Heads, form: tuple[str, int], rows: int, committed: int, kv: str = "bf16") -> AttentionCase:
    return AttentionCase(geometry, *form, ((rows, committed),), kv=kv)


def full_table() -> Iterator[AttentionCase]:
    """Every row count, committed length and form of the real heads; every page size, group and head_dim; several streams."""
    yield from (one(REAL, form, w, p) for w, p, form in product(ROWS, COMMITTED, FORMS))
    yield from (one(REAL, form, w, p, "fp8") for w, p, form in product(ROWS[1::4], COMMITTED[::3], FORMS))
    for size, (w, p) in product(PAGE_SIZES, ((17, 48), (65, 255), (129, 2048), (257, 9000))):
        yield one(REAL, ("paged", size), w, p)
    for group, D, form, (w, p) in product(GROUPS, (64, 128, 256), FORMS, ((17, 48), (129, 257), (65, 2047))):
        yield one(Heads(2 * group, 2, D), form, w, p)
    yield from (
        one(Heads(2 * group, 2, D), FORMS[D // 128], 17, 255, "fp8") for group, D in product(GROUPS, (64, 128, 256))
    )
    yield from several_streams(REAL)
    yield from small_table()


def small_table() -> Iterator[AttentionCase]:
    """Every row count up to 257 and committed length up to 2048 once, every form, page size, group and head_dim."""
    some = (
        (1, 257),
        (15, 48),
        (16, 0),
        (17, 255),
        (63, 1),
        (64, 256),
        (65, 2047),
        (127, 0),
        (128, 48),
        (129, 1),
        (257, 255),
    )
    for n, (w, p) in enumerate(some):
        yield one(Heads(6, 1), FORMS[n % 3], w, p)
    yield from (one(Heads(6, 1), ("paged", size), 17, 2048 if size == 544 else 130) for size in PAGE_SIZES)
    for n, (group, D) in enumerate(product(GROUPS, (64, 128, 256))):
        yield one(Heads(group, 1, D), FORMS[n % 3], 33, 96)
    for n, (w, p) in enumerate(((1, 300), (17, 255), (65, 48), (129, 1))):
        yield one(Heads(6, 1), FORMS[n % 3], w, p, "fp8")
    for size, D in zip(PAGE_SIZES, cycle((64, 128, 256)), strict=False):
        yield one(Heads(2, 1, D), ("paged", size), 17, 70, "fp8")
    yield one(REAL, ("paged", 48), 20, 300)
    yield FAR_PAGES
    yield from several_streams(SMALL)


def several_streams(geometry: Heads) -> Iterator[AttentionCase]:
    """Streams of one launch, one of them without rows, one at its start."""
    for form in (*FORMS, MIXED):
        yield AttentionCase(geometry, *form, ((9, 50), (33, 7)))
        yield AttentionCase(geometry, *form, ((5, 300), (0, 64), (17, 0)))
        yield AttentionCase(geometry, *form, ((5, 70), (0, 64), (17, 0), (3, 130)), kv="fp8")
    for kv in KV_TYPES:
        yield AttentionCase(replace(geometry, head_dim=64), *MIXED, ((3, 9000), (2, 9000), (5, 0), (17, 48)), kv=kv)
