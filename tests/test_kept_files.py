"""A kept state on disk is read back as it was written or not at all: every changed bit and every missing byte is noticed."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from buffers import assert_same_bits
from safetensors import numpy as safetensors

from backends.arena import CacheShape
from backends.base import Sizes, backend_class
from backends.kept import Kept
from refengine.errors import UserError
from refengine.serve import kept_files
from refengine.serve.kept_files import DamagedKept, UnusableKept, load, load_all, save

IDS, MINE = list(range(100, 117)), "weights 1, kernels 2"
KV = ("bf16", "fp8")


@cache
def state(kv: str) -> Kept:
    """A state of 17 positions: 2 attention layers, 1 linear layer."""
    rng, n = np.random.default_rng(0), len(IDS)
    rows = rng.integers(0, 2**32, (2, 2, 2, n, 8), np.uint32)
    exponents = rng.integers(-128, 127, (2, 2, 2, n), np.int8) if kv == "fp8" else None
    states = rng.standard_normal((1, 3, 8, 8), np.float32)
    return Kept(
        n, n, kv, rows, exponents, states, rng.standard_normal((1, 3, 10), np.float32).astype(ml_dtypes.bfloat16)
    )


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "folder" / "one.safetensors"


def written(path: Path, kv: str = "fp8") -> bytes:
    save(path, IDS, state(kv), "a model", MINE)
    return path.read_bytes()


def refused(path: Path, words: str = "not a kept state as it was written", kind: type[Exception] = DamagedKept) -> None:
    """Loading raises one line that names the file; no tensor is taken from it."""
    with pytest.raises(kind, match=words) as caught:
        load(path, MINE)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


# --- There and back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", KV)
def test_what_was_written_is_read(path, kv):
    written(path, kv)
    ids, found = load(path, MINE)
    assert ids == IDS and (found.positions, found.prompted, found.kv) == (len(IDS), len(IDS), kv)
    assert set(found.arrays) == set(state(kv).arrays)
    for name, array in state(kv).arrays.items():
        assert_same_bits(found.arrays[name], array)


def test_a_stream_goes_through_a_file_from_pages_to_a_window(path):
    shape, sizes = CacheShape((1, 3), (0,), 4, 2, 64, 3, 8, 8, 10, 3), Sizes(40, page_size=16, kv="fp8")
    rows = np.random.default_rng(0).integers(0, 2**32, (2, 2, 2, len(IDS), 16), np.uint32)
    stream = backend_class("paged")(shape, sizes).restore(replace(state("fp8"), rows=rows))
    save(path, IDS, stream.save(), "a model", MINE)
    found = backend_class("window")(shape, sizes).restore(load(path, MINE)[1]).save()
    for name, array in {**state("fp8").arrays, "rows": rows}.items():
        assert_same_bits(found.arrays[name], array)


def test_a_state_of_no_positions_is_read(path):
    kept = state("bf16")
    save(path, [], replace(kept, positions=0, prompted=0, rows=kept.rows[:, :, :, :0].copy()), "a model", MINE)
    ids, found = load(path, MINE)
    assert ids == [] and found.rows.shape == (2, 2, 2, 0, 8)


def test_any_reader_of_safetensors_sees_the_tensors(path):
    written(path)
    tensors = safetensors.load_file(path)
    assert set(tensors) == {"ids", "rows", "exponents", "states", "histories"}
    assert tensors["ids"].tolist() == IDS and tensors["histories"].dtype == ml_dtypes.bfloat16


def test_names_may_hold_anything(path):
    """The digest's place is found whatever the other metadata say."""
    name = 'quotes "sha256":"0000", \\ and \n'
    save(path, IDS, state("bf16"), name, name)
    assert load(path, name)[0] == IDS


def test_a_second_state_takes_the_first_ones_place(path):
    written(path, "fp8")
    written(path, "bf16")
    assert load(path, MINE)[1].kv == "bf16" and os.listdir(path.parent) == [path.name]


