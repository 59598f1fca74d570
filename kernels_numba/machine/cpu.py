"""The CPU machine: a launch as lanes, many blocks at once.

A ``Launch`` is one batch of blocks: the thread's place as lane arrays, the memory a block has, the instructions. ``run``
cuts a grid into batches, calls the kernel's lock-step function for each, and turns what goes wrong into one line that names
kernel, file, line, block and thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from types import FrameType
from typing import Any

import numpy as np
from numba.core.types import Type

from . import arrays, choices, emulate
from .arrays import GARBAGE, GlobalArray, LocalArray, SharedArray
from .dialect import INSTRUCTIONS, Const, Global, Instruction, Same, Shared
from .errors import KernelError
from .frontend import Program
from .lane_loops import LaneLoop
from .lanes import CASTS, Int, LaneTypeError, Mask, Value, add, both, converted, gt, lt, uniform
from .liveness import names_read
from .lockstep import translate

cast_int64 = CASTS["int64"]
LANES = 16384
"""How many lanes run at once: enough to hide a statement's cost, few enough to stay in cache."""

PADDING = 16
"""Lanes between the rows of a local array: rows a power of two apart would share a few sets of the cache."""

Dim3 = tuple[int, int, int]


class Launch:
    """One batch of blocks in lock step. blocks: [count, 3] block numbers; threads: a block's; shared_bytes: a block's."""

    def __init__(self, blocks: np.ndarray, threads: int, grid: Dim3, shared_bytes: int):
        self.blocks, self.threads, self.shared_bytes = blocks, threads, shared_bytes
        self.count_of_blocks = len(blocks)
        self.size = len(blocks) * threads
        self.everyone = np.ones(self.size, np.bool_)
        self.lane_numbers = np.arange(self.size)
        self.threadIdx_x = np.tile(np.arange(threads, dtype=np.int32), len(blocks))
        self.threadIdx_y = self.threadIdx_z = np.int32(0)
        self.blockIdx_x, self.blockIdx_y, self.blockIdx_z = (self.spread(blocks[:, axis]) for axis in range(3))
        self.blockDim_x, self.blockDim_y, self.blockDim_z = np.int32(threads), np.int32(1), np.int32(1)
        self.gridDim_x, self.gridDim_y, self.gridDim_z = map(np.int32, grid)
        self.path: tuple[str, ...] = ()
        self.shared: dict[tuple[str, ...], SharedArray] = {}

    def spread(self, numbers: np.ndarray) -> Value:
        """A number a block as a lane array; a scalar where all blocks have the same."""
        if (numbers == numbers[0]).all():
            return np.int32(numbers[0])
        return np.repeat(numbers.astype(np.int32), self.threads)

    def active(self, mask: Mask) -> np.ndarray:
        return self.everyone if mask is True else mask

    def full(self, value: Value, dtype: Any = None) -> np.ndarray:
        """The value as a lane array of its own, converted to dtype."""
        if value.ndim == 0:
            return np.full(self.size, converted(value, dtype or value.dtype))
        value = value if dtype is None or value.dtype == dtype else converted(value, dtype)
        return value if value.flags.c_contiguous else np.ascontiguousarray(value)

    # --- Control --------------------------------------------------------------------------------------------------------

    def steps(self, mask: Mask, *bounds: Value) -> Iterator[tuple[Value, Mask]]:
        """``range(*bounds)``: each turn's variable and the lanes that take the turn."""
        start, stop, step = {1: (Int(0), *bounds, Int(1)), 2: (*bounds, Int(1)), 3: bounds}[len(bounds)]
        if any(bound.dtype.kind not in "iu" for bound in bounds):
            raise LaneTypeError("range takes integers")
        if step.ndim == 0 and step == 0:
            raise LaneTypeError("a range's step is not 0")
        if start.ndim == stop.ndim == step.ndim == 0:
            for i in range(int(start), int(stop), int(step)):
                yield Int(i), mask
            return
        if step.ndim:
            raise LaneTypeError("a loop's step is the same for every lane")
        i, ahead = cast_int64(start), lt if step > 0 else gt
        while (turn := both(mask, ahead(i, stop))) is not None:
            yield i, turn
            i = add(i, cast_int64(step))

    def syncthreads(self, mask: Mask) -> None:
        """A barrier costs nothing in lock step."""

    syncwarp = syncthreads

    def count(self, mask: Mask, name: str) -> None:
        """Checked mode counts."""

    # --- Memory ---------------------------------------------------------------------------------------------------------

    def global_array(self, name: str, data: np.ndarray) -> GlobalArray:
        return GlobalArray(name, data)

    def called(self, place: str, function: Callable, mask: Mask, *args: Any) -> Any:
        """Call a device function that has shared arrays: each place of a kernel that calls it has arrays of its own."""
        self.path += (place,)
        result = function(self, mask, *args)
        self.path = self.path[:-1]
        return result

    def shared_array(self, place: str, shape: Any, kind: str) -> SharedArray:
        """The array that this place of the kernel declares: the same one, contents kept, each time a thread comes by."""
        where = (*self.path, place)
        if where not in self.shared:
            shape = tuple(map(int, shape)) if isinstance(shape, tuple) else (int(shape),)
            self.shared[where] = self.new_shared_array(shape, np.dtype(kind))
        return self.shared[where]

    def new_shared_array(self, shape: tuple[int, ...], dtype: np.dtype) -> SharedArray:
        """Shape 0: the launch's dynamic shared memory, as much of it as whole elements fill."""
        if shape == (0,):
            elements = self.shared_bytes // dtype.itemsize
            return SharedArray(self.dynamic_shared[:, : elements * dtype.itemsize].view(dtype), (elements,))
        return SharedArray(self.fresh_rows(int(np.prod(shape)) * dtype.itemsize).view(dtype), shape)

    @cached_property
    def dynamic_shared(self) -> np.ndarray:
        return self.fresh_rows(self.shared_bytes)

    def fresh_rows(self, nbytes: int) -> np.ndarray:
        return np.full((self.count_of_blocks, nbytes), GARBAGE, np.uint8)

    def local_array(self, shape: Any, kind: str, site: str) -> LocalArray:
        """site: where the kernel declares it."""
        shape = tuple(map(int, shape)) if isinstance(shape, tuple) else (int(shape),)
        dtype = np.dtype(kind.replace("boolean", "bool"))
        data = np.full((*shape, (self.size + PADDING) * dtype.itemsize), GARBAGE, np.uint8)
        return LocalArray(data.view(dtype)[..., : self.size], site)


