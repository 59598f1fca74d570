"""argmax: the largest logit of a row, the lowest id among equals; NaN never wins.

Draws: tokens come with their softmax probability, from what top-k and top-p keep, by seed and position alone; where one
token is left it is argmax's; and they are the exact ids that float64 gives.
"""

from __future__ import annotations

import numpy as np
import pytest
from buffers import Output
from mutants import mutate

from kernels_numba import sampling
from kernels_numba.machine import checked
from refengine.contract.entries.sampling import Sample
from refengine.contract.workbench import NAN as POISON
from refengine.device import open_device
from refengine.errors import UserError
from refengine.serve.sampling import Sampling, draw, sampling_rows
from refengine.verify.sampling_oracle import candidates

CPU = open_device("cpu")
INF, NAN = np.inf, np.nan


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


# --- Draws ------------------------------------------------------------------------------------------------------------


def drawn(logits: np.ndarray, sampling_of_row, positions=None, kernel=sampling.sample_kernel) -> list[int]:
    """A token a row. sampling_of_row: one for all rows, or one each. positions: 0, 1, ... if none are given."""
    logits = np.atleast_2d(logits)
    many = [sampling_of_row] * len(logits) if isinstance(sampling_of_row, Sampling) else sampling_of_row
    ids = Output((len(logits),), np.int32)
    rows = sampling_rows(many, range(len(logits)) if positions is None else positions, CPU)
    kernel.at()[len(logits), sampling.THREADS](ids.array, logits, *rows)
    return ids.checked().tolist()


def normal_logits(seed: int, rows: int, vocabulary: int, width: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, vocabulary), np.float32) * np.float32(width)


def tokens_of(logits, one: Sampling, rows: int = 400) -> set[int]:
    """What a row's positions draw; with some hundred draws of a few tokens, what may be drawn."""
    return set(drawn(np.tile(np.array(logits, np.float32), (rows, 1)), one))


def softmax(z: np.ndarray) -> np.ndarray:
    weights = np.exp(z - z.max())
    return weights / weights.sum()


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's statistic; nothing may come that has no probability."""
    possible = probabilities > 0
    assert not counts[~possible].any()
    expected = counts.sum() * probabilities[possible]
    assert expected.min() > 5
    return float(((counts[possible] - expected) ** 2 / expected).sum())


LOGITS = np.array([1.5, -0.5, 0.25, 1.0, 0.0, 0.75, -1.0, 2.0, 0.5], np.float32)
CHI_SQUARE_8 = 26.12
"""Eight degrees of freedom exceed this once in a thousand times; fewer, less often."""
FORMS = [
    (Sampling(temperature=1.0, seed=11), LOGITS, 9),
    (Sampling(temperature=0.5, seed=2**40 + 7), LOGITS / 0.5, 9),
    (Sampling(temperature=2.0, top_k=4, seed=3), LOGITS / 2.0, 4),
    (Sampling(temperature=1.0, top_p=0.8, seed=4), LOGITS, 5),
    (Sampling(temperature=1.0, top_k=4, top_p=0.8, seed=5), LOGITS, 3),
]
"""(sampling, scaled logits, how many tokens it keeps): the largest 4 of LOGITS have 0.77 of all, 5 have 0.85; of the 4, 2
have 0.71 and 3 have 0.87."""


@pytest.mark.parametrize(("one", "z", "kept"), FORMS, ids=["plain", "sharp", "top-k", "top-p", "both"])
def test_tokens_come_with_their_probability(one: Sampling, z: np.ndarray, kept: int) -> None:
    """Many positions under one seed, against softmax over the largest ``kept``."""
    counts = np.bincount(drawn(np.tile(LOGITS, (4000, 1)), one), minlength=9)
    among = z >= np.sort(z)[-kept]
    assert chi_square(counts, softmax(np.where(among, z, -INF).astype(np.float64))) < CHI_SQUARE_8