def test_ids_that_are_not_the_positions_are_refused(path):
    with pytest.raises(UserError, match="16 token ids for a state of 17 positions; give one for each"):
        save(path, IDS[:-1], state("bf16"), "a model", MINE)
    assert not path.parent.exists()


# --- Whole or not at all --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(path, monkeypatch, step):
    before = written(path, "bf16")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*{"fsync": (os, "fsync", fail), "replace": (Path, "replace", fail)}[step])
    with pytest.raises(UserError, match=r"one\.safetensors: cannot be written: No space left on device"):
        written(path, "fp8")
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_a_file_has_its_name_only_once_it_is_on_disk(path, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append(path.exists()))
    written(path)
    assert seen == [False, True]  # the file, then the folder that names it


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written: "):
        save(tmp_path / "file" / "one.safetensors", IDS, state("bf16"), "a model", MINE)


# --- Damage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", KV)
def test_a_file_cut_short_is_noticed(path, kv):
    content = written(path, kv)
    lengths = {*range(0, len(content), 1000), *range(0, 24), *range(len(content) - 9, len(content))}
    for length in sorted(lengths):
        path.write_bytes(content[:length])
        refused(path)


def test_a_file_that_goes_on_is_noticed(path):
    content = written(path)
    for more in (b"\0", b" ", content):
        path.write_bytes(content + more)
        refused(path)


def test_every_flipped_bit_of_the_header_is_noticed(path):
    """Its length, names, shapes, metadata, the digest itself, and the padding behind."""
    content = written(path)
    flip_each(path, content, range(kept_files.header_end(content)))


def test_flipped_bits_of_the_data_are_noticed(path):
    content = written(path)
    flip_each(path, content, [*range(kept_files.header_end(content), len(content), 97), len(content) - 1])


def flip_each(path: Path, content: bytes, places) -> None:
    """Each bit of the bytes in turn."""
    for place in places:
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            refused(path)


def test_a_digest_that_is_not_looked_at_lets_damage_through(path, monkeypatch):
    """Red: without the check a flipped bit of the data is read as if it had been written."""
    content = bytearray(written(path))
    content[-1] ^= 1
    path.write_bytes(content)
    refused(path, "its bytes do not have the SHA-256 that it names")
    monkeypatch.setattr(kept_files, "check_digest", lambda content: None)
    assert load(path, MINE)[0] == IDS


def test_nothing_is_taken_from_a_damaged_file(path, monkeypatch):
    path.write_bytes(written(path)[:-1] + b"x")
    monkeypatch.setattr(kept_files, "deserialize", lambda content: pytest.fail("tensors were read"))
    refused(path)


# --- Foreign ----------------------------------------------------------------------------------------------------------------


def sealed(tensors: dict, **about: str) -> bytes:
    """A file with a right digest, whatever it holds."""
    content = safetensors.save(tensors, metadata={**about, "sha256": kept_files.NO_DIGEST})
    return content.replace(kept_files.NO_DIGEST.encode(), hashlib.sha256(content).hexdigest().encode())


ABOUT = {
    "format": kept_files.FORMAT, "model": "a model", "fingerprint": MINE, "kv": "bf16", "positions": "17", "prompted": "17",
}  # fmt: skip


@pytest.mark.parametrize(
    "change, words",
    [
        ({"format": "refengine-kept-0"}, "format refengine-kept-0, this version reads refengine-kept-1"),
        ({"kv": "int4"}, "kv int4, 17 positions"),
        ({"positions": "18"}, r"18 positions, \[17\] ids"),
        ({"positions": "many"}, "invalid literal"),
        ({"prompted": "18"}, "17 positions, 18 of them prompt"),
        ({"fingerprint": None}, "lacks 'fingerprint'"),
    ],
)
def test_metadata_of_no_kept_state_are_refused(path, change, words):
    written(path)
    tensors = {"ids": np.array(IDS), **state("bf16").arrays}
    path.write_bytes(sealed(tensors, **ABOUT))
    assert load(path, MINE)[0] == IDS
    path.write_bytes(sealed(tensors, **{k: v for k, v in {**ABOUT, **change}.items() if v is not None}))
    refused(path, words)


