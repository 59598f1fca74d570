"""Finds a model's layout by name, or in a YAML file, and reads it."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from refengine.errors import UserError
from refengine.registry.reader import Where, read
from refengine.registry.rules import check_spec
from refengine.registry.spec import FULL_ATTENTION, LINEAR_ATTENTION, ModelSpec
from refengine.registry.strict_yaml import load_yaml

_FOLDER = Path(__file__).parent


def available() -> list[str]:
    """Names of the models in the registry, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_model(name: str | Path) -> ModelSpec:
    """The layout of a model: a name of available(), or the path of a YAML file of the same form.

    Raises UserError, one line naming file and key, for an unknown name or a file that breaks a rule.
    """
    path = _path(str(name))
    where = Where(path.name)
    return check_spec(read(ModelSpec, _expand_pattern(load_yaml(path), where), where), where)


def layer_pattern(layers: int, full_attention_interval: int) -> list[str]:
    """Types of `layers` layers in which every `full_attention_interval`-th has full attention."""
    last = full_attention_interval - 1
    return [FULL_ATTENTION if i % full_attention_interval == last else LINEAR_ATTENTION for i in range(layers)]


def _path(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name in available():
        return _FOLDER / f"{name}.yaml"
    near = get_close_matches(name, available(), n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(available())}"
    raise UserError(f'model "{name}" is not in the registry; {hint} (a path to a .yaml file would do too)')


def _expand_pattern(data: Any, where: Where) -> Any:
    """Write `full_attention_interval` out as `layer_types`; leave anything else for the reader to judge."""
    if not isinstance(data, dict) or "full_attention_interval" not in data:
        return data
    if "layer_types" in data:
        raise where.error("full_attention_interval", "give either this or layer_types, not both")
    interval, layers = data["full_attention_interval"], data.get("layers")
    if type(interval) is not int or interval < 1:
        raise where.error("full_attention_interval", f"must be a whole number above 0, not {interval!r}")
    types = layer_pattern(layers, interval) if type(layers) is int else []
    return {key: value for key, value in data.items() if key != "full_attention_interval"} | {"layer_types": types}
