"""The libraries of the extra [hf], imported when they are wanted."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from refengine.errors import UserError

INSTALL = ".venv/bin/python -m pip install -e '.[hf]'"


def extra(module: str, wanted_by: str) -> ModuleType:
    """The module. wanted_by: the start of the refusal. Raises UserError where it is not installed."""
    try:
        return import_module(module)
    except ImportError as missing:
        package = module.partition(".")[0]
        raise UserError(
            f"{wanted_by}: {package} is not installed, it comes with the extra [hf] ({INSTALL})"
        ) from missing
