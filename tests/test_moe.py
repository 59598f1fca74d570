"""Mixture of experts: the layer is what float64 makes of it, a row's bits are its own, and tiles hold every slot once."""

from __future__ import annotations

import numpy as np
import pytest
from buffers import Output, assert_same_bits, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_numba import moe
from kernels_numba.activations import swiglu
from kernels_numba.machine import KernelError
from kernels_numba.matmul import matmul
from refengine.verify.moe_oracle import picks

EXPERTS, PICKS, HIDDEN, WIDTH = 8, 2, 64, 32


def weights_of_a_layer() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "router": normal(rng, EXPERTS + 1, HIDDEN, scale=0.3),
        "gate_up": normal(rng, EXPERTS, 2 * WIDTH, HIDDEN, scale=0.2),
        "down": normal(rng, EXPERTS, HIDDEN, WIDTH, scale=0.2),
        "shared_gate_up": normal(rng, 2 * WIDTH, HIDDEN, scale=0.2),
        "shared_down": normal(rng, HIDDEN, WIDTH, scale=0.2),
    }


LAYER = weights_of_a_layer()


def routed(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    logits = Output((len(x), EXPERTS + 1), np.float32)
    matmul(logits.array, x, LAYER["router"])
    experts, weights = Output((len(x), PICKS), np.int32), Output((len(x), PICKS + 1), np.float32)
    moe.route(experts.array, weights.array, logits.checked())
    return experts.checked(), weights.checked()


def grouped(experts: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    order = Output((experts.size,), np.int32)
    tiles = Output((moe.tile_count(experts.size, count), moe.TILE_COLUMNS), np.int32)
    moe.group(order.array, tiles.array, experts, count)
    return order.checked(), tiles.checked()


def mlp(x: np.ndarray, product, gate_up: np.ndarray, down: np.ndarray, slots: int) -> np.ndarray:
    wide, narrow, out = Output((slots, 2 * WIDTH)), Output((slots, WIDTH)), Output((slots, HIDDEN))
    product(wide.array, x, gate_up)
    swiglu(narrow.array, wide.checked())
    product(out.array, narrow.checked(), down)
    return out.checked()


def layer(x: np.ndarray) -> np.ndarray:
    """The whole layer by kernels."""
    experts, weights = routed(x)
    order, tiles = grouped(experts, EXPERTS)

    def product(out, x, weight):
        moe.expert_matmul(out, x, weight, order, tiles)

    y = mlp(x, product, LAYER["gate_up"], LAYER["down"], experts.size)
    shared = mlp(x, matmul, LAYER["shared_gate_up"], LAYER["shared_down"], len(x))
    out = Output(x.shape)
    moe.combine(out.array, y, shared, weights)
    return out.checked()


def layer_in_float64(x: np.ndarray) -> np.ndarray:
    """The same without a rounding, but for the picks."""
    w = {name: array.astype(np.float64) for name, array in LAYER.items()}
    x = x.astype(np.float64)

    def one(row, gate_up, down):
        g, u = np.split(gate_up @ row, 2)
        return down @ (g / (1 + np.exp(-g)) * u)

    logits = x @ w["router"].T
    out = []
    for row, line in zip(x, logits, strict=True):
        chosen = picks(line[None, :-1], PICKS)[0]
        share = np.exp(line[chosen] - line[chosen].max())
        total = sum(
            s * one(row, w["gate_up"][e], w["down"][e]) for e, s in zip(chosen, share / share.sum(), strict=True)
        )
        out.append(total + one(row, w["shared_gate_up"], w["shared_down"]) / (1 + np.exp(-line[-1])))
    return np.array(out)


@pytest.mark.parametrize("rows", [1, 9, 70])
def test_the_layer_is_what_float64_makes_of_it(rows: int) -> None:
    x = normal(np.random.default_rng(rows), rows, HIDDEN)
    found, wanted = layer(x).astype(np.float64), layer_in_float64(x)
    assert np.linalg.norm(found - wanted) <= 2.0**-7 * np.linalg.norm(wanted)


def test_a_row_has_the_same_bits_alone_and_among_any_others() -> None:
    x = normal(np.random.default_rng(5), 70, HIDDEN)
    whole = layer(x)
    assert_same_bits(layer(x[3:4])[0], whole[3])
    assert_same_bits(layer(x[::-1].copy()), whole[::-1])


def test_picks_descend_and_ties_go_to_the_lower_expert() -> None:
    logits = np.array([[1.0, 3.0, 3.0, np.nan, 2.0, 0.0], [5.0] * 5 + [0.0]], np.float32)
    experts, weights = np.empty((2, 3), np.int32), np.empty((2, 4), np.float32)
    moe.route(experts, weights, logits)
    assert experts.tolist() == [[1, 2, 4], [0, 1, 2]] and (weights[:, 3] == 0.5).all()
    assert (weights[1, :3] == np.float32(0.333984375)).all(), "a third, in bf16"


def test_what_is_no_number_is_never_picked_while_a_number_is_left() -> None:
    logits = np.array([[np.nan, 1.0, np.nan, 0.0], [np.nan, np.nan, np.nan, 0.0]], np.float32)
    experts, weights = np.empty((2, 2), np.int32), np.empty((2, 3), np.float32)
    moe.route(experts, weights, logits)
    assert experts.tolist() == [[1, 0], [0, 0]] and weights[0].tolist() == [1.0, 0.0, 0.5]
    assert np.isnan(weights[1, :2]).all()


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 12), st.data())
def test_every_slot_lies_in_one_tile_of_its_expert(count: int, data: st.DataObject) -> None:
    experts = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=150)), np.int32)
    order, tiles = grouped(experts[:, None], count)
    places = [p for _, start, n in tiles for p in range(start, start + n)]
    assert places == list(range(experts.size)), "tiles follow each other"
    assert order.tolist() == sorted(range(experts.size), key=lambda slot: (experts[slot], slot))
    for expert, start, n in tiles:
        assert n <= moe.tile_slots(experts.size, count) and (experts[order[start : start + n]] == expert).all()


BAD = [
    (
        lambda a: moe.route(a((2, 9), int), a((2, 10), float), a((2, 9), float)),
        "route: experts (2, 9), weights (2, 10)",
    ),
    (lambda a: moe.group(a((4,), int), a((3, 3), int), a((2, 2), int), 8), "group: 4 picks, order (4,), tiles (3, 3)"),
    (
        lambda a: moe.expert_matmul(a((4, 6)), a((2, 24)), a((8, 6, 24)), a((4,), int), a((4, 3), int)),
        "expert_matmul: out (4, 6), x (2, 24), weight (8, 6, 24)",
    ),
]


@pytest.mark.parametrize("call, says", BAD, ids=["route", "group", "expert_matmul"])
def test_shapes_that_do_not_fit_are_named(call, says: str) -> None:
    def array(shape, kind=None):
        return np.zeros(
            shape, {int: np.int32, float: np.float32, None: normal(np.random.default_rng(0), 1).dtype}[kind]
        )

    with pytest.raises(KernelError) as raised:
        call(array)
    assert str(raised.value).startswith(says) and "\n" not in str(raised.value)
