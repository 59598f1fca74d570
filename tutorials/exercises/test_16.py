"""Tests of tutorial 16's exercises."""

import numpy as np

from backends.base import DECODE, PROMPT, Sizes
from backends.layout import Layout
from backends.paged import PagedBackend
from kernels_numba.machine import device
from refengine.device import open_device
from refengine.lab.exercises import expect
from refengine.verify.attention_bits import Bench, Case, Heads

FAR = 2**33
TOKENS, PAGE = 200, 48


def backend_of(answers):
    """A backend with packed tables."""

    class Packed(PagedBackend):
        name = "packed"
        layout = Layout("packed", straddles=True, page=None, locate=device(answers.locate_packed))

        def __init__(self, shape, sizes, xp=np):
            super().__init__(shape, sizes, xp)
            self.entries = -(-self.columns // 2)
            self.pages = np.full(sizes.streams * self.entries, self.null_page | self.null_page << 16, np.int32)

        def address(self, stream):
            return 0, stream.slot * self.entries

        def enter(self, stream, pages):
            for page in pages:
                answers.enter_packed(self.pages, stream.slot * self.entries, len(stream.pages), page)
                stream.pages.append(page)

    return Packed


def place(answers, pos, table, entries, base=0, ptok=48, page_words=1000):
    start, slot = answers.locate_packed(pos, base, table, ptok, np.array(entries, np.uint32).view(np.int32), page_words)
    return int(start), int(slot)


def test_locate_by_hand(answers):
    """1. locate_packed: pages 5, 7, 2 in two entries"""
    entries = [0, 5 | 7 << 16, 2]
    for pos, wanted in ((0, (5000, 0)), (47, (5000, 47)), (48, (7000, 0)), (95, (7000, 47)), (100, (2000, 4))):
        expect(f"the place of position {pos}", place(answers, pos, 1, entries), wanted)


def test_locate_large_ids(answers):
    """1. locate_packed: ids with the highest bit set"""
    entries = [40_000 | 65_535 << 16]
    expect("the place of position 0 in page 40,000", place(answers, 0, 0, entries), (40_000_000, 0))
    expect("the place of position 50 in page 65,535", place(answers, 50, 0, entries), (65_535_000, 2))


def test_locate_far_away(answers):
    """1. locate_packed: words beyond 32 bits"""
    found = place(answers, 50, 0, [3 | 60_000 << 16], base=FAR, page_words=262_144)
    expect("the place of position 50 in page 60,000", found, (FAR + 60_000 * 262_144, 2))


def test_enter_one_half(answers):
    """2. enter_packed: the other half stays"""
    pages = np.array([-1, 7 | 9 << 16, -1], np.int32)
    answers.enter_packed(pages, 1, 0, 50_000)
    expect("the entry after page 0 became 50,000", int(pages.view(np.uint32)[1]), 50_000 | 9 << 16)
    answers.enter_packed(pages, 1, 1, 40_000)
    expect("the entry after page 1 became 40,000", int(pages.view(np.uint32)[1]), 50_000 | 40_000 << 16)
    expect("the entries around it", [int(pages[0]), int(pages[2])], [-1, -1])


def test_the_backend_equals_the_window(answers):
    """2. enter_packed, locate_packed: the backend's attention is the window's, bit for bit"""
    bench = Bench(Heads(4, 1, 64), TOKENS, open_device("cpu"))
    for phase, rows, committed in ((PROMPT, 90, 70), (DECODE, 2, 190)):
        packed = backend_of(answers)(bench.heads.shape, Sizes(TOKENS, 1, PAGE, rows if phase == DECODE else 1, 3, 7))
        stream = packed.open()
        bench.store(packed, PROMPT, stream, committed)
        found = bench.store(packed, phase, stream, rows, attend=True)
        wanted = bench.attend(Case("window", PAGE, phase, rows, committed))
        same = bool((found.view(np.uint16) == wanted.view(np.uint16)).all())
        expect(f"{phase} of {rows} rows after {committed}: the same bits as the window", same, True)


def test_stray_writes(answers):
    """3. stray_writes: what changed and may not have"""
    before, after = np.zeros(6, np.float32), np.array([0, 1, 0, 2, 0, 3], np.float32)
    allowed = np.array([True, True, True, False, False, False])
    expect("stray_writes(before, after, allowed)", answers.stray_writes(before, after, allowed), np.array([3, 5]))


def test_stray_writes_by_bits(answers):
    """3. stray_writes: a NaN that stayed, one that changed, a zero that lost its sign"""
    before = np.array([0x7FC00000, 0x7FC00000, 0x80000000], np.uint32).view(np.float32)
    after = np.array([0x7FC00000, 0x7FC00001, 0x00000000], np.uint32).view(np.float32)
    found = answers.stray_writes(before, after, np.zeros(3, bool))
    expect("stray_writes of NaN, another NaN and -0", found, np.array([1, 2]))
