"""What the engine knows of a model: its dimensions, and what follows from them."""

from collections.abc import Iterator
from dataclasses import dataclass

from refengine.errors import UserError
from refengine.registry.family import Family, Template, load_family
from refengine.registry.parts import Attention, GatedDeltaNet, Mlp, Mtp, Rope, Tensor, Tokens

FULL_ATTENTION = "full_attention"
LINEAR_ATTENTION = "linear_attention"

_ALIGN = 16


@dataclass(frozen=True)
class ModelSpec:
    """A model's layout. Sizes are counts of elements unless they say bytes.

    `layer_types` has "full_attention" or "linear_attention" for each of the `layers` layers.
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
    def state_bytes(self) -> int:
        """Bytes of one stream's recurrent state: fp32 (value_dim, key_dim) a value head, bf16 rows of conv history."""
        gdn = self.gated_delta_net
        recurrent = 4 * gdn.value_heads * gdn.value_dim * gdn.key_dim
        history = 2 * (gdn.conv_width - 1) * gdn.conv_channels
        return len(self.linear_layers) * (recurrent + history)

    def kv_bytes_per_token(self, kv: str = "bf16") -> int:
        """Bytes that one position takes in the caches of all layers; kv is "bf16" or "fp8"."""
        return len(self.attention_layers) * self.attention.kv_heads * sum(self._plane_row_bytes(kv))

    def bytes_a_page(self, page_size: int, kv: str = "bf16") -> int:
        """Bytes of a page of `page_size` positions, all layers, each plane rounded up to 16 (spec attention §3).

        Raises UserError if page_size is not positive.
        """
        if page_size < 1:
            raise UserError(f"page size {page_size}: a page holds at least 1 position")
        rows = self.attention.kv_heads * page_size
        planes = sum(-(-rows * row // _ALIGN) * _ALIGN for row in self._plane_row_bytes(kv))
        return len(self.attention_layers) * planes

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
        }

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
        return Tensor(name, shape, dtypes, role, layer, template.gain)
