"""An operator gives the same type and bits whether its operands are lane arrays or one value for all lanes, and numba's."""

from __future__ import annotations

import itertools
import operator

import numba
import numpy as np
import pytest

from kernels_numba.machine import lanes

TYPES = ("bool", "int32", "uint32", "int64", "uint64", "float32")
BINARY = {
    "add": operator.add, "sub": operator.sub, "mult": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
    "lshift": operator.lshift, "rshift": operator.rshift, "bitand": operator.and_, "bitor": operator.or_,
    "bitxor": operator.xor, "eq": operator.eq, "noteq": operator.ne, "lt": operator.lt, "lte": operator.le,
    "gt": operator.gt, "gte": operator.ge, "div": operator.truediv, "int_min": min, "int_max": max,
}  # fmt: skip
UNARY = ("usub", "uadd", "invert", "logical_not", "int_abs")
DIVISIONS = ("floordiv", "mod")


def values_of(kind: str) -> np.ndarray:
    """Small values, the type's ends and their neighbours."""
    dtype = np.dtype(kind)
    if kind == "bool":
        return np.array([False, True])
    if kind == "float32":
        return np.array([0.0, -0.0, 1.5, -2.5, 3e38, -1e-40, np.inf], np.float32)
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    near = [0, 1, 2, 3, 7, 31, 32, 40, 63, 64, 65, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53 + 1, most - 1, most]
    below = [least, least + 1, -1, -2, -3, -64, -(2**31)]
    return np.array(sorted({n for n in near + below if least <= n <= most}), dtype)


def pairs(left: str, right: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of values, as lane arrays; no division by zero; one where the types are refused."""
    a, b = (m.reshape(-1).copy() for m in np.meshgrid(values_of(left), values_of(right)))
    fine = b != 0 if name in DIVISIONS else np.ones(b.size, bool)
    few = slice(None) if not isinstance(apply(name, a[-1:], b[-1:]), str) else slice(1)
    return a[fine][few], b[fine][few]


def apply(name: str, *operands):
    """The helper's result, or what it refuses."""
    mask = (True,) if name in DIVISIONS else ()
    try:
        with np.errstate(all="ignore"):
            return getattr(lanes, name)(*mask, *operands)
    except lanes.LaneTypeError as refusal:
        return str(refusal)


def scalars(array: np.ndarray) -> list:
    return [lanes.uniform(x) for x in array]


def assert_same(found: list, wanted) -> None:
    """One result a lane, each of the type and bits of the lane array, or its refusal."""
    if isinstance(wanted, str):
        assert set(found) == {wanted}
        return
    assert {f.dtype for f in found} == {wanted.dtype}
    assert np.array([np.asarray(f, wanted.dtype) for f in found]).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("left", TYPES)
def test_a_uniform_operand_is_a_lane_array_of_one_value(name, left):
    for right in TYPES:
        a, b = pairs(left, right, name)
        wanted = apply(name, a, b)
        assert_same([apply(name, x, y) for x, y in zip(scalars(a), scalars(b))], wanted)
        mixed = [apply(name, a[i : i + 1], y) for i, y in enumerate(scalars(b))]
        assert_same([m if isinstance(m, str) else m[0] for m in mixed], wanted)
        mixed = [apply(name, x, b[i : i + 1]) for i, x in enumerate(scalars(a))]
        assert_same([m if isinstance(m, str) else m[0] for m in mixed], wanted)


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("kind", TYPES)
def test_a_uniform_operand_of_a_unary_operator_is_a_lane_array_of_one_value(name, kind):
    assert_same([apply(name, x) for x in scalars(values_of(kind))], apply(name, values_of(kind)))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("wanted", [t for t in TYPES if t != "float32"])
def test_a_uniform_conversion_is_a_lane_array_s(kind, wanted):
    values = values_of(kind) if kind != "float32" else np.array([0.0, 1.5, 2.5, 1e9], np.float32)
    assert_same([lanes.CASTS[wanted](x) for x in scalars(values)], lanes.CASTS[wanted](values))


@numba.njit(error_model="numpy")
def in_numba(a, b):
    """Every binary operator on integers but the shifts."""
    return (
        a + b, a - b, a * b, a // b, a % b, a & b, a | b, a ^ b, a == b, a != b, a < b, a <= b, a > b, a >= b,
    )  # fmt: skip


@numba.njit
def shifts_in_numba(a, b):
    return a << b, a >> b


OPERATORS = (
    "add", "sub", "mult", "floordiv", "mod", "bitand", "bitor", "bitxor", "eq", "noteq", "lt", "lte", "gt", "gte",
)  # fmt: skip
WIDE = ("int32", "uint32", "int64", "uint64")


@pytest.mark.parametrize("left, right", list(itertools.product(WIDE, WIDE)))
def test_lane_arrays_follow_numba(left, right):
    a, b = pairs(left, right, "mod")
    defined = ~((a == np.iinfo(left).min) & (b.astype(np.int64) == -1)) if left == "int64" else np.ones(a.size, bool)
    a, b = a[defined], b[defined]
    assert_lanes(OPERATORS, in_numba, a, b)
    small = (b >= 0) & (b < 64)
    assert_lanes(("lshift", "rshift"), shifts_in_numba, a[small], b[small])


def assert_lanes(names: tuple[str, ...], compiled, a: np.ndarray, b: np.ndarray) -> None:
    found = list(zip(*(compiled(x, y) for x, y in zip(a, b))))
    for name, column in zip(names, found):
        wanted = apply(name, a, b)
        assert [int(w) for w in wanted] == [int(f) for f in column], name


@pytest.mark.parametrize("name", DIVISIONS)
@pytest.mark.parametrize("kind", [t for t in TYPES if t != "float32"])
def test_a_division_by_zero_names_the_first_lane_of_the_mask(name, kind):
    divide, mask = getattr(lanes, name), np.array([False, True, True])
    a, b = np.array([1, 1, 1], kind), np.array([0, 1, 0], kind)
    with pytest.raises(lanes.DivisionByZero) as stopped:
        divide(mask, a, b)
    assert stopped.value.lane == 2
    with pytest.raises(lanes.DivisionByZero) as stopped:
        divide(mask, a, lanes.uniform(np.dtype(kind).type(0)))
    assert stopped.value.lane == 1
    with np.errstate(divide="ignore"):
        assert divide(np.array([False, True, False]), a, b)[1] == (name == "floordiv")
