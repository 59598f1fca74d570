"""What a tutorial shows: code from its source, tables and pictures. In Jupyter they are displayed, elsewhere printed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from refengine.lab.page_picture import STYLE
from refengine.lab.page_picture import picture as page_picture
from refengine.lab.sources import ROOT, excerpt

PICTURES = ROOT / "build" / "tutorials"
"""Where a plain script leaves its pictures."""


def show(file: str, *names: str, start: str | None = None, end: str | None = None) -> None:
    """Definitions of a source file as they stand, with line numbers.

    file: from the top of the repository. names: functions, classes or ``Class.method``. start, end: of each, only the lines from
    the first that contains ``start`` to the next that contains ``end``. Raises DocsError for a name or text that is gone.
    """
    found = [excerpt(file, name, start, end) for name in names]
    code = "\n\n".join(part.numbered for part in found)
    present(f"{file}\n\n{code}\n", f"[{file}](../{file}#L{found[0].first})\n\n```python\n{code}\n```")


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table: numbers to the right, whole ones with commas."""
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    right = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(columns))]
    widths = [max(map(len, column)) for column in zip(columns, *cells)]

    def line(texts: Sequence[str], between: str) -> str:
        return between.join(t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, right))

    rule = "|".join("-" * (w - 1) + (":" if r else "-") for w, r in zip(widths, right))
    marked = [line(columns, "|"), rule, *(line(row, "|") for row in cells)]
    plain = [line(columns, "   "), *(line(row, "   ") for row in cells)]
    present("\n".join(row.rstrip() for row in plain) + "\n", "\n".join(f"|{row}|" for row in marked))


def picture(name: str, drawn: Figure | bytes) -> None:
    """A picture: a figure, or the bytes of an SVG. A plain script writes it to build/tutorials/NAME.svg and says so."""
    svg = drawn if isinstance(drawn, bytes) else svg_of(drawn)
    if in_notebook():
        from IPython.display import SVG, display

        display(SVG(svg))
        return
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = PICTURES / f"{name}.svg"
    path.write_bytes(svg)
    print(f"picture: {path.relative_to(ROOT)}\n")


def page_walk(name: str, page_size: int) -> None:
    """The picture of docs/paging.md for a page size: a window, its page table, the pages, the items that straddle."""
    picture(name, page_picture(page_size, "svg"))


def svg_of(figure: Figure) -> bytes:
    """A figure on white paper, the same bytes each time."""
    out = BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(out, format="svg", facecolor="#ffffff", bbox_inches="tight", metadata={"Date": None})
    return out.getvalue()


def present(plain: str, marked: str) -> None:
    """Show Markdown in a notebook, or print the plain form of it."""
    if in_notebook():
        from IPython.display import Markdown, display

        display(Markdown(marked))
    else:
        print(plain)


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    shell = sys.modules.get("IPython")
    return shell is not None and getattr(shell.get_ipython(), "kernel", None) is not None
