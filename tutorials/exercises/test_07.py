"""Tests of tutorial 07's exercises."""

import numpy as np

from kernels_numba.scalar_plan import slices
from refengine.lab.exercises import expect


def test_slices_of_the_tutorial(answers):
    """1. slices_of: 257 rows"""
    expect("slices_of(257, 128)", answers.slices_of(257, 128), [(0, 128), (128, 128), (256, 1)])
    expect("slices_of(6, 4)", answers.slices_of(6, 4), [(0, 4), (4, 2)])


def test_slices_at_the_edges(answers):
    """1. slices_of: as the engine's, around the edges"""
    for rows in (0, 1, 127, 128, 129, 255, 256, 4096):
        expect(f"slices_of({rows}, 128)", answers.slices_of(rows, 128), list(slices(rows, 128)))


def test_lands_in_its_own_place(answers):
    """2. lands: rows that there is room for"""
    for slot, row in ((0, 0), (0, 127), (1, 3)):
        expect(f"lands({slot}, {row}, 2, 128)", answers.lands(slot, row, 2, 128), (slot, row))


def test_lands_elsewhere(answers):
    """2. lands: rows that there is no room for"""
    calls = (((0, 4, 2, 4), (1, 0)), ((1, 5, 2, 4), None), ((0, 255, 3, 128), (1, 127)), ((0, 256, 3, 128), (2, 0)))
    for call, wanted in (*calls, ((2, 128, 3, 128), None)):
        expect(f"lands{call}", answers.lands(*call), wanted)


def kernel_of(streams, most, calls):
    """A kernel whose rows depend on all that they are given; notes how many rows it had in each launch."""

    def kernel(q, owners, depths, given):
        calls.append(len(q))
        if len(q) > most:
            raise AssertionError(f"the kernel was given {len(q)} rows, it takes {most}")
        if given is not streams:
            raise AssertionError("the kernel was not given the stream table as it stands")
        return q + 1000 * given[owners[: len(q)], :1] + depths[: len(q), None]

    return kernel


def run(answers, sizes, most):
    """(found, wanted, rows of each launch) of streams of so many rows."""
    owners, depths = np.repeat(np.arange(len(sizes)), sizes), np.concatenate([np.arange(n) + 1 for n in sizes])
    streams = 7 + np.arange(len(sizes) * 13).reshape(-1, 13)
    q = np.random.default_rng(0).integers(0, 100, (len(owners), 2))
    calls = []
    found = answers.in_slices(kernel_of(streams, most, calls), q, owners, depths, streams, most)
    return found, q + 1000 * streams[owners, :1] + depths[:, None], calls


def test_in_slices_of_one_stream(answers):
    """3. in_slices: one stream of 257 rows"""
    found, wanted, calls = run(answers, [257], 128)
    expect("in_slices(...)", found, wanted)
    expect("the rows of each launch", calls, [128, 128, 1])


def test_in_slices_of_several_streams(answers):
    """3. in_slices: streams that begin inside a slice"""
    for sizes in ([100, 100], [3, 200, 1, 90], [128, 120]):
        found, wanted, _ = run(answers, sizes, 128)
        expect(f"in_slices of streams of {sizes} rows", found, wanted)
