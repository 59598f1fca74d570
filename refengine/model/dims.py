"""Which layouts the kernels can run: their own checks decide, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kernels_numba import gated_delta_net
from kernels_numba.decode_plan import check_heads
from kernels_numba.flash_next import ngram
from kernels_numba.flash_next.pages import BLOCK
from kernels_numba.flash_next.turns import check_index_rope
from kernels_numba.matmul import K_STEP
from kernels_numba.rope_store import check_rope
from refengine.errors import UserError
from refengine.registry import ModelSpec


def check_dims(spec: ModelSpec) -> None:
    """Raise UserError naming the model, the key and what the kernels have."""
    for key, refusal in refusals(spec):
        if refusal:
            raise UserError(f"{spec.name}: {key}: {refusal}")


def refusals(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """What the kernels say of each key; nothing where they take it."""
    attention, gdn = spec.attention, spec.gated_delta_net
    yield "attention", said(check_heads, attention.heads, attention.kv_heads, attention.head_dim)
    yield "rope.dims", said(check_rope, attention.head_dim, spec.rope.dims)
    yield "gated_delta_net.key_dim", unless(gdn.key_dim == gated_delta_net.HEAD, gated_delta_net.HEAD, gdn.key_dim)
    yield (
        "gated_delta_net.value_dim",
        unless(gdn.value_dim == gated_delta_net.HEAD, gated_delta_net.HEAD, gdn.value_dim),
    )
    yield (
        "gated_delta_net.conv_width",
        unless(gdn.conv_width == gated_delta_net.TAPS, gated_delta_net.TAPS, gdn.conv_width),
    )
    for key, size in (("hidden", spec.hidden), ("mlp.width", spec.mlp.width)):
        yield key, unless(size % K_STEP == 0, f"multiples of {K_STEP}", size)
    yield from refusals_of_parts(spec)


def refusals_of_parts(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """The same of the parts that not every model has."""
    if (e := spec.experts) is not None:
        yield "experts.width", unless(e.width % K_STEP == 0, f"multiples of {K_STEP}", e.width)
    if (i := spec.indexer) is not None:
        yield "indexer.head_dim", said(check_index_rope, i.head_dim, spec.rope.dims)
        yield "indexer.block", unless(i.block == BLOCK, BLOCK, i.block)
    if (h := spec.hyper) is not None:
        yield "hyper.rank", unless(h.rank % K_STEP == 0, f"multiples of {K_STEP}", h.rank)
    if (n := spec.ngrams) is not None:
        yield "ngrams.size", unless(n.size == ngram.LONGEST, ngram.LONGEST, n.size)
        yield "ngrams.conv_width", unless(n.conv_width == ngram.TAPS, ngram.TAPS, n.conv_width)
        yield "ngrams.width", unless(n.width % K_STEP == 0, f"multiples of {K_STEP}", n.width)


def said(check: Callable[..., object], *numbers: int) -> str:
    """What a kernel's own check says against the numbers."""
    try:
        check(*numbers)
    except ValueError as refusal:
        return str(refusal)
    return ""


def unless(holds: bool, wanted: object, found: int) -> str:
    return "" if holds else f"the kernels have {wanted}, not {found}"
