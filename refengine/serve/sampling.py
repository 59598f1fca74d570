"""How a request's tokens are chosen: its parameters, checked, and the arrays that a launch over many requests takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kernels_numba.sampling import argmax, sample
from refengine.device import Device
from refengine.errors import UserError

LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Sampling:
    """What decides a request's draws, besides its logits and where a token stands.

    temperature: 0 is greedy, and nothing else matters. top_k: 0 is off. top_p: 1 is off. seed: 64 bits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self, flags: bool = False) -> None:
        """Raise UserError for a value that cannot be used, by its key, or as a flag of the command line."""
        wrong = [
            ("temperature", not_from(self.temperature, 0, LARGEST), "a finite number from 0; 0 is greedy"),
            ("top_k", not_whole(self.top_k, 2**31), "a whole number from 0 to 2147483647; 0 is off"),
            ("top_p", not_from(self.top_p, 0, 1), "a number from 0 to 1; 1 is off"),
            ("seed", not_whole(self.seed, 2**64), "a whole number from 0 to 18446744073709551615"),
        ]
        for key, is_wrong, wanted in wrong:
            if is_wrong:
                name = f"--{key.replace('_', '-')}" if flags else key
                raise UserError(f"{name} {getattr(self, key)!r}: use {wanted}")


GREEDY = Sampling()


def not_from(value: Any, low: float, high: float) -> bool:
    """Whether a value is no number from low to high; NaN is none."""
    return isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high


def not_whole(value: Any, end: int) -> bool:
    """Whether a value is no whole number from 0 to below ``end``."""
    return isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < end


class SamplingRows(NamedTuple):
    """The parameters of a launch's rows, on its device, in the order in which ``sample`` takes them. Each [rows]: seeds
    uint64; positions int64; temperatures float32; top_ks int32; top_ps float32."""

    seeds: Any
    positions: Any
    temperatures: Any
    top_ks: Any
    top_ps: Any


def sampling_rows(samplings: Sequence[Sampling], positions: Sequence[int], device: Device) -> SamplingRows:
    """The arrays for rows of these parameters. positions: where each row's drawn token will stand in its stream, from 0."""
    return SamplingRows(
        device.put(np.array([s.seed for s in samplings], np.uint64)),
        device.put(np.array(positions, np.int64)),
        device.put(np.array([s.temperature for s in samplings], np.float32)),
        device.put(np.array([s.top_k for s in samplings], np.int32)),
        device.put(np.array([s.top_p for s in samplings], np.float32)),
    )


def draw(logits: Any, samplings: Sequence[Sampling], positions: Sequence[int], device: Device) -> list[int]:
    """A token for each row. logits: float32 [rows, vocabulary], on the device; samplings, positions: one a row."""
    ids = device.xp.empty(logits.shape[0], dtype=np.int32)
    sample(ids, logits, *sampling_rows(samplings, positions, device))
    return [int(i) for i in device.get(ids)]


def choose(logits: Any, samplings: Sequence[Sampling], positions: Sequence[int], device: Device) -> list[int]:
    """As ``draw``; where every row is greedy the largest logit of each, ties to the lower id, without a draw."""
    if any(sampling.temperature for sampling in samplings):
        return draw(logits, samplings, positions, device)
    ids = device.xp.empty(logits.shape[0], dtype=np.int32)
    argmax(ids, logits)
    return [int(i) for i in device.get(ids)]
