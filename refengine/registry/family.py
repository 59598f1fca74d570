"""A model family: how its checkpoints name their tensors, and of which dimensions each tensor is made."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from refengine.registry.reader import Where, read
from refengine.registry.strict_yaml import load_yaml

FAMILIES = Path(__file__).parent / "families"


@dataclass(frozen=True)
class Template:
    """One tensor of a family: its name with `{prefix}` and `{layer}` to fill in, and its shape as dimension names.

    `gain` is None except for norm weights w: "one_plus" if the norm multiplies by 1 + w, "plain" if by w. `stored` is the type in
    a file where it is no weight. A name with `{part}` stands for as many tensors as its part has.
    """

    name: str
    shape: tuple[str, ...]
    gain: str | None = None
    stored: str | None = None


@dataclass(frozen=True)
class Family:
    """The tensors of a family by role: those of the model, of every layer, of each kind of layer, of the layer with the n-gram
    branch, and of the MTP head.

    Names of the head, and of its layers, start with `mtp_prefix`.
    """

    family: str
    prefixes: tuple[str, ...]
    mtp_prefix: str
    ignored: tuple[str, ...]
    model: dict[str, Template]
    layer: dict[str, Template]
    full_attention: dict[str, Template]
    linear_attention: dict[str, Template]
    mtp: dict[str, Template]
    ngrams: dict[str, Template] = field(default_factory=dict)

    def of_layer(self, layer_type: str) -> dict[str, Template]:
        """Roles of a layer of type "full_attention" or "linear_attention"."""
        own = self.full_attention if layer_type == "full_attention" else self.linear_attention
        return self.layer | own


def family_names() -> list[str]:
    """Names of the families in the registry."""
    return sorted(path.stem for path in FAMILIES.glob("*.yaml"))


@cache
def load_family(name: str) -> Family:
    """The family of that name; `name` is one of family_names()."""
    path = FAMILIES / f"{name}.yaml"
    return read(Family, load_yaml(path), Where(path.name))
