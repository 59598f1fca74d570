"""A prompt begins with what was read of one that begins alike: those positions, that state, unchanged; and never with a reply."""

from __future__ import annotations

import numpy as np
import pytest
from hash_step import SHAPE, HashStep, expected

from backends.arena import CacheShape
from backends.base import Backend, BackendError, NoRoom, Sizes, backend_class
from backends.kept import save_prefix
from backends.pool import PoolBroken
from backends.prefix import Prefix
from refengine.serve.prompt_cache import GRAIN, PromptCache
from refengine.serve.requests import DONE, Request
from refengine.serve.scheduler import Scheduler

FORMS = {"window": 1, "paged": 4, "paged-p256": 256, "mixed": 4}
"""Page sizes."""
TEXT = np.random.default_rng(0).integers(0, 50, 900).tolist()
OTHER = np.random.default_rng(1).integers(0, 50, 900).tolist()


class House:
    """A backend and what runs through it, with a prompt cache."""

    def __init__(self, name: str = "paged", page_size: int = 4, grain: int | None = None, rows: int = 1000, **sizes):
        sizes = {"context": 64, "streams": 3, "window_rows": 1, "shuffle": 3} | sizes
        self.backend: Backend = backend_class(name)(SHAPE, Sizes(page_size=page_size, **sizes))
        self.cache = PromptCache(self.backend, grain)
        self.step = HashStep(self.backend)
        self.scheduler = Scheduler(self.backend, self.step, rows, self.cache, check=True)

    def run(self, prompt, tokens: int = 3, marks: tuple[int, ...] | None = None) -> Request:
        """One request to its end; the reply is right."""
        one = self.submit(prompt, tokens, marks)
        list(self.scheduler.run())
        assert one.outcome == DONE and one.reply == expected(one.prompt, tokens)
        return one

    def submit(self, prompt, tokens: int = 3, marks: tuple[int, ...] | None = None) -> Request:
        one = Request(list(prompt), tokens, marks=marks)
        self.scheduler.submit(one)
        return one

    @property
    def lengths(self) -> list[int]:
        return [len(entry.ids) for entry in self.cache.entries]


