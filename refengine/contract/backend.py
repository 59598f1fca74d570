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
from kernels_numba.fp8 import row_words
from kernels_numba.locate import locate
from kernels_numba.rope_store import rope_table
from kernels_numba.streams import BASE, K_EXP_PLANE, K_PLANE, PAGE_WORDS, PTOK, TABLE, V_EXP_PLANE, V_PLANE
from refengine.contract.attention import length_for
from refengine.contract.entry import Bounds, Control, Entry, Inputs, Modules, Outputs
from refengine.contract.gates import EXACT, REPEATS, launched, this_device
from refengine.contract.workbench import BF16, NAN, Array, Poison, Workbench, drawn, drawn_bf16
from refengine.device import Device
from refengine.verify import bounds, fp8_oracle
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
    kv: str = "bf16"

    @property
    def sizes(self) -> Sizes:
        """What the backend is built for: some positions stay unused."""
        context = max(rows + committed for rows, committed in self.streams) + 5
        rows = max(rows for rows, _ in self.streams) if self.phase == DECODE else 1
        return Sizes(context, len(self.streams), self.ptok, rows, SPARE_PAGES, SHUFFLE, self.kv)

    def __str__(self) -> str:
        rows, committed = (",".join(map(str, part)) for part in zip(*self.streams, strict=True))
        kv = f" {self.kv}" if self.kv != "bf16" else ""
        return f"{self.phase} {self.geometry} P={self.ptok}{kv} W={rows} p0={committed}"


class BackendEntry(Entry):
    """The contract of one backend; the window backend is the twin of every other."""

    kernels = ()
    modules = ()
    axes = {
        "out": ("row", "head", "dim"), "q": ("row", "head", "dim"), "cache": ("K or V", "position", "head", "dim"),
    }  # fmt: skip

    def __init__(self, backend: str):
        self.name, self.backend = PREFIX + backend, backend_class(backend)  # type: ignore[misc]

    def cases(self, full: bool) -> Sequence[BackendCase]:
        sizes = (1, 16, 48, 64, 128, 256, 512, 544) if full else (1, 48, 256)
        geometry, streams = (REAL, ((1, 0), (17, 48), (16, 511))) if full else (SMALL, ((3, 130),))
        out = [BackendCase(geometry, phase, size, (s,)) for phase, size, s in product((PROMPT, DECODE), sizes, streams)]
        several = ((9, 50), (1, 0), (4, 260))
        out += [BackendCase(SMALL, phase, size, several) for phase, size in product((PROMPT, DECODE), (48, 256))]
        return out + [BackendCase(SMALL, phase, 48, several, "fp8") for phase in (PROMPT, DECODE)]

    def control_cases(self) -> Sequence[BackendCase]:
        return [BackendCase(SMALL, phase, 48, ((rows, 530),) * 2) for phase, rows in ((PROMPT, 9), (DECODE, 2))]

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
        bench.watch("arena", backend.arena.words.view(np.uint8), may_write(case, backend, places))
        bench.watch("pages", backend.pages, np.zeros(backend.pages.shape, bool))
        norms, rope = norms_and_rope(case, device)
        rows = np.concatenate([data[c : c + r] for data, (r, c) in zip(inputs["rows"], case.streams, strict=True)])
        q = backend.store(0, device.put(rows), norms, rope, batch)
        bench.result("q", q)
        bench.result("out", backend.attend(0, q, batch))
        backend.finish(batch)
        memory = device.get(backend.arena.words).view(np.uint8)
        bench.result("cache", np.concatenate([as_read(memory, place) for place in places], axis=1))

    def exact(self, case: BackendCase, inputs: Inputs) -> Bounds:
        window = on_window(case, inputs["seed"])
        cache_rows = window["cache"]  # bf16 [K or V, positions of all streams, HK, D]
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


@dataclass(frozen=True)
class Cells:
    """Where a stream's positions lie. rows: int64 [K or V, positions, HK, row bytes], exponents: int64 [K or V, positions, HK]
    of an fp8 cache, else None; arena bytes."""

    rows: Array
    exponents: Array | None

    def of(self, first: int, last: int) -> Iterator[Array]:
        """Every byte of positions first .. last - 1."""
        yield self.rows[:, first:last]
        if self.exponents is not None:
            yield self.exponents[:, first:last]


def cells(backend: Backend, stream: Stream, positions: int, device: Device) -> Cells:
    """The places of a stream's positions, asked of the backend's address function."""
    row = backend.layer_tables(np.array([backend.stream_row(stream, 0, 0)], np.int64))[0, 0]
    found = device.put(np.zeros((positions, 2), np.int64))
    base, table, ptok, page_words = (int(row[n]) for n in (BASE, TABLE, PTOK, PAGE_WORDS))
    numbers = device.put(np.arange(positions))
    locate(found, numbers, backend.pages, base, table, ptok, page_words, backend.layout)
    start, slot = device.get(found).T[:, None, :, None]
    in_plane = np.arange(backend.shape.kv_heads) * row[PTOK] + slot
    row_bytes = 4 * row_words(backend.shape.head_dim, backend.sizes.kv)
    planes, exponents = (row[list(names)][:, None, None] for names in ((K_PLANE, V_PLANE), (K_EXP_PLANE, V_EXP_PLANE)))
    rows = (4 * (start + planes) + in_plane * row_bytes)[..., None] + np.arange(row_bytes)
    return Cells(rows, 4 * (start + exponents) + in_plane if backend.sizes.kv == "fp8" else None)


def as_read(memory: Array, place: Cells) -> Array:
    """bf16 [K or V, positions, HK, D]: what an attention kernel reads there. memory: the arena as uint8."""
    rows = np.ascontiguousarray(memory[place.rows])
    if place.exponents is None:
        return rows.view(BF16)
    return fp8_oracle.widened(rows, memory[place.exponents].view(np.int8))


def may_write(case: BackendCase, backend: Backend, places: list[Cells]) -> Array:
    """bool [bytes]: the new positions' rows; in a decode pass their rows of the window record, too."""
    out = np.zeros(4 * backend.arena.words.size, bool)
    for place, (rows, committed) in zip(places, case.streams, strict=True):
        for at in place.of(committed, committed + rows):
            out[at] = True
    if case.phase == DECODE:
        row_bytes = 2 * backend.shape.kv_heads * backend.shape.head_dim
        record = 4 * backend.arena.starts["records"] + np.arange(2 * backend.arena.rows * row_bytes)
        out[record.reshape(2, backend.arena.rows, row_bytes)[:, : sum(rows for rows, _ in case.streams)]] = True
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
    word = int(cells(backend, streams[0], 32, device).rows[0, 31, 0, 28]) // 4
    backend.arena.words[word : word + 1] += np.uint32(1)


def exchange_entries(backend: Backend, streams: list[Stream]) -> None:
    """The first two entries that name pages in use."""
    host = np.asarray(backend.pages.tolist())
    first, second = [int(i) for i in np.flatnonzero(host != backend.null_page)[:2]]
    backend.pages[first], backend.pages[second] = int(host[second]), int(host[first])
