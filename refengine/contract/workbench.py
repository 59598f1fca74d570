"""Buffers between guards, for one run of a kernel: what it must write is poison before, the rest must stay as it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from refengine.device import Device

Array = np.ndarray
BF16 = np.dtype(ml_dtypes.bfloat16)
GUARD_BYTES = 256
"""Before and after every buffer; keeps the alignment that 16-byte copies need."""


@dataclass(frozen=True)
class Poison:
    """What memory holds that a kernel may not read. word: twice a bf16, once a float32 or int32."""

    name: str
    word: int

    def filled(self, nbytes: int) -> Array:
        """uint8 [nbytes], a multiple of 2, the word over and over."""
        words = np.full(-(-nbytes // 4), self.word, np.uint32)
        return words.view(np.uint8)[:nbytes]


NAN = Poison("NaN", 0xFFB5FFB5)
"""A NaN that no kernel writes: what still holds it was not written."""
HUGE = Poison("0x7F bytes", 0x7F7F7F7F)
"""The largest finite bf16 but for one bit; as an index, out of every array."""
ONES = Poison("ones", 0x3F803F80)
"""A value like any other: a key that is read but masked by a finite number shows."""
POISONS = (NAN, HUGE, ONES)


@dataclass
class Buffer:
    """One array of a run. memory: its bytes on the device, ``guard`` of them before and after it. before: the same on the host.

    may_write: bool, of the array's shape; None: all of it must be written; False: nothing may be; True: anything may. shown:
    whether what was written is an output.
    """

    name: str
    array: Any
    memory: Any
    guard: int
    before: Array
    may_write: Array | bool | None
    shown: bool


class Workbench:
    """The buffers of one run on a device. Kernels get ``input``, ``output``, ``changed`` and ``scratch`` arrays; ``finish``
    holds them against what they were."""

    def __init__(self, device: Device, poison: Poison):
        self.device, self.poison = device, poison
        self.buffers: list[Buffer] = []
        self.results: dict[str, Array] = {}

    def input(self, name: str, array: Array) -> Any:
        """An array that nobody may write."""
        return self._place(name, array, False)

    def output(self, name: str, shape: tuple[int, ...], dtype: Any = BF16, written: Array | None = None) -> Any:
        """An array of which every element must be written; written: bool of its shape, only those and no others."""
        return self._place(name, self._poisoned(shape, dtype), written)

    def changed(self, name: str, array: Array, may_write: Array) -> Any:
        """An array that is read and written; may_write: bool of its shape, the elements that must be written."""
        return self._place(name, array, may_write)

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        """Room that holds nothing before or after; its guards must hold."""
        return self._place(name, self._poisoned(shape, dtype), True)

    def watch(self, name: str, array: Any, may_write: Array) -> None:
        """An array of somebody else's, from now on; may_write as in ``changed``. It is no output."""
        before = self.device.get(array).reshape(-1).view(np.uint8).copy()
        memory = array.reshape(-1).view(np.uint8)
        self.buffers.append(Buffer(name, array, memory, 0, before, may_write, shown=False))

    def result(self, name: str, array: Any) -> None:
        """An output that lies elsewhere: its bits count, its place is not held."""
        self.results[name] = self.device.get(array).copy()

    def _poisoned(self, shape: tuple[int, ...], dtype: Any) -> Array:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.poison.filled(nbytes).view(dtype).reshape(shape)

    def _place(self, name: str, array: Array, may_write: Array | bool | None) -> Any:
        guard = self.poison.filled(GUARD_BYTES)
        inside = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        pad = self.poison.filled(-len(inside) % 16)
        before = np.concatenate([guard, inside, pad, guard])
        memory = self.device.put(before.copy())
        view = memory[GUARD_BYTES : GUARD_BYTES + len(inside)].view(array.dtype).reshape(array.shape)
        shown = may_write is None or isinstance(may_write, np.ndarray)
        self.buffers.append(Buffer(name, view, memory, GUARD_BYTES, before, may_write, shown))
        return view

    def finish(self) -> tuple[dict[str, Array], list[str]]:
        """(outputs by name, what was done that may not be)."""
        self.device.synchronize()
        outputs, problems = dict(self.results), []
        for buffer in self.buffers:
            after = self.device.get(buffer.memory)
            problems += self._problems(buffer, after)
            if buffer.shown:
                outputs[buffer.name] = written(inner(after, buffer), buffer.may_write)
        return outputs, problems

    def _problems(self, buffer: Buffer, after: Array) -> list[str]:
        """What is wrong with one buffer after the run."""
        start, end = buffer.guard, buffer.guard + buffer.array.nbytes
        outside = (after[:start] != buffer.before[:start]).any() or (after[end:] != buffer.before[end:]).any()
        problems = [f"{buffer.name}: written past an end"] if outside else []
        if buffer.may_write is True:
            return problems
        old, new = (bits(inner(memory, buffer)) for memory in (buffer.before, after))
        allowed = np.broadcast_to(np.asarray(buffer.may_write is None) | np.asarray(buffer.may_write, bool), old.shape)
        if (stray := (old != new) & ~allowed).any():
            problems.append(f"{buffer.name}{first(stray)}: written, and may not be ({int(stray.sum())} elements)")
        empty = self.unwritten(new, allowed)
        if self.poison is NAN and empty.any():
            problems.append(f"{buffer.name}{first(empty)}: not written ({int(empty.sum())} elements)")
        return problems

    def unwritten(self, new: Array, allowed: Array) -> Array:
        """Where poison still lies that must be gone; bytes are judged by the four of a word, for one alone may be as it was."""
        if new.dtype != np.uint8:
            return allowed & (new == self.poison_bits(new.dtype))
        still = new == self.poison.filled(new.nbytes).reshape(new.shape)
        words = (still | ~allowed).reshape(-1, 4).all(axis=1)
        return allowed & np.repeat(words, 4).reshape(new.shape)

    def poison_bits(self, dtype: Any) -> Any:
        """The poison as the bits of one element."""
        return self._poisoned((1,), f"u{np.dtype(dtype).itemsize}")[0]


def written(array: Array, may_write: Array | bool | None) -> Array:
    """A copy of what a kernel wrote, zero elsewhere."""
    out = array.copy()
    if isinstance(may_write, np.ndarray):
        out[~may_write] = 0
    return out


def inner(memory: Array, buffer: Buffer) -> Array:
    """The array inside its guards, of bytes on the host."""
    return (
        memory[buffer.guard : buffer.guard + buffer.array.nbytes].view(buffer.array.dtype).reshape(buffer.array.shape)
    )


def bits(array: Array) -> Array:
    """The same memory as unsigned integers."""
    return array.view(f"u{array.dtype.itemsize}")


def first(where: Array) -> list[int]:
    """The first index at which a mask is true."""
    return [int(i) for i in np.argwhere(where)[0]]


# --- Inputs, the same on every platform -----------------------------------------------------------------------------


def drawn(seed: tuple[int, ...], *shape: int, scale: float = 1.0) -> Array:
    """Numbers about as wide as unit normal ones, float32: sums of integers, so that no platform rounds them otherwise."""
    rng = np.random.default_rng(seed)
    total = rng.integers(-(2**11), 2**11, (4, *shape), dtype=np.int32).sum(axis=0)
    return total.astype(np.float32) * np.float32(2.0**-11) * np.float32(0.875 * scale)


def drawn_bf16(seed: tuple[int, ...], *shape: int, scale: float = 1.0) -> Array:
    """The same in bf16."""
    return drawn(seed, *shape, scale=scale).astype(BF16)
