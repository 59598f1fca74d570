"""A layout that the kernels cannot run is refused by key before any weight is read; kernels and check agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from refengine.errors import UserError
from refengine.model import check_dims
from refengine.model.dims import refusals
from refengine.registry import available, load_model

TINY = load_model("qwen3.5-tiny")


def changed(part: str, **numbers):
    """TINY with numbers of a part changed, or of the model itself."""
    return replace(TINY, **(numbers if part == "" else {part: replace(getattr(TINY, part), **numbers)}))


@pytest.mark.parametrize("name", available())
def test_every_layout_of_the_registry_has_its_kernels(name):
    assert [(key, refusal) for key, refusal in refusals(load_model(name)) if refusal] == []


@pytest.mark.parametrize(
    ("part", "numbers", "says"),
    [
        ("attention", {"heads": 34}, "attention: heads 34, kv_heads 2: decode takes 1 to 16 query heads a KV head"),
        ("attention", {"head_dim": 96}, "attention: head_dim 96: decode has 64, 128 and 256"),
        ("rope", {"dims": 6}, "rope.dims: rotary dims 6 of head_dim 256"),
        ("gated_delta_net", {"key_dim": 64}, "gated_delta_net.key_dim: the kernels have 128, not 64"),
        ("gated_delta_net", {"value_dim": 64}, "gated_delta_net.value_dim: the kernels have 128, not 64"),
        ("gated_delta_net", {"conv_width": 3}, "gated_delta_net.conv_width: the kernels have 4, not 3"),
        ("mlp", {"width": 200}, "mlp.width: the kernels have multiples of 16, not 200"),
        ("", {"hidden": 120}, "hidden: the kernels have multiples of 16, not 120"),
    ],
)
def test_what_no_kernel_has_is_refused_by_key(part, numbers, says):
    with pytest.raises(UserError, match=f"qwen3.5-tiny: {says}"):
        check_dims(changed(part, **numbers))


@pytest.mark.parametrize(
    ("part", "numbers", "key", "says"),
    [
        ("indexer", {"head_dim": 96}, "indexer.head_dim", "index_dim 96: the sparse indexer has 64 and 128"),
        ("indexer", {"block": 8}, "indexer.block", "the kernels have 4, not 8"),
        ("experts", {"width": 72}, "experts.width", "the kernels have multiples of 16, not 72"),
        ("hyper", {"rank": 40}, "hyper.rank", "the kernels have multiples of 16, not 40"),
        ("ngrams", {"size": 4}, "ngrams.size", "the kernels have 3, not 4"),
        ("ngrams", {"conv_width": 3}, "ngrams.conv_width", "the kernels have 4, not 3"),
        ("ngrams", {"width": 120}, "ngrams.width", "the kernels have multiples of 16, not 120"),
    ],
)
def test_parts_that_no_kernel_has_are_refused_by_key(part, numbers, key, says):
    spec = load_model("flash-next-tiny")
    bad = replace(spec, **{part: replace(getattr(spec, part), **numbers)})
    assert [(k, refusal) for k, refusal in refusals(bad) if refusal] == [(key, says)]
