"""Without a GPU, every instruction of the dialect compiles for CUDA, and arithmetic to what the source states."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

from kernels_numba.machine import (
    KernelError,
    bf16_high,
    bf16_low,
    bits_float,
    cp_async16,
    cp_commit,
    cp_wait,
    cuda,
    device,
    float32,
    float64,
    float_bits,
    fma,
    fmax,
    fmin,
    int32,
    int64,
    kernel,
    ldmatrix4,
    ldmatrix4_trans,
    mma,
    pack_bf16,
    round_int,
    shfl,
    shfl_xor,
    sqrt,
    uint32,
    uint64,
)
from kernels_numba.machine.dialect import INSTRUCTIONS

pytest.importorskip("numba_cuda")

from kernels_numba.machine import compiler, gpu, records

try:
    compiler.find_tool("ptxas", "nvidia-cuda-nvcc")
except KernelError as missing:
    pytest.skip(str(missing), allow_module_level=True)

FLOATS, WORDS = np.zeros(4, np.float32), np.zeros(4, np.uint32)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REFENGINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@kernel
def every_instruction(out, x, words):
    """Each instruction once; out, x: float32 [n]; words: uint32 [n]."""
    memory = cuda.shared.array(0, uint32)
    lane = cuda.threadIdx.x
    cp_async16(memory, 4 * lane, words, int64(4 * lane), 16)
    cp_commit()
    cp_wait(0)
    cuda.syncthreads()
    a0, a1, a2, a3 = ldmatrix4(memory, 4 * lane)
    b0, b1, b2, b3 = ldmatrix4_trans(memory, 4 * lane)
    c0, c1, c2, c3 = mma(a0, a1, a2, a3, b0, b1, x[0], x[1], x[2], x[3])
    d = fma(c0, c1, fmin(c2, fmax(c3, sqrt(x[lane]))))
    d = shfl(shfl_xor(d, 16), int32(lane // 2))
    word = shfl_xor(pack_bf16(d, bits_float(b2)), 1)
    out[lane] = bf16_low(word)
    out[lane + 1] = bf16_high(word)
    words[lane] = float_bits(out[lane + 2]) + b3
    out[lane + 3] = float32(round_int(d))


@kernel
def product_and_sum(out, a, b, c):
    """out = a · b + c and a / b, as operators; float32 [n]."""
    i = cuda.threadIdx.x
    out[i] = a[i] * b[i] + c[i]
    out[i + 32] = a[i] / b[i] - c[i]


@kernel
def scaled(out, x, *, FACTOR):
    """out = FACTOR · x; float32 [n]."""
    out[cuda.threadIdx.x] = x[cuda.threadIdx.x] * float32(FACTOR)


@device
def first_positive(x, n, *, FALLBACK):
    """A device function that returns from inside a loop."""
    for i in range(n):
        if x[i] > float32(0.0):
            return x[i], i
    return float32(FALLBACK), int64(-1)


@kernel
def with_device_calls(out, x):
    """The same device function with two bindings; float32 [n]."""
    value, at = first_positive(x, 4, FALLBACK=1)
    other, place = first_positive(out, 4, FALLBACK=2)
    rows = cuda.local.array((2, 2), float32)
    rows[0, 0], rows[1, 1] = value, other
    out[cuda.threadIdx.x] = rows[0, 0] + rows[1, 1] + float32(at + place)


def ptx_of(made, *args, capability=(8, 0)):
    """A bound kernel's PTX for the types of the arguments."""
    return compiler.compile_ptx(made.program, compiler.signature(args), capability)


