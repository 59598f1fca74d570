"""Two runs of sparse attention that differ are explained: the block that one chose and the other did not, and why; of equal
choices the key whose rows differ. Rows, scores and folds are the kernels' own."""

from __future__ import annotations

import json
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from test_explain import attended, folds_of

from backends import sparse
from backends.base import DECODE, PROMPT, Sizes, backend_class
from backends.paged import PagedBackend
from kernels_numba.flash_next.pages import BLOCK
from kernels_numba.streams import INDEX_PLANE, POOLED_PLANE
from refengine.checkpoint import load_weights, open_cached
from refengine.commands.choice_words import choice_words
from refengine.commands.explain import told
from refengine.contract.entries.fn_attend import SparseCase
from refengine.contract.gates import this_device
from refengine.model import cache_shape, open_model
from refengine.registry import load_model
from refengine.verify.attention_bits import Heads
from refengine.verify.explain import Place, Side, first_place, parting, read_at
from refengine.verify.key_choice import ChoiceParting, choice_parting
from refengine.verify.launches import one_of_each_kind
from refengine.verify.planted import FAULTS
from refengine.verify.selection_oracle import listed_keys

TINY = one_of_each_kind(load_model("flash-next-tiny"))
BUDGET, SPARSE = 8, 36
"""Blocks of a sparse row; keys of the first such row."""
SPEC = replace(TINY, indexer=replace(TINY.indexer, budget=BLOCK * BUDGET))
PROMPT_TOKENS, TOKENS, PAGE = 50, 2, 8
LAYER = cache_shape(SPEC).attention_layers[0]
HEAD, DIM = SPEC.attention.heads - 1, 5
LAST = Place(0, PROMPT, LAYER, PROMPT_TOKENS - 1, HEAD, DIM)
"""In the prompt's last row, of the last KV head."""
ENTRY = (PROMPT_TOKENS - 1) // PAGE
"""The last that the prompt takes."""


# --- Folds are the kernel's own -------------------------------------------------------------------------------------------

CASE = SparseCase(Heads(6, 2, 64), "paged", 48, ((2, 70), (3, 600)), budget=140)


@pytest.mark.parametrize(("row", "head", "dim"), [(0, 0, 0), (1, 5, 63), (4, 3, 34)])
def test_the_last_states_of_a_row_are_its_partials(row, head, dim):
    folds, outputs = folds_of("fn_attn_chunks", CASE, row, head, dim)
    keys = 71 + row if row < 2 else 4 * 140 + (599 + row) % 4
    assert [state.key for fold in folds for state in fold.states[1:]] == list(range(0, keys, 64))
    assert len(folds) == (1 if row < 2 else 2) and {fold.kernel for fold in folds} == {"fn_attn_chunks"}
    for slot, fold in enumerate(folds):
        last = fold.states[-1]
        wanted = [outputs[part][slot, row, head] for part in ("pm", "pl")] + [outputs["po"][slot, row, head, dim]]
        assert [x.tobytes() for x in (last.m, last.l, last.o)] == [np.float32(x).tobytes() for x in wanted]


# --- Two runs of a model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def side():
    """Makes the sides of a comparison, all on one model."""
    device, sizes = this_device("cpu"), Sizes(PROMPT_TOKENS + TOKENS, 1, PAGE, shuffle=5)
    model = open_model(SPEC, load_weights(open_cached(SPEC), SPEC), device, sizes.context)
    prompt = [(7 * i) % 256 for i in range(PROMPT_TOKENS)]

    def make(name: str, planted=nullcontext, rows: int = 256, kv: str = "bf16") -> Side:
        build = lambda: backend_class(name)(cache_shape(SPEC), replace(sizes, kv=kv))  # noqa: E731
        return Side(name, build, model, device, [prompt], rows, TOKENS, planted)

    return make


@pytest.fixture(scope="module")
def sound(side):
    """What the last row of the prompt has in a window."""
    return read_at(side("window"), LAST)


