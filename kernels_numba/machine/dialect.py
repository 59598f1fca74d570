# mypy: disable-error-code="valid-type,empty-body,misc,syntax"
"""The dialect: everything a kernel may say besides Python's own arithmetic and control flow.

An instruction is declared once, here, by a function that has a docstring and no body: the annotations give each operand's
type a lane, ``ptx`` is what it becomes on a GPU (machine/ptx.py), and machine/emulate.py does the same to NumPy lanes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numba
from numba import boolean, float32, float64, int8, int32, int64, uint8, uint16, uint32, uint64

from .errors import KernelError

Scalar = numba.types.Type

SCALARS: dict[str, Scalar] = {
    str(t): t for t in (boolean, int8, uint8, uint16, int32, uint32, int64, uint64, float32, float64)
}
"""The scalar types of the dialect, by name; ``float32(x)`` in a kernel is a conversion."""


@dataclass(frozen=True)
class Shared:
    """Operand: an array in shared memory of 32-bit words."""


@dataclass(frozen=True)
class Global:
    """Operand: an array in global memory of 32-bit words."""


@dataclass(frozen=True)
class Const:
    """Operand: an int known when the kernel is compiled."""


@dataclass(frozen=True)
class Same:
    """Operand: any 32-bit scalar; the result has its type."""


Operand = Scalar | Shared | Global | Const | Same


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction of the dialect.

    name: as kernels write it. operands: a type each, in order. results: a type each. ptx: the PTX opcode. collective: the
    lanes of a warp (or block) take part together, so every lane that takes part must arrive together.
    """

    name: str
    operands: tuple[Operand, ...]
    results: tuple[Scalar | Same, ...]
    ptx: str
    collective: bool
    doc: str

    def __call__(self, *_: Any) -> Any:
        raise KernelError(
            f"{self.name} is an instruction of the kernel dialect: only a @kernel or @device function can use it"
        )


INSTRUCTIONS: dict[str, Instruction] = {}


def instruction(ptx: str, collective: bool = False) -> Callable[[Callable], Instruction]:
    """Declare an instruction from a function's name, annotations and docstring."""

    def declare(fn: Callable) -> Instruction:
        hints = inspect.get_annotations(fn, eval_str=True)
        results = hints.pop("return", ())
        made = Instruction(
            fn.__name__,
            tuple(hints.values()),
            results if isinstance(results, tuple) else (results,),
            ptx,
            collective,
            inspect.getdoc(fn) or "",
        )
        INSTRUCTIONS[made.name] = made
        return made

    return declare


# --- Tensor cores and the way to them -------------------------------------------------------------------------------


@instruction("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", collective=True)
def mma(
    a0: uint32,
    a1: uint32,
    a2: uint32,
    a3: uint32,
    b0: uint32,
    b1: uint32,
    c0: float32,
    c1: float32,
    c2: float32,
    c3: float32,
) -> (float32, float32, float32, float32):
    """One warp's D[16, 8] = A[16, 16] · B[16, 8] + C[16, 8], bf16 × bf16 + float32.

    Lane l, g = l / 4, q = l % 4 (each word two bf16, low half first):
    a0 = A[g, 2q:2q+2], a1 = A[g+8, 2q:2q+2], a2 = A[g, 2q+8:2q+10], a3 = A[g+8, 2q+8:2q+10];
    b0 = B[2q:2q+2, g], b1 = B[2q+8:2q+10, g]; c0, c1 = C[g, 2q:2q+2], c2, c3 = C[g+8, 2q:2q+2]; the result as C.
    """


@instruction("ldmatrix.sync.aligned.m8n8.x4.shared.b16", collective=True)
def ldmatrix4(memory: Shared(), word: int64) -> (uint32, uint32, uint32, uint32):
    """Four 8 × 8 tiles of bf16: lane 8m + r gives the word where row r (16 bytes) of tile m starts.

    Result m of lane l is tile m's row l / 4, elements 2(l % 4) and the next: an A operand's order.
    """


