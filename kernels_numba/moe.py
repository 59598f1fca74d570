"""Mixture of experts: each row picks K of E experts, is multiplied by their matrices, and adds up what they give.

Spec flash-next §2. A *slot* is one pick of one row: slot row·K + k is the row's k-th pick, the largest logit first.
A layer is

    logits = x · routerᵀ                     ``matmul``, float32 [rows, E + 1]; the last column is the shared expert's gate
    experts, weights = route(logits)
    order, tiles = group(experts)            slots sorted by expert, cut into tiles for the products
    y = down · swiglu(gate_up · x)           ``expert_matmul`` by slot, ``swiglu`` between the two
    out = combine(y, shared, weights)

Grouping rows by expert moves them between tiles, never between sums: an element of a product is one chain over K, as in
matmul.py, so that a row's bits depend on its own inputs alone.
"""

from __future__ import annotations

from typing import Any

from kernels_numba.machine import (
    KernelError,
    bf16_high,
    bf16_low,
    bits_float,
    cuda,
    device,
    float32,
    int32,
    int64,
    kernel,
    lanewise,
    mma,
    pack_bf16,
    shfl,
    shfl_xor,
    uint32,
)
from kernels_numba.matmul import BLOCK_FEATURES, K_STEP, word_or_zero
from kernels_numba.portable_math import exp_to_one, sigmoid
from kernels_numba.rounding import to_bf16
from kernels_numba.sampling import MINUS_INFINITY, NOBODY, best_of_warp, better

THREADS = 128
WARP = 32
NARROW, WIDE = 8, 32
"""Slots a tile: few where experts have few slots each, so that little of a tile is empty."""
TILE_COLUMNS = 3
EXPERT, START, SLOTS = range(TILE_COLUMNS)
"""Columns of ``tiles``: the tile's expert, its first place in ``order``, its slots; a tile without slots does nothing."""


def route(experts: Any, weights: Any, logits: Any, stream: Any = None) -> None:
    """A row's K largest logits, ties to the lower expert, and what each counts; then what the shared expert counts.

    experts: int32 [rows, K], by descending logit; weights: float32 [rows, K + 1], bf16 values: bf16(exp(l - l_max) / sum over
    the picks), the last bf16(sigmoid(bf16(l))) of the last logit; logits: float32 [rows, E + 1].

    A NaN is never picked. A pick for which no logit is left is expert 0 with weight 0, with NaN in a row of NaN alone.
    Raises KernelError unless the shapes fit and K <= E.
    """
    (rows, picks), count = experts.shape, logits.shape[1] - 1
    if weights.shape != (rows, picks + 1) or logits.shape[0] != rows or picks > count:
        raise KernelError(
            f"route: experts {experts.shape}, weights {weights.shape}, logits {logits.shape}: wants [rows, K], "
            "[rows, K + 1] and [rows, E + 1] with K <= E"
        )
    route_kernel.at(E=count, K=picks)[rows, WARP, stream](experts, weights, logits)


def tile_slots(slots: int, experts: int) -> int:
    """Slots a tile for that many slots: NARROW or WIDE."""
    return NARROW if slots <= NARROW * experts else WIDE