def test_tokens_come_with_their_probability_for_many_seeds() -> None:
    """One position, many seeds, several of a thread's turns."""
    logits = np.full((3000, 5000), -INF, np.float32)
    places = [3, 1027, 2051, 4000, 4999, 31, 32, 0, 1023]
    logits[:, places] = LOGITS
    ids = drawn(logits, [Sampling(temperature=1.0, seed=seed) for seed in range(3000)], [77] * 3000)
    counts = np.array([ids.count(place) for place in places])
    assert counts.sum() == 3000 and chi_square(counts, softmax(LOGITS.astype(np.float64))) < CHI_SQUARE_8


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" + gumbel(seed, position, int32(i))", ""),
        ("gumbel(seed, position, int32(i))", "gumbel(seed, position, int32(i)) * float32(0.8)"),
        ("gumbel(seed, position, int32(i))", "gumbel(seed, position // 4, int32(i))"),
        ("else (logit - best) / temperature", "else (logit - best) * float32(1.2) / temperature"),
    ],
    ids=["no noise", "less noise", "positions share noise", "sharper"],
)
def test_red_when_tokens_come_otherwise(old: str, new: str) -> None:
    one, z, _ = FORMS[0]
    mutant = mutate(sampling.sample_kernel, old, new)
    counts = np.bincount(drawn(np.tile(LOGITS, (4000, 1)), one, kernel=mutant), minlength=9)
    assert chi_square(counts, softmax(z.astype(np.float64))) > CHI_SQUARE_8


# --- Where one token is left ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [1, 31, 1024, 5001])
@pytest.mark.parametrize(
    "one",
    [
        Sampling(),
        Sampling(temperature=0.0, top_k=3, top_p=0.5, seed=9),
        Sampling(temperature=1e-30),
        Sampling(temperature=1e-7),
        Sampling(temperature=50.0, top_k=1),
        Sampling(temperature=50.0, top_p=1e-9),
        Sampling(temperature=50.0, top_p=0.0),
    ],
    ids=["greedy", "greedy, the rest unused", "near zero", "small", "top-k 1", "top-p tiny", "top-p 0"],
)
def test_one_token_left_is_argmax(vocabulary: int, one: Sampling) -> None:
    logits = normal_logits(vocabulary, 12, vocabulary, width=8.0)
    assert drawn(logits, one) == picked(logits)


def test_greedy_rows_are_argmax_whatever_they_hold() -> None:
    logits = np.zeros((6, 320), np.float32)
    logits[0, 17], logits[1, :-1], logits[2], logits[3], logits[4] = NAN, NAN, NAN, -INF, INF
    logits[5] = -0.0
    logits[5, 9] = 0.0
    assert drawn(logits, Sampling()) == picked(logits) == [0, 319, -1, 0, 0, 0]


def test_neighbouring_floats_are_told_apart() -> None:
    """Top-k 1 and a tiny top-p find the larger of two logits that are one step apart, of either sign."""
    for value in (1.0, -1.0, 3e38, 1e-45, -1e-45, -3e38):
        logits = np.full(70, value, np.float32)
        logits[33] = np.nextafter(np.float32(value), np.float32(INF))
        for one in (Sampling(temperature=1e30, top_k=1), Sampling(temperature=1e30, top_p=1e-9)):
            assert drawn(np.tile(logits, (5, 1)), one) == [33] * 5


# --- What top-k and top-p keep ----------------------------------------------------------------------------------------


def test_what_ties_with_the_kth_stays() -> None:
    logits = [5.0, 4.0, 4.0, 4.0, 3.0]
    assert [tokens_of(logits, Sampling(temperature=9.0, top_k=k)) for k in (1, 2, 3, 4, 5)] == [
        {0}, {0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3, 4},
    ]  # fmt: skip


def test_zeros_of_both_signs_tie() -> None:
    assert tokens_of([-0.0, 0.0, -1.0], Sampling(temperature=9.0, top_k=1)) == {0, 1}


