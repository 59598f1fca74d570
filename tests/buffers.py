"""Arrays for tests: outputs between guards, filled with a NaN that no kernel writes; inputs in bf16."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BF16 = np.dtype(ml_dtypes.bfloat16)
GUARD = 64
"""Elements before and after an output; a multiple of 4 keeps it aligned."""
FILL = np.uint16(0xFFB5)
"""Twice in a float32 or int32; a NaN, unlike any that the machine makes."""


class Output:
    """An output of the given shape; ``array`` is what the kernel gets."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype | type = BF16):
        size = int(np.prod(shape)) + 2 * GUARD
        self.memory = np.full(size * np.dtype(dtype).itemsize // 2, FILL)
        self.array = self.memory.view(dtype)[GUARD : size - GUARD].reshape(shape)

    def checked(self) -> NDArray:
        """The output: every element written, the guards as they were."""
        halves = self.array.dtype.itemsize // 2
        inside = self.memory[GUARD * halves : len(self.memory) - GUARD * halves].reshape(-1, halves)
        assert not (inside == FILL).all(axis=1).any(), "elements were not written"
        outside = np.concatenate([self.memory[: GUARD * halves], self.memory[len(self.memory) - GUARD * halves :]])
        assert (outside == FILL).all(), "written past an end"
        return self.array


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> NDArray:
    """Normal numbers in bf16."""
    return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(BF16)


def assert_same_bits(found: NDArray, wanted: NDArray) -> None:
    """Equal as bytes: NaN equals NaN, -0 is not 0."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    unequal = np.argwhere(bits(found) != bits(wanted))
    assert not len(unequal), f"{len(unequal)} elements differ, first at {unequal[0].tolist()}"


def bits(array: NDArray) -> NDArray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
