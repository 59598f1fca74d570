"""The three kinds of array a kernel sees on the CPU machine: global, shared and local."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import emulate
from .emulate import LaneError
from .lanes import CASTS, Int, LaneTypeError, Mask, Value, add, converted, mult, uniform

cast_int64 = CASTS["int64"]
GARBAGE = 0xFF
"""Every byte of memory that nothing has written: NaN as a float, -1 as an integer."""


def flat_index(shape: tuple[int, ...], index: Any) -> Value:
    """The element number of an index (an integer or one a dimension) in a C-contiguous array."""
    if not isinstance(index, tuple):
        index = (index,)
    if len(index) != len(shape):
        raise LaneTypeError(f"an array of {len(shape)} dimensions takes as many indices, not {len(index)}")
    out = cast_int64(whole(index[0]))
    for size, i in zip(shape[1:], index[1:]):
        out = add(mult(out, Int(size)), cast_int64(whole(i)))
    return out


def whole(index: Value) -> Value:
    """The index, which is an integer."""
    if index.dtype.kind not in "iu":
        raise LaneTypeError(f"an index is an integer, not {index.dtype}")
    return index


class GlobalArray:
    """A C-contiguous array in global memory. shape: of the array as the kernel sees it."""

    def __init__(self, name: str, data: np.ndarray):
        self.name, self.flat = name, data.reshape(-1)
        self.dtype = data.dtype
        self.shape = tuple(map(Int, data.shape))

    def check(self, index: Any) -> None:
        """Each index of a many-dimensional element in its own range: the flat index alone would hide a column too many."""
        if not isinstance(index, tuple):
            return
        for axis, (i, size) in enumerate(zip(index, self.shape)):
            if i.ndim == 0 and not 0 <= i < size:
                raise LaneError(0, int(i), int(size), f"global array {self.name} (axis {axis})")

    def load(self, launch: Any, mask: Mask, index: Any) -> Value:
        self.check(index)
        at = flat_index(self.shape, index)
        if at.ndim == 0:
            if not 0 <= at < self.flat.size:
                raise LaneError(0, int(at), self.flat.size, f"global array {self.name}")
            return uniform(self.flat[at])
        return emulate.load_global(launch.active(mask), self.flat, at)

    def store(self, launch: Any, mask: Mask, index: Any, value: Value) -> None:
        self.check(index)
        at = launch.full(flat_index(self.shape, index))
        emulate.store_global(launch.active(mask), self.flat, at, launch.full(value, self.dtype))


class SharedArray:
    """One array a block in shared memory; rows: [blocks, elements]."""

    def __init__(self, rows: np.ndarray, shape: tuple[int, ...]):
        self.rows, self.dtype, self.shape = rows, rows.dtype, tuple(map(Int, shape))

    def load(self, launch: Any, mask: Mask, index: Any) -> Value:
        at = launch.full(flat_index(self.shape, index))
        return emulate.load_shared(launch.active(mask), self.rows, at)

    def store(self, launch: Any, mask: Mask, index: Any, value: Value) -> None:
        at = launch.full(flat_index(self.shape, index))
        emulate.store_shared(launch.active(mask), self.rows, at, launch.full(value, self.dtype))


class LocalArray:
    """A thread's own array of one or two dimensions; data: [*shape, lanes]; rows: its elements' lanes, as lists.

    site: where its function declares it; None for a row of another.
    """

    def __init__(self, data: np.ndarray, site: str | None = None):
        self.data, self.dtype, self.site = data, data.dtype, site
        self.shape = tuple(map(Int, data.shape[:-1]))
        self.rows = list(data) if data.ndim == 2 else [list(plane) for plane in data]

    def one_element(self, index: Any) -> bool:
        """Whether the index is the same element for every lane, and inside: the usual case, decided fast."""
        if index.__class__ is Int:
            return len(self.shape) == 1 and 0 <= index < self.shape[0]
        if index.__class__ is not tuple or len(index) != len(self.shape):
            return False
        return all(i.__class__ is Int and 0 <= i < size for i, size in zip(index, self.shape))

    def peek(self, launch: Any, mask: Mask, index: Any) -> Any:
        """The element as it stands: a view, for an operand that is used up at once. A row is an array again."""
        if self.one_element(index):
            return self.data[index]
        many = index if isinstance(index, tuple) else (index,)
        if all(i.ndim == 0 for i in many):
            self.check(many)
            found = self.data[index]
            return found if len(many) == len(self.shape) else LocalArray(found)
        if len(many) != len(self.shape):
            raise LaneTypeError("a row of a local array is taken by an index that is the same for every thread")
        return self.data[self.per_lane(launch, mask, many)]

    def load(self, launch: Any, mask: Mask, index: Any) -> Any:
        found = self.peek(launch, mask, index)
        return found.copy() if isinstance(found, np.ndarray) else found

    def store(self, launch: Any, mask: Mask, index: Any, value: Value) -> None:
        if mask is True and self.one_element(index):
            put(mask, self.data[index], value)
            return
        many = index if isinstance(index, tuple) else (index,)
        if len(many) != len(self.shape):
            raise LaneTypeError(f"a local array of {len(self.shape)} dimensions takes as many indices, not {len(many)}")
        if not all(i.ndim == 0 for i in many):
            at = self.per_lane(launch, mask, many)
            active = launch.active(mask)
            self.data[tuple(a[active] for a in at)] = launch.full(value, self.dtype)[active]
            return
        self.check(many)
        put(mask, self.data[index], value)

    def check(self, many: tuple[Value, ...]) -> None:
        for axis, (i, size) in enumerate(zip(many, self.shape)):
            whole(i)
            if not 0 <= i < size:
                raise LaneError(0, int(i), int(size), f"local array (axis {axis})")

    def per_lane(self, launch: Any, mask: Mask, many: tuple[Value, ...]) -> tuple[np.ndarray, ...]:
        """Fancy index for an index that differs between lanes; inactive lanes look at element 0."""
        active = launch.active(mask)
        out = []
        for axis, (i, size) in enumerate(zip(many, self.shape)):
            i = launch.full(whole(i))
            bad = active & ((i < 0) | (i >= size))
            if bad.any():
                lane = int(bad.argmax())
                raise LaneError(lane, int(i[lane]), int(size), f"local array (axis {axis})")
            out.append(np.where(active, i, 0))
        return (*out, launch.lane_numbers)


def load(launch: Any, mask: Mask, array: Any, index: Any) -> Value:
    """``array[index]`` in a kernel."""
    return array.load(launch, mask, index)


def peek(launch: Any, mask: Mask, array: Any, index: Any) -> Value:
    """``array[index]`` as an operand that is used up at once."""
    return array.peek(launch, mask, index) if isinstance(array, LocalArray) else array.load(launch, mask, index)


def put(mask: Mask, row: np.ndarray, value: Value) -> None:
    """Write one element of a local array; row: its lanes."""
    if value.dtype is not row.dtype:
        value = converted(value, row.dtype)
    if mask is True:
        row[:] = value
    else:
        np.copyto(row, value, where=mask, casting="unsafe")


def store(launch: Any, mask: Mask, array: Any, index: Any, value: Value) -> None:
    """``array[index] = value`` in a kernel."""
    array.store(launch, mask, index, value)
