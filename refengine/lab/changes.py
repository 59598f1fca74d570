"""A kernel with a few places of its source changed, in the place of the real one: what a tutorial breaks."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from refengine.contract.controls import module_from
from refengine.errors import UserError
from refengine.lab.notebook import present


@contextmanager
def changed(module: str, edits: Mapping[str, str]) -> Iterator[None]:
    """While this is open, backends launch a module's kernels with ``edits`` made: old text, which stands there once, to new.

    Only what a module of ``backends`` took from the module by name is exchanged. Raises UserError for a text that does not stand
    there once, and where no backend launches anything of it.
    """
    right = importlib.import_module(module)
    wrong = module_from(edited(right, edits), module)
    taken = [(user, name, value) for user in backend_modules() for name, value in users(user, right)]
    if not taken:
        raise UserError(f"{module}: no backend takes a kernel of it")
    try:
        for user, name, _ in taken:
            setattr(user, name, vars(wrong)[name])
        yield
    finally:
        for user, name, value in taken:
            setattr(user, name, value)


def edited(module: ModuleType, edits: Mapping[str, str]) -> str:
    """A module's source with the edits made."""
    source = inspect.getsource(module)
    for old, new in edits.items():
        if (times := source.count(old)) != 1:
            raise UserError(f"{old!r} stands {times} times in {module.__name__}, not once")
        source = source.replace(old, new)
    return source


def backend_modules() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith("backends.")]


def users(user: ModuleType, right: ModuleType) -> list[tuple[str, Any]]:
    """(name, value) of each kernel or function of a module that another defines."""
    taken = [(name, value) for name, value in vars(user).items() if vars(right).get(name) is value]
    return [(name, value) for name, value in taken if home(value) == right.__name__]


def home(value: Any) -> str:
    """The module that defines a kernel or function; empty for what is neither."""
    return getattr(getattr(value, "fn", value), "__module__", "")


def show_edits(edits: Mapping[str, str]) -> None:
    """The edits as a patch shows them."""
    parts = [
        "\n".join([*(f"- {line}" for line in old.splitlines()), *(f"+ {line}" for line in new.splitlines())])
        for old, new in edits.items()
    ]
    text = "\n\n".join(parts)
    present(text + "\n", f"```diff\n{text}\n```")
