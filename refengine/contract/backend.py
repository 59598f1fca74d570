"""A whole backend on trial, one of the engine's or a plug-in: its page tables and its address function, through both phases.

A case opens streams, stores their committed positions in a prompt pass, then runs the pass on trial: store, attend, finish. Where
each position lies is asked of the backend's own address function, so that the guards know every word that may be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from backends.base import DECODE, PROMPT, Backend, Norms, Sizes, Stream, backend_class
from kernels_numba.rope_store import rope_table
from kernels_numba.streams import BASE, PTOK, TABLE
from refengine.contract.attention import length_for
from refengine.contract.entries.layout import THREADS, locate_kernel
from refengine.contract.entry import Bounds, Control, Entry, Inputs, Modules, Outputs
from refengine.contract.gates import EXACT, REPEATS, launched, this_device
from refengine.contract.workbench import NAN, Array, Poison, Workbench, drawn, drawn_bf16
from refengine.device import Device
from refengine.verify import bounds
from refengine.verify.attention_bits import EPS, ROPE_DIMS, THETA, Heads
from refengine.verify.attention_oracle import attend

PREFIX = "backend "
SMALL, REAL = Heads(6, 1), Heads(24, 4)
SPARE_PAGES, SHUFFLE = 3, 7
Fault = Callable[[Backend, list[Stream]], None]


@dataclass(frozen=True)
class BackendCase:
    """A pass of (rows, committed) streams on a backend with pages of ``ptok``."""

    geometry: Heads
    phase: str
    ptok: int
    streams: tuple[tuple[int, int], ...]

    @property
    def sizes(self) -> Sizes:
        """What the backend is built for: some positions stay unused."""
        context = max(rows + committed for rows, committed in self.streams) + 5
        rows = max(rows for rows, _ in self.streams) if self.phase == DECODE else 1
        return Sizes(context, len(self.streams), self.ptok, rows, SPARE_PAGES, SHUFFLE)

    def __str__(self) -> str:
        rows, committed = (",".join(map(str, part)) for part in zip(*self.streams, strict=True))
        return f"{self.phase} {self.geometry} P={self.ptok} W={rows} p0={committed}"


class BackendEntry(Entry):
    """The contract of one backend; the window backend is the twin of every other."""

    kernels = ()
    modules = ()
    axes = {
        "out": ("row", "head", "dim"), "q": ("row", "head", "dim"), "cache": ("K or V", "position", "head", "word"),
    }  # fmt: skip

    def __init__(self, backend: str):
        self.name, self.backend = PREFIX + backend, backend_class(backend)  # type: ignore[misc]

    def cases(self, full: bool) -> Sequence[BackendCase]:
        sizes = (1, 16, 48, 64, 128, 256, 512, 544) if full else (1, 48, 256)
        geometry, streams = (REAL, ((1, 0), (17, 48), (16, 511))) if full else (SMALL, ((3, 130),))
        out = [BackendCase(geometry, phase, size, (s,)) for phase, size, s in product((PROMPT, DECODE), sizes, streams)]
        several = ((9, 50), (1, 0), (4, 260))
        return out + [BackendCase(SMALL, phase, size, several) for phase, size in product((PROMPT, DECODE), (48, 256))]

    def control_cases(self) -> Sequence[BackendCase]:
        return [BackendCase(SMALL, PROMPT, 48, ((9, 530),)), BackendCase(SMALL, DECODE, 48, ((2, 530),))]

    def controls(self) -> Sequence[Control]:
        out = [
            Control("a stored row changed by one bf16 step", EXACT, planting(change_row)),
            Control("a stored row changed after the first run", REPEATS, planting(change_row)),
        ]
        if self.backend.paged:
            out.append(Control("two entries of a page table exchanged", EXACT, planting(exchange_entries)))
        return out

    def inputs(self, case: BackendCase, poison: Poison, seed: int) -> Inputs:
        length = length_for(case.sizes.context)
        rows = [projected(case.geometry, seed, n, length) for n in range(len(case.streams))]
        return {"backend": self.backend, "rows": rows, "poison": poison, "seed": seed, "plant": None}

    def launch(self, case: BackendCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        device = bench.device
        backend = inputs["backend"](case.geometry.shape, case.sizes, device.xp)
        backend.arena.words[:] = np.uint32(inputs["poison"].word)
        streams = [backend.open(rows + committed) for rows, committed in case.streams]
        commit(case, inputs, backend, streams, device)
        batch = backend.batch(case.phase, [(s, rows) for s, (rows, _) in zip(streams, case.streams, strict=True)])
        if inputs["plant"] is not None:
            inputs["plant"](backend, streams)
        places = [
            cells(backend, s, s.committed + rows, device) for s, (rows, _) in zip(streams, case.streams, strict=True)
        ]
        bench.watch("arena", backend.arena.words, may_write(case, backend, places))
        bench.watch("pages", backend.pages, np.zeros(backend.pages.shape, bool))
        norms, rope = norms_and_rope(case, device)
        rows = np.concatenate([data[c : c + r] for data, (r, c) in zip(inputs["rows"], case.streams, strict=True)])
        q = backend.store(0, device.put(rows), norms, rope, batch)
        bench.result("q", q)
        bench.result("out", backend.attend(0, q, batch))
        backend.finish(batch)
        words = device.get(backend.arena.words)
        bench.result("cache", np.concatenate([words[place] for place in places], axis=1))

    def exact(self, case: BackendCase, inputs: Inputs) -> Bounds:
        window = on_window(case, inputs["seed"])
        cache_rows = window["cache"].view(window["q"].dtype)  # [K or V, positions of all streams, HK, D]
        value, limit = np.empty(window["q"].shape), np.empty(window["q"].shape)
        row = position = 0
        for rows, committed in case.streams:
            here = slice(row, row + rows)
            k, v = cache_rows[:, position : position + committed + rows]
            visible = np.arange(committed + rows) <= committed + np.arange(rows)[:, None]
            found = attend(window["q"][here], k, v, visible, float(case.geometry.scale))
            bound = bounds.prompt_attention if case.phase == PROMPT else bounds.decode_attention
            value[here], limit[here] = found.out, bound(found, case.geometry.head_dim)
            row, position = row + rows, position + committed + rows
        return {"out": (value, limit)}

    def twins(
        self, case: BackendCase, inputs: Inputs, run: Callable[[Any, Inputs], Outputs]
    ) -> Iterator[tuple[str, Outputs]]:
        yield "the window backend", on_window(case, inputs["seed"])


@lru_cache(16)
def on_window(case: BackendCase, seed: int) -> Outputs:
    """What the window backend makes of a case, on the CPU machine."""
    entry = BackendEntry("window")
    return launched(entry, case, entry.inputs(case, NAN, seed), Workbench(this_device("cpu"), NAN))[0]


# --- The parts of a run -----------------------------------------------------------------------------------------------


@lru_cache(16)
def projected(heads: Heads, seed: int, stream: int, length: int) -> Array:
    """bf16 [positions, columns]: the projections of a stream's positions."""
    return drawn_bf16((seed, heads.head_dim, stream, 3), length, heads.columns)


