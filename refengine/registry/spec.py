"""What the engine knows of a model: its dimensions, and what follows from them."""

from collections.abc import Iterator
from dataclasses import dataclass

from refengine.errors import UserError
from refengine.registry.family import Family, Template, load_family
from refengine.registry.ngrams import NgramHash, ngram_hash
from refengine.registry.parts import (
    Attention,
    Experts,
    GatedDeltaNet,
    Hyper,
    Indexer,
    Mlp,
    Mtp,
    Ngrams,
    Rope,
    Tensor,
    Tokens,
)

FULL_ATTENTION = "full_attention"
LINEAR_ATTENTION = "linear_attention"

_ALIGN = 16


@dataclass(frozen=True)
class ModelSpec:
    """A model's layout. Sizes are counts of elements unless they say bytes.

    `layer_types` has "full_attention" or "linear_attention" for each of the `layers` layers; with an indexer, full attention is
    sparse. Parts that a model has not are None.
    """

    name: str
    family: str
    hidden: int
    vocabulary: int
    layers: int
    layer_types: tuple[str, ...]
    norm_eps: float
    tied_head: bool
    max_positions: int
    attention: Attention
    rope: Rope
    gated_delta_net: GatedDeltaNet
    mlp: Mlp
    tokens: Tokens
    mtp: Mtp = Mtp(0)
    experts: Experts | None = None
    indexer: Indexer | None = None
    hyper: Hyper | None = None
    ngrams: Ngrams | None = None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have full attention, hence a KV cache."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL_ATTENTION)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Numbers of the Gated DeltaNet layers, which have recurrent state."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR_ATTENTION)

    @property
    def mtp_layers(self) -> tuple[int, ...]:
        """Numbers of the MTP head's layers in a cache: they follow the model's."""
        return tuple(range(self.layers, self.layers + self.mtp.layers))

    @property
    def drafts_trees(self) -> bool:
        """Whether drafts may branch: a row of sparse attention sees all rows before it, so its drafts are chains."""
        return self.indexer is None

    @property
    def state_bytes(self) -> int:
        """Bytes of one stream's recurrent state: fp32 (value_dim, key_dim) a value head, bf16 rows of conv history.

        With an n-gram branch, its bf16 rows of conv history and int32 tokens too.
        """
        gdn = self.gated_delta_net
        recurrent = 4 * gdn.value_heads * gdn.value_dim * gdn.key_dim
        history = 2 * (gdn.conv_width - 1) * gdn.conv_channels
        ngrams = 0
        if self.ngrams is not None:
            ngrams = 2 * self.ngrams.kept_rows * self.stream_width + 4 * (self.ngrams.size - 1)
        return len(self.linear_layers) * (recurrent + history) + ngrams

    @property
    def stream_width(self) -> int:
        """Elements of a row of the residual, all its streams together."""
        return self.hidden * (1 if self.hyper is None else self.hyper.streams)

    @property
    def ngram_hash(self) -> NgramHash:
        """The numbers of the n-gram branch's hash. Raises ValueError for a model that has no such branch."""
        n = self.ngrams
        if n is None:
            raise ValueError(f"{self.name} has no n-gram branch")
        return ngram_hash(self.vocabulary, n.size, n.heads, n.base, n.divisor, n.seed)

    def kv_bytes_per_token(self, kv: str = "bf16") -> int:
        """Bytes that one position takes in the caches of all layers; kv is "bf16" or "fp8".

        With an indexer: its index key, and its share of its block's pooled key, too.
        """
        row = self.attention.kv_heads * sum(self._plane_row_bytes(kv))
        if self.indexer is not None:
            row += self.indexer.row_bytes + self.indexer.row_bytes // self.indexer.block
        return len(self.attention_layers) * row

    def bytes_a_page(self, page_size: int, kv: str = "bf16") -> int:
        """Bytes of a page of `page_size` positions, all layers, each plane rounded up to 16 (spec attention §3).

        With an indexer, a page has a plane of index keys and one of pooled keys, a row for each block begun.

        Raises UserError if page_size is not positive.
        """
        if page_size < 1:
            raise UserError(f"page size {page_size}: a page holds at least 1 position")
        rows = self.attention.kv_heads * page_size
        planes = [rows * row for row in self._plane_row_bytes(kv)]
        if self.indexer is not None:
            planes += [self.indexer.row_bytes * n for n in (page_size, -(-page_size // self.indexer.block))]
        return len(self.attention_layers) * sum(-(-plane // _ALIGN) * _ALIGN for plane in planes)

    def _plane_row_bytes(self, kv: str) -> tuple[int, ...]:
        dim = self.attention.head_dim
        planes = {"bf16": (2 * dim, 2 * dim), "fp8": (dim, dim, 1, 1)}
        if kv not in planes:
            raise UserError(f'KV type "{kv}" is unknown; use bf16 or fp8')
        return planes[kv]

    @property
    def dimensions(self) -> dict[str, int]:
        """The dimensions of which the family's tensor shapes are made, by name."""
        attention, gdn = self.attention, self.gated_delta_net
        query = attention.heads * attention.head_dim
        return {
            "one": 1,
            "hidden": self.hidden,
            "embedding_and_hidden": 2 * self.hidden,
            "vocabulary": self.vocabulary,
            "mlp_width": self.mlp.width,
            "head_dim": attention.head_dim,
            "query": query,
            "query_and_gate": 2 * query if attention.output_gate else query,
            "key_value": attention.kv_heads * attention.head_dim,
            "gdn_value_heads": gdn.value_heads,
            "gdn_value_dim": gdn.value_dim,
            "gdn_value": gdn.value_heads * gdn.value_dim,
            "conv_channels": gdn.conv_channels,
            "conv_width": gdn.conv_width,
            **self._dimensions_of_parts(),
        }

    def _dimensions_of_parts(self) -> dict[str, int]:
        """Dimensions of the parts that not every model has."""
        found = {"streams": self.stream_width}
        if (e := self.experts) is not None:
            found |= {"experts": e.count, "expert_width": e.width, "expert_gate_up": 2 * e.width}
        if (i := self.indexer) is not None:
            found |= {"index_head_dim": i.head_dim, "index_query_key": (i.heads + 1) * i.head_dim}
        if (h := self.hyper) is not None:
            found |= {"hyper_streams": h.streams, "hyper_rank": h.rank}
        if (n := self.ngrams) is not None:
            found |= {"ngram_width": n.width, "ngram_conv_width": n.conv_width, "ngram_size": n.size}
            found |= {"ngram_heads": n.all_heads, "ngram_head_width": n.width // n.all_heads}
            found |= {"ngram_part_rows": self.ngram_hash.rows // n.parts}
        return found

    def tensors(self, prefix: str | None = None) -> tuple[Tensor, ...]:
        """Every tensor of the model without its MTP head; names start with `prefix` (by default the family's first)."""
        family = load_family(self.family)
        return tuple(self._tensors(family, family.prefixes[0] if prefix is None else prefix))

    def mtp_tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of the MTP head, none where the model has no head; its layers count on from the model's."""
        return tuple(self._mtp_tensors(load_family(self.family))) if self.mtp.layers else ()

    def _tensors(self, family: Family, prefix: str) -> Iterator[Tensor]:
        for role, template in family.model.items():
            if not (self.tied_head and role == "lm_head"):
                yield self._tensor(role, template, template.name.format(prefix=prefix), None)
        for layer, kind in enumerate(self.layer_types):
            for role, template in family.of_layer(kind).items():
                yield self._tensor(role, template, template.name.format(prefix=prefix, layer=layer), layer)
        if self.ngrams is not None:
            yield from self._ngram_tensors(family, prefix, self.ngrams)

    def _ngram_tensors(self, family: Family, prefix: str, ngrams: Ngrams) -> Iterator[Tensor]:
        """A tensor in parts has a role for each: ngram_table_0 and so on."""
        for role, template in family.ngrams.items():
            split = "{part}" in template.name
            for part in range(ngrams.parts if split else 1):
                name = template.name.format(prefix=prefix, layer=ngrams.layer, part=part)
                yield self._tensor(f"{role}_{part}" if split else role, template, name, ngrams.layer)

    def _mtp_tensors(self, family: Family) -> Iterator[Tensor]:
        prefix = family.mtp_prefix
        for role, template in family.mtp.items():
            yield self._tensor(role, template, template.name.format(prefix=prefix), None)
        for number in range(self.mtp.layers):
            for role, template in family.of_layer(FULL_ATTENTION).items():
                name = template.name.format(prefix=prefix, layer=number)
                yield self._tensor(role, template, name, self.layers + number)

    def _tensor(self, role: str, template: Template, name: str, layer: int | None) -> Tensor:
        sizes = self.dimensions
        shape = tuple(sizes[dimension] for dimension in template.shape)
        dtypes = ("BF16", "F32") if len(shape) == 1 else ("BF16",)
        if template.stored is not None:
            dtypes = (template.stored,)
        return Tensor(name, shape, dtypes, role, layer, template.gain)
