"""Faults that paged-attention engines have had, each with its small input; docs/faults.md says which test holds which."""

from __future__ import annotations

import ast
import re
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from buffers import BF16, Output, assert_same_bits, normal
from paging import Cache, StreamRows, build_cache

from backends.base import DECODE, PROMPT, Backend, BackendError, Sizes, Stream, backend_class
from backends.layout import paged, window
from kernels_numba import gated_delta_net as gdn
from kernels_numba.decode_attention import decode_attention, empty, fold_pair, tile_words
from kernels_numba.decode_attention import shared_bytes as decode_shared
from kernels_numba.decode_plan import chain_tables, plan_decode
from kernels_numba.machine import BoundKernel, KernelError, checked, cuda, float32, int64, kernel, pack_bf16, uint32
from kernels_numba.norms import warp_sum
from kernels_numba.prompt_attention import heads_per_block, launch_shape, prompt_attention
from kernels_numba.sampling import argmax
from kernels_numba.streams import COLUMNS
from refengine.commands.compare import Request, room
from refengine.contract import workbench
from refengine.contract.caches import poison_unheld
from refengine.device import open_device
from refengine.errors import UserError
from refengine.registry import load_model
from refengine.verify.attention_bits import Bench, Heads

ROOT = Path(__file__).parents[1]
WIDE, SMALL = Heads(24, 4, 256), Heads(2, 1, 64)
NAN = np.nan
BACKENDS = ("window", "paged", "paged-p256")


# --- The table --------------------------------------------------------------------------------------------------------


SECTIONS = {
    "A": (1, 3, 4, 6),
    "B": (2, 3, 4, 5, 6),
    "C": (1, 3, 4),
    "D": (1, 4, 5, 6),
    "E": (1, 2, 5, 6),
    "F": (1, 3, 4),
    "G": (1, 3, 4, 5),
    "H": (1, 2, 3, 6, 7),
    "I": (1, 3, 4, 5, 8, 9),
    "J": (1,),
    "K": (1, 2, 3, 5),
    "L": (1, 4),
    "N": (1, 3, 4),
    "O": (1, 2, 4, 5, 6, 8, 10),
    "P": (1, 2, 4, 5, 7, 8),
    "R": (2, 3, 5, 7, 8, 9),
    "M": (1, 2, 3, 4, 5, 6, 7),
}


def table() -> dict[str, list[str]]:
    """Each fault of docs/faults.md and the cells of its row."""
    lines = (ROOT / "docs/faults.md").read_text(encoding="utf-8").splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| [A-Z]\d+ \|", line)
    ]
    assert len({row[0] for row in rows}) == len(rows), "a fault stands twice"
    return {row[0]: row[1:] for row in rows}


@cache
def names_in(file: Path) -> set[str]:
    return {n.name for n in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef)}


def test_the_table_names_every_fault():
    assert list(table()) == [f"{section}{n}" for section, numbers in SECTIONS.items() for n in numbers]


def test_a_row_of_the_table_names_tests_that_exist_or_why_there_are_none():
    for fault, (_, _, held) in table().items():
        named = re.findall(r"`(test_\w+)::(test_\w+)`", held)
        assert named or held.startswith("not applicable: "), f"{fault}: names no test and no reason"
        for file, test in named:
            assert test in names_in(ROOT / "tests" / f"{file}.py"), f"{fault}: {file} has no {test}"


@pytest.mark.parametrize("file", ["test_faults", "test_serving_faults", "test_flash_next_faults"])
def test_the_table_names_every_test_of_its_own_files(file):
    named = {test for row in table().values() for test in re.findall(rf"`{file}::(test_\w+)`", row[2])}
    own = {
        name
        for name in names_in(ROOT / f"tests/{file}.py")
        if re.match("test_(?!the_table_|a_row_of_the_table_)", name)
    }
    assert named == own


# --- Passes of an attention layer -------------------------------------------------------------------------------------


@cache
def bench(heads: Heads, positions: int) -> Bench:
    return Bench(heads, positions, open_device("cpu"))


def build(heads: Heads, name: str, context: int, page_size: int = 16, streams: int = 1) -> Backend:
    """A backend, its pages shuffled, three of them nobody's."""
    return backend_class(name)(heads.shape, Sizes(context, streams, page_size, spare_pages=3, shuffle=7))