def norms_and_rope(case: BackendCase, device: Device) -> tuple[Norms, Any]:
    """Gains of the q and k norms, and the rotary table of the case's positions."""
    gains = 1 + drawn((case.geometry.head_dim,), 2, case.geometry.head_dim, scale=0.25)
    norms = Norms(device.put(gains[0].astype(np.float32)), device.put(gains[1].astype(np.float32)), EPS)
    return norms, device.put(rope_table(case.sizes.context, ROPE_DIMS, THETA))


def commit(case: BackendCase, inputs: Inputs, backend: Backend, streams: list[Stream], device: Device) -> None:
    """Store every stream's committed positions in one prompt pass."""
    work = [(s, c) for s, (_, c) in zip(streams, case.streams, strict=True) if c]
    if work:
        rows = np.concatenate([data[:c] for data, (_, c) in zip(inputs["rows"], case.streams, strict=True)])
        batch = backend.batch(PROMPT, work)
        backend.store(0, device.put(rows), *norms_and_rope(case, device), batch)
        backend.finish(batch)


def cells(backend: Backend, stream: Stream, positions: int, device: Device) -> Array:
    """int64 [K or V, positions, HK, D/2]: the arena words of a stream's positions, asked of the backend's address function."""
    row, shape = backend.stream_row(stream, 0, 0), backend.shape
    found = device.put(np.zeros((positions, 2), np.int64))
    locate_kernel.at(layout=backend.layout)[1, THREADS](
        found, device.put(np.arange(positions)), backend.pages, row[BASE], row[TABLE], row[PTOK], backend.page_words
    )
    start, slot = device.get(found).T[:, :, None, None]
    head, word = np.arange(shape.kv_heads)[:, None], np.arange(shape.head_dim // 2)
    plane = np.array(backend.planes(0))[:, None, None, None]
    return start + plane + (head * row[PTOK] + slot) * (shape.head_dim // 2) + word


def may_write(case: BackendCase, backend: Backend, places: list[Array]) -> Array:
    """bool [words]: the new positions' rows; in a decode pass their rows of the window record, too."""
    out = np.zeros(backend.arena.words.shape, bool)
    for place, (_, committed) in zip(places, case.streams, strict=True):
        out[place[:, committed:]] = True
    if case.phase == DECODE:
        row_words = backend.shape.kv_heads * backend.shape.head_dim // 2
        record = backend.arena.starts["records"] + np.arange(2 * backend.arena.rows * row_words)
        out[record.reshape(2, backend.arena.rows, row_words)[:, : sum(rows for rows, _ in case.streams)]] = True
    return out


# --- Faults -----------------------------------------------------------------------------------------------------------


def planting(fault: Fault) -> Callable[[Inputs], None]:
    """A control's plant: the fault happens when the pass's tables stand."""

    def plant(inputs: Inputs) -> None:
        inputs["plant"] = fault

    return plant


def change_row(backend: Backend, streams: list[Stream]) -> None:
    """One element of the first stream's position 31."""
    device = this_device("cpu" if backend.xp is np else "cuda")
    word = int(cells(backend, streams[0], 32, device)[0, 31, 0, 7])
    backend.arena.words[word : word + 1] += np.uint32(1)


def exchange_entries(backend: Backend, streams: list[Stream]) -> None:
    """The first two entries that name pages in use."""
    host = np.asarray(backend.pages.tolist())
    first, second = [int(i) for i in np.flatnonzero(host != backend.null_page)[:2]]
    backend.pages[first], backend.pages[second] = int(host[second]), int(host[first])