# --- Instructions: the operands checked, then the emulation --------------------------------------------------------------


def memory_operand(instruction: Instruction, number: int, kind: Any, value: Any) -> np.ndarray:
    """An array operand as the emulation takes it: words."""
    if not isinstance(value, kind) or value.dtype.itemsize != 4:
        raise LaneTypeError(f"{instruction.name}: operand {number} is a {kind.__name__} of 32-bit words")
    return value.rows.view(np.uint32) if isinstance(value, SharedArray) else value.flat.view(np.uint32)


def scalar_operand(instruction: Instruction, number: int, wanted: np.dtype | None, value: Any) -> Value:
    """A lane operand of the wanted type (None: any of 32 bits). Any integer may stand for a signed one, no other type."""
    if wanted is None:
        if value.dtype.itemsize != 4:
            raise LaneTypeError(f"{instruction.name}: operand {number} is a 32-bit scalar, not {value.dtype}")
        return value
    if value.dtype == wanted:
        return value
    if value.dtype.kind not in "iu" or wanted.kind != "i":
        raise LaneTypeError(f"{instruction.name}: operand {number} is {wanted}, not {value.dtype}: convert it")
    return value.astype(wanted)


def preparers(instruction: Instruction) -> list[Callable[[Any], Any]]:
    """How each operand is made ready."""
    made: list[Callable[[Any], Any]] = []
    for number, operand in enumerate(instruction.operands):
        if isinstance(operand, (Shared, Global)):
            made.append(
                partial(
                    memory_operand, instruction, number, SharedArray if isinstance(operand, Shared) else GlobalArray
                )
            )
        elif isinstance(operand, Const):
            made.append(int)
        else:
            wanted = None if isinstance(operand, Same) else np.dtype(str(operand))
            made.append(partial(scalar_operand, instruction, number, wanted))
    return made


def arithmetic(instruction: Instruction, body: Callable) -> Callable:
    """A launch's method for an instruction in which lanes do not meet."""
    ready = preparers(instruction)

    def do(launch: Launch, mask: Mask, *operands: Value) -> Value:
        return body(*[prepare(v) for prepare, v in zip(ready, operands)])

    return do


def with_lanes(instruction: Instruction, body: Callable) -> Callable:
    """A launch's method for an instruction that moves data between lanes or memory: full lane arrays, under the mask."""
    ready = preparers(instruction)
    wanted = [np.dtype(str(o)) if isinstance(o, Type) else None for o in instruction.operands]
    lanes = [isinstance(o, (Type, Same)) for o in instruction.operands]

    def do(launch: Launch, mask: Mask, *operands: Value) -> Value:
        for dtype, value in zip(wanted, operands):
            if value.__class__ is not np.ndarray or value.dtype is not dtype:
                operands = prepared(launch, operands)
                break
        return body(launch.everyone if mask is True else mask, *operands)

    def prepared(launch: Launch, operands: tuple[Value, ...]) -> tuple[Any, ...]:
        made = [prepare(value) for prepare, value in zip(ready, operands)]
        return tuple(launch.full(value) if a_lane else value for a_lane, value in zip(lanes, made))

    return do


