"""The tensor core's own arithmetic, to the bit. Spec numerics §2.

An output is a sum of 17 terms: 16 products a·b (exact) and the accumulator c. Each term is truncated toward zero to a
multiple of 2^(e - fraction bits), e being the largest exponent among them (a product's is the sum of its factors'
exponents); the truncated terms are added exactly, and the sum is rounded toward zero to float32. From that follows:

* a zero term takes no part, so a column of B that is zero leaves c as it is, and a sum of nothing but zeros is +0;
* a subnormal operand has its true exponent.

The rule does not speak of what is beyond float32: that becomes an infinity. Infinities and NaN follow IEEE addition, and
every NaN is 0x7FFFFFFF. All of this an H200 does too, compared on random warps of each kind, with one exception: where the
largest exponent is so small that the sum is subnormal, the GPU's last bit is sometimes another.

Two forms give the same bits. The vector form takes one column of 16 rows at a time in explicit vector code; it needs
normal numbers and a largest exponent that leaves every scaled term inside int32. The scalar form is the rule itself, in
integers, for the columns that the vector form returns undone and for the other architectures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import int64, njit, types, uint32
from numba.core import cgutils
from numba.extending import intrinsic


@dataclass(frozen=True)
class Accumulation:
    """How a tensor core adds. fraction_bits: kept below the largest exponent. group: products added to c at a time.

    measured: whether recorded outputs of that hardware were reproduced; otherwise the numbers are a published model's.
    """

    fraction_bits: int
    group: int
    measured: bool


HOPPER = Accumulation(fraction_bits=25, group=16, measured=True)
ADA = Accumulation(fraction_bits=24, group=8, measured=False)
AMPERE = Accumulation(fraction_bits=24, group=8, measured=False)

OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, "cache": True}

# --- Vector form: Hopper, one column of 16 rows at a time -------------------------------------------------------------

FRACTION_BITS = HOPPER.fraction_bits
ZERO = -600
"""The biased exponent of a zero: no sum of it with another is the largest."""
LOWEST, HIGHEST = -80, 100
"""Largest exponents between which scale, terms and result are normal float32 and scaled terms fit int32."""
BIAS = 127

I32, I64 = ir.IntType(32), ir.IntType(64)
ROWS, LANES = 16, 32
"""Rows of a tile; lanes of a warp."""


def _vector(element: ir.Type, count: int) -> ir.VectorType:
    return ir.VectorType(element, count)


V16I, V32I = _vector(I32, ROWS), _vector(I32, LANES)
V16F, V16D, V16L = _vector(ir.FloatType(), ROWS), _vector(ir.DoubleType(), ROWS), _vector(I64, ROWS)


class Lowering:
    """An IR builder with the few vector operations that the column form is made of."""

    def __init__(self, build: ir.IRBuilder):
        self.build = build

    def all(self, kind: ir.VectorType, value: int | float) -> ir.Constant:
        """A vector with one value everywhere."""
        return ir.Constant(kind, [value] * kind.count)

    def long(self, value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def room(self, kind: ir.VectorType) -> Any:
        """Words of the stack."""
        return self.build.bitcast(cgutils.alloca_once(self.build, kind), I32.as_pointer())

    def load(self, pointer: Any, kind: ir.VectorType, offset: Any = 0) -> Any:
        """A vector from 4-byte elements at pointer[offset]."""
        found = self.build.load(self._at(pointer, kind, offset))
        found.align = 4
        return found

    def store(self, value: Any, pointer: Any, offset: Any = 0) -> None:
        self.build.store(value, self._at(pointer, value.type, offset)).align = 4

    def _at(self, pointer: Any, kind: ir.Type, offset: Any) -> Any:
        offset = self.long(offset) if isinstance(offset, int) else offset
        return self.build.bitcast(self.build.gep(pointer, [offset]), kind.as_pointer())

    def splat(self, pointer: Any, offset: Any, element: ir.Type) -> Any:
        """The element at pointer[offset] everywhere."""
        kind = _vector(element, ROWS)
        nothing = ir.Constant(kind, ir.Undefined)
        one = self.build.insert_element(nothing, self.load(pointer, element, offset), ir.Constant(I32, 0))
        return self.pick(one, nothing, [0] * ROWS)

    def pick(self, first: Any, second: Any, places: list[int]) -> Any:
        """Elements of two vectors end to end, by place."""
        return self.build.shuffle_vector(first, second, ir.Constant(_vector(I32, len(places)), places))

    def maximum(self, first: Any, second: Any) -> Any:
        return self.build.select(self.build.icmp_signed(">", first, second), first, second)

    def any(self, flags: Any) -> Any:
        """Whether any of the flags, a vector of i1, is set."""
        return self.build.icmp_unsigned("!=", self.mask(flags), ir.Constant(ir.IntType(flags.type.count), 0))

    def some(self, bits: Any, j: Any, count: int) -> Any:
        """Whether any of the ``count`` bits from j * count on is set."""
        kind = bits.type
        first = self.build.mul(j, self.long(count))
        moved = self.build.lshr(bits, first if kind == I64 else self.build.trunc(first, kind))
        kept = self.build.and_(moved, ir.Constant(kind, (1 << count) - 1))
        return self.build.icmp_unsigned("!=", kept, ir.Constant(kind, 0))

    def mask(self, flags: Any) -> Any:
        """The flags as the bits of one integer."""
        return self.build.bitcast(flags, ir.IntType(flags.type.count))

    def halves(self, words: Any) -> tuple[Any, Any]:
        """The low and high bf16 of each word, as float32."""
        low = self.build.shl(words, self.all(words.type, 16))
        high = self.build.and_(words, self.all(words.type, 0xFFFF0000))
        kind = _vector(ir.FloatType(), words.type.count)
        return self.build.bitcast(low, kind), self.build.bitcast(high, kind)

    def exponents(self, values: Any, fraction: int) -> tuple[Any, Any]:
        """Biased exponents of the bit patterns (ZERO for 0), and flags for subnormals, infinities and NaN."""
        kind = values.type
        raised = self.build.and_(self.build.lshr(values, self.all(kind, fraction)), self.all(kind, 255))
        magnitude = self.build.shl(values, self.all(kind, 1))
        zero = self.build.icmp_unsigned("==", magnitude, self.all(kind, 0))
        low = self.build.icmp_unsigned("==", raised, self.all(kind, 0))
        odd = self.build.or_(self.build.xor(low, zero), self.build.icmp_unsigned("==", raised, self.all(kind, 255)))
        return self.build.select(zero, self.all(kind, ZERO), raised), odd

    def word_exponents(self, words: Any) -> tuple[Any, Any]:
        """``exponents`` of the two bf16 of each word, side by side in int16."""
        return self.exponents(self.build.bitcast(words, _vector(ir.IntType(16), 2 * words.type.count)), 7)


class Tile(NamedTuple):
    """A warp's operands between lanes and columns."""

    a: list[Any]
    """float32 [k][16 rows], in registers."""
    a_exponents: list[Any]
    """int16 pairs [k / 2][16 rows], in registers."""
    a_odd: Any
    """Whether A has subnormals, infinities or NaN."""
    b: list[Any]
    """In memory: low halves, high halves and exponent pairs of b0, then of b1; each [32 words], column j at 4j."""
    b_used: Any
    """A bit for each lane whose words of B are not zero."""
    b_odd: Any
    """A bit for each bf16 of b0 that, in b0 or b1, is subnormal, infinite or NaN."""
    c: Any
    """In memory: float32 [8 columns][16 rows], at first C, at last the result."""