def attend(b: Bench, made: Backend, phase: str, work: Sequence[tuple[Stream, int]]) -> np.ndarray:
    """A pass over garbage scratch: bf16 [W, H, D]. Each stream reads other rows of the bench, by its number."""
    rows = [b.rows[s.committed + 11 * s.number : s.committed + 11 * s.number + n] for s, n in work]
    batch = made.batch(phase, work)
    if batch.scratch is not None:
        batch.scratch[:] = NAN
    q = made.store(0, np.concatenate(rows), b.norms, b.rope, batch)
    out = made.attend(0, q, batch)
    made.finish(batch)
    return out


def fill(b: Bench, made: Backend, stream: Stream, end: int) -> None:
    """Store the stream's rows below position ``end``."""
    first, rows = stream.committed + 11 * stream.number, end - stream.committed
    if rows:
        batch = made.batch(PROMPT, [(stream, rows)])
        made.store(0, b.rows[first : first + rows], b.norms, b.rope, batch)
        made.finish(batch)


def at_lengths(b: Bench, made: Backend, lengths: Sequence[int]) -> dict[tuple[int, str], np.ndarray]:
    """The last rows of each kv length, ascending: up to three by a prompt pass, one by a decode pass."""
    stream, found = made.open(), {}
    for length in lengths:
        rows = min(3, length)
        fill(b, made, stream, max(stream.committed, length - rows))
        stream.committed = length - rows
        found[length, PROMPT] = attend(b, made, PROMPT, [(stream, rows)])
        stream.committed = length - 1
        found[length, DECODE] = attend(b, made, DECODE, [(stream, 1)])
    return found


def assert_same(found: dict, wanted: dict) -> None:
    for case, rows in found.items():
        assert np.isfinite(rows.astype(np.float32)).all(), case
        assert_same_bits(rows, wanted[case])


# --- A, B: pages and lengths --------------------------------------------------------------------------------------------


PAGES = (1, 3, 16, 48, 96, 544, 1056)
LENGTHS = (255, 256, 257, 511, 513)


def around(page_size: int) -> list[int]:
    return sorted({max(1, page_size - 1), page_size, page_size + 1, 2 * page_size + 7})


@cache
def in_a_window() -> dict:
    """Every length that a page size asks for."""
    lengths = {*LENGTHS, *(n for page_size in PAGES for n in around(page_size))}
    return at_lengths(bench(WIDE, 2120), build(WIDE, "window", 2120), sorted(lengths))


@pytest.mark.parametrize("page_size", PAGES)
def test_pages_of_any_size_give_the_windows_rows(page_size):
    made = build(WIDE, "paged", 2120, page_size)
    assert_same(at_lengths(bench(WIDE, 2120), made, around(page_size)), in_a_window())


@pytest.mark.parametrize(("name", "page_size"), [("paged", 128), ("paged", 256), ("paged-p256", 256)])
def test_pages_beyond_the_tile_give_the_windows_rows(name, page_size):
    made = build(WIDE, name, 2120, page_size)
    assert_same(at_lengths(bench(WIDE, 2120), made, LENGTHS), in_a_window())


@cache
def far_in_a_window(length: int) -> dict:
    return at_lengths(bench(SMALL, 8460), build(SMALL, "window", 8460), [length])


