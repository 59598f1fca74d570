"""argmax: the largest logit of a row, the lowest id among equals; NaN never wins."""

from __future__ import annotations

import numpy as np
import pytest
from buffers import Output
from mutants import mutate

from kernels_numba import sampling


def picked(logits: np.ndarray, kernel=sampling.argmax_kernel) -> list[int]:
    ids = Output((len(logits),), np.int32)
    kernel.at()[len(logits), sampling.THREADS](ids.array, logits)
    return ids.checked().tolist()


@pytest.mark.parametrize("vocabulary", [1, 31, 320, 1024, 5001])
def test_the_largest_logit_wins(vocabulary: int) -> None:
    logits = np.random.default_rng(vocabulary).standard_normal((7, vocabulary), np.float32)
    assert picked(logits) == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("places", [(0, 1), (31, 32), (5, 1029), (1023, 1024), (2047, 3000), (7, 8, 9)])
def test_ties_go_to_the_lower_id(places: tuple[int, ...]) -> None:
    logits = np.random.default_rng(0).standard_normal((2, 3001), np.float32)
    logits[:, places] = 9.0
    assert picked(logits) == [min(places)] * 2


def test_all_equal_gives_the_first() -> None:
    assert picked(np.stack([np.full(320, x, np.float32) for x in (0.0, -np.inf, np.inf)])) == [0, 0, 0]


def test_nan_never_wins() -> None:
    logits = np.zeros((3, 320), np.float32)
    logits[0, 17], logits[1, :-1], logits[2] = np.nan, np.nan, np.nan
    assert picked(logits) == [0, 319, -1]


def test_red_when_ties_go_to_the_higher_id() -> None:
    mutant = mutate(sampling.argmax_kernel, "other_name < name", "other_name > name")
    logits = np.zeros((1, 320), np.float32)
    assert picked(logits, mutant) != picked(logits)