BY_COLUMN = [list(range(q, 2 * LANES, 4)) for q in range(4)]
"""Of two registers end to end, the 16 lanes that hold word q of each row."""


def _tile_a(low: Lowering, pointers: list[Any]) -> tuple[list[Any], list[Any], Any]:
    """Tile.a, a_exponents and a_odd."""
    values: list[Any] = []
    exponents: list[Any] = []
    odd = None
    for upper, lower in (pointers[0:2], pointers[2:4]):
        top, bottom = low.load(upper, V32I), low.load(lower, V32I)
        for places in BY_COLUMN:
            words = low.pick(top, bottom, places)
            values += low.halves(words)
            exponent, flags = low.word_exponents(words)
            exponents.append(exponent)
            odd = flags if odd is None else low.build.or_(odd, flags)
    return values, exponents, low.any(odd)


def _tile_b(low: Lowering, pointers: list[Any]) -> tuple[list[Any], Any, Any]:
    """Tile.b, b_used and b_odd."""
    room, used, odd = [low.room(V32I) for _ in range(6)], None, None
    for i, pointer in enumerate(pointers):
        words = low.load(pointer, V32I)
        exponents, flags = low.word_exponents(words)
        for value, place in zip((*low.halves(words), exponents), room[3 * i : 3 * i + 3], strict=True):
            low.store(value, place)
        some = low.build.and_(words, low.all(V32I, 0x7FFF7FFF))
        used = some if used is None else low.build.or_(used, some)
        odd = flags if odd is None else low.build.or_(odd, flags)
    return room, low.mask(low.build.icmp_unsigned("!=", used, low.all(V32I, 0))), low.mask(odd)


