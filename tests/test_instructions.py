"""Every instruction does on NumPy lanes what its definition says, to the bit, and no access leaves its array.

The definitions are written out a second time here: mma in fractions, ldmatrix and the shuffles by their index formulas.
"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kernels_numba.machine import emulate
from kernels_numba.machine.cpu import Launch
from kernels_numba.machine.dialect import INSTRUCTIONS
from kernels_numba.machine.emulate import LaneError
from kernels_numba.machine.exact_mma import ADA, AMPERE, HOPPER, Accumulation

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

RECORDING = Path(__file__).parent / "data" / "mma_m16n8k16_bf16_h200.npz"
LANE = np.arange(32)
NAN, INF, MINUS_INF = 0x7FFFFFFF, 0x7F800000, 0xFF800000
BF16_NAN, BF16_INF, BF16_ONE, BF16_MINUS = 0x7FC0, 0x7F80, 0x3F80, 0x8000
BF16_SMALL = 0x2B80  # 2^-40


def everyone(count: int) -> np.ndarray:
    return np.ones(count, np.bool_)


def all_but(count: int, *lanes: int) -> np.ndarray:
    active = everyone(count)
    active[list(lanes)] = False
    return active


def test_every_instruction_has_a_body():
    at_once = {"cp_commit", "cp_wait"}
    assert all(callable(getattr(emulate, name)) for name in INSTRUCTIONS.keys() - at_once)
    assert all(callable(getattr(Launch, f"do_{name}")) for name in INSTRUCTIONS)


# --- mma: the recording ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording() -> dict[str, list[np.ndarray]]:
    """Lane arrays [25600] a, b, c, o of 800 warps."""
    with np.load(RECORDING) as data:
        return {name: [data[name][..., i].reshape(-1) for i in range(data[name].shape[2])] for name in data.files}


def same_bits(found: list[np.ndarray], wanted: list[np.ndarray]) -> np.ndarray:
    return np.stack([f.view(np.uint32) == w.view(np.uint32) for f, w in zip(found, wanted, strict=True)])


def replay(recording: dict[str, list[np.ndarray]], rule: Accumulation = HOPPER) -> np.ndarray:
    """Which of the 102,400 recorded outputs come out."""
    operands = [*recording["a"], *recording["b"], *recording["c"]]
    return same_bits(emulate.mma(everyone(operands[0].size), *operands, rule=rule), recording["o"])


def test_mma_gives_every_recorded_bit(recording):
    match = replay(recording)
    assert match.size == 102_400 and match.all()


@pytest.mark.parametrize("fraction_bits", [24, 26])
def test_one_bit_more_or_less_is_caught(recording, fraction_bits):
    assert replay(recording, Accumulation(fraction_bits, 16, measured=False)).mean() < 0.95


def test_both_forms_give_the_recorded_bits(recording):
    """A subnormal in A's row 0 sends its warp to the scalar form; rows 1 to 15 do not contain it."""
    operands = [x.copy() for x in (*recording["a"], *recording["b"], *recording["c"])]
    operands[0][::32] = operands[0][::32] & 0xFFFF0000 | 1
    match = same_bits(emulate.mma(everyone(operands[0].size), *operands), recording["o"])
    rows = np.tile(LANE // 4, 800)
    assert match[:, rows > 0].all() and match[2:].all() and not match[:2, rows == 0].all()


# --- mma: the rule, in fractions -------------------------------------------------------------------------------------


def float_of(bits: int, width: int) -> float:
    """The value of a bf16's (width 16) or a float32's bits."""
    return float(np.uint32(bits << (32 - width)).view(np.float32))


def truncated(value: Fraction) -> np.float32:
    """The float32 nearest to value that is not further from zero; from 2^128 on, an infinity."""
    with np.errstate(over="ignore"):
        near = np.float32(float(value))
    if np.isinf(near):
        return near if abs(value) >= 2**128 else np.copysign(np.finfo(np.float32).max, near)
    while abs(Fraction(float(near))) > abs(value):
        near = np.nextafter(near, np.float32(0))
    return near if near else np.float32(0)


def oracle(a: np.ndarray, b: np.ndarray, c: int, rule: Accumulation) -> int:
    """Spec numerics §2 for one output. a, b: 16 bf16 bit patterns; c: float32 bits."""
    total = float_of(c, 32)
    for first in range(0, 16, rule.group):
        terms = [(Fraction(total), math.frexp(total)[1] - 1)]
        for x, y in zip(a[first : first + rule.group], b[first : first + rule.group], strict=True):
            x, y = float_of(int(x), 16), float_of(int(y), 16)
            terms.append((Fraction(x) * Fraction(y), math.frexp(x)[1] + math.frexp(y)[1] - 2))
        largest = max((e for value, e in terms if value), default=0)
        unit = Fraction(2) ** (largest - rule.fraction_bits)
        total = float(truncated(sum(math.trunc(value / unit) for value, _ in terms) * unit))
        if math.isinf(total):
            break
    return int(np.float32(total).view(np.uint32))


def fragments(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
    """Lane arrays of warps' A [W, 16, 16] and B [W, 16 (k), 8] (bf16 bits) and C [W, 16, 8] (float32 bits)."""
    g, q = LANE // 4, 2 * (LANE % 4)

    def pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return (low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)).reshape(-1)

    words = [pair(a[:, g + r, q + k], a[:, g + r, q + k + 1]) for k in (0, 8) for r in (0, 8)]
    words += [pair(b[:, q + k, g], b[:, q + k + 1, g]) for k in (0, 8)]
    return words + [c[:, g + r, q + i].astype(np.uint32).view(np.float32).reshape(-1) for r in (0, 8) for i in (0, 1)]


def matrices(results: list[np.ndarray]) -> np.ndarray:
    """float32 bits [W, 16, 8] of the four results' lane arrays."""
    out = np.zeros((results[0].size // 32, 16, 8), np.uint32)
    for i, lanes in enumerate(results):
        out[:, LANE // 4 + 8 * (i // 2), 2 * (LANE % 4) + i % 2] = lanes.view(np.uint32).reshape(-1, 32)
    return out


def random_bits(rng: np.random.Generator, shape: tuple, fraction: int, exponents: tuple[int, int]) -> np.ndarray:
    """Random signs and fractions, biased exponents in the range; 16 or 32 bits."""
    raised = rng.integers(*exponents, shape, endpoint=True)
    return rng.integers(0, 2, shape) << (fraction + 8) | raised << fraction | rng.integers(0, 1 << fraction, shape)


EXPONENTS = {
    "alike": ((124, 129), (124, 129), (122, 132)),
    "far apart": ((100, 150), (100, 150), (90, 165)),
    "small": ((0, 60), (60, 70), (0, 5)),
    "small but normal": ((20, 50), (20, 50), (1, 20)),
    "large": ((140, 180), (140, 180), (190, 240)),
    "tiny results": ((0, 64), (0, 64), (0, 1)),
    "subnormal operands": ((0, 1), (120, 254), (0, 254)),
    "overflow": ((180, 192), (180, 192), (250, 254)),
    "any": ((0, 254), (0, 254), (0, 254)),
}


@pytest.mark.parametrize("rule", [HOPPER, AMPERE], ids=["hopper", "ampere"])
@pytest.mark.parametrize("case", EXPONENTS)
def test_mma_is_the_rule(case, rule):
    """Random warps, the second with half of A and B zero, the third with three columns of B only."""
    rng = np.random.default_rng(list(EXPONENTS).index(case))
    ea, eb, ec = EXPONENTS[case]
    a, b = random_bits(rng, (3, 16, 16), 7, ea), random_bits(rng, (3, 16, 8), 7, eb)
    c = random_bits(rng, (3, 16, 8), 23, ec)
    for x in (a[1], b[1]):
        x[rng.random(x.shape) < 0.5] &= 0x8000
    b[2, :, rng.permutation(8)[:5]] &= 0x8000
    found = matrices(emulate.mma(everyone(96), *fragments(a, b, c), rule=rule))
    for w, i, j in np.ndindex(found.shape):
        assert int(found[w, i, j]) == oracle(a[w, i], b[w, :, j], int(c[w, i, j]), rule)


def test_ada_has_ampere_s_published_numbers_and_neither_is_measured():
    assert (ADA, AMPERE.measured, HOPPER.measured) == (AMPERE, False, True)


def test_products_alone_may_fill_the_vector_form_s_integers():
    """16 largest products of one sign and a c that goes beyond 2^31 units."""
    a, b, c = (np.full(s, v) for s, v in (((2, 16, 16), 0x3FFF), ((2, 16, 8), 0x3FFF), ((2, 16, 8), 0x3FFFFFFF)))
    b[1] |= BF16_MINUS
    c[1] |= 0x80000000
    found = matrices(emulate.mma(everyone(64), *fragments(a, b, c)))
    for w in range(2):
        assert (found[w] == oracle(a[w, 0], b[w, :, 0], int(c[w, 0, 0]), HOPPER)).all()


# --- mma: zeros, infinities, NaN, masks ------------------------------------------------------------------------------


def one_output(a: int, b: int, c: int, fill: int = BF16_ONE) -> int:
    """Output (0, 0) where A[0, 0] = a, B[0, 0] = b, C[0, 0] = c, the rest of A is ``fill`` and of B and C zero."""
    x, y, z = np.full((1, 16, 16), fill), np.zeros((1, 16, 8), np.int64), np.zeros((1, 16, 8), np.int64)
    x[0, 0, 0], y[0, 0, 0], z[0, 0, 0] = a, b, c
    return int(matrices(emulate.mma(everyone(32), *fragments(x, y, z)))[0, 0, 0])


ENDS = {
    "0 · inf": (0, BF16_INF, 0, NAN),
    "inf · 0 in a column of zeros": (BF16_INF, 0, 0, NAN),
    "inf": (BF16_INF, BF16_ONE, 0x3F800000, INF),
    "-inf": (BF16_INF, BF16_ONE | BF16_MINUS, 0x3F800000, MINUS_INF),
    "inf - inf": (BF16_INF, BF16_ONE | BF16_MINUS, INF, NAN),
    "NaN in A": (BF16_NAN, BF16_ONE, 0, NAN),
    "NaN in B": (BF16_ONE, BF16_NAN | BF16_MINUS, 0, NAN),
    "NaN in C": (BF16_ONE, BF16_ONE, 0xFFC00001, NAN),
    "NaN in C over a column of zeros": (BF16_ONE, 0, 0xFFC00001, NAN),
    "inf in C over a column of zeros": (BF16_ONE, 0, MINUS_INF, MINUS_INF),
    "overflow": (0x7F7F, 0x7F7F, 0, INF),
    "-0 over a column of zeros": (BF16_ONE, 0, 0x80000000, 0),
    "-0 and a product of -0": (0, BF16_ONE | BF16_MINUS, 0x80000000, 0),
    "a sum of zero": (BF16_ONE, BF16_ONE | BF16_MINUS, 0x3F800000, 0),
    "subnormal C over a column of zeros": (BF16_ONE, 0, 0x80000001, 0x80000001),
}


@pytest.mark.parametrize("fill", [BF16_ONE, 1], ids=["vector form", "scalar form"])
@pytest.mark.parametrize(("a", "b", "c", "wanted"), ENDS.values(), ids=ENDS)
def test_mma_at_the_ends_of_the_numbers(a, b, c, wanted, fill):
    assert one_output(a, b, c, fill) == wanted


@pytest.mark.parametrize("operand", ["A", "B", "C"])
def test_a_nan_in_any_place_reaches_what_it_should_and_nothing_else(operand):
    """A warp for each place: of A it reaches a row, of B a column, of C itself; all exponents are ordinary."""
    shape = {"A": (16, 16), "B": (16, 8), "C": (16, 8)}[operand]
    count = math.prod(shape)
    a, b = np.full((count, 16, 16), BF16_SMALL), np.full((count, 16, 8), BF16_SMALL)
    c = np.full((count, 16, 8), np.float32(2**-80).view(np.uint32))
    wanted = np.full((count, 16, 8), np.float32(17 * 2**-80).view(np.uint32))
    for w, (row, column) in enumerate(np.ndindex(shape)):
        {"A": a, "B": b, "C": c}[operand][w, row, column] = NAN if operand == "C" else BF16_NAN
        reached = {"A": (row, slice(None)), "B": (slice(None), column), "C": (row, column)}[operand]
        wanted[w][reached] = NAN
    assert (matrices(emulate.mma(everyone(32 * count), *fragments(a, b, c))) == wanted).all()


def test_a_column_of_zeros_keeps_c(recording):
    operands = [x.copy() for x in (*recording["a"], *recording["b"], *recording["c"])]
    for word in operands[4:6]:
        word.reshape(-1, 32)[:, 4:] &= np.uint32(0x80008000)
    found, c = matrices(emulate.mma(everyone(25600), *operands)), matrices(recording["c"])
    assert (found[..., 1:] == c[..., 1:]).all()
    assert (found[..., 0] == matrices(recording["o"])[..., 0]).all()


def test_warps_without_an_active_lane_give_zeros(recording):
    active = everyone(25600).reshape(-1, 32)
    active[::3] = False
    active[1::3, 1:] = False
    operands = [*recording["a"], *recording["b"], *recording["c"]]
    found = [x.reshape(-1, 32) for x in emulate.mma(active.reshape(-1), *operands)]
    assert not any(x[::3].view(np.uint32).any() for x in found)
    wanted = [x.reshape(-1, 32) for x in recording["o"]]
    assert all(same_bits([f[s::3] for f in found], [w[s::3] for w in wanted]).all() for s in (1, 2))


def test_mma_takes_scalars_and_strided_lanes():
    ones, halves = np.uint32(0x3F803F80), np.full(128, 0x3F003F00, np.uint32)[::2]
    found = emulate.mma(everyone(64), ones, ones, ones, ones, halves, halves, *[np.float32(2)] * 4)
    assert all((x == 10).all() and x.dtype == np.float32 for x in found)


# --- ldmatrix, cp.async, shuffles ------------------------------------------------------------------------------------


@pytest.fixture
def tiles() -> tuple[np.ndarray, np.ndarray]:
    """Shared memory of two blocks, and the row words of their 64 lanes each."""
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 2**32, (2, 512), dtype=np.uint32)
    return rows, 4 * rng.integers(0, 128, 128)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_is_its_definition(tiles, transposed):
    rows, word = tiles
    found = (emulate.ldmatrix4_trans if transposed else emulate.ldmatrix4)(everyone(128), rows, word)
    for warp, lane, m in np.ndindex(4, 32, 4):
        starts = word[32 * warp + 8 * m : 32 * warp + 8 * m + 8]
        tile = np.stack([rows[warp // 2, s : s + 4].view(np.uint16) for s in starts])  # [row, column]
        tile = tile.T if transposed else tile
        low, high = (int(tile[lane // 4, 2 * (lane % 4) + i]) for i in (0, 1))
        assert int(found[m][32 * warp + lane]) == low | high << 16


@pytest.mark.parametrize("load", [emulate.ldmatrix4, emulate.ldmatrix4_trans])
def test_ldmatrix_of_inactive_lanes_reads_nothing(tiles, load):
    rows, word = tiles
    active = all_but(128, *range(32, 64), 65)
    word[~active] = 10**12
    found, whole = load(active, rows, word), load(everyone(128), rows, np.where(active, word, 0))
    assert not np.any([f[32:64] for f in found])
    assert all((f[96:] == w[96:]).all() for f, w in zip(found, whole, strict=True))


def test_cp_async_copies_or_fills_with_zeros():
    rows, source = np.full((2, 256), 0xFFFFFFFF, np.uint32), np.arange(1, 1001, dtype=np.uint32)
    word, at = np.tile(4 * np.arange(32), 2)[::-1].copy(), 4 * np.arange(64)
    nbytes, active = np.full(64, 16, np.int32), all_but(64, 5)
    nbytes[7], at[7] = 0, 4 * 10**9
    emulate.cp_async16(active, rows, word, source, at, nbytes)
    wanted = np.full((2, 256), 0xFFFFFFFF, np.uint32)
    for t in range(64):
        if t != 5:
            wanted[t // 32, word[t] : word[t] + 4] = 0 if t == 7 else source[4 * t : 4 * t + 4]
    assert (rows == wanted).all()


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32])
@pytest.mark.parametrize("lane_mask", [1, 2, 4, 8, 16, 31])
def test_shfl_xor_is_its_definition(dtype, lane_mask):
    value = np.arange(96).astype(dtype)
    found = emulate.shfl_xor(all_but(96, *range(32)), value, lane_mask)
    assert found.dtype == dtype and not found[:32].any()
    assert (found[32:] == value[np.arange(96) ^ lane_mask][32:]).all()


def test_shfl_is_its_definition():
    value, lane = np.arange(64, dtype=np.float32), np.random.default_rng(4).integers(0, 32, 64).astype(np.int32)
    assert (emulate.shfl(everyone(64), value, lane) == value[np.arange(64) // 32 * 32 + lane]).all()
    assert (emulate.shfl(everyone(64), value, np.int32(3)) == np.repeat([3, 35], 32)).all()


# --- Loads and stores ------------------------------------------------------------------------------------------------

TYPES = [np.uint32, np.int32, np.float32, np.int64, np.float64, np.uint8, np.bool_]


@pytest.mark.parametrize("dtype", TYPES)
def test_loads_and_stores_are_indexing(dtype):
    rng = np.random.default_rng(5)
    active, index = rng.random(64) < 0.7, rng.permutation(100)[:64]
    memory = rng.integers(0, 2, (2, 100)).astype(dtype)
    memory.flags.writeable = False
    block = np.repeat([0, 1], 32)
    for found, whole in (
        (emulate.load_global(active, memory[1], index), memory[1, index]),
        (emulate.load_shared(active, memory, index), memory[block, index]),
    ):
        assert found.dtype == dtype and (found == np.where(active, whole, 0)).all()
    values, room = rng.integers(0, 2, 64).astype(dtype), memory.copy()
    emulate.store_shared(active, room, index, values)
    wanted = memory.copy()
    wanted[block[active], index[active]] = values[active]
    assert (room == wanted).all()
    emulate.store_global(active, room[0], index, values)
    wanted[0, index[active]] = values[active]
    assert (room == wanted).all()


def test_of_several_stores_to_one_index_the_last_stays():
    flat = np.zeros(4, np.float32)
    emulate.store_global(all_but(64, 63), flat, np.int64(2), np.arange(64, dtype=np.float32))
    assert flat.tolist() == [0, 0, 62, 0]


def test_narrow_and_unsigned_indices_are_indices():
    flat = np.arange(300)
    for dtype in (np.int32, np.uint32, np.uint64):
        assert (emulate.load_global(everyone(32), flat, np.arange(32, dtype=dtype) + dtype(200)) == LANE + 200).all()


# --- Bounds ----------------------------------------------------------------------------------------------------------

ROWS, SOURCE, VALUES, SIXTEEN = (
    np.zeros((2, 64), np.uint32),
    np.zeros(64, np.uint32),
    np.ones(64, np.uint32),
    np.int32(16),
)
PIECES = np.tile(4 * np.arange(16), 4)
ACCESSES = {
    "load_global": (lambda on, i: emulate.load_global(on, SOURCE, i), 1, "a global array"),
    "store_global": (lambda on, i: emulate.store_global(on, SOURCE, i, VALUES), 1, "a global array"),
    "load_shared": (lambda on, i: emulate.load_shared(on, ROWS, i), 1, "shared memory"),
    "store_shared": (lambda on, i: emulate.store_shared(on, ROWS, i, VALUES), 1, "shared memory"),
    "ldmatrix4": (lambda on, i: emulate.ldmatrix4(on, ROWS, i), 4, "shared memory"),
    "ldmatrix4_trans": (lambda on, i: emulate.ldmatrix4_trans(on, ROWS, i), 4, "shared memory"),
    "cp_async16 to": (lambda on, i: emulate.cp_async16(on, ROWS, i, VALUES, PIECES, SIXTEEN), 4, "shared memory"),
    "cp_async16 from": (lambda on, i: emulate.cp_async16(on, ROWS, PIECES, VALUES, i, SIXTEEN), 4, "a global array"),
}
BAD = [(width, i) for width, indices in ((1, (-1, 64, 2**40)), (4, (-4, 64, 2**40, 62, 5))) for i in indices]


@pytest.mark.parametrize(
    ("access", "index"), [(name, i) for name, (_, w, _) in ACCESSES.items() for width, i in BAD if w == width]
)
def test_the_first_active_lane_outside_is_named_and_nothing_is_written(access, index):
    touch, width, what = ACCESSES[access]
    where = np.zeros(64, np.int64)
    where[[40, 41, 50]] = index
    with pytest.raises(LaneError) as refusal:
        touch(all_but(64, 40), where)
    assert (refusal.value.lane, refusal.value.index, refusal.value.size) == (41, index, 64)
    text = str(refusal.value)
    assert text.startswith(f"index {index} ") and what in text and ("multiple of 4" in text) == (index % width != 0)
    assert not ROWS.any() and not SOURCE.any()


def test_a_piece_that_ends_outside_is_refused():
    with pytest.raises(LaneError, match="index 8 to 11 is outside shared memory of 10"):
        emulate.ldmatrix4(everyone(32), np.zeros((1, 10), np.uint32), np.int64(8))


def test_a_byte_count_other_than_0_and_16_is_refused():
    with pytest.raises(LaneError, match="8"):
        emulate.cp_async16(everyone(64), ROWS, PIECES, VALUES, PIECES, np.int32(8))


# --- Arithmetic and bits ---------------------------------------------------------------------------------------------


def nearest(value: Fraction) -> np.float32:
    """The float32 nearest to value, ties to even."""
    near = np.float32(float(value))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(around, key=lambda f: (abs(Fraction(float(f)) - value), int(f.view(np.uint32)) & 1))


def test_fma_rounds_once():
    rng = np.random.default_rng(6)
    a, b = (random_bits(rng, (500,), 23, (100, 150)).astype(np.uint32).view(np.float32) for _ in range(2))
    c = np.where(rng.random(500) < 0.5, -(a * b), a * b * np.float32(2**24) + 1).astype(np.float32)
    found = emulate.fma(a, b, c)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    assert found.tolist() == [float(nearest(v)) for v in exact]
    assert (found != a * b + c).any()


def test_fma_is_not_a_float64_sum_rounded_again():
    """The product is halfway between two float32; float64 loses the addend that decides."""
    x, little = np.float32(1 + 2**-12), np.float32(2**-60)
    assert emulate.fma(x, x, little) == np.float32(1 + 2**-11 + 2**-23)
    assert np.float32(np.float64(x) * np.float64(x) + np.float64(little)) == np.float32(1 + 2**-11)


def test_sqrt_is_correctly_rounded():
    x = random_bits(np.random.default_rng(7), (2000,), 23, (0, 254)).astype(np.uint32).view(np.float32)
    x = np.abs(x)
    assert (emulate.sqrt(x) == np.sqrt(x.astype(np.float64)).astype(np.float32)).all()


@pytest.mark.parametrize(("body", "larger"), [(emulate.fmax, True), (emulate.fmin, False)])
def test_fmax_and_fmin_prefer_numbers_and_order_zeros(body, larger):
    nan, zero, minus = np.float32(np.nan), np.float32(0), np.float32(-0.0)
    assert body(nan, zero) == 0 and body(np.float32(3), nan) == 3 and np.isnan(body(nan, nan))
    assert np.signbit([body(zero, minus), body(minus, zero)]).tolist() == [not larger] * 2
    assert body(np.float32(-np.inf), np.float32(2)) == (2 if larger else -np.inf)


def test_round_int_takes_ties_to_even():
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.4999998, 8388609, 2147483520, -2147483648], np.float32)
    found = emulate.round_int(x)
    assert found.dtype == np.int32 and found.tolist() == [0, 2, 2, 0, -2, 2, 8388609, 2147483520, -2147483648]


def test_pack_bf16_rounds_to_even_and_has_one_nan():
    low = random_bits(np.random.default_rng(8), (4000,), 23, (0, 255)).astype(np.uint32).view(np.float32)
    low[:3] = [np.float32(1 + 2**-8), np.float32(1 + 3 * 2**-8), np.float32(-0.0)]
    wanted = low.astype(ml_dtypes.bfloat16).view(np.uint16)
    wanted = np.where(np.isnan(low), 0x7FFF, wanted).astype(np.uint32)
    found = emulate.pack_bf16(low, low[::-1].copy())
    assert (found == (wanted | wanted[::-1] << np.uint32(16))).all() and np.isnan(low).any()


def test_halves_and_bits_are_views():
    words = np.random.default_rng(9).integers(0, 2**32, 100, dtype=np.uint32)
    halves = words.view(ml_dtypes.bfloat16).astype(np.float32).reshape(-1, 2)
    assert (emulate.bf16_low(words).view(np.uint32) == halves[:, 0].view(np.uint32)).all()
    assert (emulate.bf16_high(words).view(np.uint32) == halves[:, 1].view(np.uint32)).all()
    assert (emulate.float_bits(emulate.bits_float(words)) == words).all()


ARITHMETIC = [
    "fma",
    "sqrt",
    "fmax",
    "fmin",
    "round_int",
    "float_bits",
    "bits_float",
    "pack_bf16",
    "bf16_low",
    "bf16_high",
]


@pytest.mark.parametrize("name", ARITHMETIC)
def test_scalars_give_a_scalar_and_lanes_give_lanes(name):
    types = [np.dtype(str(t)) for t in INSTRUCTIONS[name].operands]
    result = np.dtype(str(INSTRUCTIONS[name].results[0]))
    one = getattr(emulate, name)(*[t.type(2) for t in types])
    many = getattr(emulate, name)(*[np.full(32, 2, t) for t in types])
    assert isinstance(one, np.generic) and one.dtype == many.dtype == result
    assert (many.view(np.uint32) == one.view(np.uint32)).all()
