"""Shared memory is the same on both machines: an array a place that declares it, kept for the launch, 48 KiB of them at most."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kernels_numba.machine import KernelError, boolean, checked, cuda, device, float32, int32, kernel, uint8
from kernels_numba.machine.modes import recorded
from kernels_numba.machine.shared_memory import static_bytes

THREADS = 32


@device
def kept(x, more):
    """What the last call from this place left, then x + more; x, more: int32."""
    cell = cuda.shared.array(32, int32)
    t = cuda.threadIdx.x
    before = cell[t]
    cell[t] = x + more
    return before


@device
def kept_twice(x):
    """Two places: what each was left by the last call of this function from the same place; x: int32."""
    return kept(x, 0) + kept(x, 100)


@kernel
def visits(out):
    """Row i of each half is what turn i finds; out: int32 [2, 3, 32]."""
    for turn in range(3):
        out[0, turn, cuda.threadIdx.x] = kept_twice(int32(turn))
        out[1, turn, cuda.threadIdx.x] = kept_twice(int32(10 * turn))


@kernel
def places(out):
    """Arrays of every sort: 16 + 36 + 5 + 4 bytes, three calls of a device function, dynamic memory; out: int32 [32]."""
    one, two = cuda.shared.array(4, int32), cuda.shared.array((3, 3), float32)
    for _turn in range(2):
        three = cuda.shared.array(5, uint8)
        three[cuda.threadIdx.x % 5] = uint8(1)
    four, five = cuda.shared.array(4, boolean), cuda.shared.array(0, uint8)
    t = cuda.threadIdx.x
    one[t % 4], two[t % 3, 1], four[t % 4], five[t] = int32(1), float32(1), t > 3, uint8(1)
    cuda.syncthreads()
    out[t] = one[0] + int32(two[2, 1]) + int32(three[4]) + int32(four[0]) + int32(five[t ^ 1])
    out[t] = out[t] + kept_twice(out[t]) + kept(out[t], 1)


@kernel
def large(out, *, n):
    """Two static arrays of n floats; out: float32 [32]."""
    one, two = cuda.shared.array(n, float32), cuda.shared.array(n, float32)
    one[cuda.threadIdx.x], two[cuda.threadIdx.x] = float32(1), float32(2)
    out[cuda.threadIdx.x] = one[cuda.threadIdx.x] + two[cuda.threadIdx.x]


@kernel
def sized_at_launch(out, n):
    shared = cuda.shared.array(n, float32)
    out[0] = shared[0]


@kernel
def sized_by_a_float(out):
    shared = cuda.shared.array(4.0, float32)
    out[0] = shared[0]


@kernel
def of_no_type(out):
    shared = cuda.shared.array(4)
    out[0] = shared[0]


@kernel
def of_a_variable(out, kind):
    shared = cuda.shared.array(4, kind)
    out[0] = shared[0]


def test_an_array_keeps_its_contents_from_turn_to_turn():
    """Garbage (-1) first; then each place of each call finds what it left itself."""
    out = np.zeros((2, 3, 32), np.int32)
    visits[2, THREADS](out)
    assert (out == np.array([[-2, 100, 102], [-2, 100, 120]])[..., None]).all()


def test_its_garbage_is_a_finding_in_checked_mode():
    with checked(), pytest.raises(KernelError, match="reads word 0 of shared memory that nothing has written"):
        visits[1, THREADS](np.zeros((2, 3, 32), np.int32))


def test_static_memory_is_counted_as_the_gpu_lays_it_out():
    """An array in PTX for each that is counted: kept is called from three places."""
    pytest.importorskip("numba_cuda")
    from kernels_numba.machine.compiler import compile_ptx, signature

    program = places.at().program
    text = compile_ptx(program, signature((np.zeros(32, np.int32),)), (8, 0))
    arrays = [int(n) for n in re.findall(r"^\.visible \.shared .*\[(\d+)\];", text, re.MULTILINE)]
    assert sorted(arrays) == [4, 5, 16, 36, 128, 128, 128]
    assert static_bytes(program) == sum(arrays)


def test_48_kib_of_static_arrays_and_no_more():
    out = np.zeros(32, np.float32)
    large.at(n=6144)[1, THREADS](out)
    assert (out == 3).all()
    message = r"large: 49160 bytes of static shared memory a block, at most 49152: declare shape 0 .* at launch"
    with pytest.raises(KernelError, match=message):
        large.at(n=6145)


def test_static_and_dynamic_memory_share_the_largest_limit():
    out = np.zeros(32, np.float32)
    large.at(n=1024)[1, THREADS, None, 232448 - 8192](out)
    with recorded(), pytest.raises(KernelError, match="large: 224260 bytes .* and 8192 of static arrays: .* 232448"):
        large.at(n=1024)[1, THREADS, None, 232448 - 8192 + 4](out)


@pytest.mark.parametrize(
    "wrong", [sized_at_launch, sized_by_a_float, of_no_type, of_a_variable], ids=lambda k: k.__name__
)
def test_a_shape_or_type_that_is_no_constant_is_refused(wrong):
    with pytest.raises(
        KernelError, match=rf"^{wrong.__name__}: .*:\d+: a shared array takes a shape known at compile time"
    ):
        wrong.at()
