"""The tutorials of a checkout: which there are, and what each is made of.

tutorials/NN_name.py is a text notebook; tutorials/exercises/ has its tNN_stub.py, tNN_solution.py, tNN_wrong.yaml, test_NN.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from refengine.errors import UserError
from refengine.lab.sources import ROOT

FOLDER = ROOT / "tutorials"
CELL = re.compile(r"^# %%([^\n]*)\n", re.MULTILINE)
SECTIONS = (
    "The question",
    "A worked example in numbers",
    "The code",
    "A picture",
    "Exercises",
    "What production engines do",
    "Next",
)
"""Of every tutorial, in this order; others may stand between them."""


@dataclass(frozen=True)
class Tutorial:
    """A tutorial. number: two digits. path: of the text notebook."""

    number: str
    path: Path

    @cached_property
    def cells(self) -> list[tuple[str, str]]:
        """(kind, text) of each cell, in order; kind: "markdown" or "code"."""
        _, *parts = CELL.split(self.path.read_text(encoding="utf-8"))
        return [cell(mark, text) for mark, text in zip(parts[::2], parts[1::2])]

    @property
    def prose(self) -> str:
        return "\n\n".join(text for kind, text in self.cells if kind == "markdown")

    @property
    def code(self) -> str:
        return "\n\n".join(text for kind, text in self.cells if kind == "code")

    @property
    def title(self) -> str:
        """What it is about, without its number."""
        heading = self.cells[0][1].splitlines()[0]
        return heading.removeprefix(f"# {self.number} · ")

    @property
    def sections(self) -> list[str]:
        return re.findall(r"^## (.+)$", self.prose, re.MULTILINE)

    @property
    def question(self) -> str:
        """The paragraph under "The question"."""
        return " ".join(self.prose.split("## The question\n", 1)[1].strip().split("\n\n")[0].split())

    # --- Exercises --------------------------------------------------------------------------------------------------------

    def exercise(self, kind: str) -> Path:
        """The exercises' file: "stub" or "solution"."""
        return FOLDER / "exercises" / f"t{self.number}_{kind}.py"

    @property
    def tests(self) -> Path:
        return FOLDER / "exercises" / f"test_{self.number}.py"

    @property
    def wrong(self) -> Path:
        """Wrong answers, each of which a test must find."""
        return FOLDER / "exercises" / f"t{self.number}_wrong.yaml"


def cell(mark: str, text: str) -> tuple[str, str]:
    """A cell by what stands behind its ``# %%``; a Markdown cell is one string."""
    if "[markdown]" not in mark:
        return "code", text.strip()
    return "markdown", re.sub(r'^r?"""\n?|\n?"""$', "", text.strip()).strip()


def tutorials() -> list[Tutorial]:
    """All there are, in order."""
    return [Tutorial(path.name[:2], path) for path in sorted(FOLDER.glob("[0-9][0-9]_*.py"))]


def find_tutorial(number: str) -> Tutorial:
    """The tutorial of a number, one digit or two. Raises UserError for one that there is not."""
    there = {tutorial.number: tutorial for tutorial in tutorials()}
    if not there:
        raise UserError(
            f"{FOLDER}: no tutorials; they are part of a checkout of refengine: install it from there with -e"
        )
    if number.zfill(2) not in there:
        raise UserError(f"tutorial {number}: there is none; there are {', '.join(there)}")
    return there[number.zfill(2)]