@instruction("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", collective=True)
def ldmatrix4_trans(memory: Shared(), word: int64) -> (uint32, uint32, uint32, uint32):
    """As ldmatrix4, each tile transposed: result m of lane l is tile m's rows 2(l % 4) and the next, column l / 4."""


@instruction("cp.async.cg.shared.global")
def cp_async16(memory: Shared(), word: int64, source: Global(), source_word: int64, nbytes: int32):
    """Start a copy of 16 bytes from ``source[source_word:]`` to ``memory[word:]``; nbytes 0 reads nothing, fills zeros.

    Both words are multiples of 4. Until cp_wait no lane may touch the destination; then the lane that copied may, the
    lanes of its warp after a syncwarp that follows the wait, all others after a syncthreads that does.
    """


@instruction("cp.async.commit_group")
def cp_commit():
    """Close this lane's group of the copies started since the last commit (an empty group counts)."""


@instruction("cp.async.wait_group")
def cp_wait(pending: Const()):
    """Wait until at most ``pending`` of this lane's newest groups are still on their way."""


# --- Lanes of a warp ------------------------------------------------------------------------------------------------


@instruction("shfl.sync.bfly.b32", collective=True)
def shfl_xor(value: Same(), lane_mask: Const()) -> Same():
    """The value of lane (own lane XOR lane_mask)."""


@instruction("shfl.sync.idx.b32", collective=True)
def shfl(value: Same(), lane: int32) -> Same():
    """The value of the given lane of this warp."""


# --- Arithmetic with one stated rounding ------------------------------------------------------------------------------


@instruction("fma.rn.f32")
def fma(a: float32, b: float32, c: float32) -> float32:
    """a · b + c, rounded once."""


@instruction("sqrt.rn.f32")
def sqrt(x: float32) -> float32:
    """The correctly rounded square root."""


@instruction("max.f32")
def fmax(a: float32, b: float32) -> float32:
    """The larger; a NaN gives way to a number."""


@instruction("min.f32")
def fmin(a: float32, b: float32) -> float32:
    """The smaller; a NaN gives way to a number."""


@instruction("cvt.rni.s32.f32")
def round_int(x: float32) -> int32:
    """The nearest int, ties to even; beyond int32 its nearest end, NaN 0."""


# --- Bits -------------------------------------------------------------------------------------------------------------


@instruction("mov.b32")
def float_bits(x: float32) -> uint32:
    """The 32 bits of a float32."""


@instruction("mov.b32")
def bits_float(bits: uint32) -> float32:
    """The float32 that has these 32 bits."""


@instruction("cvt.rn.bf16x2.f32")
def pack_bf16(low: float32, high: float32) -> uint32:
    """Two values rounded to bf16, nearest even, low half first; a NaN becomes 0x7FFF."""


@instruction("shl.b32")
def bf16_low(word: uint32) -> float32:
    """The low half of a word of two bf16, widened."""


@instruction("and.b32")
def bf16_high(word: uint32) -> float32:
    """The high half of a word of two bf16, widened."""


# --- The thread's place, barriers, arrays -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Special:
    """A name of ``cuda`` with a meaning to both machines: an index, a barrier, an array maker."""

    name: str


def _axes(name: str) -> SimpleNamespace:
    return SimpleNamespace(**{axis: Special(f"{name}.{axis}") for axis in "xyz"})


cuda = SimpleNamespace(
    threadIdx=_axes("threadIdx"),
    blockIdx=_axes("blockIdx"),
    blockDim=_axes("blockDim"),
    gridDim=_axes("gridDim"),
    syncthreads=Special("syncthreads"),
    syncwarp=Special("syncwarp"),
    shared=SimpleNamespace(array=Special("shared.array")),
    local=SimpleNamespace(array=Special("local.array")),
)
"""The parts of numba.cuda that the dialect has: indices, barriers, ``shared.array`` (shape 0 = the launch's), ``local.array``."""


def count(name: str) -> None:
    """In checked mode, add one for each calling lane to the counter ``name``; elsewhere, nothing."""
    raise KernelError(f"count({name!r}) is for @kernel and @device functions")
