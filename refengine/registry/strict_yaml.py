"""YAML without surprises: scalars as JSON reads them, no key twice, no aliases, errors of one line."""

import re
from pathlib import Path
from typing import Any

import yaml

from refengine.errors import UserError

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)$")
_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?$")


class _StrictLoader(yaml.SafeLoader):
    """A loader in which `on`, `1_000`, `010` and `1:30` are text, and 1e-6 is a number."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(None, None, "a key must be text", key.start_mark)
            if key.value in seen:
                problem = f"{key.value}: repeated key; keep one"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_StrictLoader.yaml_implicit_resolvers = {}


def _resolve(tag: str, pattern: re.Pattern[str], first: str) -> None:
    _StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", pattern, list(first))


_resolve("int", _INTEGER, "-0123456789")
_resolve("float", _FLOAT, "-0123456789")
_resolve("bool", re.compile(r"(?:true|false)$"), "tf")
_resolve("null", re.compile(r"null$"), "n")
_StrictLoader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(node.value))


def load_yaml(path: Path) -> Any:
    """The content of a YAML file as dicts, lists, text, numbers and booleans.

    Raises UserError, one line naming the file, if it cannot be read or is not strict YAML.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path.name}: is not UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"{path.name}: {line}{error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path.name}: is not YAML: {' '.join(str(error).split())}") from error
