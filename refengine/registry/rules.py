"""The rules that a model's numbers keep among themselves; a layout that breaks one is refused when it is loaded."""

import re
from collections.abc import Iterator

from refengine.registry.family import family_names
from refengine.registry.parts import Indexer, Ngrams
from refengine.registry.reader import Where
from refengine.registry.spec import FULL_ATTENTION, LINEAR_ATTENTION, ModelSpec

Rule = tuple[str, bool, str]
PARTS = {
    "qwen3_5": (),
    "qwen3_5_moe": ("experts",),
    "qwen4_exp": ("experts", "indexer", "hyper", "ngrams"),
}
"""The parts of each family that others have not."""


def check_spec(spec: ModelSpec, where: Where | None = None) -> ModelSpec:
    """Return `spec` if it keeps every rule. Raises UserError naming the file of `where` and the first bad key."""
    where = where or Where(spec.name)
    for key, holds, problem in _rules(spec):
        if not holds:
            raise where.error(key, problem)
    return spec


def _rules(spec: ModelSpec) -> Iterator[Rule]:
    yield "name", bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", spec.name)), "use letters, digits, '.', '_' and '-'"
    families = family_names()
    yield "family", spec.family in families, f'"{spec.family}" is unknown; known: {", ".join(families)}'
    yield from _attention_rules(spec)
    yield from _delta_net_rules(spec)
    yield from _size_rules(spec)
    yield from _layer_rules(spec)
    yield from _part_rules(spec)
    yield "mtp.layers", spec.mtp.layers in (0, 1), f"must be 0 or 1, not {spec.mtp.layers}"
    yield from _token_rules(spec)


def _attention_rules(spec: ModelSpec) -> Iterator[Rule]:
    attention, dims = spec.attention, spec.rope.dims
    heads = f"{attention.heads} heads do not divide over {attention.kv_heads} KV heads"
    yield "attention.kv_heads", _divides(attention.kv_heads, attention.heads), heads
    yield "attention.head_dim", attention.head_dim > 0, f"must be above 0, not {attention.head_dim}"
    yield "attention.output_gate", attention.output_gate, f"must be true: family {spec.family} always gates"
    yield "rope.dims", dims > 0 and dims % 2 == 0, f"must be even and above 0, not {dims}"
    yield "rope.dims", dims <= attention.head_dim, f"{dims} dims do not fit into head_dim {attention.head_dim}"
    yield "rope.theta", spec.rope.theta > 0, f"must be above 0, not {spec.rope.theta}"


def _delta_net_rules(spec: ModelSpec) -> Iterator[Rule]:
    gdn = spec.gated_delta_net
    heads = f"{gdn.value_heads} value heads do not divide over {gdn.key_heads} key heads"
    yield "gated_delta_net.key_heads", _divides(gdn.key_heads, gdn.value_heads), heads
    yield "gated_delta_net.key_dim", gdn.key_dim > 0, f"must be above 0, not {gdn.key_dim}"
    yield "gated_delta_net.value_dim", gdn.value_dim > 0, f"must be above 0, not {gdn.value_dim}"
    yield "gated_delta_net.conv_width", gdn.conv_width > 1, f"must be 2 or more, not {gdn.conv_width}"
    yield "gated_delta_net.gate", gdn.gate in ("silu", "sigmoid"), f'"{gdn.gate}" is unknown; use silu or sigmoid'


def _size_rules(spec: ModelSpec) -> Iterator[Rule]:
    sizes = {
        "hidden": spec.hidden,
        "vocabulary": spec.vocabulary,
        "layers": spec.layers,
        "max_positions": spec.max_positions,
        "mlp.width": spec.mlp.width,
        "norm_eps": spec.norm_eps,
    }
    for key, size in sizes.items():
        yield key, size > 0, f"must be above 0, not {size}"


def _layer_rules(spec: ModelSpec) -> Iterator[Rule]:
    count = len(spec.layer_types)
    yield "layer_types", count == spec.layers, f"{count} types for {spec.layers} layers"
    known = (FULL_ATTENTION, LINEAR_ATTENTION)
    for i, kind in enumerate(spec.layer_types):
        yield f"layer_types[{i}]", kind in known, f'"{kind}" is unknown; known: {", ".join(known)}'


