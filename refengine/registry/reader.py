"""From plain data (YAML, JSON) to frozen dataclasses, with exact types and errors that name file and key."""

import dataclasses
import math
import types
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from refengine.errors import UserError

T = TypeVar("T")

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclasses.dataclass(frozen=True)
class Where:
    """The file that data came from. `names` maps a dotted key of ours to the key that the file uses for it."""

    file: str
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def error(self, key: str, problem: str) -> UserError:
        """A one-line error `file: key: problem`."""
        return UserError(f"{self.file}: {self.names.get(key, key)}: {problem}" if key else f"{self.file}: {problem}")


def read(cls: type[T], data: Any, where: Where, path: str = "") -> T:
    """Build dataclass `cls` from a mapping: every key known, every field present, every value of its exact type.

    Text that looks like a number is not a number, true is not 1, and 1.0 is not a whole number.
    Raises UserError naming file and key.
    """
    if not isinstance(data, Mapping):
        raise where.error(path, f"must be a mapping, not {_describe(data)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    _refuse_unknown(data, list(fields), where, path)
    values = {}
    for name, field in fields.items():
        key = _join(path, name)
        if name in data:
            values[name] = _value(hints[name], data[name], where, key)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise where.error(key, "missing key")
    return cls(**values)


def _refuse_unknown(data: Mapping[Any, Any], known: list[str], where: Where, path: str) -> None:
    for key in data:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
            raise where.error(_join(path, str(key)), f"unknown key; {hint}")


def _value(kind: Any, value: Any, where: Where, key: str) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        return None if value is None else _value(get_args(kind)[0], value, where, key)
    if dataclasses.is_dataclass(kind):
        return read(kind, value, where, key)  # type: ignore[arg-type]
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind)[0], value, where, key)
    if get_origin(kind) is dict:
        return _dict(get_args(kind)[1], value, where, key)
    if type(value) is kind or (kind is float and type(value) is int):
        return _finite(value, where, key) if kind is float else value
    raise where.error(key, f"must be {_WORDS[kind]}, not {_describe(value)}")


def _tuple(kind: Any, value: Any, where: Where, key: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise where.error(key, f"must be a list, not {_describe(value)}")
    return tuple(_value(kind, item, where, f"{key}[{i}]") for i, item in enumerate(value))


def _dict(kind: Any, value: Any, where: Where, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise where.error(key, f"must be a mapping, not {_describe(value)}")
    return {name: _value(kind, item, where, _join(key, name)) for name, item in value.items()}


def _finite(value: float, where: Where, key: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise where.error(key, f"must be a finite number, not {value}")
    return number


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _describe(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return f'the text "{value}"'
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    return str(value).lower()
