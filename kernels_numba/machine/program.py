"""A kernel or device function as machines take it: its syntax tree, compile-time arguments bound, and the names in it."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .errors import KernelError


@dataclass(frozen=True, eq=False)
class Program:
    """A kernel or device function with its compile-time arguments bound: what a machine translates.

    tree: the function, original line numbers. env: every free name of the tree. lanewise: see ``machine.lanewise``.
    counted: the tree with its ``count`` statements, which only the checked CPU machine runs.
    """

    name: str
    kind: str
    lanewise: bool
    tree: ast.FunctionDef
    counted: ast.FunctionDef
    env: dict[str, Any]
    filename: str
    params: tuple[str, ...] = field(default=())

    @property
    def devices(self) -> list[Program]:
        """The device functions it calls, in order of appearance."""
        return [v for v in self.env.values() if isinstance(v, Program)]


def refuse(filename: str, node: ast.AST, kernel: str, message: str) -> KernelError:
    """A KernelError that names the kernel, the file and line, and shows the line."""
    line = getattr(node, "lineno", 0)
    shown = linecache.getline(filename, line).strip()
    return KernelError(f"{kernel}: {filename}:{line}: {message}" + (f"  [{shown}]" if shown else ""))


def parse(fn: Callable[..., Any]) -> tuple[ast.FunctionDef, str]:
    """The function's syntax tree with the file's own line numbers, and the file's name."""
    lines, first = inspect.getsourcelines(fn)
    tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    ast.increment_lineno(tree, first - 1)
    return tree, fn.__code__.co_filename


def compile_time_names(fn: Callable[..., Any]) -> list[str]:
    """The keyword-only parameters: what ``.at`` binds."""
    return [p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY]