def no_wait(launch: Launch, mask: Mask, *operands: Value) -> None:
    """Copies are done at once; checked mode keeps the groups."""


MOVES = ("mma", "ldmatrix4", "ldmatrix4_trans", "cp_async16", "shfl_xor", "shfl")
for _name, _instruction in INSTRUCTIONS.items():
    if _name in ("cp_commit", "cp_wait"):
        _method = no_wait
    else:
        _body = emulate.mma_lanes if _name == "mma" else getattr(emulate, _name)
        _method = (with_lanes if _name in MOVES else arithmetic)(_instruction, _body)
    setattr(Launch, f"do_{_name}", _method)


# --- Running a grid -----------------------------------------------------------------------------------------------------

SUPPORT = {
    "load": arrays.load, "store": arrays.store, "peek": arrays.peek, "put": arrays.put,
    "merge": choices.merge, "select": choices.select, "redeclared": choices.redeclared,
}  # fmt: skip
"""What lock-step functions call besides the arithmetic of machine/lanes.py."""


@cache
def stepped(program: Program) -> Callable:
    """The program's lock-step function, all its device functions in lock step too."""
    return translate(program, stepped, SUPPORT)


@cache
def fast(program: Program, ranks: tuple[int, ...] = ()) -> Callable:
    """The program's lock-step function, lanewise device functions compiled. ranks: its parameters', see Translator."""
    if program.lanewise:
        return lane_loop(program)
    return translate(program, fast, SUPPORT, ranks)


@cache
def lane_loop(program: Program) -> LaneLoop:
    """The compiled form of a lanewise program, one for all ranks."""
    stepped(program)  # refuses what lock step cannot say
    return LaneLoop(program)


def batches(grid: Dim3, threads: int, lanes: int = LANES) -> Iterator[np.ndarray]:
    """The grid's block numbers, [count, 3] at a time; x varies slowest, so that blocks of one batch do like work."""
    total = int(np.prod(grid, dtype=np.int64))
    many = max(1, lanes // threads)
    for first in range(0, total, many):
        number = np.arange(first, min(first + many, total))
        rest, z = np.divmod(number, grid[2])
        x, y = np.divmod(rest, grid[1])
        yield np.stack([x, y, z], axis=1)


def run(
    program: Program, function: Callable, grid: Dim3, threads: int, shared_bytes: int, args: tuple,
    make: Callable[..., Launch] = Launch, only: Dim3 | None = None,
) -> None:  # fmt: skip
    """Run a grid, or one block of it; ``make`` builds each batch's launch (a checked one, say)."""
    for blocks in batches(grid, threads) if only is None else [np.array([only])]:
        launch = make(blocks, threads, grid, shared_bytes)
        ready = [
            launch.global_array(n, a) if isinstance(a, np.ndarray) else uniform(a) for n, a in zip(program.params, args)
        ]
        try:
            with np.errstate(all="ignore"):
                function(launch, True, *ready)
        except Exception as reason:
            if not isinstance(reason, STOPPED) and not hasattr(reason, "lane"):
                raise
            raise KernelError(where(program, launch, reason)) from reason


STOPPED = (LaneTypeError, ArithmeticError, TypeError, AttributeError, IndexError, ValueError)
"""What a lock-step function raises where the kernel is at fault, besides errors that name a lane."""


def where(program: Program, launch: Launch, reason: Exception) -> str:
    """Kernel, file, line, block and thread of an error in a lock-step function."""
    file, line, frame = program.filename, 0, None
    trace = reason.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__lockstep__"):
            frame, file, line = trace.tb_frame, trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    place = ""
    lane = getattr(reason, "lane", None)
    if lane is not None:
        block, thread = divmod(lane, launch.threads)
        place = f"block {tuple(int(b) for b in launch.blocks[block])}, thread {thread}: "
    return f"{program.name}: {file}:{line}: {place}{in_words(reason, frame, line)}"


def in_words(reason: Exception, frame: FrameType | None, line: int) -> str:
    """What was wrong, as the kernel's author would say it. frame: of the lock-step function that stopped."""
    if isinstance(reason, IndexError):
        what = (
            "an index is outside its local array" if "list" in str(reason) else "an index is outside a tuple or shape"
        )
        return f"{what}; checked mode names it"
    if frame is None or "NoneType" not in str(reason):
        return str(reason)
    read = names_read(frame.f_globals["__lockstep__"].counted, line)
    unset = [name for name in sorted(read) if frame.f_locals.get(name, 0) is None]
    return f"{unset[0] if unset else 'a variable on this line'} is read before any thread has assigned it"
