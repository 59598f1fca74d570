"""Tests of tutorial 05's exercises."""

from kernels_numba.machine import checked
from refengine.device import open_device
from refengine.lab.exercises import expect
from refengine.lab.page_walk import PageWalk
from refengine.verify.attention_bits import Bench, Case, Heads


def test_straddling_whole_items(answers):
    """1. straddling: as the engine's own addresses say"""
    for page_size in (16, 20, 48, 64):
        found = answers.straddling(384, page_size)
        expect(f"straddling(384, {page_size})", list(found), PageWalk(page_size, 384).straddling)


def test_straddling_at_the_end(answers):
    """1. straddling: a text that ends inside an item"""
    for positions, page_size, wanted in ((48, 48, []), (49, 48, [1]), (200, 40, [1, 2, 3]), (1, 1, [])):
        expect(f"straddling({positions}, {page_size})", list(answers.straddling(positions, page_size)), wanted)


def count(positions: int, page_size: int) -> int:
    """What checked mode counts in the kernel's last block."""
    bench = Bench(Heads(heads=1, kv_heads=1, head_dim=256), positions, open_device("cpu"))
    backend = bench.build(Case("paged", page_size, "prompt", positions, 0))
    batch = backend.batch("prompt", [(backend.open(), positions)])
    q = backend.store(0, bench.rows, bench.norms, bench.rope, batch)
    with checked(sample=lambda grid: (grid[0] - 1, 0, 0)) as report:
        backend.attend(0, q, batch)
    return report.counters["lookups"]


def test_lookups_by_hand(answers):
    """2. block_lookups: the tutorial's numbers"""
    for page_size, wanted in ((48, 5_120), (64, 3_072), (16, 9_216)):
        expect(f"block_lookups(192, {page_size})", answers.block_lookups(192, page_size), wanted)


def test_lookups_as_counted(answers):
    """2. block_lookups: texts that fill no item, as the kernel counts"""
    for positions, page_size in ((50, 48), (70, 20), (130, 128)):
        found = answers.block_lookups(positions, page_size)
        expect(f"block_lookups({positions}, {page_size})", found, count(positions, page_size))


def test_rows_of(answers):
    """3. rows_of: where the rows are"""
    table = [4, 2, 0, 3]
    for page_size, positions in ((48, list(range(192))), (10, [0, 3, 9, 10, 29, 39])):
        wanted = [table[p // page_size] * page_size + p % page_size for p in positions]
        found = answers.rows_of(positions, page_size, table.__getitem__)
        expect(f"rows_of({positions[:3]}..., {page_size})", list(found), wanted)


class Asked:
    """A page table whose every entry is page 7; notes what is asked for."""

    def __init__(self):
        self.entries = []

    def __call__(self, entry):
        self.entries.append(int(entry))
        return 7


def test_rows_of_asks_once(answers):
    """3. rows_of: the entries that it asks for"""
    for page_size, positions, wanted in ((48, range(100), [0, 1, 2]), (10, [5, 6, 31, 32, 39, 75], [0, 3, 7])):
        asked = Asked()
        answers.rows_of(list(positions), page_size, asked)
        expect(f"the entries asked for, pages of {page_size}", asked.entries, wanted)