def test_top_k_past_the_vocabulary_is_off() -> None:
    logits = normal_logits(1, 50, 100)
    wanted = drawn(logits, Sampling(temperature=1.0))
    assert all(drawn(logits, Sampling(temperature=1.0, top_k=k)) == wanted for k in (100, 101, 2**31 - 1))


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    """Of 1/2, 1/4, 1/8 and 1/8, the first reaches 1/2, two 3/4; the third and fourth tie."""
    logits = np.log(np.array([0.125, 0.5, 0.125, 0.25]))
    kept = [tokens_of(logits, Sampling(temperature=1.0, top_p=p)) for p in (0.49, 0.51, 0.74, 0.76, 0.99, 1.0)]
    assert kept == [{1}, {1, 3}, {1, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}]


def test_top_p_is_of_what_top_k_keeps() -> None:
    """Of 1/2 and 1/4, the first has 2/3; of all, 1/2."""
    logits = np.log(np.array([0.125, 0.5, 0.125, 0.25]))
    assert tokens_of(logits, Sampling(temperature=1.0, top_k=2, top_p=0.6)) == {1}
    assert tokens_of(logits, Sampling(temperature=1.0, top_p=0.6)) == {1, 3}


def test_temperature_comes_before_top_p() -> None:
    """At temperature 2 the probabilities 16/22, 4/22, 1/22 and 1/22 become 4/8, 2/8, 1/8 and 1/8."""
    logits = np.log(np.array([1.0, 16.0, 1.0, 4.0]))
    assert tokens_of(logits, Sampling(temperature=1.0, top_p=0.7)) == {1}
    assert tokens_of(logits, Sampling(temperature=2.0, top_p=0.7)) == {1, 3}


# --- Keyed by seed and position ---------------------------------------------------------------------------------------

MIXED = [
    Sampling(temperature=1.0, seed=1), Sampling(), Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=2**63),
    Sampling(temperature=5.0, top_p=0.5, seed=1), Sampling(temperature=2.0, top_k=300, seed=7),
]  # fmt: skip
POSITIONS = [4, 9, 2**35, 4, 100_000]


def test_a_row_draws_alone_what_it_draws_in_a_batch() -> None:
    logits = normal_logits(5, 5, 3001)
    together = drawn(logits, MIXED, POSITIONS)
    assert [drawn(logits[i], MIXED[i], [POSITIONS[i]])[0] for i in range(5)] == together
    turned = [drawn(np.roll(logits, n, 0), [*MIXED[-n:], *MIXED[:-n]], np.roll(POSITIONS, n)) for n in (1, 3)]
    assert [np.roll(row, -n).tolist() for row, n in zip(turned, (1, 3))] == [together] * 2


def test_seed_and_position_decide() -> None:
    """The same row under other seeds or at other positions draws others; under the same ones the same."""
    logits = np.zeros((40, 5000), np.float32)
    at = drawn(logits, Sampling(temperature=1.0, seed=3))
    by = drawn(logits, [Sampling(temperature=1.0, seed=seed) for seed in range(40)], [3] * 40)
    assert len(set(at)) > 35 and len(set(by)) > 35 and at[3] == by[3]
    assert drawn(logits, Sampling(temperature=1.0, seed=3)) == at
    assert drawn(logits, Sampling(temperature=1.0, seed=3 + 2**32)) != at


# --- Edges ------------------------------------------------------------------------------------------------------------


def test_rows_with_nothing_to_draw_give_none() -> None:
    logits = np.full((3, 1500), NAN, np.float32)
    logits[1], logits[2, ::2] = -INF, -INF
    for one in (Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=5), Sampling(temperature=1.0, top_p=0.5)):
        assert drawn(logits, one) == [-1] * 3


def test_nan_and_minus_infinity_are_never_drawn() -> None:
    logits = np.full(2100, -INF, np.float32)
    logits[[5, 1030, 2099]], logits[7::50] = (-90.0, -89.0, -91.0), NAN
    for one in (Sampling(temperature=9.0), Sampling(temperature=9.0, top_k=99), Sampling(temperature=9.0, top_p=0.999)):
        assert tokens_of(logits, one, 100) == {5, 1030, 2099}


def test_infinite_logits_share_all_probability() -> None:
    logits = [1.0, INF, 3e38, INF, NAN]
    for one in (Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=4, top_p=0.9)):
        assert tokens_of(logits, one, 60) == {1, 3}