# --- How much is resumed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 12, 13, 14, 15, 16, 17, 18, 32, 33])
def test_sent_again_all_whole_pages_but_the_last_token_are_cached(page_size, length):
    house = House(page_size=page_size)
    first, again = house.run(TEXT[:length]), house.run(TEXT[:length])
    assert (first.resumed, again.resumed) == (0, (length - 1) // page_size * page_size)


@pytest.mark.parametrize("name", FORMS)
def test_at_least_one_token_is_left_to_run(name):
    """The whole prompt is kept, too, for longer ones; the prompt itself resumes before it."""
    house = House(name, FORMS[name], grain=4)
    house.run(TEXT[:8], marks=(4, 8))
    assert house.run(TEXT[:8]).resumed == 4 and house.run(TEXT[:9]).resumed == 8


@pytest.mark.parametrize("marks", [(1,), (3,), (4,), (5,), (7,), (8,), (3, 4, 5), (8, 9)])
@pytest.mark.parametrize("name", FORMS)
def test_a_mark_may_lie_inside_a_page_and_at_its_edges(name, marks):
    house = House(name, FORMS[name], grain=4)
    house.run(TEXT[:10], marks=marks)
    assert house.lengths == list(marks)
    for end in range(1, 11):
        resumed = house.run(TEXT[:end] + OTHER[:3], marks=()).resumed
        assert resumed == max((mark for mark in marks if mark <= end), default=0)


def test_without_pages_marks_are_as_far_apart_as_the_cache_says():
    house = House("window", context=2 * GRAIN + 64)
    assert [house.cache.marks(TEXT[:n]) for n in (1, GRAIN, GRAIN + 1, 2 * GRAIN + 9)] == [
        (),
        (),
        (GRAIN,),
        (2 * GRAIN,),
    ]
    house.run(TEXT[: GRAIN + 9])
    assert house.run(TEXT[: GRAIN + 1]).resumed == GRAIN


def test_it_begins_only_where_the_state_was_kept_though_the_pages_go_further():
    """32 positions are in pages; the state behind them is kept at 16 alone."""
    house = House(page_size=16)
    house.run(TEXT[:40], marks=(16,))
    assert house.run(TEXT[:32] + OTHER[:8]).resumed == 16
    assert house.run(TEXT[:13] + OTHER[:3]).resumed == 0


# --- What is shared, what is copied -------------------------------------------------------------------------------------


def words_of(house: House, positions: range, pages: list[int]) -> bytes:
    """The words of positions in these pages."""
    b = house.backend
    entries, slots = np.divmod(np.array(positions), b.positions)
    return b.arena.words[house.step.in_pages(np.array(pages)[entries] * b.page_words, slots, b.positions)].tobytes()


def test_full_pages_are_shared_and_stay_as_they_were():
    """A hit of 32 and 8 new tokens, pages of 16: only positions from 32 on are written, to pages of its own."""
    house = House(page_size=16)
    house.run(TEXT[:40])
    (entry,) = house.cache.entries
    shared, before = list(entry.begin.pages), words_of(house, range(32), entry.begin.pages)
    one = house.submit(TEXT[:32] + OTHER[:8])
    house.scheduler.admit()
    assert one.resumed == 32 and one.place.pages == shared and house.backend.pool.holders[shared].tolist() == [2, 2]
    list(house.scheduler.round())
    assert one.place.pages[:2] == shared and not set(one.place.pages[2:]) & set(shared)
    list(house.scheduler.run())
    assert one.reply == expected(one.prompt, 3) and words_of(house, range(32), shared) == before


def test_a_partial_last_page_is_copied_and_the_kept_one_stays_as_it_was():
    """Three streams go on inside the third page: each in its own copy."""
    house = House(page_size=4)
    house.run(TEXT[:10], marks=(9,))
    (entry,) = house.cache.entries
    last, before = entry.begin.pages[2], words_of(house, range(12), entry.begin.pages)
    ones = [house.submit(TEXT[:9] + OTHER[n : n + 5], marks=()) for n in range(3)]
    house.scheduler.admit()
    assert house.backend.pool.holders[last] == 1 and len({r.place.pages[2] for r in ones} | {last}) == 4
    list(house.scheduler.run())
    assert all(r.resumed == 9 and r.reply == expected(r.prompt, 3) for r in ones)
    assert words_of(house, range(12), entry.begin.pages) == before


def test_the_stream_that_was_kept_goes_on_in_the_page_that_is_shared_in_part():
    """It writes behind the kept positions, which others copy."""
    house = House(page_size=8, rows=3)
    one = house.submit(TEXT[:20], marks=(3,))
    list(house.scheduler.round())
    other = house.submit(TEXT[:3] + OTHER[:9], marks=())
    list(house.scheduler.run())
    assert other.resumed == 3 and [r.reply for r in (one, other)] == [expected(r.prompt, 3) for r in (one, other)]


# --- Keys ---------------------------------------------------------------------------------------------------------------


def test_keys_are_hashes_of_whole_token_ids():
    """No bits of an id are cut off."""
    house = House()
    small, large = [65, 1, 2, 3, 9], [321, 257, 258, 259, 9]
    house.run(small)
    assert house.cache.find(large) is None
    assert not set(house.cache.keys(small)[1:]) & set(house.cache.keys(large))
    assert not set(house.cache.keys(small)[1:]) & set(house.cache.keys([i + 2**32 for i in small]))


def test_a_key_says_all_that_went_before():
    cache = House().cache
    keys, other = cache.keys(TEXT[:12]), cache.keys(OTHER[:4] + TEXT[4:12])
    assert len(keys) == 4 and keys[0] == other[0] and not set(keys[1:]) & set(other[1:])
    assert cache.keys(TEXT[:15]) == keys


def test_where_all_keys_are_equal_tokens_decide(monkeypatch):
    monkeypatch.setattr(PromptCache, "hashed", lambda self, data: b"one for all")
    house = House()
    for prompt in (TEXT[:13], OTHER[:13], TEXT[:9], TEXT[:5] + OTHER[:20]):
        house.run(prompt)
    assert len(house.cache.table) == 1
    assert house.run(TEXT[:8] + OTHER[:8]).resumed == 8 and house.run(OTHER[:4] + TEXT[:9]).resumed == 0
    assert house.run(OTHER[:12] + TEXT[:9]).resumed == 12
    house.cache.clear()
    assert not house.cache.table and house.backend.pool.free == house.backend.pool.count


@pytest.mark.parametrize("rows", [1, 3, 16, 20, 40])
def test_keys_and_what_is_hit_are_the_same_whatever_the_chunks(rows):
    """Pages of 16, a prompt of 40."""
    house = House(page_size=16, rows=rows)
    house.run(TEXT[:40])
    (entry,) = house.cache.entries
    assert list(entry.ids) == TEXT[:32] and list(house.cache.table) == [house.cache.keys(TEXT[:40])[-1]]
    assert house.run(TEXT[:32] + OTHER[:1]).resumed == 32


def test_of_entries_that_fit_the_longest_is_found():
    house = House()
    house.run(TEXT[:20], marks=(4, 5, 6, 11, 16))
    found = [house.cache.look_up(TEXT[:n] + OTHER[:9], n) for n in range(1, 21)]
    lengths = [len(entry.ids) if entry else 0 for entry in found]
    assert lengths == [0, 0, 0, 4, 5, *[6] * 5, *[11] * 5, *[16] * 5]


# --- Which go first -----------------------------------------------------------------------------------------------------


def test_the_one_used_longest_ago_goes_first():
    house = House()
    for n in range(3):
        house.run(TEXT[50 * n : 50 * n + 5])
    assert house.run(TEXT[:5]).resumed == 4
    assert house.cache.evict()
    assert [entry.ids[0] for entry in house.cache.entries] == [TEXT[100], TEXT[0]]
    house.cache.evict()
    assert [entry.ids[0] for entry in house.cache.entries] == [TEXT[0]] and house.cache.evicted == 2


def test_reading_what_is_kept_already_keeps_it_once_and_makes_it_the_newest():
    """Two that are equal in one pass, and one later."""
    house = House()
    ones = [house.submit(TEXT[:9]) for _ in range(2)]
    house.submit(OTHER[:9])
    list(house.scheduler.run())
    assert all(one.reply == expected(one.prompt, 3) for one in ones)
    assert house.lengths == [8, 8] and house.cache.kept == 2
    assert house.cache.keep(TEXT[:8], read(house, 8)) and house.cache.kept == 2
    assert [entry.ids[0] for entry in house.cache.entries] == [OTHER[0], TEXT[0]]


def test_a_pinned_entry_is_not_evicted_until_it_is_let_go():
    house = House()
    house.run(TEXT[:9])
    found = house.cache.find(TEXT[:9])
    house.cache.find(TEXT[:9])
    for pins in (2, 1):
        assert found.pins == pins and not house.cache.evict()
        house.cache.unpin(found)
    assert house.cache.evict() and not house.cache.evict() and not house.cache.entries


def test_older_entries_make_room_for_a_newer_one_and_without_any_it_is_refused():
    house = House(pool=10, streams=1)
    for n in range(4):
        house.run(TEXT[50 * n : 50 * n + 9], 1)
    assert house.cache.evicted == 2 and house.lengths == [8, 8] and house.cache.refused == 0
    house = House(pool=4, streams=1)
    house.run(TEXT[:9], 1)
    assert house.cache.refused == 1 and not house.cache.entries and house.backend.pool.free == 4


def test_a_page_that_is_taken_again_is_no_longer_hit():
    """Pool of a stream and a half: A ends, B takes its pages, A again; then two equal ones in one step."""
    house = House(pool=6, streams=2)
    assert [house.run(prompt, 4).resumed for prompt in (TEXT[:9], OTHER[:9], TEXT[:9], TEXT[:9])] == [0, 0, 0, 8]
    twins = [house.submit(OTHER[:5], 2) for _ in range(2)]
    list(house.scheduler.run())
    assert all(one.reply == expected(one.prompt, 2) for one in twins)
    house.cache.clear()
    assert house.backend.pool.free == 6


def test_entries_on_the_host_take_no_more_than_they_may():
    house = House("window", grain=4)
    house.run(TEXT[:9])
    nbytes = house.cache.held_bytes
    house.cache.host_bytes = 2 * nbytes
    for prompt in (OTHER[:9], TEXT[50:59]):
        house.run(prompt)
    assert house.cache.held_bytes == 2 * nbytes and house.cache.evicted == 1 and house.run(TEXT[:9]).resumed == 0


def test_one_that_the_host_never_has_room_for_drives_nobody_out():
    house = House("window", grain=4)
    house.run(TEXT[:5])
    house.cache.host_bytes = house.cache.held_bytes
    house.run(OTHER[:40])
    assert house.lengths == [4] and (house.cache.evicted, house.cache.refused) == (0, 1)
    found = house.cache.find(TEXT[:9])
    house.run(OTHER[:5])
    assert house.cache.entries == [found] and house.cache.refused == 2


# --- Only prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_once_a_reply_is_written_a_stream_is_no_beginning(name):
    house = House(name, FORMS[name], grain=4)
    one = house.submit(TEXT[:9], 6, marks=())
    list(house.scheduler.round())
    free = house.backend.pool.free if house.backend.paged else None
    kept = one.place.save()
    with pytest.raises(BackendError, match="positions from 9 on were generated"):
        house.backend.snapshot(one.place)
    with pytest.raises(BackendError, match="prompt cache: positions from 9 on were generated"):
        house.cache.add([*one.prompt, *one.reply][: kept.positions], kept)
    assert not house.cache.entries and (free is None or house.backend.pool.free == free)
    list(house.scheduler.run())


def test_a_reply_s_positions_are_read_again_as_prompt_in_the_next_turn():
    house = House()
    one = house.run(TEXT[:9], 8)
    turn = house.run([*one.prompt, *one.reply, *OTHER[:3]])
    assert turn.resumed == 8 and house.lengths == [8, 16]


def test_a_beginning_of_other_tokens_or_another_shape_or_backend_is_refused():
    house, there = House(), House()
    there.run(TEXT[:9])
    prefix = there.cache.entries[0].begin
    kept = save_prefix(prefix)
    other = CacheShape(SHAPE.attention_layers, SHAPE.linear_layers, 4, 2, 128, 2, 8, 16, 40, 3)
    made = backend_class("window")(other, Sizes(64))
    for cache, ids, begin, words in (
        (house.cache, TEXT[:7], kept, "8 positions are not those of 7 tokens"),
        (house.cache, TEXT[:8], prefix, "lies in another backend; save it, and restore it here"),
        (PromptCache(made), TEXT[:8], kept, "window: kept state: rows"),
    ):
        with pytest.raises(BackendError, match=words):
            cache.add(ids, begin)
        assert not cache.entries
    there.cache.clear()
    with pytest.raises(BackendError, match="was released; take another snapshot"):
        there.cache.add(TEXT[:8], prefix)


# --- From one form to another -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", FORMS)
@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("length", [7, 8])
def test_what_was_kept_in_one_form_of_cache_is_resumed_in_another(source, target, length):
    here, there = House(source, FORMS[source], grain=4), House(target, FORMS[target] * 3, grain=3)
    here.run(TEXT[:9], marks=(length,))
    begin = here.cache.entries[0].begin
    kept = save_prefix(begin) if isinstance(begin, Prefix) else begin
    here.cache.clear()
    here.backend.arena.words[:] = 0xFFFFFFFF
    assert there.cache.add(TEXT[:length], kept)
    assert there.run(TEXT[:length] + OTHER[:6]).resumed == length
    there.cache.clear()
    assert not there.backend.streams


def test_beside_pages_a_window_takes_and_gives_beginnings():
    """The first stream of mixed keeps a window: it resumes from pages, and the others from what it read."""
    house = House("mixed", grain=4)
    first, second = house.submit(TEXT[:9]), house.submit(OTHER[:9])
    list(house.scheduler.run())
    assert first.reply == expected(first.prompt, 3) and second.reply == expected(second.prompt, 3)
    kinds = [type(entry.begin).__name__ for entry in house.cache.entries]
    assert kinds == ["Kept", "Prefix"]
    in_window, on_pages = house.submit(OTHER[:9]), house.submit(TEXT[:9])
    house.scheduler.admit()
    assert house.backend.has_window(in_window.place) and not house.backend.has_window(on_pages.place)
    list(house.scheduler.run())
    assert [one.resumed for one in (in_window, on_pages)] == [8, 8]
    assert [one.reply for one in (in_window, on_pages)] == [expected(OTHER[:9], 3), expected(TEXT[:9], 3)]


def test_a_snapshot_that_finds_no_run_takes_nothing():
    house = House(pool=4, streams=1)
    one = house.submit(TEXT[:9], 1, marks=())
    house.scheduler.admit()
    house.step("prompt", {one: one.chunk(8)})
    holders = house.backend.pool.holders.tolist()
    with pytest.raises(NoRoom, match="release a stream or a prefix"):
        house.backend.snapshot(one.place)
    assert house.backend.pool.holders.tolist() == holders and not house.backend.prefixes
    house.backend.check()


# --- What goes wrong leaves nothing held --------------------------------------------------------------------------------


def read(house: House, rows: int) -> object:
    """An open stream that has read so many tokens of the text."""
    one = Request(TEXT[: rows + 1], 1)
    one.stream = house.backend.open(40)
    house.step("prompt", {one: one.chunk(rows)})
    return one.stream


@pytest.mark.parametrize("count", [0, 3, 5])
def test_other_tokens_than_the_stream_s_are_refused_and_nothing_is_held(count):
    house = House()
    stream = read(house, 4)
    with pytest.raises(BackendError, match=f"4 positions are not those of {count} tokens"):
        house.cache.keep(TEXT[:count], stream)
    house.backend.check()
    assert not house.backend.prefixes and not house.cache.entries


@pytest.mark.parametrize("name", FORMS)
def test_the_same_beginning_twice_is_one_entry(name):
    house = House(name, FORMS[name])
    stream = read(house, 8)
    for _ in range(2):
        assert house.cache.add(TEXT[:8], house.backend.snapshot(stream))
    assert house.lengths == [8] and house.cache.kept == 1
    house.cache.clear()
    stream.release()
    house.backend.check()
    assert not house.backend.paged or house.backend.pool.available == house.backend.pool.count


@pytest.mark.parametrize("name", ["paged", "mixed"])
def test_a_copy_that_fails_leaves_no_prefix_and_no_stream(name, monkeypatch):
    house = House(name)
    first, stream = house.backend.open(4), read(house, 6)
    prefix = house.backend.snapshot(stream)
    taken = house.backend.pool.available

    def fails(*_):
        raise OSError("no copy")

    monkeypatch.setattr(house.backend.arena, "copy", fails)
    for call in (lambda: house.backend.snapshot(stream), lambda: house.backend.open(20, prefix)):
        with pytest.raises(OSError, match="no copy"):
            call()
        house.backend.check()
        assert house.backend.pool.available == taken and house.backend.prefixes == [prefix]
    assert len(house.backend.streams) == 2 and first.slot == 0


def test_a_stream_in_a_pass_is_not_kept():
    """Its recurrent state may have moved, and its positions have not."""
    house = House()
    stream = read(house, 4)
    house.backend.batch("prompt", [(stream, 2)])
    with pytest.raises(BackendError, match="is in a pass; finish it first"):
        house.backend.snapshot(stream)
    assert not house.backend.prefixes


# --- The books ----------------------------------------------------------------------------------------------------------


def free_and_taken(house: House, stream) -> None:
    house.backend.free_slots.append(stream.slot)


def lost_place(house: House, stream) -> None:
    house.backend.free_slots.pop()


def other_place(house: House, stream) -> None:
    stream.number = 2


def past_capacity(house: House, stream) -> None:
    stream.committed = stream.capacity + 1


def no_page_for_what_is_written(house: House, stream) -> None:
    house.backend.pool.give_back(stream.pages[-1:])
    stream.claim.left += 1
    house.backend.pages[stream.slot * house.backend.columns + len(stream.pages) - 1] = house.backend.null_page
    stream.pages.pop()


def claim_of_nobody(house: House, stream) -> None:
    house.backend.pool.claim(1)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (free_and_taken, "places free"),
        (lost_place, "places free"),
        (other_place, "does not belong to place 0"),
        (past_capacity, "does not belong to place 0|takes 1, "),
        (no_page_for_what_is_written, "holds 1 pages and was promised 9 more; its capacity takes 10, 2 are written"),
        (claim_of_nobody, "2 claims, 1 of open streams"),
    ],
)
def test_check_finds_what_is_wrong_with_places_and_promises(plant, words):
    house = House()
    stream = read(house, 6)
    house.backend.check()
    plant(house, stream)
    with pytest.raises(PoolBroken, match=words):
        house.backend.check()