def tile_count(slots: int, experts: int) -> int:
    """Rows of ``tiles`` for that many slots, however they fall: enough for E partly empty tiles, and no more than slots."""
    return min(slots, experts + slots // tile_slots(slots, experts))


def group(order: Any, tiles: Any, experts: Any, count: int, stream: Any = None) -> None:
    """Slots sorted by expert, those of an expert ascending, and the tiles that they are multiplied in.

    order: int32 [slots]; tiles: int32 [tile_count(slots, count), 3], columns EXPERT, START, SLOTS; experts: int32 [rows, K] with
    rows·K slots, each in 0 .. count - 1. Raises KernelError for other shapes.
    """
    slots = order.shape[0]
    if experts.size != slots or tiles.shape != (tile_count(slots, count), TILE_COLUMNS):
        raise KernelError(
            f"group: {experts.size} picks, order {order.shape}, tiles {tiles.shape}: wants a place a pick and "
            f"{(tile_count(slots, count), TILE_COLUMNS)} tiles"
        )
    bound = group_kernel.at(TILE=tile_slots(slots, count))
    bound[count, WARP, stream](order, tiles, experts.reshape(-1))


def expert_matmul(out: Any, x: Any, weight: Any, order: Any, tiles: Any, stream: Any = None) -> None:
    """out[slot] = x[slot // (slots / rows)] · weight[expert of the slot]ᵀ, one float32 chain an element, rounded to bf16.

    out: bf16 [slots, features], features even; x: bf16 [rows, K], a row for each slot or for each K of them; weight: bf16
    [E, features, K], K a multiple of 16; order, tiles: as ``group`` makes them. Raises KernelError for other shapes.
    """
    (slots, features), (rows, k), (count, _, _) = out.shape, x.shape, weight.shape
    share = slots // rows if rows else 1
    whole = slots == rows * share and order.shape == (slots,)
    if weight.shape != (count, features, k) or k % K_STEP or features % 2 or not whole:
        raise KernelError(
            f"expert_matmul: out {out.shape}, x {x.shape}, weight {weight.shape}: wants [rows·n, features], [rows, K] and "
            f"[E, features, K], K a multiple of {K_STEP}, features even"
        )
    wide, slab = (1, 8) if tile_slots(slots, count) == NARROW else (WIDE // 8, 4)
    bound = expert_matmul_kernel.at(FEATURES=features, SHARE=share, TILES=wide, SLAB=slab)
    grid = (-(-features // BLOCK_FEATURES), tiles.shape[0])
    bound[grid, THREADS, stream](out, x, weight.reshape(count * features, k), order, tiles)


def combine(out: Any, y: Any, shared: Any, weights: Any, stream: Any = None) -> None:
    """out = bf16(sum of weight · y over a row's slots in order, then weight · shared), products and sums in float32.

    out, shared: bf16 [rows, D], D even; y: bf16 [rows·K, D]; weights: float32 [rows, K + 1].
    """
    bound = combine_kernel.at(K=weights.shape[1] - 1)
    bound[-(-out.size // (2 * THREADS)), THREADS, stream](out, y, shared, weights)


# --- Routing ----------------------------------------------------------------------------------------------------------


@kernel
def route_kernel(experts, weights, logits, *, E, K):
    """A warp takes a row. Spec flash-next §2.

    experts: int32 [rows, K]; weights: float32 [rows, K + 1]; logits: float32 [rows, E + 1]. Launch: grid rows, 32
    threads.
    """
    row, lane = cuda.blockIdx.x, cuda.threadIdx.x
    parts = cuda.local.array(K, float32)  # exp(l - l_max) by pick
    # The picks: each the best of those after the one before; l_max is the first.
    value, name, largest = bits_float(uint32(0x7F800000)), int32(-1), float32(0.0)
    total = float32(0.0)
    for k in range(K):
        value, name = best_after(logits, row, lane, value, name, E=E)
        value, name = best_of_warp(value, name)
        if k == 0:
            largest = value
        parts[k] = exp_to_one(value - largest)
        total = total + parts[k]
        if lane == 0:
            experts[row, k] = name if name != NOBODY else int32(0)
    # Their shares, and the shared expert's gate.
    if lane == 0:
        for k in range(K):
            weights[row, k] = to_bf16(parts[k] / total)
        weights[row, K] = to_bf16(sigmoid(to_bf16(logits[row, E])))


@lanewise
def best_after(logits, row, lane, value, name, *, E):
    """The best of every 32nd logit of a row, from ``lane``, that comes after (value, name): (value, id).

    (-inf, NOBODY) if there is none.
    """
    best, best_name = bits_float(uint32(MINUS_INFINITY)), int32(NOBODY)
    for i in range(lane, E, WARP):
        logit = logits[row, i]
        if logit < value or (logit == value and i > name):
            best, best_name = better(best, best_name, logit, int32(i))
    return best, best_name


# --- Grouping ---------------------------------------------------------------------------------------------------------


@kernel
def group_kernel(order, tiles, experts, *, TILE):
    """A warp takes an expert: its slots follow those of all lower experts. A lane looks at neighbouring slots.

    order: int32 [slots]; tiles: int32 [tiles, 3]; experts: int32 [slots]. Launch: grid E, 32 threads.
    """
    expert, lane = cuda.blockIdx.x, cuda.threadIdx.x
    share = (experts.shape[0] + WARP - 1) // WARP
    first, stop = lane * share, min((lane + 1) * share, experts.shape[0])
    # How many slots lower experts have, how many this one has, and how many of these lie in lanes before.
    lower, mine = count_slots(experts, first, stop, expert)
    below = int64(shfl(sum_to_lane(lower, lane), int32(WARP - 1)))
    upto = sum_to_lane(mine, lane)
    own = int64(shfl(upto, int32(WARP - 1)))
    # The slots, ascending.
    at = below + upto - mine
    for slot in range(first, stop):
        if experts[slot] == expert:
            order[at] = int32(slot)
            at = at + 1
    # The tiles: those of the next expert start late enough for all of this one's; what is left between has no slots.
    start = first_tile(below, expert, TILE=TILE)
    for n in range(lane, first_tile(below + own, expert + 1, TILE=TILE) - start, WARP):
        tiles[start + n, EXPERT] = int32(expert)
        tiles[start + n, START] = int32(below + n * TILE)
        tiles[start + n, SLOTS] = int32(max(0, min(TILE, own - n * TILE)))


@lanewise
def first_tile(below, expert, *, TILE):
    """An expert's first tile when lower ones have ``below`` slots: both terms grow by at least an expert's tiles."""
    return min(below, expert + below // TILE)


@lanewise
def count_slots(experts, first, stop, expert):
    """(slots of lower experts, slots of this one) among first .. stop - 1, int32."""
    lower, mine = int32(0), int32(0)
    for slot in range(first, stop):
        lower = int32(lower + (1 if experts[slot] < expert else 0))
        mine = int32(mine + (1 if experts[slot] == expert else 0))
    return lower, mine


@device
def sum_to_lane(count, lane):
    """The sum of the counts of the lanes up to this one, int32."""
    total = count
    for doubling in range(5):
        step = 1 << doubling
        total = plus_if(total, shfl(total, int32(max(lane - step, 0))), lane >= step)
    return total


@lanewise
def plus_if(total, more, wanted):
    """total + more, or total."""
    return int32(total + more) if wanted else total


# --- The experts' products --------------------------------------------------------------------------------------------


@kernel
def expert_matmul_kernel(out, x, weight, order, tiles, *, FEATURES, SHARE, TILES, SLAB):
    """A warp takes 16 features × a tile of 8·TILES slots of one expert. Spec numerics §4 "projections"; the chain of matmul.py.

    out: bf16 [slots, FEATURES]; x: bf16 [slots / SHARE, K]; weight: bf16 [E·FEATURES, K]; order: int32 [slots]; tiles: int32
    [tiles, 3]. SLAB: mma steps whose operands are loaded together. Launch: grid (FEATURES / 64, tiles), 128 threads.
    """
    tile = cuda.blockIdx.y
    first, count = int64(tiles[tile, START]), int64(tiles[tile, SLOTS])
    lane = cuda.threadIdx.x % 32
    feature = cuda.blockIdx.x * BLOCK_FEATURES + cuda.threadIdx.x // 32 * 16 + lane // 4  # this lane's: this and + 8
    if count > 0:
        a = cuda.local.array((SLAB, 4), uint32)  # [step, a0..a3]
        b = cuda.local.array((TILES, SLAB, 2), uint32)  # [part, step, b0..b1]
        c = cuda.local.array((TILES, 4), float32)  # [part, c0..c3]
        rows = cuda.local.array(TILES, int64)  # the row of x of this lane's slot in each part
        for n in range(TILES):
            rows[n] = row_of(order, x, first, count, 8 * n + lane // 4, SHARE=SHARE)
            for i in range(4):
                c[n, i] = float32(0.0)
        upper = weight_row(weight, tiles[tile, EXPERT], feature, FEATURES=FEATURES)
        lower = weight_row(weight, tiles[tile, EXPERT], feature + 8, FEATURES=FEATURES)
        for step in range(0, weight.shape[1] // 8, SLAB):
            load_fragments(a, b, x, weight, rows, upper, lower, step * 8 + lane % 4, TILES=TILES, SLAB=SLAB)
            for n in range(TILES):
                c0, c1, c2, c3 = c[n, 0], c[n, 1], c[n, 2], c[n, 3]
                for s in range(SLAB):
                    c0, c1, c2, c3 = mma(a[s, 0], a[s, 1], a[s, 2], a[s, 3], b[n, s, 0], b[n, s, 1], c0, c1, c2, c3)
                c[n, 0], c[n, 1], c[n, 2], c[n, 3] = c0, c1, c2, c3
        for n in range(TILES):
            store_slots(out, order, first, count, 8 * n, feature, lane, c[n, 0], c[n, 1])
            store_slots(out, order, first, count, 8 * n, feature + 8, lane, c[n, 2], c[n, 3])


@lanewise
def row_of(order, x, first, count, at, *, SHARE):
    """The row of x of a tile's slot; past its slots the row after x's last, which counts as zeros."""
    return int64(order[first + at]) // SHARE if at < count else int64(x.shape[0])


@lanewise
def weight_row(weight, expert, feature, *, FEATURES):
    """The row of an expert's feature among all experts'; past its features the row after the last."""
    return int64(expert) * FEATURES + feature if feature < FEATURES else int64(weight.shape[0])


@lanewise
def load_fragments(a, b, x, weight, rows, upper, lower, word, *, TILES, SLAB):
    """The mma operands of SLAB steps, from this lane's first word of K; a step past K is zeros, which leave a sum as it is."""
    for s in range(SLAB):
        at = word + 8 * s
        a[s, 0] = word_or_zero(weight, upper, at)
        a[s, 1] = word_or_zero(weight, lower, at)
        a[s, 2] = word_or_zero(weight, upper, at + 4)
        a[s, 3] = word_or_zero(weight, lower, at + 4)
        for n in range(TILES):
            b[n, s, 0] = word_or_zero(x, rows[n], at)
            b[n, s, 1] = word_or_zero(x, rows[n], at + 4)


@device
def store_slots(out, order, first, count, part, feature, lane, left, right):
    """A lane's sums of two slots for one feature, as bf16 words: as matmul.store_rounded, at the slots' own rows."""
    odd = feature % 2 == 1
    got = shfl_xor(left if odd else right, 4)
    at = part + lane % 4 * 2 + feature % 2
    if at < count and feature < out.shape[1] * 2:
        out[order[first + at], feature // 2] = pack_bf16(got if odd else left, right if odd else got)


# --- Adding up --------------------------------------------------------------------------------------------------------


@kernel
def combine_kernel(out, y, shared, weights, *, K):
    """A thread takes a pair of a row's elements. Spec flash-next §2.

    out, shared: bf16 [rows, D]; y: bf16 [rows·K, D]; weights: float32 [rows, K + 1]. Launch: grid rows·D / 256, 128
    threads.
    """
    pair = int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    row, word = pair // out.shape[1], pair % out.shape[1]
    if row < out.shape[0]:
        out[row, word] = combined_pair(y, shared, weights, row, word, K=K)


@lanewise
def combined_pair(y, shared, weights, row, word, *, K):
    """bf16 of the sums of a pair: the picks in order, the shared expert last."""
    low, high = float32(0.0), float32(0.0)
    for k in range(K):
        pair, weight = y[row * K + k, word], weights[row, k]
        low, high = low + bf16_low(pair) * weight, high + bf16_high(pair) * weight
    pair, weight = shared[row, word], weights[row, K]
    return pack_bf16(low + bf16_low(pair) * weight, high + bf16_high(pair) * weight)
