"""What tests of Gated DeltaNet share: weights, runs among runs of nobody, stream tables, rows. HK, HV: the heads of all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from buffers import BF16, assert_same_bits, normal

from kernels_numba.streams import COLUMNS, FIRST, ROWS

HK, HV = 2, 4
C = (2 * HK + HV) * 128
COLUMNS_MIXED = C + HV * 128 + 2 * HV
STATE, HISTORY, GAP = HV * 128 * 128, 3 * C // 2, 12
"""Words of a state, of a history, and of nobody's before each run and after the last."""
STRIDE = GAP + STATE + HISTORY
NOBODY = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True)
class Weights:
    """taps: bf16 [C, 4]; a_log, dt_bias: float32 [HV]; gain: float32 [128]."""

    taps: np.ndarray
    a_log: np.ndarray
    dt_bias: np.ndarray
    gain: np.ndarray


def weights() -> Weights:
    rng = np.random.default_rng(1)
    a_log = np.log(rng.uniform(0.1, 16, HV)).astype(np.float32)
    dt_bias, gain = rng.uniform(-4, 0, HV).astype(np.float32), rng.uniform(0.5, 1.5, 128).astype(np.float32)
    return Weights(normal(rng, C, 4, scale=0.5), a_log, dt_bias, gain)


@dataclass(frozen=True)
class Layer:
    """One layer's part of an arena: runs, each a state and a history, among NaN that nobody owns.

    memory: uint32 [words]. slots: int32 [S], which run is whose.
    """

    memory: np.ndarray
    slots: np.ndarray

    @property
    def runs(self) -> np.ndarray:
        """int64 [S], as kernels take it."""
        return GAP + self.slots.astype(np.int64) * STRIDE

    @property
    def state_words(self) -> np.ndarray:
        """float32 [words], as kernels take it."""
        return self.memory.view(np.float32)

    @property
    def history_words(self) -> np.ndarray:
        """bf16 [2 · words], as kernels take it."""
        return self.memory[STATE:].view(BF16)

    @property
    def states(self) -> np.ndarray:
        """float32 [slots, HV, 128, 128], the same memory."""
        return self.by_slot()[:, GAP : GAP + STATE].view(np.float32).reshape(-1, HV, 128, 128)

    @property
    def histories(self) -> np.ndarray:
        """bf16 [slots, 3, C], the same memory."""
        return self.by_slot()[:, GAP + STATE :].view(BF16).reshape(-1, 3, C)

    def by_slot(self) -> np.ndarray:
        return self.memory[:-GAP].reshape(-1, STRIDE)

    def copy(self) -> Layer:
        return replace(self, memory=self.memory.copy())

    def stream(self, s: int) -> Layer:
        """One of the streams, among the same runs."""
        return replace(self.copy(), slots=self.slots[s : s + 1].copy())

    def alone(self, s: int) -> Layer:
        """One of the streams, with no other run."""
        made = Layer(np.full(STRIDE + GAP, NOBODY), np.zeros(1, np.int32))
        made.by_slot()[:] = self.by_slot()[self.slots[s]]
        return made

    def checked(self, before: Layer) -> Layer:
        """Every word that is no stream's as it was."""
        nobodys = np.ones(len(self.memory), bool)
        for run in self.runs:
            nobodys[run : run + STATE + HISTORY] = False
        assert_same_bits(self.memory[nobodys], before.memory[nobodys])
        return self


def layer(streams: int, seed: int = 0) -> Layer:
    """Runs in no order, two of nobody among them."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(streams + 2)[:streams].astype(np.int32)
    made = Layer(np.full((streams + 2) * STRIDE + GAP, NOBODY), slots)
    made.states[slots] = rng.standard_normal((streams, HV, 128, 128), np.float32) * np.float32(0.3)
    made.histories[slots] = normal(rng, streams, 3, C)
    return made


def table(*rows: int, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(streams, rows) of streams side by side."""
    streams = np.full((len(rows), COLUMNS), -7, np.int64)
    streams[:, ROWS], streams[:, FIRST] = rows, first + np.concatenate([[0], np.cumsum(rows)[:-1]])
    return streams, np.repeat(np.arange(len(rows)), rows).astype(np.int32)


def mixed_rows(rows: int, seed: int = 0) -> np.ndarray:
    return normal(np.random.default_rng([rows, seed]), rows, COLUMNS_MIXED)


@dataclass(frozen=True)
class Rows:
    """What the delta rule takes. qkv: bf16 [W, C]; decay, beta: float32 [W, HV]."""

    qkv: np.ndarray
    decay: np.ndarray
    beta: np.ndarray

    def cut(self, first: int, stop: int) -> Rows:
        return Rows(*(np.ascontiguousarray(a[first:stop]) for a in (self.qkv, self.decay, self.beta)))

    def heads(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k, v by head."""
        parts = np.split(self.qkv.reshape(len(self.qkv), -1, 128), [HK, 2 * HK], axis=1)
        return parts[0], parts[1], parts[2]


def delta_rows(rows: int, seed: int = 0) -> Rows:
    """q and k of length 1 / sqrt(128) and 1, as the convolution leaves them."""
    rng = np.random.default_rng([rows, seed])
    heads = rng.standard_normal((rows, C // 128, 128))
    heads[:, : 2 * HK] /= np.linalg.norm(heads[:, : 2 * HK], axis=-1, keepdims=True)
    heads[:, :HK] /= np.sqrt(128)
    decay, beta = rng.uniform(0.5, 1.0, (rows, HV)), rng.uniform(0.0, 1.0, (rows, HV))
    return Rows(heads.reshape(rows, C).astype(BF16), decay.astype(np.float32), beta.astype(np.float32))
