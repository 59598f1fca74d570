"""Tests of tutorial 08's exercises."""

import numpy as np

from backends.attention import takes_scalar
from kernels_numba.streams import COLUMNS, ROWS, TABLE
from refengine.lab.exercises import expect, expect_bits


def test_fold_of_four(answers):
    """1. fold_lanes: four lanes by hand"""
    x = np.array([1, 2**-24, -1, 0], np.float32)
    expect_bits("fold_lanes([1, 2^-24, -1, 0])", answers.fold_lanes(x), np.float32(2**-24))


def test_fold_of_many(answers):
    """1. fold_lanes: 16 lanes, many times"""
    for number, x in enumerate(np.random.default_rng(8).random((50, 16), dtype=np.float32)):
        wanted = x
        for distance in (8, 4, 2, 1):  # all lanes at once, as shfl_xor gives them
            wanted = wanted + wanted[np.arange(16) ^ distance]
        expect_bits(f"fold_lanes of the random row {number}", answers.fold_lanes(x.copy()), wanted[0])


def test_tiles_never_change(answers):
    """2. path_of: in the mode "tiles" the phase decides"""
    for phase in ("prompt", "decode"):
        for pages in ([False], [True], [False, True]):
            expect(f'path_of("tiles", "{phase}", {pages})', answers.path_of("tiles", phase, pages), phase)


def test_paths_as_the_engine(answers):
    """2. path_of: all modes, as the engine chooses"""
    for mode in ("scalar-batch", "scalar-decode"):
        for phase in ("prompt", "decode"):
            for pages in ([False], [False, False], [True], [False, True], [True, False]):
                wanted = "scalar" if takes_scalar(mode, phase, streams(pages)) else phase
                expect(f'path_of("{mode}", "{phase}", {pages})', answers.path_of(mode, phase, pages), wanted)


def streams(pages):
    """A stream table with one row for each stream."""
    found = np.zeros((len(pages), COLUMNS), np.int64)
    found[:, ROWS], found[:, TABLE] = 1, [0 if paged else -1 for paged in pages]
    return found


def test_a_server_that_is_right(answers):
    """3. changed_by_company: nobody is changed, one result is NaN"""
    results = {"a": np.array([1.0, np.nan]), "b": np.array([2.0, 3.0])}
    found = answers.changed_by_company(lambda names: [results[name].copy() for name in names], ["a", "b"])
    expect('changed_by_company(serve, ["a", "b"])', found, [])


def test_a_server_with_the_fault(answers):
    """3. changed_by_company: those in windows are changed by one on pages"""

    def serve(names):
        score = np.float32(1) + np.float32(2**-20 if "pages" in names else 0)
        return [score.reshape(1) if name != "pages" else np.float32([1 + 2**-20]) for name in names]

    found = answers.changed_by_company(serve, ["window 1", "pages", "window 2"])
    expect("changed_by_company(serve, names)", list(found), ["window 1", "window 2"])


def test_signs_of_zero(answers):
    """3. changed_by_company: +0 becomes -0"""

    def serve(names):
        return [np.array([-0.0 if len(names) > 1 else 0.0]) for _ in names]

    expect('changed_by_company(serve, ["a", "b"])', list(answers.changed_by_company(serve, ["a", "b"])), ["a", "b"])