@pytest.mark.parametrize(
    ("place", "kv"),
    [
        (replace(LAST, row=SPARSE - 2), "bf16"),
        (replace(LAST, row=40), "bf16"),
        (Place(1, DECODE, LAYER, 0, HEAD, DIM), "bf16"),
        (Place(1, DECODE, LAYER, 0, HEAD, DIM), "fp8"),
    ],
)
def test_equal_runs_read_equal_rows_and_fold_alike(side, monkeypatch, place, kv):
    monkeypatch.setattr(sparse, "ROWS_A_SLICE", 16)
    end = PROMPT_TOKENS + 1 if place.phase == DECODE else place.row + 1
    a, b = (read_at(side(name, kv=kv), place) for name in ("window", "paged"))
    found = parting(a, b)
    assert (found.queries_differ, found.choice, found.key, found.step) == (False, None, None, None)
    scores = np.zeros(0, np.float32) if b.choice is None else np.array([block.score for block in b.choice.blocks])
    assert len(scores) == (end // BLOCK if end >= SPARSE else 0)
    assert [row.position for row in b.keys] == listed_keys(scores, end, BUDGET if len(scores) else end).tolist()
    assert attended(b, DIM) == pytest.approx(float(b.states[-1][1].o / b.states[-1][1].l), rel=0.02, abs=1e-3)


def test_scores_come_of_the_rows_that_are_shown(side):
    for choice in (read_at(side(name), LAST).choice for name in ("window", "paged")):
        pooled = np.array([block.pooled.key for block in choice.blocks], np.float64)
        scores = np.maximum(choice.index_q.astype(np.float64) @ pooled.T, 0).sum(axis=0) / pooled.shape[1] ** 0.5
        np.testing.assert_allclose([block.score for block in choice.blocks], scores, rtol=1e-5)
        raw = np.array([[row.key for row in block.raw] for block in choice.blocks], np.float64)
        still = slice(SPEC.rope.dims, None)
        means = raw.mean(axis=1)[:, still]
        assert all(np.corrcoef(x, y)[0, 1] > 0.99 for x, y in zip(means, pooled[:, still], strict=True))


# --- Planted ----------------------------------------------------------------------------------------------------------------


def row_at(backend, plane: int, position: int) -> slice:
    """The words of an index key in the arena: of a position, or of the block that begins with it."""
    width, (page, slot) = backend.shape.index_dim // 2, divmod(position, PAGE)
    (stream,) = backend.streams.values()
    slot //= BLOCK if plane == POOLED_PLANE else 1
    start = stream.pages[page] * backend.page_words + int(backend.current.streams[0, 0, plane]) + slot * width
    return slice(start, start + width)


@contextmanager
def stored_wrong(plane: int, target: int, source: int):
    """Passes of a paged backend that put an index key in the place of another: raw ones before, pooled ones after blocks are
    pooled. target, source: the position, or the first one of the block."""
    store, pool = PagedBackend.store_sparse, sparse.fn_qsa_pool

    def stored(self, *args):
        def pooled(*given):
            for before in (True, False):
                if before is (plane == INDEX_PLANE):
                    self.arena.words[row_at(self, plane, target)] = self.arena.words[row_at(self, plane, source)]
                if before:
                    pool(*given)

        with patch.object(sparse, "fn_qsa_pool", pooled):
            return store(self, *args)

    with patch.object(PagedBackend, "store_sparse", stored):
        yield


def page_of(reading, position: int) -> int:
    """By the words of its key's place."""
    return next(int(row.where.split()[1]) for row in reading.keys if row.position == position)


@pytest.mark.parametrize(("rows", "place"), [(20, replace(LAST, row=8)), (256, replace(LAST, row=40))])
def test_a_wrong_entry_of_a_page_table(side, rows, place):
    """In a dense row, and in one whose chosen blocks all lie before. The pass ends in a page that is the one before."""
    window, paged = side("window", rows=rows), side("paged", FAULTS[0].planted, rows)
    first = first_place(window.run(), paged.run())
    assert (first.number, first.layer, first.row) == (0, LAYER, place.row)
    a, b = (read_at(one, place) for one in (window, paged))
    found, entry = parting(a, b), place.row // PAGE
    assert (a.choice is None) is (b.choice is None) is (rows == 20)
    assert not found.queries_differ and found.choice is None and found.step == 0
    x, y = found.key
    assert x.position == y.position == place.row and x.where == f"slot {place.row} of the window"
    assert y.where == f"page {page_of(b, place.row)} slot 0 (entry {entry})"
    wrong = f"entry {entry + 1} of the page table names page {page_of(b, place.row)}, "
    assert b.wrong_entry.startswith(wrong) and a.wrong_entry == ""


def test_a_pooled_key_of_another_block(side, sound):
    best = max(sound.choice.blocks, key=lambda block: block.score).number
    left = next(block.number for block in sound.choice.blocks if not block.taken)
    other = read_at(side("paged", lambda: stored_wrong(POOLED_PLANE, BLOCK * left, BLOCK * best)), LAST)
    found = parting(sound, other)
    x, y = found.choice.blocks
    assert not found.queries_differ and not found.choice.queries_differ and found.key is None
    assert (x.number, x.taken, y.taken) == (left, False, True)
    assert (x.score, y.score) == (sound.choice.blocks[left].score, sound.choice.blocks[best].score)
    assert x.pooled.where == f"pooled slot {left} of the window" and found.choice.raw is None
    page, slot = divmod(left, PAGE // BLOCK)
    assert y.pooled.where == f"page {page_of(other, BLOCK * left)} pooled slot {slot} (entry {page})"
    assert choice_words(("window", "paged"), found.choice) == (
        f"they chose different keys: paged has block {left}, from position {BLOCK * left} on, and window has not; it scores "
        f"{x.score:.9g} in window and {y.score:.9g} in paged: index queries are equal, its pooled keys differ "
        f"({x.pooled.where} against {y.pooled.where}), its raw keys are equal"
    )


def test_a_raw_key_of_another_position(side, sound):
    other = read_at(side("paged", lambda: stored_wrong(INDEX_PLANE, 29, 32)), LAST)
    found = parting(sound, other)
    x, y = found.choice.blocks
    assert (x.number, x.taken, y.taken) == (7, False, True) and found.choice.pooled_differ
    position, a, b = found.choice.raw
    assert (position, a.where) == (29, "slot 29 of the window")
    assert b.where == f"page {page_of(other, 29)} slot 5 (entry 3)"
    assert b.key.tobytes() == other.choice.blocks[8].raw[0].key.tobytes()
    said = choice_words(("window", "paged"), found.choice)
    assert said.endswith(f"so does its raw key of position 29 ({a.where} against {b.where})")


def test_the_whole_explanation_says_the_choice_first(side, sound, capsys):
    planted = side("paged", lambda: stored_wrong(INDEX_PLANE, 29, 32))
    arms = [side("window").run(), planted.run()]
    place = first_place(*arms)
    readings = [read_at(side("window"), place), read_at(planted, place)]
    line, body = told(*(SimpleNamespace(backend=name) for name in ("window", "paged")), arms, place, readings)
    assert line.startswith(f"PARTED pass 1 (prompt), layer {LAYER}, row {place.row}, ") and place.row >= SPARSE
    said = choice_words(("window", "paged"), parting(*readings).choice)
    assert line.endswith(f"; {said}")
    assert "entries from" in capsys.readouterr().out
    report = json.loads(json.dumps(body))["choice"]
    assert report["a"]["taken"] is not report["b"]["taken"] and report["raw_position"] == 29


@pytest.mark.parametrize(
    ("score", "key", "queries", "said"),
    [
        (0, 0, False, "; its score is {} in both, as with every such block: the choosing itself differs"),
        (1, 0, False, ": index queries are equal, its pooled keys are equal, so the scoring itself differs"),
        (1, 0, True, ": index queries differ, its pooled keys are equal"),
        (1, 1, True, ": index queries differ, its pooled keys differ (pooled slot 3 of the window against "
         "pooled slot 3 of the window), its raw keys are equal"),
    ],
)  # fmt: skip
def test_why_in_words(sound, score, key, queries, said):
    one = sound.choice.blocks[3]
    pooled = replace(one.pooled, key=one.pooled.key + np.float32(key))
    other = replace(one, taken=not one.taken, score=one.score + np.float32(score), pooled=pooled)
    found = choice_words(("paged", "paged"), ChoiceParting((one, other), queries))
    assert found.endswith(said.format(f"{one.score:.9g}"))
    assert found.startswith("they chose different keys: the ") and " run has block 3, " in found


def test_the_block_whose_scores_differ_is_named(sound):
    blocks = [replace(block, taken=not block.taken) for block in sound.choice.blocks]
    assert choice_parting(sound.choice, replace(sound.choice, blocks=blocks)).blocks[0].number == 0
    blocks[6] = replace(blocks[6], score=np.float32(99))
    assert choice_parting(sound.choice, replace(sound.choice, blocks=blocks)).blocks[0].number == 6
    assert choice_parting(sound.choice, sound.choice) is choice_parting(None, None) is None
