"""Code as it stands in its source file: what docs and tutorials show, so that they cannot say what the code does not."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
Definition = ast.FunctionDef | ast.ClassDef


class DocsError(Exception):
    """A part of a page that cannot be made: one line naming what is wrong."""


@dataclass(frozen=True)
class Excerpt:
    """Lines of a file. file: from the top of the repository. first: the number of the first line."""

    file: str
    first: int
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def numbered(self) -> str:
        """The lines, each behind its number."""
        return "\n".join(f"{n:4}  {line}".rstrip() for n, line in enumerate(self.lines, self.first))


def excerpt(file: str, name: str, start: str | None = None, end: str | None = None) -> Excerpt:
    """A definition of a Python file as it stands, decorators too. name: of a function or class, or ``Class.method``.

    start, end: only its lines from the first that contains ``start`` to the next that contains ``end``. Raises DocsError for a
    name or a text that is not there.
    """
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    node = definition(file, "\n".join(lines), name)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    last = node.end_lineno or first
    if start is not None:
        first = line_with(file, name, lines, start, first, last)
    if end is not None:
        last = line_with(file, name, lines, end, first, last)
    return Excerpt(file, first, tuple(lines[first - 1 : last]))


def definition(file: str, text: str, name: str) -> Definition:
    """The function or class of that name."""
    body: list[ast.stmt] = ast.parse(text).body
    for part in name.split("."):
        found = [node for node in body if isinstance(node, Definition) and node.name == part]
        if not found:
            raise DocsError(f"{file}: has no function or class {name}")
        body = found[0].body
    return found[0]


def line_with(file: str, name: str, lines: list[str], text: str, first: int, last: int) -> int:
    """The number of the first line from ``first`` to ``last`` that contains a text."""
    for number in range(first, last + 1):
        if text in lines[number - 1]:
            return number
    raise DocsError(f"{file}: {name} has no line with {text!r} where it was looked for")
