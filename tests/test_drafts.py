"""With drafts a session gives plain decode's tokens and logits rows, bit for bit, whatever is drafted. Spec serving §5."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from backends.base import Sizes, backend_class
from refengine.checkpoint import load_mtp, load_weights, open_cached
from refengine.device import open_device
from refengine.errors import UserError
from refengine.model import MtpHead, Qwen35, cache_shape
from refengine.registry import load_model
from refengine.serve.drafters import JoinedDrafter, MtpDrafter, NgramDrafter
from refengine.serve.drafts import Draft, chain, cut, joined, siblings
from refengine.serve.forward import Pass
from refengine.serve.sampling import Sampling
from refengine.serve.session import Session
from refengine.serve.windows import Chunk, Window
from refengine.verify.launches import one_of_each_kind

SPEC = one_of_each_kind(load_model("qwen3.5-tiny"))
DEVICE, CONTEXT, WINDOW_ROWS, TOKENS = open_device("cpu"), 90, 8, 9
PROMPTS = [[(7 * i + 3) % 250 for i in range(41)], [(11 * i + 5) % 250 for i in range(23)], [9]]
SAMPLINGS = [Sampling(), Sampling(0.8, 20, 0.9, seed=5), Sampling(1.0, seed=6)]
TREE = JoinedDrafter((MtpDrafter(3), NgramDrafter()))


@cache
def model() -> tuple[Qwen35, MtpHead]:
    checkpoint = open_cached(SPEC)
    made = Qwen35(SPEC, load_weights(checkpoint, SPEC), DEVICE, CONTEXT)
    return made, MtpHead(SPEC, load_mtp(checkpoint, SPEC), made, DEVICE)


def session(drafters=(), name="paged", rows=16, samplings=SAMPLINGS, context=CONTEXT, **more) -> Session:
    sizes = Sizes(context, len(PROMPTS), 16, WINDOW_ROWS, spare_pages=3, shuffle=1)
    backend = backend_class(name)(cache_shape(SPEC, mtp=True), sizes)
    return Session(model()[0], backend, DEVICE, PROMPTS, rows, samplings, drafters, **more)


def rows_of(passes: list[Pass]) -> list[bytes]:
    """Each stream's logits rows, in order, as bytes."""
    return [b"".join(row.tobytes() for p in passes for n, row in zip(p.streams, p.logits) if n == s) for s in range(3)]


