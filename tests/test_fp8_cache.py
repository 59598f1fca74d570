"""An fp8 cache through every writer and reader: the bits of a bf16 cache of the rows it gives back. Spec attention §4."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from buffers import BF16, assert_same_bits

from backends.base import DECODE, PROMPT, Backend, BackendError, Norms, Sizes, Stream, backend_class
from kernels_numba.rope_store import rope_table
from refengine.contract.backend import cells
from refengine.device import open_device
from refengine.registry import load_model
from refengine.verify import fp8_oracle
from refengine.verify.attention_bits import Heads, projected_rows

CPU = open_device("cpu")
HEADS = Heads(6, 2, 64)
CONTEXT, ROWS = 320, 5
NAMES = ("window", "paged", "paged-p256", "mixed")
EDGE = np.array([448, 464, 465, 1000, -448, -1000, 1e-4, 2.0**-133, 0, -0.0], np.float32).astype(BF16)
"""Around what e4m3 can hold, and what a row beside it loses."""


def make(name: str, kv: str, page_size: int = 48) -> tuple[Backend, list[Stream]]:
    """A backend of one layer with two streams, its pages shuffled."""
    made = backend_class(name)(HEADS.shape, Sizes(CONTEXT, 2, page_size, ROWS, 3, 7, kv))
    return made, [made.open() for _ in range(2)]


def one_pass(
    made: Backend,
    phase: str,
    work: list[tuple[Stream, int]],
    qkv: np.ndarray,
    between: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Store, attend, finish; ``between`` happens once the rows are stored."""
    gains = np.ones(HEADS.head_dim, np.float32)
    batch = made.batch(phase, work)
    q = made.store(0, qkv, Norms(gains, gains, 1e-6), rope_table(CONTEXT, 16, 1e4), batch)
    between()
    out = made.attend(0, q, batch)
    made.finish(batch)
    return out


def widen(made: Backend, streams: list[Stream], lengths: list[int]) -> None:
    """Every row of a bf16 backend, cached or in the window record, as an fp8 cache gives it back."""
    memory = made.arena.words.view(np.uint8)
    for stream, length in zip(streams, lengths, strict=True):
        at = cells(made, stream, length, CPU).rows
        memory[at] = fp8_oracle.through_fp8(np.ascontiguousarray(memory[at]).view(BF16)).view(np.uint8)
    with np.errstate(invalid="ignore"):
        made.arena.records[:] = fp8_oracle.through_fp8(made.arena.records)


def replies(name: str, kv: str, widened: bool = False) -> dict[str, np.ndarray]:
    """Attention of two streams' prompts, then of a window of each."""
    made, (a, b) = make(name, kv)
    rows = projected_rows(HEADS, 2 * CONTEXT)
    rows[:, -2 * HEADS.kv_heads * HEADS.head_dim :] *= np.exp2(np.arange(2 * CONTEXT) % 5)[:, None].astype(BF16)
    first, second = ([(a, 130), (b, 71)], [(a, 3), (b, 5)])
    prompt = one_pass(made, PROMPT, first, rows[:201], lambda: widen(made, [a, b], [130, 71]) if widened else None)
    window = one_pass(made, DECODE, second, rows[201:209], lambda: widen(made, [a, b], [130, 71]) if widened else None)
    return {"prompt": prompt, "window": window}


@pytest.mark.parametrize("name", NAMES)
def test_any_fp8_backend_gives_the_bits_of_widened_rows_in_bf16(name):
    wanted = replies("window", "bf16", widened=True)
    found = replies(name, "fp8")
    for phase in wanted:
        assert_same_bits(found[phase], wanted[phase])
        assert (found[phase] != replies(name, "bf16")[phase]).any(), "fp8 lost nothing: the rows prove nothing"


def stored_values(values: np.ndarray, phase: str) -> tuple[np.ndarray, np.ndarray]:
    """(codes [D], exponent) of a value row of head 1 that a pass of the phase has put into an fp8 cache."""
    made, (stream, _) = make("paged", "fp8")
    qkv = projected_rows(HEADS, 1)
    qkv[0, -HEADS.head_dim :] = 1
    qkv[0, -HEADS.head_dim :][: len(values)] = values
    one_pass(made, phase, [(stream, 1)], qkv)
    memory, place = made.arena.words.view(np.uint8), cells(made, stream, 1, CPU)
    return memory[place.rows[1, 0, 1]], memory[place.exponents[1, 0, 1]].view(np.int8)


@pytest.mark.parametrize("phase", [PROMPT, DECODE])
@pytest.mark.parametrize("extra", [[], [np.nan], [np.inf, -np.inf], [np.nan, np.inf]])
def test_outliers_saturate_and_nan_stays_alone_through_both_writers(phase, extra):
    values = np.concatenate([EDGE, np.array(extra, np.float32).astype(BF16)])
    codes, e = stored_values(values, phase)
    row = np.ones(HEADS.head_dim, BF16)
    row[: len(values)] = values
    assert_same_bits(fp8_oracle.widened(codes, e), fp8_oracle.through_fp8(row))
    assert (codes & 0x7F == 0x7F).tolist() == np.isnan(row.astype(np.float32)).tolist()


@pytest.mark.parametrize("phase", [PROMPT, DECODE])
def test_a_row_of_zeros_has_exponent_zero(phase):
    codes, e = stored_values(np.zeros(HEADS.head_dim, BF16), phase)
    assert e == 0 and not codes.any()


@pytest.mark.parametrize("page_size", [1, 48, 256])
def test_a_stream_holds_the_bytes_of_the_type_that_is_stored(page_size):
    spec = load_model("qwen3.5-tiny")
    attention, layers = spec.attention, len(spec.attention_layers)
    heads = Heads(attention.heads, attention.kv_heads, attention.head_dim)
    for kv in ("bf16", "fp8"):
        made = backend_class("paged")(heads.shape, Sizes(CONTEXT, 2, page_size, kv=kv))
        stream = made.open()
        stream.grow(100)
        pages = -(-100 // page_size)
        assert made.cache_bytes(stream) * layers == pages * spec.bytes_a_page(page_size, kv)


def test_a_cache_of_another_type_is_refused():
    with pytest.raises(BackendError, match="kv 'int8': use one of bf16, fp8"):
        make("paged", "int8")


@pytest.mark.parametrize("plane", [0, 1])
def test_red_an_exponent_that_stays_behind_when_its_page_moves(plane):
    outs = []
    for moved in (0, 1):
        made, (stream, _) = make("paged", "fp8")
        rows = projected_rows(HEADS, 101)
        one_pass(made, PROMPT, [(stream, 100)], rows[:100])
        made.arena.words.view(np.uint8)[cells(made, stream, 100, CPU).exponents[plane, :48]] += moved
        outs.append(one_pass(made, DECODE, [(stream, 1)], rows[100:]))
    assert (outs[0] != outs[1]).any()
