"""The n-gram branch: its hash is the published one, a prompt may be cut anywhere, and its sums are what float64 makes of them."""

from __future__ import annotations

import numpy as np
import pytest
from buffers import Output, assert_same_bits, normal

from kernels_numba.embedding import embed
from kernels_numba.flash_next import ngram
from kernels_numba.flash_next.hyper import norm_streams
from kernels_numba.machine import KernelError
from kernels_numba.matmul import matmul
from kernels_numba.streams import COLUMNS, FIRST, ROWS
from refengine.registry.ngrams import ngram_hash, primes_from, splitmix64

END, VOCABULARY, HEADS, WIDTH, S, D, EPS = 7, 320, 4, 8, 4, 96, 1e-6
HASH = ngram_hash(VOCABULARY, 3, HEADS // 2, 50, 16, 1234)
RNG = np.random.default_rng(4)
TABLE = normal(RNG, HASH.rows, WIDTH)
KEY, VALUE = normal(RNG, S * D, HEADS * WIDTH, scale=0.2), normal(RNG, D, HEADS * WIDTH, scale=0.2)
GAINS = [(1 + 0.3 * RNG.standard_normal(S * D)).astype(np.float32) for _ in range(3)]
WEIGHT = normal(RNG, S * D, 4, scale=0.5)
LENGTH = 31


def test_the_hash_of_flash_next_is_the_published_one() -> None:
    found = ngram_hash(248_320, 3, 8, 20_000_000, 128, 1234)
    assert found.rows == 320_001_536 and len(found.sizes) == 16 and found.sizes[0] == 20_000_003
    assert found.multipliers == (23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071)
    assert all(m % 2 for m in found.multipliers) and max(found.multipliers) * 248_319 < 2**63
    assert found.offsets == tuple(np.cumsum([0, *found.sizes])[:-1])


def test_the_hash_of_another_layer_has_other_primes_and_multipliers() -> None:
    first, second = (ngram_hash(VOCABULARY, 3, 2, 50, 16, 1234, index) for index in (0, 1))
    assert first.sizes + second.sizes == primes_from(50, 8) == (53, 59, 61, 67, 71, 73, 79, 83)
    assert not set(first.multipliers) & set(second.multipliers)


def test_splitmix64_gives_its_known_first_number() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF


# --- The branch over one stream ---------------------------------------------------------------------------------------


class Stream:
    """What one stream keeps, and the branch over its next rows."""

    def __init__(self) -> None:
        self.tokens, self.tails = np.zeros(2, np.int32), np.zeros(9 * S * D, TABLE.dtype)

    def pass_over(self, ids: np.ndarray, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows of the table, h with the branch added); what is kept moves on."""
        streams, runs = np.zeros((1, COLUMNS), np.int64), np.zeros(1, np.int64)
        streams[0, [FIRST, ROWS]] = 0, len(ids)
        owners, h, out = np.zeros(len(ids), np.int32), h.copy(), Output((len(ids), HEADS), np.int32)
        hashed = (np.array(numbers, np.uint64) for numbers in (HASH.multipliers, HASH.sizes, HASH.offsets))
        ngram.ngram_rows(out.array, ids, self.tokens, *hashed, owners, streams, runs, END)
        gated, normed = self.gated(out.checked(), h)
        ngram.ngram_conv(h, gated, normed, self.tails, WEIGHT, owners, streams, runs)
        ngram.commit_tokens(self.tokens, ids, streams, runs)
        ngram.commit_tails(self.tails, normed, streams, runs)
        return out.array, h

    def gated(self, rows: np.ndarray, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        e, keys, values, gated, normed = (Output((len(h), n)) for n in (HEADS * WIDTH, S * D, D, S * D, S * D))
        embed(e.array.reshape(-1, WIDTH), TABLE, rows.reshape(-1))
        matmul(keys.array, e.checked(), KEY)
        matmul(values.array, e.array, VALUE)
        ngram.ngram_gate(gated.array, keys.checked(), values.checked(), h, GAINS[0], GAINS[1], EPS)
        norm_streams(normed.array, gated.checked(), GAINS[2], S, EPS)
        return gated.array, normed.checked()


def prompt() -> tuple[np.ndarray, np.ndarray]:
    """(ids, h): a text with three ends, two of them neighbours."""
    rng = np.random.default_rng(6)
    ids = rng.integers(0, VOCABULARY, LENGTH).astype(np.int32)
    ids[[5, 6, 17]] = END
    return ids, normal(rng, LENGTH, S * D)


def rows_of_texts(ids: np.ndarray) -> list[list[int]]:
    """The hash of every row of a whole prompt: before its text's first token there are ends."""
    out, text = [], [END, END]
    for token in ids.tolist():
        text.append(token)
        mixed = 0
        for back, multiplier in enumerate(HASH.multipliers):
            mixed ^= text[-1 - back] * multiplier
            if back == 1:
                heads = [mixed] * (HEADS // 2)
        heads += [mixed] * (HEADS // 2)
        out.append([o + x % n for o, x, n in zip(HASH.offsets, heads, HASH.sizes, strict=True)])
        if token == END:
            text = [END, END]
    return out


def branch_in_float64(rows: np.ndarray, h: np.ndarray) -> np.ndarray:
    e = TABLE.astype(np.float64)[rows].reshape(len(h), -1)

    def normed(x, gain):
        split = x.reshape(len(x), S, D)
        return split / np.sqrt((split**2).mean(-1, keepdims=True) + EPS) * gain.reshape(S, D)

    d = (normed(e @ KEY.astype(np.float64).T, GAINS[0]) * normed(h, GAINS[1])).sum(-1) / np.sqrt(D)
    gate = 1 / (1 + np.exp(-np.sign(d) * np.sqrt(np.abs(d))))
    gated = (gate[..., None] * (e @ VALUE.astype(np.float64).T)[:, None]).reshape(len(h), -1)
    x = np.concatenate([np.zeros((9, S * D)), normed(gated, GAINS[2]).reshape(len(h), -1)])
    total = sum(x[3 * t : 3 * t + len(h)] * WEIGHT[:, t].astype(np.float64) for t in range(4))
    return h + gated + total / (1 + np.exp(-total))


def test_the_hash_sees_no_token_before_an_end() -> None:
    ids, h = prompt()
    assert Stream().pass_over(ids, h)[0].tolist() == rows_of_texts(ids)


def test_the_branch_is_what_float64_makes_of_it() -> None:
    ids, h = prompt()
    rows, found = Stream().pass_over(ids, h)
    added, wanted = found.astype(np.float64) - h.astype(np.float64), branch_in_float64(rows, h.astype(np.float64))
    wanted = wanted - h.astype(np.float64)
    assert np.linalg.norm(added - wanted) <= 2.0**-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize("pieces", [[1] * LENGTH, [2, 9, 10, 10], [30, 1]], ids=["ones", "some", "two"])
def test_a_prompt_may_be_cut_anywhere(pieces: list[int]) -> None:
    ids, h = prompt()
    rows, whole = Stream().pass_over(ids, h)
    stream, start = Stream(), 0
    for length in pieces:
        part = slice(start, start + length)
        own_rows, own = stream.pass_over(ids[part], h[part])
        assert own_rows.tolist() == rows[part].tolist()
        assert_same_bits(own, whole[part])
        start += length
    assert start == LENGTH


def test_a_nan_in_the_streams_reaches_the_values() -> None:
    h = normal(RNG, 2, S * D)
    h[0, 3] = np.nan
    gated, _ = Stream().gated(np.zeros((2, HEADS), np.int32), h)
    assert np.isnan(gated[0, :D].astype(np.float32)).all() and np.isfinite(gated[0, D:].astype(np.float32)).all()


def test_shapes_that_do_not_fit_are_named() -> None:
    numbers, words = np.zeros(4, np.uint64), np.zeros(4, np.int64)
    with pytest.raises(
        KernelError, match=r"^ngram_rows: 4 heads, sizes \(4,\), offsets \(4,\), multipliers \(4,\): wants"
    ):
        ngram.ngram_rows(np.zeros((2, 4), np.int32), words, words, numbers, numbers, numbers, words, words, words, END)
    with pytest.raises(KernelError, match=r"^ngram_gate: streams \(2, 9\), a row \(2, 4\)"):
        ngram.ngram_gate(None, None, normal(RNG, 2, 4), normal(RNG, 2, 9), None, None, EPS)
