"""The API pages of the docs site: for each module the names that it offers, whose docstrings mkdocstrings renders."""

from __future__ import annotations

import ast

from refengine.lab.sources import ROOT

API = (
    "backends.base",
    "backends.layout",
    "kernels_numba.machine",
    "refengine.model",
    "refengine.registry",
    "refengine.verify.compare",
    "refengine.measure.paired",
)
"""Modules that others may build on."""


def api_page(module: str) -> str:
    """The page of a module, as Markdown for mkdocstrings."""
    parts = [f"# {module}", first_docstring(module), *(f"::: {name}" for name in offered(module))]
    return "\n\n".join(parts) + "\n"


def first_docstring(module: str) -> str:
    return ast.get_docstring(tree_of(module)) or ""


def offered(module: str) -> list[str]:
    """The names of ``__all__`` that this project defines, each with the module where it is; without ``__all__``, public functions
    and classes, and constants that have a docstring.
    """
    tree = tree_of(module)
    places = {name: f"{module}.{name}" for name in defined(tree)} | imported(module, tree)
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [places[name] for name in ast.literal_eval(node.value) if name in places]
    return [places[name] for name in defined(tree) if not name.startswith("_")]


def defined(tree: ast.Module) -> list[str]:
    """Functions and classes of a module, and constants that have a docstring."""
    found = []
    for node, following in zip(tree.body, [*tree.body[1:], None]):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and is_docstring(following):
            found.append(ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target))
    return found


def is_docstring(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def imported(module: str, tree: ast.Module) -> dict[str, str]:
    """Names that a module, or a package, takes from this project, and where they are defined."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            origin = f"{module}.{node.module}" if node.level else node.module or ""
            if origin.split(".")[0] in ("backends", "kernels_numba", "refengine"):
                found |= {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names}
    return found


def tree_of(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))
