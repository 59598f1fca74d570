"""The picture of docs/paging.md is what the code draws, and the code draws what the address functions say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import ml_dtypes
import numpy as np
import pytest

from backends.base import PROMPT, Norms
from kernels_numba.rope_store import rope_table
from refengine.lab.page_picture import STRADDLING, picture
from refengine.lab.page_walk import PageWalk

COMMITTED = Path(__file__).parents[1] / "docs" / "paging.svg"
PAGE_SIZES = (16, 33, 48, 64, 256)


def texts(svg: bytes) -> list[str]:
    """The labels of an SVG, in order."""
    return ["".join(t.itertext()) for t in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_committed_picture_is_what_the_code_draws():
    committed, drawn = COMMITTED.read_bytes(), picture(48, "svg")
    assert texts(committed) == texts(drawn)
    if f"Matplotlib v{matplotlib.__version__}," in committed.decode():
        assert committed == drawn


def test_the_picture_has_the_same_bytes_each_time():
    assert picture(48, "svg") == picture(48, "svg")


def test_the_picture_has_paper_of_its_own():
    assert b"fill: #ffffff" in COMMITTED.read_bytes()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_places_follow_the_page_table(page_size):
    walk = PageWalk(page_size)
    wanted = [(walk.table[p // page_size], p % page_size) for p in range(walk.positions)]
    assert [tuple(place) for place in walk.places.tolist()] == wanted
    assert walk.table != sorted(walk.table) and len(set(walk.table)) == len(walk.table)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pieces_cover_the_positions_once_and_stay_in_their_page(page_size):
    walk = PageWalk(page_size)
    assert [p for piece in walk.pieces for p in range(piece.first, piece.last + 1)] == list(range(walk.positions))
    for piece in walk.pieces:
        assert piece.item == piece.first // 32 == piece.last // 32
        assert piece.entry == piece.first // page_size == piece.last // page_size


@pytest.mark.parametrize("page_size", [16, 48, 64, 256])
def test_labels_are_the_walk_s(page_size):
    walk, labels = PageWalk(page_size), texts(picture(page_size, "svg"))
    for piece in walk.pieces:
        assert labels.count(piece.name) == 2, "once in the window, once in a page"
    for page in walk.table:
        assert str(page) in labels


def test_at_48_every_third_item_straddles():
    walk = PageWalk(48)
    assert walk.straddling == [1, 4]
    assert [(p.first, p.last, p.slot) for p in walk.pieces if p.item == 1] == [(32, 47, 32), (48, 63, 0)]
    assert STRADDLING.encode() in COMMITTED.read_bytes()


@pytest.mark.parametrize("page_size", [32, 64, 96, 256])
def test_a_page_size_that_32_divides_shows_no_straddling_item(page_size):
    svg = picture(page_size, "svg")
    assert STRADDLING.encode() not in svg
    assert any(label.startswith("No item straddles") for label in texts(svg))


def test_a_stored_row_lies_at_the_word():
    walk = PageWalk(48)
    shape, backend = walk.shape, walk.backend
    columns = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    qkv = np.random.default_rng(0).standard_normal((walk.positions, columns), np.float32).astype(ml_dtypes.bfloat16)
    gain = np.ones(shape.head_dim, np.float32)
    batch = backend.batch(PROMPT, [(walk.stream, walk.positions)])
    backend.store(7, qkv, Norms(gain, gain, 1e-6), rope_table(walk.positions, 64, 1e7), batch)
    for position in range(walk.positions):
        values = qkv[position, columns - shape.kv_heads * shape.head_dim :].reshape(shape.kv_heads, -1).view(np.uint32)
        for kv_head in range(shape.kv_heads):
            word = walk.word(7, 1, position, kv_head)
            assert (backend.arena.words[word : word + shape.head_dim // 2] == values[kv_head]).all()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["x.svg", "--page-size", "15"], "--page-size 15"),
        (["x.svg", "--page-size", "257"], "--page-size 257"),
        (["x.jpg"], "x.jpg"),
        (["missing/x.svg"], "missing/x.svg"),
    ],
)
def test_a_bad_call_is_one_line(arguments, named, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "refengine.lab.page_picture", *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and named in done.stderr and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
