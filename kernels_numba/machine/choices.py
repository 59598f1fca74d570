"""Where lanes take different values: a variable assigned by some of them, the two sides of a conditional expression.

Numbers differ freely between lanes. An array does not: a variable that holds one means one array for all threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import GlobalArray, LocalArray, SharedArray
from .lanes import LaneTypeError, Mask, Value, common_type, without

ARRAYS = (GlobalArray, SharedArray, LocalArray)
Held = Any
"""What a variable holds: a Value, an array, a tuple of these; None before any lane has assigned it."""


def merge(mask: Mask, new: Held, old: Held, readers: Mask, gone: Mask) -> Held:
    """A variable after ``name = new`` under a mask: lanes outside keep the old value.

    readers: the lanes that may read it later, but for those that are gone.
    Raises LaneTypeError when the variable holds an array and a lane outside the mask would keep another one.
    """
    if mask is True or mask is readers or old is None:
        return new
    if isinstance(new, tuple) and isinstance(old, tuple) and len(new) == len(old):
        return tuple(merge(mask, n, o, readers, gone) for n, o in zip(new, old))
    if new is None or not numbers(new, old):
        if without(readers, mask, gone) is None:
            return new
        return one_array(new, old)
    return picked(mask, *alike(new, old))


def select(condition: Value, yes: Held, no: Held) -> Held:
    """``yes if condition else no``; a side is None where no lane takes it."""
    if yes is None or no is None:
        return no if yes is None else yes
    if isinstance(yes, tuple) and isinstance(no, tuple) and len(yes) == len(no):
        return tuple(select(condition, y, n) for y, n in zip(yes, no))
    if not numbers(yes, no):
        return one_array(yes, no)
    return picked(condition, *alike(yes, no))


def redeclared(mask: Mask, new: LocalArray, old: Held, readers: Mask, gone: Mask) -> Held:
    """A variable after its ``cuda.local.array`` under a mask: lanes that declare it again lose what it held, others do not."""
    if isinstance(old, LocalArray) and old.site == new.site and mask is not True:
        np.copyto(old.data, new.data, where=mask)
        return old
    return merge(mask, new, old, readers, gone)


def numbers(*held: Held) -> bool:
    """Whether all are numbers: lane arrays or scalars."""
    return all(hasattr(h, "astype") for h in held)


def alike(a: Value, b: Value) -> tuple[Value, Value]:
    """Two values in their common type."""
    if a.dtype == b.dtype:
        return a, b
    wide = common_type(a.dtype, b.dtype)
    return a.astype(wide), b.astype(wide)


def picked(condition: Value, yes: Value, no: Value) -> Value:
    """Each lane's own of two values of one type."""
    chosen: Any = np.where(condition, yes, no)
    return chosen.astype(yes.dtype, copy=False)


def one_array(new: Held, old: Held) -> Held:
    """The array that both are."""
    if isinstance(new, ARRAYS) and isinstance(old, ARRAYS):
        if same_memory(new, old):
            return old
        raise LaneTypeError("a variable holds one array for all threads: here some would have another one")
    raise LaneTypeError(f"one variable takes {named(old)} and {named(new)}: give each a name of its own")


def same_memory(a: Any, b: Any) -> bool:
    """Whether two arrays are the same elements."""
    first, second = memory(a), memory(b)
    return a.shape == b.shape and all(
        first.__array_interface__[key] == second.__array_interface__[key]
        for key in ("data", "shape", "typestr", "strides")
    )


def memory(array: Any) -> np.ndarray:
    if isinstance(array, LocalArray):
        return array.data
    return array.rows if isinstance(array, SharedArray) else array.flat


def named(held: Held) -> str:
    """What kind of thing a variable holds, in words."""
    if held is None:
        return "nothing"
    if isinstance(held, tuple):
        return f"a tuple of {len(held)}"
    return "an array" if isinstance(held, ARRAYS) else str(held.dtype)
