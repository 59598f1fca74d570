"""Small pieces of syntax tree that the translation to lock step is built of."""

from __future__ import annotations

import ast
from typing import Any


def load_name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def helper(name: str) -> str:
    """A helper function's name in the generated code: no kernel has a name that starts with two underscores."""
    return f"__{name}"


def call(name: str, *args: ast.expr) -> ast.Call:
    """A call of a helper."""
    return ast.Call(load_name(helper(name)), list(args), [])


def function_call(function: str, *args: ast.expr) -> ast.Call:
    """A call of a device function, under the kernel's own name for it."""
    return ast.Call(load_name(function), list(args), [])


def named(name: str, value: ast.expr) -> ast.NamedExpr:
    """``(name := value)``."""
    return ast.NamedExpr(ast.Name(name, ast.Store()), value)


def method(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(load_name("__x"), name, ast.Load()), list(args), [])


def assign(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def some_lane(mask: str, body: list[ast.stmt]) -> list[ast.stmt]:
    """``if mask is not None: body``."""
    test = ast.Compare(load_name(mask), [ast.IsNot()], [ast.Constant(None)])
    return [ast.If(test, body, [])] if body else []


def locate(made: Any, source: ast.AST) -> Any:
    """Give every new node the line of the source it stands for."""
    for n in ast.walk(made):
        if isinstance(n, (ast.stmt, ast.expr, ast.arg)) and not hasattr(n, "lineno"):
            ast.copy_location(n, source)
    return made