def _part_rules(spec: ModelSpec) -> Iterator[Rule]:
    """Each family has its parts, all of them and no others; then their numbers."""
    own = PARTS[spec.family]
    for part in ("experts", "indexer", "hyper", "ngrams"):
        held, needed = getattr(spec, part) is not None, part in own
        yield (
            part,
            held == needed,
            f"missing key: family {spec.family} has it" if needed else f"family {spec.family} has none",
        )
    if (e := spec.experts) is not None:
        yield "experts.count", e.count > 0, f"must be above 0, not {e.count}"
        yield "experts.picks", 0 < e.picks <= e.count, f"must be 1 to the {e.count} experts, not {e.picks}"
        yield "experts.width", e.width > 0, f"must be above 0, not {e.width}"
    if spec.indexer is not None:
        yield from _indexer_rules(spec, spec.indexer)
    if (h := spec.hyper) is not None:
        yield "hyper.streams", h.streams > 1 and h.streams % 2 == 0, f"must be even and above 0, not {h.streams}"
        yield "hyper.rank", h.rank > 0, f"must be above 0, not {h.rank}"
    if spec.ngrams is not None:
        yield from _ngram_rules(spec, spec.ngrams)


def _indexer_rules(spec: ModelSpec, indexer: Indexer) -> Iterator[Rule]:
    for key in ("heads", "block"):
        yield f"indexer.{key}", getattr(indexer, key) > 0, f"must be above 0, not {getattr(indexer, key)}"
    fits = spec.rope.dims <= indexer.head_dim
    yield "indexer.head_dim", fits, f"{spec.rope.dims} rotary dims do not fit into {indexer.head_dim}"
    whole = f"{indexer.budget} positions are not whole blocks of {indexer.block}"
    yield "indexer.budget", _divides(indexer.block, indexer.budget), whole


def _ngram_rules(spec: ModelSpec, ngrams: Ngrams) -> Iterator[Rule]:
    yield "ngrams.layer", 0 <= ngrams.layer < spec.layers, f"{ngrams.layer} is none of the {spec.layers} layers"
    yield "ngrams.size", ngrams.size > 1, f"must be 2 or more, not {ngrams.size}"
    for key in ("heads", "base", "parts"):
        yield f"ngrams.{key}", getattr(ngrams, key) > 0, f"must be above 0, not {getattr(ngrams, key)}"
    heads = f"{ngrams.width} features do not divide over {ngrams.all_heads} heads"
    yield "ngrams.width", _divides(ngrams.all_heads, ngrams.width), heads
    parts = f"tables of multiples of {ngrams.divisor} rows do not divide over {ngrams.parts} parts"
    yield "ngrams.divisor", _divides(ngrams.parts, ngrams.divisor), parts
    within = f"{ngrams.end} is not in the vocabulary of {spec.vocabulary}"
    yield "ngrams.end", 0 <= ngrams.end < spec.vocabulary, within
    yield "ngrams.conv_width", ngrams.conv_width > 1, f"must be 2 or more, not {ngrams.conv_width}"


def _token_rules(spec: ModelSpec) -> Iterator[Rule]:
    tokens, vocabulary = spec.tokens, spec.vocabulary
    yield "tokens.text", tokens.text in ("bytes", "tokenizer"), f'"{tokens.text}" is unknown; use bytes or tokenizer'
    yield "tokens.text", tokens.text != "bytes" or vocabulary >= 256, f"bytes need 256 ids, vocabulary is {vocabulary}"
    last = tokens.first_special + len(tokens.specials)
    fits = 0 <= tokens.first_special <= vocabulary and last <= vocabulary
    yield "tokens.specials", fits, f"ids {tokens.first_special} to {last - 1} leave the vocabulary of {vocabulary}"
    for i, token in enumerate(tokens.end):
        yield f"tokens.end[{i}]", 0 <= token < vocabulary, f"{token} is not in the vocabulary of {vocabulary}"


def _divides(part: int, whole: int) -> bool:
    return part > 0 and whole > 0 and whole % part == 0