def test_logits_far_apart_do_not_overflow() -> None:
    logits = np.array([-3e38, 3e38, -3e38, 2.9e38], np.float32)
    assert tokens_of(logits, Sampling(temperature=1e-3, top_p=0.9), 20) == {1}


def test_a_vocabulary_of_one() -> None:
    assert tokens_of([-7.0], Sampling(temperature=1.0, top_k=1, top_p=0.5), 20) == {0}


@pytest.mark.parametrize("vocabulary", [2, 33, 1023, 1025, 2048, 5001, 248_320])
def test_ids_are_exact(vocabulary: int) -> None:
    rows = 3 if vocabulary == 248_320 else 5
    logits, some = normal_logits(vocabulary, rows, vocabulary, 2.0), MIXED[:rows]
    for token, row, one, position in zip(drawn(logits, some, POSITIONS[:rows]), logits, some, POSITIONS):
        wanted = candidates(row, one.seed, position, np.float32(one.temperature), one.top_k, np.float32(one.top_p))
        assert [token] == wanted.tolist()


def test_the_contracts_cases_leave_no_choice() -> None:
    """Each row of its table has one candidate, so that its ids are exact; the largest vocabulary in full is left out."""
    entry = Sample()
    for case in [c for c in entry.cases(full=False) if c.vocabulary < 248_320]:
        _, bound = entry.exact(case, entry.inputs(case, POISON, 0))["ids"]
        assert (bound == 0.5).all()


def test_checked_mode_finds_nothing() -> None:
    logits = normal_logits(6, 5, 1100)
    plain = drawn(logits, MIXED, POSITIONS)
    with checked():
        assert drawn(logits, MIXED, POSITIONS) == plain


# --- Parameters of a request ------------------------------------------------------------------------------------------


def test_the_host_helper_draws() -> None:
    logits = normal_logits(5, 5, 3001)
    assert draw(logits, MIXED, POSITIONS, CPU) == drawn(logits, MIXED, POSITIONS)


def test_parameters_that_can_be_used() -> None:
    for one in (*MIXED, Sampling(1, 2**31 - 1, 0, 2**64 - 1), Sampling(temperature=3e38, top_p=1)):
        one.check()


@pytest.mark.parametrize(
    ("one", "key", "says"),
    [
        (Sampling(temperature=-0.1), "temperature", "-0.1: use a finite number from 0; 0 is greedy"),
        (Sampling(temperature=INF), "temperature", "inf: use a finite number from 0; 0 is greedy"),
        (Sampling(temperature=NAN), "temperature", "nan: use a finite number from 0; 0 is greedy"),
        (Sampling(temperature="hot"), "temperature", "'hot': use a finite number from 0; 0 is greedy"),
        (Sampling(top_k=-1), "top_k", "-1: use a whole number from 0 to 2147483647; 0 is off"),
        (Sampling(top_k=2**31), "top_k", "2147483648: use a whole number from 0 to 2147483647; 0 is off"),
        (Sampling(top_k=1.5), "top_k", "1.5: use a whole number from 0 to 2147483647; 0 is off"),
        (Sampling(top_p=1.01), "top_p", "1.01: use a number from 0 to 1; 1 is off"),
        (Sampling(top_p=NAN), "top_p", "nan: use a number from 0 to 1; 1 is off"),
        (Sampling(seed=-1), "seed", "-1: use a whole number from 0 to 18446744073709551615"),
        (Sampling(seed=True), "seed", "True: use a whole number from 0 to 18446744073709551615"),
    ],
)
def test_bad_parameters_are_named(one: Sampling, key: str, says: str) -> None:
    with pytest.raises(UserError) as by_key:
        one.check()
    with pytest.raises(UserError) as by_flag:
        one.check(flags=True)
    assert (str(by_key.value), str(by_flag.value)) == (f"{key} {says}", f"--{key.replace('_', '-')} {says}")


def test_rows_without_their_parameters_are_refused():
    logits = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match="parameters for 2 rows: one of each a row"):
        draw(logits, [Sampling(temperature=1.0)], [0], open_device("cpu"))
