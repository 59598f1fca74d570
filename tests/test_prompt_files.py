"""A prompt cache that was written to disk is found there by one of any form, and requests resume from it with the same bits."""

from __future__ import annotations

import re

import pytest
from hash_step import SHAPE, HashStep, expected

from backends.base import Sizes, backend_class
from refengine.errors import UserError
from refengine.serve.prompt_cache import PromptCache
from refengine.serve.prompt_files import load_entries, name_of, save_entries
from refengine.serve.requests import Request
from refengine.serve.scheduler import Scheduler

FORMS = [("window", 16), ("paged", 1), ("paged", 3), ("paged", 16), ("paged-p256", 256), ("mixed", 16)]
PROMPTS = [list(range(1, 30)), [7] * 45, list(range(1, 20)) + [3] * 20]


def cache(name: str, size: int, **sizes) -> PromptCache:
    return PromptCache(backend_class(name)(SHAPE, Sizes(300, 3, size, 4, shuffle=5, **sizes)), grain=8)


def served(prompts: PromptCache, requests: list[Request]) -> list[Request]:
    scheduler = Scheduler(prompts.backend, HashStep(prompts.backend), 13, prompts, check=True)
    for request in requests:
        scheduler.submit(request)
    for _ in scheduler.run():
        pass
    return requests


def filled(name: str, size: int) -> PromptCache:
    """A cache with an entry of each prompt."""
    found = cache(name, size)
    served(found, [Request(prompt, 3, marks=(len(prompt),)) for prompt in PROMPTS])
    return found


@pytest.mark.parametrize("there", FORMS)
@pytest.mark.parametrize("here", FORMS)
def test_any_form_resumes_from_what_any_form_wrote(tmp_path, here, there):
    wrote, reads, lines = filled(*here), cache(*there), list[str]()
    assert len(save_entries(wrote, tmp_path, "hash", "f")) == len(PROMPTS)
    assert load_entries(reads, tmp_path, "f", lines.append) == len(PROMPTS) and lines == []
    again = served(reads, [Request([*prompt, 5, 6], 4, marks=()) for prompt in PROMPTS])
    assert [request.resumed for request in again] == [len(prompt) for prompt in PROMPTS]
    assert [request.reply for request in again] == [expected([*prompt, 5, 6], 4) for prompt in PROMPTS]


def test_the_same_prompts_have_the_same_files(tmp_path):
    first, second = (save_entries(filled(*form), tmp_path, "hash", "f") for form in (("window", 16), ("paged", 3)))
    assert sorted(first) == sorted(second) == sorted(tmp_path.iterdir())
    assert {path.name for path in first} == {name_of(prompt, "f") for prompt in PROMPTS}


def test_a_damaged_file_is_dropped_with_a_line_and_the_others_are_taken(tmp_path):
    files = save_entries(filled("paged", 16), tmp_path, "hash", "f")
    content = bytearray(files[1].read_bytes())
    content[-1] ^= 1
    files[1].write_bytes(content)
    files[0].write_bytes(files[0].read_bytes()[:-8])
    reads, lines = cache("window", 16), list[str]()
    assert load_entries(reads, tmp_path, "f", lines.append) == 1 and len(reads.entries) == 1
    assert len(lines) == 2 and all("dropped, never read" in line and line.count("\n") == 0 for line in lines)
    assert sorted(line.split(":")[0] for line in lines) == sorted(map(str, files[:2]))
    again = served(reads, [Request([*prompt, 5], 4, marks=()) for prompt in PROMPTS])
    assert [request.reply for request in again] == [expected([*prompt, 5], 4) for prompt in PROMPTS]


def test_files_of_another_shape_or_run_are_dropped_and_stay(tmp_path):
    save_entries(filled("paged", 16), tmp_path, "hash", "f")
    lines = list[str]()
    assert load_entries(cache("paged", 16, kv="fp8"), tmp_path, "f", lines.append) == 0
    assert len(lines) == 3 and all("kv bf16, this backend has fp8" in line for line in lines)
    assert load_entries(cache("paged", 16), tmp_path, "g", lines.append) == 0
    assert all("this run has g" in line for line in lines[3:]) and len(list(tmp_path.glob("*.safetensors"))) == 3


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / 'file' / 'deeper'}: cannot be made")):
        save_entries(filled("paged", 16), tmp_path / "file" / "deeper", "hash", "f")
    assert load_entries(cache("paged", 16), tmp_path / "nowhere", "f", pytest.fail) == 0