@dataclass(frozen=True)
class Knowing:
    """Drafts a stream's known reply, ``right`` tokens of it, each with a wrong token beside it."""

    reply: list[int]
    prompt: int
    right: int
    guesses: int = 0

    def propose(self, tokens, ranked) -> Draft:
        ahead = self.reply[len(tokens) - self.prompt :][: self.right]
        draft = chain(ahead)
        wrong = Draft(tuple((t + 1) % 250 for t in ahead), draft.parents)
        pairs = [t for pair in zip(wrong.tokens, draft.tokens) for t in pair]
        return Draft(tuple(pairs), tuple(max(-1, 2 * (place // 2) - 1) for place in range(len(pairs))))


@cache
def plain(name: str = "paged") -> tuple[list[bytes], list[list[int]], int]:
    one = session(name=name)
    passes = list(one.run(TOKENS))
    assert all(np.isfinite(p.logits).all() for p in passes) and not any(p.drafted for p in passes)
    return rows_of(passes), one.replies, len(passes)


# --- Trees of tokens --------------------------------------------------------------------------------------------------


def test_drafts_that_begin_alike_share_their_rows():
    tree = joined([siblings([5, 7]), chain([7, 8, 9]), chain([7, 8, 4])])
    assert tree == Draft((5, 7, 8, 9, 4), (-1, -1, 1, 2, 2))


def test_a_cut_keeps_rows_with_all_that_they_follow():
    tree = Draft((1, 2, 3, 4, 5), (-1, 0, -1, 1, 2))
    assert cut(tree, 9, 2) == Draft((1, 2, 3, 5), (-1, 0, -1, 2))
    assert cut(tree, 2, 9) == Draft((1, 2), (-1, 0)) and cut(tree, 0, 9) == cut(tree, 9, 0) == Draft()


def test_a_window_is_walked_along_what_was_drawn():
    window = Window(9, Draft((1, 2, 1, 3), (-1, -1, 1, 2)))
    assert window.ids == (9, 1, 2, 1, 3) and window.parents == (-1, 0, 0, 2, 3)
    assert window.kept([2, 0, 1, 3, 8], ()) == [0, 2, 3, 4] and window.chosen([2, 0, 1, 3, 8], ()) == [2, 1, 3, 8]
    assert window.kept([2, 0, 1, 3, 8], {1}) == [0, 2] and window.kept([3, 0, 1, 3, 8], ()) == [0]
    assert [window.depth(row) for row in range(5)] == [0, 1, 1, 2, 3]


def test_a_chunk_s_draw_is_chosen_when_the_prompt_is_read():
    assert Chunk((4, 5), (6, 7)).chosen([1], ()) == [] and Chunk((4, 5), (6, 7)).following([1]) == (5, 6)
    assert Chunk((4, 5), ()).chosen([1], ()) == [1] and Chunk((4, 5), ()).following([1]) == (5, 1)


def test_an_n_gram_takes_the_longest_match_and_of_those_the_newest():
    drafter = NgramDrafter(longest=3, tokens=2)
    assert drafter.propose([1, 2, 3, 8, 9, 7, 3, 5, 1, 2, 3], []) == chain([8, 9])
    assert drafter.propose([3, 8, 8, 3, 5, 3], []) == chain([5, 3])
    assert NgramDrafter(tokens=2, earlier=(5, 6, 7, 8)).propose([7, 3, 5, 6], []) == chain([7, 8])
    assert drafter.propose([1, 1, 1], []) == chain([1]) and drafter.propose([1, 2, 3], []) == Draft()


def test_a_head_s_guesses_stand_side_by_side():
    assert MtpDrafter(2).propose([1], [8, 5, 3]) == siblings([8, 5])
    assert TREE.guesses == 3 and TREE.propose([4, 6, 4], [6, 1, 2]) == Draft((6, 1, 2, 4), (-1, -1, -1, 0))


# --- Drafted and plain ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["window", "paged", "mixed"])
@pytest.mark.parametrize("right", [1, 3])
def test_drafted_is_plain(name, right):
    """Streams with known replies, one of them without drafts now and then; half of each window is rejected."""
    rows, replies, passes = plain(name)
    drafters = [Knowing(replies[n], len(PROMPTS[n]), right) for n in range(2)]
    one = session([*drafters, None], name)
    found = list(one.run(TOKENS))
    assert one.replies == replies and rows_of(found) == rows
    assert sum(p.drafted for p in found) > 0 and len(found) == passes


@pytest.mark.parametrize("drafter", [NgramDrafter(), MtpDrafter(), TREE])
def test_real_drafters_change_nothing(drafter):
    one = session([drafter] * 3, head=model()[1])
    found = list(one.run(TOKENS))
    assert one.replies == plain()[1] and rows_of(found) == plain()[0]


def test_right_drafts_save_passes_and_their_rows_are_kept():
    rows, replies, passes = plain()
    one = session([Knowing(replies[n], len(PROMPTS[n]), 3) for n in range(3)])
    found = list(one.run(TOKENS))
    assert one.replies == replies and rows_of(found) == rows
    assert passes - len(found) == TOKENS - 1 - 2
    assert [s.committed for s in one.streams] == [len(p) + TOKENS - 1 for p in PROMPTS]


def test_prompts_read_together_are_read_alone():
    one = session(rows=10)
    found = [*one.read(3, TOKENS), *one.write(TOKENS)]
    assert one.replies == plain()[1] and found[0].streams == (0, 1, 2)


def test_a_window_ends_with_its_capacity_and_its_reply():
    """The context has room for the longest prompt and its reply alone."""
    replies = plain()[1]
    drafters = [Knowing(replies[n], len(PROMPTS[n]), 9) for n in range(3)]
    one = session(drafters, context=len(PROMPTS[0]) + TOKENS)
    assert [len(r) for r in one.replies] == [] and list(one.run(TOKENS)) and one.replies == replies


def test_a_stop_token_ends_a_reply_within_a_window():
    replies = plain()[1]
    drafters = [Knowing(replies[n], len(PROMPTS[n]), 3) for n in range(3)]
    one = session(drafters, stop=frozenset([replies[0][2], replies[1][0]]))
    list(one.run(TOKENS))
    assert one.replies[0] == replies[0][:3] and one.replies[1] == replies[1][:1]
    assert one.streams[0].committed == len(PROMPTS[0]) + 2


def test_the_head_guesses_alike_whatever_was_drafted():
    """Its keys are stored for every committed position, and for no others."""
    replies, head = plain()[1], model()[1]
    alike = []
    for drafts in (None, 3):
        drafters = [
            MtpDrafter(4) if drafts is None else JoinedDrafter((Knowing(replies[0], 41, drafts), MtpDrafter(4)))
        ]
        one = session([*drafters, None, None], head=head)
        for _ in one.run(TOKENS):
            pass
        alike.append(one.requests[0].ranked)
    assert alike[0] == alike[1] and len(set(alike[0])) == 4


def test_a_drafter_without_its_head_is_refused():
    with pytest.raises(UserError, match="has no MTP head; draft by n-gram"):
        session([MtpDrafter()] * 3)


# --- Planted faults ---------------------------------------------------------------------------------------------------


def differs(patch) -> bool:
    rows, replies, _ = plain()
    one = session([Knowing(replies[n], len(PROMPTS[n]), 3) for n in range(3)])
    with pytest.MonkeyPatch.context() as planted:
        patch(planted)
        found = list(one.run(TOKENS))
    return rows_of(found) != rows


def test_red_when_the_recurrent_state_is_not_replayed():
    assert differs(lambda p: p.setattr("refengine.model.blocks.delta_trees.replay", lambda *_: None))


def test_red_when_a_rejected_row_is_kept():
    kept = Window.kept
    assert differs(lambda p: p.setattr(Window, "kept", lambda w, d, s: [*kept(w, d, s), len(w.ids) - 1]))


def test_red_when_a_draw_is_keyed_by_its_place_in_the_batch():
    assert differs(lambda p: p.setattr(Window, "depth", lambda window, row: row))


@pytest.mark.parametrize(
    "prompts, how, message",
    [
        ([[1, 2], []], {}, "prompt 1: is empty"),
        ([[1]], {"prompt_rows": 0}, "prompt_rows 0: at least 1"),
        ([[1], [2]], {"samplings": [Sampling()]}, "samplings: 1 for 2 prompts"),
        ([[1], [2]], {"drafters": [NgramDrafter()]}, "drafters: 1 for 2 prompts"),
        ([[1]], {"samplings": [Sampling(temperature=-1.0)]}, "temperature -1.0"),
    ],
)
def test_a_session_that_cannot_run_is_refused(prompts, how, message):
    how = {"prompt_rows": 4, **how}
    with pytest.raises(UserError, match=message):
        Session(None, None, None, prompts, **how)
