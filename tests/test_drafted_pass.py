"""A drafted pass: each row has the bits of the same row alone behind its ancestors, and what is accepted is committed as if it
had been generated. Spec serving §5, attention §2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from backends.base import DECODE, PROMPT, Backend, BackendError, Sizes, Stream, backend_class
from refengine.checkpoint import load_weights, open_cached
from refengine.device import open_device
from refengine.model import Qwen35, cache_shape
from refengine.registry import load_model
from refengine.verify.launches import one_of_each_kind

SPEC = one_of_each_kind(load_model("qwen3.5-tiny"))
DEVICE = open_device("cpu")
PROMPTS = [[(7 * i + 3) % 250 for i in range(70)], [(11 * i + 5) % 250 for i in range(45)]]
PARENTS = [[-1, 0, 1, 1, 0, 4, 3], [-1, 0, 1]]
IDS = [[9, 8, 7, 6, 5, 4, 3], [21, 22, 23]]
NAMES = ["window", "paged", "paged-p256", "mixed"]


@dataclass
class Run:
    """A model with two prompts read."""

    model: Qwen35
    backend: Backend
    streams: list[Stream]

    def forward(self, work: list[tuple[Stream, int]], ids: list[int], phase: str = DECODE, parents=None):
        batch = self.backend.batch(phase, work, parents)
        rows = np.arange(len(ids))
        return batch, self.model.forward(np.array(ids, np.int32), self.backend, batch, rows)

    def step(self, stream: int, token: int) -> np.ndarray:
        """One token of one stream, committed; its logits."""
        batch, logits = self.forward([(self.streams[stream], 1)], [token])
        self.model.finish(self.backend, batch)
        return logits[0]


@pytest.fixture(scope="module")
def model() -> Qwen35:
    return Qwen35(SPEC, load_weights(open_cached(SPEC), SPEC), DEVICE, 200)


def started(model: Qwen35, name: str, **sizes: str) -> Run:
    made = backend_class(name)(cache_shape(SPEC), Sizes(200, 2, 48, 8, 3, 5, **sizes))
    run = Run(model, made, [made.open() for _ in PROMPTS])
    for stream, prompt in zip(run.streams, PROMPTS, strict=True):
        batch, _ = run.forward([(stream, len(prompt))], prompt, PROMPT)
        model.finish(made, batch)
    return run


def drafted(run: Run):
    work = [(s, len(p)) for s, p in zip(run.streams, PARENTS, strict=True)]
    return run.forward(work, [i for ids in IDS for i in ids], parents=PARENTS)


@pytest.mark.parametrize("name", NAMES)
def test_a_drafted_row_is_the_row_alone_behind_its_ancestors(model, name):
    _, found = drafted(started(model, name))
    for stream, leaf in ((0, 6), (0, 2), (0, 5), (1, 2)):
        one = started(model, name)
        batch = one.backend.batch(DECODE, [(s, len(p)) for s, p in zip(one.streams, PARENTS)], PARENTS)
        for row in batch.path(stream, leaf):
            wanted = one.step(stream, IDS[stream][row])
            at = row + stream * len(IDS[0])
            assert wanted.tobytes() == found[at].tobytes(), (stream, row)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("accepted", [(6, 2), (0, -1), (5, 0), (-1, -1)])
def test_accepted_drafts_are_committed_as_if_generated(model, name, accepted):
    run, plain = started(model, name), started(model, name)
    batch, _ = drafted(run)
    paths = [batch.path(stream, last) for stream, last in enumerate(accepted)]
    model.finish(run.backend, batch, accepted)
    for stream, path in enumerate(paths):
        for row in path:
            plain.step(stream, IDS[stream][row])
    assert [s.committed for s in run.streams] == [s.committed for s in plain.streams]
    for stream in range(2):
        assert run.step(stream, 77).tobytes() == plain.step(stream, 77).tobytes(), stream


def test_drafts_that_make_no_sense_are_refused_and_nothing_changes(model):
    run = started(model, "paged")
    work = [(run.streams[0], 2)]
    for phase, parents, message in (
        (PROMPT, [[-1, 0]], "drafts belong to 'decode' passes"),
        (DECODE, [[-1]], "one for each"),
        (DECODE, [[-1, 1]], "an earlier row"),
    ):
        with pytest.raises(BackendError, match=message):
            run.backend.batch(phase, work, parents)
    batch, _ = drafted(run)
    for accepted in (None, [0], [7, 0], [-2, 0]):
        with pytest.raises(BackendError, match="accepted"):
            model.finish(run.backend, batch, accepted)
    model.finish(run.backend, batch, [0, 0])
    with pytest.raises(BackendError, match="no drafts"):
        model.finish(run.backend, run.backend.batch(DECODE, [(run.streams[0], 1)]), [0])


def test_a_window_of_128_drafts(model):
    """The longest window there is, a bushy tree: rows at its ends are the rows alone, and the longest path is kept."""
    made = backend_class("paged")(cache_shape(SPEC), Sizes(200, 1, 48, 128, 3, 5))
    parents = [-1, *(max(row // 2 - 1, 0) for row in range(1, 128))]
    ids = [(37 * row + 11) % 250 for row in range(128)]
    run, plain = Run(model, made, [made.open()]), started(model, "window")
    batch, _ = run.forward([(run.streams[0], 70)], PROMPTS[0], PROMPT)
    model.finish(made, batch)
    batch, found = run.forward([(run.streams[0], 128)], ids, parents=[parents])
    model.finish(made, batch, [127])
    for row in batch.path(0, 127):
        assert plain.step(0, ids[row]).tobytes() == found[row].tobytes(), row
    assert run.step(0, 5).tobytes() == plain.step(0, 5).tobytes()


def test_drafts_are_committed_once_and_through_the_model(model):
    run = started(model, "paged")
    work = [(run.streams[0], 2)]
    with pytest.raises(BackendError, match="have not been through the model"):
        model.finish(run.backend, run.backend.batch(DECODE, work, [[-1, 0]]), [1])
    batch, _ = run.forward(work, [5, 6], parents=[[-1, 0]])
    with pytest.raises(BackendError, match="recurrent layers wait for the accepted rows"):
        run.backend.finish(batch, [1])
    before = run.streams[0].committed
    model.finish(run.backend, batch, [1])
    assert run.streams[0].committed == before + 2


@pytest.mark.parametrize("over", ["replaced", "released"])
def test_drafts_of_a_pass_that_is_over_touch_nothing(model, over):
    """A released stream's place may be another's by now."""
    run = started(model, "window")
    batch, _ = drafted(run)
    if over == "released":
        run.streams[0].release()
        run.backend.open()
    else:
        run.backend.batch(DECODE, [(run.streams[0], 1)])
    before = run.backend.arena.words.tobytes()
    with pytest.raises(BackendError, match="this batch is over"):
        model.finish(run.backend, batch, [6, 2])
    assert run.backend.arena.words.tobytes() == before
