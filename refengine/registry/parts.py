"""The parts of a model's layout: attention, rotary embedding, Gated DeltaNet, MLP, tokens, and its tensors."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """Full attention: query head h reads KV head h // (heads / kv_heads); `output_gate`: sigmoid gate before o_proj."""

    heads: int
    kv_heads: int
    head_dim: int
    output_gate: bool


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of a head's first `dims` dims, in pairs (j, j + dims/2); angle pos · theta^(-2j/dims)."""

    dims: int
    theta: float


@dataclass(frozen=True)
class GatedDeltaNet:
    """Linear attention: value head h uses key head h // (value_heads / key_heads); a causal conv over `conv_width`.

    `gate`: what the output gate makes of its input, "silu" or "sigmoid".
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    gate: str = "silu"

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution, in the order query, key, value."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class Mlp:
    """SwiGLU of `width` hidden features, of every token; beside experts it is the shared one, under a sigmoid gate."""

    width: int


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: each token goes through `picks` of `count` SwiGLUs of `width` hidden features."""

    count: int
    picks: int
    width: int


@dataclass(frozen=True)
class Indexer:
    """Sparse attention: a query sees the `budget` positions whose blocks of `block` score highest, and its unfinished block.

    `heads` index queries of `head_dim` share one index key.
    """

    heads: int
    head_dim: int
    budget: int
    block: int

    @property
    def row_bytes(self) -> int:
        """Bytes of an index key, bf16, and of a block's pooled key."""
        return 2 * self.head_dim


@dataclass(frozen=True)
class Hyper:
    """Hyper-connections: a residual of `streams` streams; a product of rank `rank` says how a block reads them."""

    streams: int
    rank: int


@dataclass(frozen=True)
class Ngrams:
    """The n-gram branch before layer `layer`: `heads` rows for each length from 2 to `size` tokens make `width` features.

    No head's table has fewer than `base` rows, all together have a multiple of `divisor`, in `parts` tensors; `seed` makes the
    hash; the token `end` ends a text for it. A causal conv over `conv_width` rows, `size` apart, follows.
    """

    layer: int
    width: int
    size: int
    heads: int
    base: int
    divisor: int
    parts: int
    seed: int
    end: int
    conv_width: int

    @property
    def all_heads(self) -> int:
        """Heads of all lengths together."""
        return (self.size - 1) * self.heads

    @property
    def kept_rows(self) -> int:
        """Rows of the convolution's input that a stream keeps."""
        return (self.conv_width - 1) * self.size


@dataclass(frozen=True)
class Mtp:
    """Multi-token prediction: a head of `layers` decoder layers with full attention, 0 where a model has none."""

    layers: int


@dataclass(frozen=True)
class Tokens:
    """Token ids. `text` is "bytes" (id = byte) or "tokenizer" (a tokenizer.json beside the weights).

    `specials` are the names of the ids from `first_special` on; `end` are the ids that end a reply.
    """

    text: str
    end: tuple[int, ...]
    first_special: int = 0
    specials: tuple[str, ...] = ()

    def id_of(self, special: str) -> int:
        """Id of a special token by name. Raises ValueError if the model has none of that name."""
        return self.first_special + self.specials.index(special)


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint. `dtypes` are the safetensors types it may have, the usual one first."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    role: str
    layer: int | None
    gain: str | None

    @property
    def dtype(self) -> str:
        """The type in which a synthetic checkpoint stores it."""
        return self.dtypes[0]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)