@pytest.fixture(scope="module", params=[(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def everything(request):
    """The PTX of every_instruction for an architecture."""
    return ptx_of(every_instruction.at(), FLOATS, FLOATS, WORDS, capability=request.param), request.param


# --- Instructions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(INSTRUCTIONS))
def test_instruction_becomes_its_opcode(everything, name):
    """The PTX has the opcode that the dialect declares, and the test's kernel leaves no instruction out."""
    assert name in every_instruction.at().program.env
    assert INSTRUCTIONS[name].ptx in [opcode for opcode, _ in records.instructions(everything[0])]


def test_machine_code_of_every_instruction(everything):
    """ptxas takes the PTX, and the target is the one asked for."""
    ptx, cc = everything
    assert f".target sm_{cc[0]}{cc[1]}" in ptx and ".entry every_instruction(" in ptx
    assert records.machine_code(compiler.compile_cubin(ptx, cc)[0].read_bytes())


def test_copies_stay_between_their_barriers(everything):
    """cp.async, commit, wait, barrier, ldmatrix: in the order that the source has."""
    order = ("cp.async.cg", "cp.async.commit", "cp.async.wait", "bar.sync", "ldmatrix.sync.aligned.m8n8.x4.shared")
    opcodes = [opcode for opcode, _ in records.instructions(everything[0]) if opcode.startswith(order)]
    assert [next(o for o in order if opcode.startswith(o)) for opcode in opcodes] == list(order)


@kernel
def wrong_mma(out, x):
    a = x[0]
    out[0], out[1], out[2], out[3] = mma(a, a, a, a, a, a, a, a, a, a)


@kernel
def wrong_fma(out, x):
    out[0] = fma(x[0], x[1], 1)


@kernel
def wrong_bits(out, x):
    out[0] = bits_float(int32(x[0]))


@kernel
def wrong_shuffle(out, x):
    out[0] = shfl_xor(int64(x[0]), 1)


@kernel
def wrong_matrix(out, x):
    memory = cuda.shared.array(64, int64)
    a, b, c, d = ldmatrix4(memory, 0)
    out[0] = bits_float(a + b + c + d)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (wrong_mma, "mma: operand 0 is uint32, not float32"),
        (wrong_fma, "fma: operand 2 is float32, not int64"),
        (wrong_bits, "bits_float: operand 0 is uint32, not int32"),
        (wrong_shuffle, "shfl_xor: operand 0 is a 32-bit scalar, not int64"),
        (wrong_matrix, "ldmatrix4: operand 0 is a C-contiguous array of 32-bit words"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_operand_type_is_refused(made, message):
    """numba would cast silently; the intrinsic names instruction and operand, the error kernel, file and line."""
    with pytest.raises(KernelError) as refused:
        ptx_of(made.at(), FLOATS, FLOATS)
    line = str(refused.value)
    assert message in line and line.startswith(f"{made.__name__}: {__file__}:") and "\n" not in line


# --- Arithmetic -------------------------------------------------------------------------------------------------------


def test_operators_are_not_contracted():
    """a · b + c is two roundings; a quotient and a difference one each; nothing approximate."""
    made = records.float_operations(ptx_of(product_and_sum.at(), *[FLOATS] * 4))
    assert made.unwanted == {} and not made.written
    assert made.generated == {"mul.rn.f32": 1, "add.rn.f32": 1, "div.rn.f32": 1, "sub.rn.f32": 1}


@pytest.mark.parametrize("options", [{"fastmath": False, "opt": 3}, {"fastmath": True, "opt": 3}], ids=["fma", "fast"])
def test_contraction_is_noticed(monkeypatch, options):
    """The compiler's own defaults, and fast math, come out red."""
    monkeypatch.setattr(compiler, "NVVM_OPTIONS", options)
    made = records.float_operations(ptx_of(product_and_sum.at(), *[FLOATS] * 4))
    assert any(opcode.startswith("fma") for opcode in made.unwanted)


def test_written_fma_is_counted(everything):
    """The one fma of the source is the one fma of the PTX."""
    made = records.float_operations(everything[0])
    assert made.written["fma.rn.f32"] == 1 and made.written["sqrt.rn.f32"] == 1 and made.unwanted == {}


@pytest.mark.parametrize("opcode", ["mul.f32", "add.ftz.f32", "ex2.approx.f32", "div.full.f32", "sqrt.approx.f32"])
def test_loose_opcode_is_noticed(opcode):
    """A product without a stated rounding is one that ptxas may contract."""
    assert records.float_operations(f"\t{opcode} \t%f1, %f2, %f3;\n").unwanted == {opcode: 1}


# --- Programs ---------------------------------------------------------------------------------------------------------


def test_device_functions_are_inlined():
    """Two bindings of one device function stay apart, and no call is left."""
    ptx = ptx_of(with_device_calls.at(), FLOATS, FLOATS)
    opcodes = [opcode for opcode, _ in records.instructions(ptx)]
    assert not [o for o in opcodes if o.startswith("call")] and "0f3F800000" in ptx and "0f40000000" in ptx


def test_indices_are_not_counted_from_the_end():
    """An address is a shift and a sum; numba's rule for negative indices would select first."""
    opcodes = [opcode for opcode, _ in records.instructions(ptx_of(scaled.at(FACTOR=3), FLOATS, FLOATS))]
    assert not [o for o in opcodes if o.startswith(("shr", "selp", "and", "setp"))]


def test_array_is_seven_parameters():
    """What ``flattened`` passes is what the entry takes: 8 bytes each, a scalar of its own size."""

    class Device(np.ndarray):
        data = type("Memory", (), {"ptr": 4096})

    args = (np.zeros((2, 3), np.float32).view(Device), np.float32(1.0), np.int64(7))
    assert gpu.flattened(args) == (0, 0, 6, 4, 4096, 2, 3, 12, 4, np.float32(1.0), np.int64(7))
    taken = ptx_of(scaled.at(FACTOR=3), FLOATS, FLOATS).count(".param .u64")
    assert taken == len(gpu.flattened([FLOATS.view(Device)] * 2)) == 14


# --- Cache ------------------------------------------------------------------------------------------------------------


def test_cache_returns_the_same_bytes(monkeypatch, tmp_path):
    """A second compilation reads the first one's file; a compilation into an empty cache gives the same bytes."""
    made = scaled.at(FACTOR=3)
    first = ptx_of(made, FLOATS, FLOATS)
    with monkeypatch.context() as patch:
        patch.setenv("REFENGINE_CACHE", str(tmp_path))
        assert ptx_of(made, FLOATS, FLOATS) == first
    monkeypatch.setattr(compiler, "_nvvm", None)
    assert ptx_of(made, FLOATS, FLOATS) == first


def test_cache_key_is_all_that_it_is_made_of(monkeypatch):
    """Another constant, type, architecture or compiler option: another key."""
    types, program = compiler.signature((FLOATS, FLOATS)), scaled.at(FACTOR=3).program
    keys = [
        compiler.cache_key(program, types, (8, 0)),
        compiler.cache_key(scaled.at(FACTOR=4).program, types, (8, 0)),
        compiler.cache_key(program, compiler.signature((FLOATS, WORDS)), (8, 0)),
        compiler.cache_key(program, types, (9, 0)),
    ]
    monkeypatch.setattr(compiler, "NVVM_OPTIONS", {"fastmath": False, "opt": 3})
    keys.append(compiler.cache_key(program, types, (8, 0)))
    assert len(set(keys)) == len(keys)


def test_source_key_reaches_into_device_functions():
    """The text that is hashed has the device function's own constants."""
    text = compiler.source(with_device_calls.at().program)
    assert "return (float32(1), int64(-1))" in text and "return (float32(2), int64(-1))" in text


# --- Records ----------------------------------------------------------------------------------------------------------


@kernel
def large_shared(out, x):
    """More dynamic shared memory than a kernel has unasked; float32 [n]."""
    memory = cuda.shared.array(0, float32)
    fixed = cuda.shared.array(64, float32)
    lane = cuda.threadIdx.x
    memory[lane + 16384] = x[lane]
    fixed[lane] = x[lane]
    cuda.syncthreads()
    out[lane] = memory[16384 + 31 - lane] + fixed[31 - lane]


def test_records_of_every_architecture():
    """One record each; static shared memory counted, dynamic not; code found without names."""
    found = records.records(large_shared.at().program, compiler.signature((FLOATS, FLOATS)))
    assert [r.sm for r in found] == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121"]
    for r in found:
        assert r.kernel == "large_shared" and r.shared_bytes == 256 and 0 < r.registers <= 255
        assert r.stack_bytes == r.spill_store_bytes == r.spill_load_bytes == 0
        assert r.code_bytes > 0 and len(r.code_hash) == 16 and r.ptx_instructions > 10 and "ptxas" in r.compiler
    assert len({r.ptx_bytes for r in found}) == 1
    assert found == records.records(large_shared.at().program, compiler.signature((FLOATS, FLOATS)))


def test_code_hash_sees_a_changed_constant():
    """Same size, other machine code."""
    one, other = (
        records.records(scaled.at(FACTOR=f).program, compiler.signature((FLOATS, FLOATS)), [(9, 0)])[0] for f in (3, 5)
    )
    assert one.code_hash != other.code_hash
    assert dataclasses.replace(one, code_hash="") == dataclasses.replace(other, code_hash="")


def test_large_block_has_fewer_registers():
    """All threads of a block share one SM's registers."""
    ptx = ptx_of(scaled.at(FACTOR=3), FLOATS, FLOATS)
    assert compiler.compile_cubin(ptx, (9, 0), 256) == compiler.compile_cubin(ptx, (9, 0))
    assert compiler.compile_cubin(ptx, (9, 0), 1024)[0] != compiler.compile_cubin(ptx, (9, 0))[0]


def test_machine_code_is_shown():
    """The disassembly names the kernel and multiplies once."""
    try:
        sass = records.sass_text(scaled.at(FACTOR=3).program, compiler.signature((FLOATS, FLOATS)), (9, 0))
    except KernelError as missing:
        pytest.skip(str(missing))
    assert "scaled" in sass and sass.count("FMUL") == 1


# --- What is missing is named -----------------------------------------------------------------------------------------


def test_missing_tool_names_its_package(monkeypatch):
    """Where ptxas comes from is part of the error."""
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(compiler.shutil, "which", lambda _: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(KernelError, match="pip install nvidia-cuda-nvcc"):
        compiler.find_tool("ptxas", "nvidia-cuda-nvcc")


def test_missing_compiler_names_its_package(monkeypatch):
    """Without numba-cuda only a compilation fails."""
    monkeypatch.setitem(sys.modules, "numba.cuda.compiler", None)
    with pytest.raises(KernelError, match=r"numba-cuda\[cu13\]"):
        ptx_of(scaled.at(FACTOR=7), FLOATS, FLOATS)


def test_refused_ptx_is_a_kernel_error():
    """ptxas's own first line, not a traceback."""
    with pytest.raises(KernelError, match="ptxas"):
        compiler.compile_cubin(".version 1.0", (9, 0))


# --- float64 that nobody asked for ----------------------------------------------------------------------------------------


@kernel
def one_variable_of_two_widths(out, w):
    """numba makes the variable float64: 2^53 + 1 would become 2^53."""
    x = uint64(9007199254740993)
    if w[0] > 5:
        x = int64(2)
    out[0] = x


@device
def two_widths(w):
    y = uint64(9007199254740993)
    if w[0] > 5:
        y = int64(2)
    return uint64(y)


@kernel
def in_a_device_function(out, w):
    out[0] = two_widths(w)


@kernel
def wide_on_purpose(out, w):
    out[0] = float64(w[0]) / float64(3.0)


def test_a_float64_that_nobody_asked_for_is_refused():
    words = np.zeros(1, np.uint32)
    types = compiler.signature((np.zeros(1, np.uint64), words))
    for wrong, variable in ((one_variable_of_two_widths, "x"), (in_a_device_function, "y")):
        with pytest.raises(
            KernelError, match=f"{wrong.__name__}: .* {variable} becomes float64, which nobody asked for"
        ):
            compiler.compile_ptx(wrong.at().program, types, (8, 0))
    asked = compiler.signature((np.zeros(1, np.float64), words))
    assert ".f64" in compiler.compile_ptx(wide_on_purpose.at().program, asked, (8, 0))