@pytest.mark.parametrize("page_size", [16, 32, 64, 256])
def test_a_page_list_is_as_long_as_its_rows_need(page_size):
    for length in (4096 + 1, 2 * 4096 + page_size + 1):
        made = build(SMALL, "paged", 8460, page_size)
        assert_same(at_lengths(bench(SMALL, 8460), made, [length]), far_in_a_window(length))
        assert (made.pages != made.null_page).sum() == -(-length // page_size)
        assert (made.pages[-(-length // page_size) :] == made.null_page).all()


@pytest.mark.parametrize("asked", [16, 255, 256, 512, 768])
def test_pages_of_256_have_256_positions_whatever_is_asked_for(asked):
    made = build(WIDE, "paged-p256", 2120, asked)
    assert made.positions == made.layout.page == 256 and made.columns == 9
    assert_same(at_lengths(bench(WIDE, 2120), made, [257]), in_a_window())


@pytest.mark.parametrize("length", [1, 16, 32])
def test_whole_pages_sent_twice_are_computed_twice(length):
    made, found = build(SMALL, "paged", 64), []
    for _ in range(2):
        stream = made.open()
        found.append(attend(bench(SMALL, 8460), made, PROMPT, [(stream, length)]))
        stream.release()
        made.arena.words[:] = 0xFFFFFFFF
    assert found[0].shape == (length, 2, 64)
    assert_same({"again": found[1]}, {"again": found[0]})


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("phase", "stored"), [(PROMPT, 0), (PROMPT, 48), (DECODE, 48)])
def test_rows_past_the_last_column_are_refused_before_any_launch(name, phase, stored):
    """Three columns of 16: 48 positions are a length, 49 are none, in one pass or by one row more."""
    b, made = bench(SMALL, 8460), build(SMALL, name, 48)
    stream = made.open()
    fill(b, made, stream, stored)
    before = made.arena.words.tobytes(), made.pages.tobytes(), stream.committed
    with pytest.raises(BackendError, match="position 48 is past its capacity of 48"):
        made.batch(phase, [(stream, 49 - stored)])
    assert (made.arena.words.tobytes(), made.pages.tobytes(), stream.committed) == before
    assert_same(at_lengths(b, build(SMALL, name, 48), [48]), at_lengths(b, build(SMALL, "window", 99), [48]))


@pytest.mark.parametrize(("prompt", "tokens", "fits"), [(63, 1, True), (63, 2, False), (64, 1, False), (65, 1, False)])
def test_a_prompt_and_its_tokens_fit_into_the_context_together(prompt, tokens, fits):
    spec = load_model("qwen3.5-tiny")
    request = Request("", BACKENDS, 16, None, None, tokens, 1, 256, 64, None, "cpu", 0)
    for asked, model in ((request, spec), (replace(request, context=None), replace(spec, max_positions=64))):
        if fits:
            assert room(asked, prompt, model) == 64
        else:
            with pytest.raises(UserError, match=f"{prompt + tokens} positions"):
                room(asked, prompt, model)


def assert_each_alone(b: Bench, phase: str, lengths: Sequence[int]) -> None:
    """Streams of these kv lengths in one pass, up to two rows of each, and each in a pass of its own."""
    rows = [min(length, 2 if phase == PROMPT else 1) for length in lengths]
    passes = [range(len(lengths)), *([n] for n in range(len(lengths)) if rows[n])]
    found = []
    for members in passes:
        made = build(b.heads, "paged", max(lengths), streams=len(lengths))
        streams = [made.open() for _ in lengths]
        for n in members:
            fill(b, made, streams[n], lengths[n] - rows[n])
        found.append(attend(b, made, phase, [(streams[n], rows[n]) for n in members]))
    assert_same({"together": found[0]}, {"together": np.concatenate(found[1:])})


@pytest.mark.parametrize("phase", [PROMPT, DECODE])
@pytest.mark.parametrize("lengths", [(1, 2, 3, 4000), (9, 0, 30), (0, 5, 0), (0, 0, 5, 0, 4)])
def test_streams_of_any_lengths_in_one_pass_are_each_alone(phase, lengths):
    assert_each_alone(bench(SMALL, 8460), phase, lengths)


# --- C: integers ------------------------------------------------------------------------------------------------------


def far_pages(heads: Heads, name: str, page_size: int, ids: Sequence[int], path: Path) -> dict:
    """The rows of a stream on these pages, of an arena that is a hole in a file but for them."""
    length = page_size * len(ids)
    made = build(heads, name, length, page_size)
    assert made.arena.records.size
    made.arena.words = np.memmap(path, np.uint32, "w+", shape=(max(ids) + 1) * made.page_words)
    b, stream = bench(heads, 2120), made.open()
    stream.grow(length)
    made.pages[:] = ids
    fill(b, made, stream, length - 3)
    found = {PROMPT: attend(b, made, PROMPT, [(stream, 2)]), DECODE: attend(b, made, DECODE, [(stream, 1)])}
    stream.committed = length - 1
    return found | {"kept": attend(b, made, PROMPT, [(stream, 1)])}


@pytest.mark.parametrize(
    ("heads", "name", "page_size", "ids"),
    [
        (WIDE, "paged", 256, (0, 8191, 8192, 8199)),
        (WIDE, "paged-p256", 256, (8199, 8192, 8191, 0)),
        (SMALL, "paged", 1, (65536, 65535, 0, 65537)),
    ],
)
def test_far_pages_give_the_rows_of_near_ones(heads, name, page_size, ids, tmp_path):
    near = far_pages(heads, name, page_size, (2, 0, 3, 1), tmp_path / "near")
    assert_same(far_pages(heads, name, page_size, ids, tmp_path / "far"), near)


def test_rows_past_2_gib_words_are_read_and_written(tmp_path):
    """The first row of the stream starts past word 2^31 of q and of out."""
    b = bench(WIDE, 2120)
    k, v = (normal(np.random.default_rng(n), 3, 4, 256) for n in (0, 1))
    q = normal(np.random.default_rng(2), 3, 24, 256)
    found = []
    for first in (0, 2**31 // (24 * 128) + 1):
        c = build_cache(window, 0, [StreamRows(k, v, first, 3, 0)])
        shape = (first + 3, b.heads.heads, b.heads.head_dim)
        far_q, out = (np.memmap(tmp_path / f"{name}{first}", BF16, "w+", shape=shape) for name in ("q", "out"))
        far_q[first:] = q
        launch_prompt(out, far_q, c)
        found.append(np.array(out[first:]))
    assert_same({"far": found[1]}, {"far": found[0]})
    assert (found[0] != 0).any()


def launch_prompt(out: np.ndarray, q: np.ndarray, c: Cache, stream: int = 0) -> None:
    """prompt_attention of one stream of a cache, scores as they are."""
    _, heads, D = q.shape
    grid, threads, shared = launch_shape(int(c.streams[stream, 1]), heads, c.kv_heads, D)
    bound = prompt_attention.at(D=D, HPC=heads_per_block(heads // c.kv_heads), layout=c.layout, kv=c.kv)
    place = (c.arena, c.pages, c.streams, stream, heads, c.kv_heads)
    bound[grid, threads, None, shared](out, q, *place, np.float32(1))


# --- D: what unused slots hold ----------------------------------------------------------------------------------------


PLANES = ((True, False), (False, True), (True, True))
FILLS = [
    *((x, planes) for x in (NAN, np.inf, -np.inf) for planes in PLANES),
    *((x, PLANES[2]) for x in (1, 100, 1e3, 6e4)),
]
"""(value, whether it goes into K and into V)."""


def unused(made: Backend, stream: Stream) -> tuple[np.ndarray, np.ndarray]:
    """The slots that hold no row of the stream, bf16 words of K and of V: [slots, D / 2] indices into the arena."""
    pages = np.arange(made.pool.count + 1)
    slots = np.ones((len(pages), made.positions), bool)
    for n, page in enumerate(stream.pages):
        slots[page, : max(0, stream.committed - n * made.positions)] = False
    page, slot = np.nonzero(slots)
    words = made.shape.head_dim // 2
    k, v = (page * made.page_words + plane + slot * words for plane in made.planes(0))
    return k[:, None] + np.arange(words), v[:, None] + np.arange(words)


def pair(value: float) -> np.uint32:
    """A word of two equal bf16."""
    return np.full(2, value, BF16).view(np.uint32)[0]


@pytest.mark.parametrize("phase", [PROMPT, DECODE])
@pytest.mark.parametrize("length", [17, 4090])
def test_what_unused_slots_hold_does_not_show(length, phase):
    b, made = bench(SMALL, 8460), build(SMALL, "paged", 4096)
    stream = made.open()
    fill(b, made, stream, length)
    tails, found = unused(made, stream), {}
    for value, planes in ((0, PLANES[2]), *FILLS):
        for words, hit in zip(tails, planes):
            made.arena.words[words] = pair(value if hit else 0)
        stream.committed = length - (3 if phase == PROMPT else 1)
        found[value, planes] = attend(b, made, phase, [(stream, length - stream.committed)])
    assert_same(found, dict.fromkeys(found, found[0, PLANES[2]]))


def test_poison_that_changes_nothing_is_noticed():
    words, some = np.zeros(8, np.uint32), np.arange(32) < 16
    poison_unheld(words, ~some, workbench.NAN)
    assert np.isnan(words[:4].view(BF16).astype(np.float32)).all() and (words[4:] == 0).all()
    with pytest.raises(AssertionError, match="the poison changed nothing"):
        poison_unheld(words, ~some, workbench.NAN)


# --- F: scratch and memory --------------------------------------------------------------------------------------------


def decode(heads: Heads, c: Cache, depths: Sequence[int], q, k, v, scratch=None) -> np.ndarray:
    """decode_attention of chains cut to these depths, scores as they are, NaN in out and scratch before."""
    plan = plan_decode(c.streams, heads.heads, heads.kv_heads, heads.head_dim)
    rows, paths, _ = chain_tables(c.streams)
    out = Output((plan.rows, heads.heads, heads.head_dim))
    scratch = np.full(plan.scratch_size, NAN, np.float32) if scratch is None else scratch
    decode_attention(
        out.array, q, c.arena, c.pages, c.streams, rows, paths, np.array(depths, np.int32), k, v,
        np.float32(1), scratch, plan, c.layout,
    )  # fmt: skip
    return out.checked()


@pytest.mark.parametrize("rows", [31, 32, 33])
@pytest.mark.parametrize(("heads", "committed"), [(WIDE, 5), (SMALL, 1030)])
def test_scratch_for_32_rows_takes_no_more(heads, committed, rows):
    """One plan decides the launches, the scratch and its use; a launch that does not fit starts nothing."""
    rng, H, HK, D = np.random.default_rng(0), heads.heads, heads.kv_heads, heads.head_dim
    k, v = normal(rng, committed, HK, D), normal(rng, committed, HK, D)
    own = [normal(rng, rows, n, D) for n in (H, HK, HK)]
    c = build_cache(paged, 16, [StreamRows(k, v, 0, rows, committed)])
    sized = c.streams.copy()
    sized[0, 1] = 32
    size = plan_decode(sized, H, HK, D).scratch_size
    memory = np.full(size + 64, NAN, np.float32)
    depths = range(1, rows + 1)
    if rows > 32:
        with pytest.raises(ValueError, match=r"scratch float32 \(\d+,\): decode needs float32"):
            decode(heads, c, depths, *own, memory[:size])
        assert np.isnan(memory).all()
    else:
        found = decode(heads, c, depths, *own, memory[:size])
        assert np.isnan(memory[size:]).all() and not np.isnan(memory[:size]).all()
        assert_same({"out": found}, {"out": decode(heads, c, depths, *own)})


@pytest.mark.parametrize("rows", [31, 32, 33])
def test_scratch_of_the_27b_is_rows_times_slots_times_heads(rows):
    """1030 committed keys and the rows: two whole chunks of 512, one that is begun."""
    streams = np.array([[0, rows, 1030, 0, -1, 1100]], np.int64)
    assert plan_decode(streams, 24, 4, 256).scratch_size == rows * 3 * 24 * (256 + 2)


def test_a_prompt_pass_takes_no_more_memory_the_longer_the_context():
    b, made, peaks = bench(SMALL, 64 * 256), build(SMALL, "paged", 64 * 256, 64), []
    stream = made.open()
    for chunk in range(64):
        if chunk not in (1, 2, 63):
            fill(b, made, stream, stream.committed + 256)
            continue
        tracemalloc.start()
        attend(b, made, PROMPT, [(stream, 256)])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.05 * peaks[1], peaks


# --- G: rows and parts without a key ----------------------------------------------------------------------------------


@kernel
def folded(out, parts):
    """out = FOLD of the parts, in order. out: float32 [4], m, l, o, o; parts: float32 [n, 4], as out."""
    state = cuda.local.array(4, float32)  # [m, l, o, o]
    empty(state)
    for part in range(parts.shape[0]):
        fold_pair(state, parts[part, 0], parts[part, 1], parts[part, 2], parts[part, 3])
    for i in range(4):
        out[i] = state[i]


def test_an_empty_part_changes_no_other():
    nothing, some = [-np.inf, 0, 0, 0], [3.5, 2.25, -1.5, 0.75]
    for parts, wanted in (
        ([nothing, nothing], nothing), ([some, nothing], some), ([nothing, some], some), ([nothing, some, nothing], some)
    ):  # fmt: skip
        out = np.full(4, NAN, np.float32)
        folded.at()[1, 32](out, np.array(parts, np.float32))
        assert out.tolist() == wanted


def marked(keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys of zero, which weigh the same, and values that say whose they are: bf16 [keys, 1, 64]."""
    return np.zeros((keys, 1, 64), BF16), np.eye(keys, 64, dtype=np.float32)[:, None].astype(BF16)


def mean_of(keys: int) -> np.ndarray:
    """What a row gives that sees the first keys of marked: [heads, D]."""
    row = np.where(np.arange(64) < keys, 1 / max(keys, 1), 0).astype(np.float32)
    return np.tile(row.astype(BF16), (2, 1))


def test_rows_without_a_key_give_zero_beside_rows_with_some():
    k, v = marked(5)
    streams = [StreamRows(k[:n], v[:n], first, 1, n) for first, n in enumerate((0, 5, 0))]
    c = build_cache(window, 0, streams)
    garbage = np.full((3, 1, 64), NAN, BF16)
    found = decode(SMALL, c, [0, 0, 0], normal(np.random.default_rng(0), 3, 2, 64), garbage, garbage)
    assert_same_bits(found, np.stack([mean_of(0), mean_of(5), mean_of(0)]))


@pytest.mark.parametrize("phase", [PROMPT, DECODE])
def test_each_of_several_new_rows_sees_the_keys_up_to_itself(phase):
    k, v = marked(8)
    q = normal(np.random.default_rng(0), 4, 2, 64)
    if phase == PROMPT:
        out = Output((4, 2, 64))
        launch_prompt(out.array, q, build_cache(paged, 3, [StreamRows(k, v, 0, 4, 4)]))
        found = out.checked()
    else:
        found = decode(SMALL, build_cache(paged, 3, [StreamRows(k[:4], v[:4], 0, 4, 4)]), [1, 2, 3, 4], q, k[4:], v[4:])
    assert_same_bits(found, np.stack([mean_of(4 + 1 + i) for i in range(4)]))


@pytest.mark.parametrize("run", [gdn.chain, lambda *args: gdn.step(*args, commit=True)], ids=["chain", "step"])
def test_streams_of_no_rows_keep_their_delta_rule_state(run):
    """Packed starts 0, 0, 5, 5, 9."""
    rng, counts = np.random.default_rng(0), (0, 5, 0, 4)
    qkv = normal(rng, 9, 3 * 128, scale=0.1)
    decay, beta = (rng.uniform(0.5, 1, (9, 1)).astype(np.float32) for _ in range(2))
    states = rng.standard_normal((4, 128 * 128), np.float32)

    def launched(first: int, rows: Sequence[int], slots: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        streams = np.zeros((len(rows), COLUMNS), np.int64)
        streams[:, 0], streams[:, 1] = np.cumsum([0, *rows])[:-1], rows
        stop, after, y = first + sum(rows), states.copy(), Output((sum(rows), 128))
        runs = np.array(slots, np.int64) * states.shape[1]
        run(y.array, after.reshape(-1), qkv[first:stop], decay[first:stop], beta[first:stop], streams, runs)
        return y.checked(), after

    y, after = launched(0, counts, range(4))
    for first, slot in ((0, 1), (5, 3)):
        alone, state = launched(first, [counts[slot]], [slot])
        assert_same_bits(y[first : first + counts[slot]], alone)
        assert_same_bits(after[slot], state[slot])
    assert_same_bits(after[[0, 2]], states[[0, 2]])


# --- K, L: bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [16, 48, 256])
def test_a_budget_holds_twice_the_fp8_pages_less_their_scales(page_size):
    spec = load_model("qwen3.8-27b")
    assert spec.bytes_a_page(page_size) * 257 == spec.bytes_a_page(page_size, "fp8") * 512


@pytest.mark.parametrize(("D", "kib"), [(64, 18), (128, 34), (256, 66)])
def test_decode_asks_for_the_shared_memory_of_its_tiles(D, kib):
    assert decode_shared(D) == kib * 1024 == 2 * 64 * D * 2 + 16 * 64 * 2
    assert tile_words(D) == 64 * D // 2


@kernel
def last_word(out):
    """The last word of the dynamic memory, by a thread that did not write it; out: uint32 [32]."""
    memory = cuda.shared.array(0, uint32)
    t, words = int64(cuda.threadIdx.x), int64(out.shape[0])
    memory[words - 32 + t] = uint32(t)
    cuda.syncthreads()
    out[words - 32 + t] = memory[words - 1 - t]


@pytest.mark.parametrize("kib", [48, 49, 227])
def test_dynamic_memory_around_48_kib_is_whole(kib):
    out = np.zeros(kib * 256, np.uint32)
    last_word.at()[1, 32, None, kib * 1024](out)
    assert out[-32:].tolist() == list(range(31, -1, -1))
    with pytest.raises(KernelError, match="is outside"):
        last_word.at()[1, 32, None, kib * 1024 - 4](out)


# --- R, M: the machine ------------------------------------------------------------------------------------------------


@kernel
def carved(out, *, second):
    """Two dynamic arrays are one memory: the second starts where the caller says. out: float32 [64]."""
    low, high = cuda.shared.array(0, uint32), cuda.shared.array(0, float32)
    t = int64(cuda.threadIdx.x)
    low[t] = uint32(0x3F800000)
    high[second + t] = float32(t + 2)
    cuda.syncthreads()
    out[t], out[32 + t] = high[t], high[second + t]


@pytest.mark.parametrize("second", [0, 32])
def test_two_dynamic_arrays_start_in_one_place(second):
    """Unless it is carved up by offsets, the second overwrites the first: 0x3F800000 is 1.0."""
    out, numbers = np.zeros(64, np.float32), [float(t + 2) for t in range(32)]
    with checked():
        carved.at(second=second)[1, 32, None, 256](out)
    assert out.tolist() == (numbers if second == 0 else [1.0] * 32) + numbers


@kernel
def summed(out, x, *, uneven):
    """out[0] = the sum of x, at most 64 elements, by exchanges; uneven: lanes without an element take no part."""
    t = cuda.threadIdx.x
    sums = cuda.shared.array(2, float32)
    total = float32(0.0)
    if uneven:
        if t < x.shape[0]:
            total = warp_sum(x[t])
    else:
        total = warp_sum(x[t] if t < x.shape[0] else total)
    if t % 32 == 0:
        sums[t // 32] = total
    cuda.syncthreads()
    if t == 0:
        out[0] = sums[0] + sums[1]


@pytest.mark.parametrize("count", [1, 31, 33])
def test_a_reduction_of_any_count_is_the_sum_and_needs_whole_warps(count):
    out, x = np.zeros(1, np.float32), np.arange(1, count + 1, dtype=np.float32)
    with checked():
        summed.at(uneven=False)[1, 64](out, x)
    assert out[0] == count * (count + 1) / 2
    with checked(), pytest.raises(KernelError, match="shfl_xor reached by a part of the warp"):
        summed.at(uneven=True)[1, 64](out, x)
    with pytest.raises(KernelError, match="multiple of 32"):
        summed.at(uneven=False)[1, count]


@pytest.mark.parametrize("width", [1, 5, 31, 33, 4000])
def test_the_largest_logit_of_any_count_is_found(width):
    logits = -np.abs(np.random.default_rng(width).standard_normal((3, width), np.float32))
    ids = Output((3,), np.int32)
    argmax(ids.array, logits)
    assert ids.checked().tolist() == logits.argmax(axis=1).tolist()


@kernel
def rounded(out, x):
    """x through bf16 in shared and in local memory; out: uint32 [2, 32]."""
    shared, own = cuda.shared.array(32, uint32), cuda.local.array(1, uint32)
    t = int64(cuda.threadIdx.x)
    shared[t] = pack_bf16(x[t], float32(0.0))
    own[0] = pack_bf16(float32(0.0), x[t])
    out[0, t], out[1, t] = shared[t], own[0] >> uint32(16)


def test_bf16_rounds_to_even_and_keeps_what_is_no_number():
    largest = float(ml_dtypes.finfo(BF16).max)
    cases = {
        1 + 2**-8: 0x3F80, 1 + 3 * 2**-9: 0x3F81, 1 + 3 * 2**-8: 0x3F82, -0.0: 0x8000, np.inf: 0x7F80, -np.inf: 0xFF80,
        largest: 0x7F7F, -largest: 0xFF7F, 3.4e38: 0x7F80, NAN: 0x7FFF,
    }  # fmt: skip
    x = np.zeros(32, np.float32)
    x[: len(cases)] = list(cases)
    out = np.ones((2, 32), np.uint32)
    rounded.at()[1, 32](out, x)
    assert out[0, : len(cases)].tolist() == out[1, : len(cases)].tolist() == list(cases.values())


class PlainSlices(np.ndarray):
    """An array that takes Python's own ints as the ends of a slice, as a device array must."""

    def __getitem__(self, index: Any) -> Any:
        check_ends(index)
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        check_ends(index)
        super().__setitem__(index, value)


def check_ends(index: Any) -> None:
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, slice):
            assert all(end is None or type(end) is int for end in (part.start, part.stop, part.step)), index


class OnPlainSlices:
    """numpy for a backend, its new arrays PlainSlices."""

    def __getattr__(self, name: str) -> Any:
        made = getattr(np, name)
        return made if name not in ("full", "empty", "asarray") else lambda *a, **k: made(*a, **k).view(PlainSlices)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_slices_by_plain_ints(name):
    with pytest.raises(AssertionError):
        np.zeros(4).view(PlainSlices)[np.int32(1) :]
    sizes, b = Sizes(48, 2, 16, 1, shuffle=7), bench(SMALL, 8460)
    made, plain = (backend_class(name)(SMALL.shape, sizes, xp) for xp in (OnPlainSlices(), np))
    found = []
    for backend in (made, plain):
        streams = [backend.open(), backend.open()]
        attend(b, backend, PROMPT, [(streams[0], 20), (streams[1], 17)])
        found.append(attend(b, backend, DECODE, [(s, 1) for s in streams]))
        for stream in streams:
            stream.release()
    assert isinstance(made.pages, PlainSlices)
    assert_same({"out": np.asarray(found[0])}, {"out": found[1]})


def test_a_pass_launches_in_the_current_stream(monkeypatch):
    """So that the device runs them in order, copies to it too."""
    launch, streams = BoundKernel.launch, []

    def noted(self, grid, threads, stream, *rest):
        streams.append((self.__name__, stream))
        launch(self, grid, threads, stream, *rest)

    monkeypatch.setattr(BoundKernel, "launch", noted)
    at_lengths(bench(SMALL, 8460), build(SMALL, "paged", 48), [20])
    names = {name for name, _ in streams}
    assert names >= {"rope_store_kernel", "prompt_attention", "rope_record_kernel", "decode_merge", "keep_kernel"}
    assert {stream for _, stream in streams} == {None}


@kernel
def narrow(out, halves, codes, words):
    """Integers narrower than 64 bits: one for all threads, one for each. out: int64 [2, 4, 32]; the others: [32]."""
    t = int64(cuda.threadIdx.x)
    out[0, 0, t], out[1, 0, t] = halves[0] << 16, halves[t] << 16
    out[0, 1, t], out[1, 1, t] = codes[0] - 127, codes[t] - 127
    out[0, 2, t], out[1, 2, t] = words[0] - 5, words[t] - 5
    out[0, 3, t], out[1, 3, t] = int64(uint32(words[0] - codes[0])), int64(uint32(words[t] - codes[t]))


def test_narrow_integers_widen_before_they_overflow():
    out = np.zeros((2, 4, 32), np.int64)
    halves, codes, words = np.full(32, 0x3F80, np.uint16), np.full(32, 121, np.uint8), np.full(32, 3, np.uint32)
    narrow.at()[1, 32](out, halves, codes, words)
    assert (out == np.array([0x3F800000, -6, -2, 2**32 - 118])[:, None]).all()