@pytest.mark.parametrize(
    "without, beside, words",
    [
        ("states", {}, "lacks 'states'"),
        ("", {"w": IDS}, r"of no use: \['w'\]"),
        ("", {"w": [0.5]}, "w: type F64, which no"),
    ],
)
def test_tensors_of_no_kept_state_are_refused(path, without, beside, words):
    path.parent.mkdir()
    tensors = {"ids": np.array(IDS), **state("bf16").arrays, **{name: np.array(x) for name, x in beside.items()}}
    path.write_bytes(sealed({name: x for name, x in tensors.items() if name != without}, **ABOUT))
    refused(path, words)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"hello", b"\xff" * 64, b"\0" * 64, json.dumps({"a": 1}).encode(),
        safetensors.save({"a": np.zeros(3)}), safetensors.save({"a": np.zeros(3)}, metadata={"sha256": "short"}),
    ],
    ids=["empty", "text", "ones", "zeros", "json", "a checkpoint", "a short digest"],
)  # fmt: skip
def test_a_file_of_something_else_is_refused(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    refused(path)


def test_anothers_state_is_refused(path):
    save(path, IDS, state("bf16"), "a model", "weights 9")
    words = f"kept by a model with fingerprint weights 9, this run has {MINE}"
    refused(path, words, UnusableKept)


def test_a_file_that_cannot_be_opened_is_refused(path):
    refused(path, "cannot be read: No such file or directory", UnusableKept)
    path.mkdir(parents=True)
    refused(path, "cannot be read: Is a directory", UnusableKept)


# --- A folder ---------------------------------------------------------------------------------------------------------------


def test_the_good_files_of_a_folder_are_read_and_the_others_named(tmp_path):
    for name in ("a", "b", "c", "d"):
        save(tmp_path / f"{name}.safetensors", IDS, state("bf16"), "a model", "another" if name == "c" else MINE)
    broken = tmp_path / "b.safetensors"
    content = broken.read_bytes()[:-1]
    broken.write_bytes(content)
    (tmp_path / ".e.safetensors.0.unfinished").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("not a state")
    lines: list[str] = []
    found = list(load_all(tmp_path, MINE, lines.append))
    assert [(path.name, ids) for path, ids, _ in found] == [("a.safetensors", IDS), ("d.safetensors", IDS)]
    assert len(lines) == 2 and all("dropped, never read" in line and "\n" not in line for line in lines)
    assert str(broken) in lines[0] and lines[0].endswith("now b.safetensors.damaged")
    assert "c.safetensors" in lines[1] and lines[1].endswith("it stays where it is")
    assert (tmp_path / "b.safetensors.damaged").read_bytes() == content and (tmp_path / "c.safetensors").exists()


def test_a_damaged_file_is_reported_once_and_replaces_no_other(tmp_path):
    lines: list[str] = []
    for content in (b"first", b"second"):
        (tmp_path / "a.safetensors").write_bytes(content)
        assert list(load_all(tmp_path, MINE, lines.append)) == [] == list(load_all(tmp_path, MINE, lines.append))
    assert [line.rsplit(" ", 1)[1] for line in lines] == ["a.safetensors.damaged", "a.safetensors.damaged.1"]
    assert [p.read_bytes() for p in sorted(tmp_path.iterdir())] == [b"first", b"second"]


def test_a_damaged_file_that_cannot_be_renamed_is_still_named(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(1, "Operation not permitted")

    (tmp_path / "a.safetensors").write_bytes(b"no state")
    monkeypatch.setattr(Path, "replace", fail)
    lines: list[str] = []
    assert list(load_all(tmp_path, MINE, lines.append)) == []
    assert lines[0].endswith("dropped, never read; it stays where it is: Operation not permitted")


def test_a_folder_that_is_not_there_has_no_states(tmp_path):
    assert list(load_all(tmp_path / "none", MINE, pytest.fail)) == []