def _tile_c(low: Lowering, pointers: list[Any]) -> Any:
    """Tile.c, from lanes."""
    room = low.room(_vector(I32, 8 * ROWS))
    for odd in range(2):
        top, bottom = low.load(pointers[odd], V32I), low.load(pointers[odd + 2], V32I)
        for q, places in enumerate(BY_COLUMN):
            low.store(low.pick(top, bottom, places), room, ROWS * (2 * q + odd))
    return room


def _to_lanes(low: Lowering, tile: Tile, pointers: list[Any]) -> None:
    """The result, from Tile.c."""
    for odd in range(2):
        columns = [low.load(tile.c, V16I, ROWS * (2 * q + odd)) for q in range(4)]
        for half in range(2):
            zipped = [x for g in range(8 * half, 8 * half + 8) for x in (g, g + ROWS)]
            pairs = [low.pick(columns[q], columns[q + 1], zipped) for q in (0, 2)]
            places = [x for g in range(8) for x in (2 * g, 2 * g + 1, 2 * g + ROWS, 2 * g + ROWS + 1)]
            low.store(low.pick(pairs[0], pairs[1], places), pointers[odd + 2 * half])


def _largest(low: Lowering, tile: Tile, j: Any, own: Any) -> Any:
    """The largest exponent of each row's 17 terms in column j, biased twice; negative where all are zero."""
    pairs = None
    for k, exponents in enumerate(tile.a_exponents):
        place = low.build.add(low.build.mul(j, low.long(4)), low.long(k % 4))
        other = low.build.bitcast(low.splat(tile.b[3 * (k // 4) + 2], place, I32), exponents.type)
        both = low.build.add(exponents, other)
        pairs = both if pairs is None else low.maximum(pairs, both)
    words = low.build.bitcast(pairs, V16I)
    first = low.build.ashr(low.build.shl(words, low.all(V16I, 16)), low.all(V16I, 16))
    products = low.maximum(first, low.build.ashr(words, low.all(V16I, 16)))
    return low.maximum(products, low.build.add(own, low.all(V16I, BIAS)))


def _sum(low: Lowering, tile: Tile, j: Any, c: Any, exponent: Any) -> Any:
    """The 17 terms, truncated, added and rounded toward zero; exponent: the largest, within LOWEST .. HIGHEST."""
    build = low.build
    scale = build.shl(build.sub(low.all(V16I, BIAS + FRACTION_BITS), exponent), low.all(V16I, 23))
    scale = build.bitcast(scale, V16F)
    total = low.all(V16I, 0)
    for k, column in enumerate(tile.a):
        place = build.add(build.mul(j, low.long(4)), low.long(k // 2 % 4))
        product = build.fmul(column, low.splat(tile.b[3 * (k // 8) + k % 2], place, ir.FloatType()))
        total = build.add(total, build.fptosi(build.fmul(product, scale), V16I))
    own = build.fptosi(build.fmul(c, scale), V16I)
    exact = build.fadd(build.sitofp(total, V16D), build.sitofp(own, V16D))
    unit = build.sext(build.add(exponent, low.all(V16I, 1023 - FRACTION_BITS)), V16L)
    value = build.fmul(exact, build.bitcast(build.shl(unit, low.all(V16L, 52)), V16D))
    kept = build.and_(build.bitcast(value, V16L), low.all(V16L, 0xFFFFFFFFE0000000))
    return build.fptrunc(build.bitcast(kept, V16D), V16F)


def _column(low: Lowering, tile: Tile, j: Any, undone: Any) -> None:
    """Column j in place, or its bit in ``undone``. A column whose B is zero keeps C."""
    build = low.build
    place = build.mul(j, low.long(ROWS))
    bits = low.load(tile.c, V16I, place)
    c = build.bitcast(bits, V16F)
    own, odd_c = low.exponents(bits, 23)
    odd = build.or_(low.some(tile.b_odd, j, 8), build.or_(tile.a_odd, low.any(odd_c)))
    multiply = low.some(tile.b_used, j, 4)
    low.store(build.fadd(c, low.all(V16F, 0.0)), tile.c, place)
    with build.if_then(build.or_(odd, multiply)):
        twice = _largest(low, tile, j, own)
        nothing = build.icmp_signed("<", twice, low.all(V16I, 0))
        exponent = build.select(nothing, low.all(V16I, 0), build.sub(twice, low.all(V16I, 2 * BIAS)))
        below = build.icmp_signed("<", exponent, low.all(V16I, LOWEST))
        above = build.icmp_signed(">", exponent, low.all(V16I, HIGHEST))
        left = build.or_(odd, low.any(build.or_(below, above)))
        with build.if_else(left) as (leave, compute):
            with leave:
                bit = build.shl(ir.Constant(I32, 1), build.trunc(j, I32))
                build.store(build.or_(build.load(undone), bit), undone)
            with compute:
                low.store(_sum(low, tile, j, c, exponent), tile.c, place)


@intrinsic
def _tile(context, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, o0, o1, o2, o3, base):
    """One warp, its lanes from base on; a bit j of the result for each column j that is still to be done."""

    def lower(ctx, build, sig, args):
        low = Lowering(build)
        data = [
            ctx.make_array(kind)(ctx, build, value=v).data for kind, v in zip(sig.args[:-1], args[:-1], strict=True)
        ]
        words = [build.gep(pointer, [args[-1]]) for pointer in data]
        tile = Tile(*_tile_a(low, words[0:4]), *_tile_b(low, words[4:6]), _tile_c(low, words[6:10]))
        undone = cgutils.alloca_once(build, I32)
        build.store(ir.Constant(I32, 0), undone)
        with cgutils.for_range(build, low.long(8)) as loop:
            _column(low, tile, loop.index, undone)
        _to_lanes(low, tile, words[10:14])
        return build.load(undone)

    return types.uint32(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, o0, o1, o2, o3, types.int64), lower


# --- Scalar form: the rule, in integers -------------------------------------------------------------------------------

NAN = 0x7FFFFFFF
INFINITY = 0x7F800000
NONE = -100_000
"""The exponent of a zero."""


@njit(**OPTIONS)
def _length(x):
    """How many bits x >= 0 has."""
    n = 0
    while x:
        x >>= 1
        n += 1
    return n


@njit(**OPTIONS)
def _decode(bits, fraction):
    """(sign, significand, exponent of its last bit) of a finite number with 8 exponent bits."""
    raised = (bits >> fraction) & 255
    rest = bits & ((1 << fraction) - 1)
    sign = -1 if bits >> (fraction + 8) else 1
    return sign, rest | (int64(raised > 0) << fraction), max(raised, 1) - BIAS - fraction


@njit(**OPTIONS)
def _encode(total, unit):
    """The float32 bits of total · 2^unit, rounded toward zero; from 2^128 on, an infinity."""
    sign = int64(0x80000000) if total < 0 else int64(0)
    size = abs(total)
    if size == 0:
        return int64(0)
    last = max(_length(size) - 24 + unit, -149)  # the exponent of the result's last bit
    kept = size >> (last - unit) if last > unit else size << (unit - last)
    raised = last + 149 + (kept >> 23)
    return sign | (INFINITY if raised > 254 else (raised << 23) | (kept & 0x7FFFFF) if kept >> 23 else kept)


@njit(**OPTIONS)
def _special(a, b, c):
    """The result's bits where a term is infinite or NaN; -1 where none is. Operands as ``_element``'s."""
    sign, magnitude = c >> 31, c & 0x7FFFFFFF
    invalid, plus, minus = magnitude > INFINITY, False, False
    if magnitude == INFINITY:
        plus, minus = sign == 0, sign == 1
    for k in range(16):
        x, y = a[k] & 0x7FFF, b[k] & 0x7FFF
        if max(x, y) >= 0x7F80:
            invalid = invalid or max(x, y) > 0x7F80 or min(x, y) == 0
            negative = (a[k] ^ b[k]) & 0x8000
            plus, minus = plus or not negative, minus or negative != 0
    if invalid or (plus and minus):
        return int64(NAN)
    return int64(INFINITY) if plus else int64(INFINITY | 0x80000000) if minus else int64(-1)


@njit(**OPTIONS)
def _element(a, b, c, fraction_bits, group):
    """The bits of c + Σ a[k]·b[k], ``group`` products at a time. a, b: int64 [16], bf16 bits; c: float32 bits."""
    special = _special(a, b, c)
    if special >= 0:
        return special
    sign, exponent, significand = np.empty(17, np.int64), np.empty(17, np.int64), np.empty(17, np.int64)
    for first in range(0, 16, group):
        sign[16], significand[16], exponent[16] = _decode(c, 23)
        largest = exponent[16] + _length(significand[16]) - 1 if significand[16] else NONE
        for k in range(first, first + group):
            sign_a, x, ea = _decode(a[k], 7)
            sign_b, y, eb = _decode(b[k], 7)
            sign[k], significand[k], exponent[k] = sign_a * sign_b, x * y, ea + eb
            if x and y:
                largest = max(largest, ea + eb + _length(x) + _length(y) - 2)
        unit = largest - fraction_bits
        total = int64(0)
        for t in range(first, first + group + 1):
            k = t if t < first + group else 16
            if significand[k]:
                shift = exponent[k] - unit
                size = significand[k] << shift if shift > 0 else significand[k] >> min(-shift, 63)
                total += sign[k] * size
        c = _encode(total, unit)
        if c & 0x7FFFFFFF == INFINITY:
            break
    return c


@njit(**OPTIONS)
def _columns(todo, fraction_bits, group, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, o0, o1, o2, o3, base):
    """The columns whose bits are set in ``todo``, of the warp whose lanes start at base."""
    a, b = np.empty(16, np.int64), np.empty(16, np.int64)
    for row in range(16):
        for k in range(16):
            place = base + 4 * (row & 7) + (k & 7) // 2
            top, bottom = (a0[place], a1[place]) if k < 8 else (a2[place], a3[place])
            a[k] = (int64(top if row < 8 else bottom) >> 16 * (k & 1)) & 0xFFFF
        for j in range(8):
            if not (todo >> j) & 1:
                continue
            for k in range(16):
                place = base + 4 * j + (k & 7) // 2
                b[k] = (int64(b0[place] if k < 8 else b1[place]) >> 16 * (k & 1)) & 0xFFFF
            place = base + 4 * (row & 7) + j // 2
            even, odd = (c0, c1) if row < 8 else (c2, c3)
            c = int64(odd[place] if j & 1 else even[place])
            even, odd = (o0, o1) if row < 8 else (o2, o3)
            found = uint32(_element(a, b, c, fraction_bits, group))
            if j & 1:
                odd[place] = found
            else:
                even[place] = found


@njit(**OPTIONS)
def mma_warps(fraction_bits, group, active, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, out):
    """The mma of every warp, into out: uint32 [4, N], float32 by their bits.

    active: bool [N]; a and b: uint32 [N]; c: float32 [N]; all contiguous. A warp with no active lane gets zeros.
    """
    vector = fraction_bits == FRACTION_BITS and group == 16
    c0, c1, c2, c3 = c0.view(np.uint32), c1.view(np.uint32), c2.view(np.uint32), c3.view(np.uint32)
    o0, o1, o2, o3 = out[0], out[1], out[2], out[3]
    for base in range(0, active.size, 32):
        some = False
        for lane in range(base, base + 32):
            some = some or active[lane]
        if not some:
            for lane in range(base, base + 32):
                o0[lane] = o1[lane] = o2[lane] = o3[lane] = uint32(0)
            continue
        todo = uint32(255)
        if vector:
            todo = _tile(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, o0, o1, o2, o3, base)
        if todo:
            _columns(todo, fraction_bits, group, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, o0, o1, o2, o3, base)
