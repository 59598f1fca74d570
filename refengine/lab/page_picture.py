"""The picture of docs/paging.md: a window, a page table, the pages, an item that straddles two, and a page's inside.

    python -m refengine.lab.page_picture docs/paging.svg --page-size 48

Every number in it is a PageWalk's, so an address function that changes changes the picture.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Rectangle

from kernels_numba.prompt_attention import ITEM
from refengine.lab.page_walk import PageWalk, Piece

LEAST_PAGE, MOST_PAGE = 16, 256
WIDTH, HEIGHT = 10.4, 9.0
"""Inches."""
GAP = 6.0
"""Between pages, in positions."""
INK, FAINT, PAPER = "#1a1a1a", "#595959", "#ffffff"
PLAIN, SHADED, STRADDLING, UNUSED, TABLE = "#d6e7f7", "#aecfec", "#ffc36b", "#ececec", "#e3ddf3"
STYLE: Any = {"svg.hashsalt": "page picture", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 12}
FONTS = "'DejaVu Sans', Verdana, sans-serif"
"""Where DejaVu is missing, one as wide."""
WINDOW_Y, TABLE_Y, POOL_Y, INSIDE_Y = 79.0, 60.0, 37.0, 4.5
ROW, FLAT_ROW = 9.0, 6.0
"""Heights of strips."""
UPRIGHT = 14.0
"""Points that upright text takes."""


class Drawing:
    """The figure of one walk; x in positions, y from 0 to 100."""

    def __init__(self, walk: PageWalk):
        self.walk = walk
        self.page = walk.page_size
        self.span = (walk.pool_pages + 1) * (self.page + GAP) - GAP
        self.left = (self.span - walk.positions) / 2
        self.figure = Figure(figsize=(WIDTH, HEIGHT), facecolor=PAPER)
        self.axes = self.figure.add_axes((0.03, 0.01, 0.94, 0.98))
        self.axes.set_xlim(0, self.span)
        self.axes.set_ylim(0, 100)
        self.axes.axis("off")
        self.window()
        self.table()
        self.pool()
        self.inside()

    # --- Pieces of the drawing ------------------------------------------------------------------------------------------

    def points(self, width: float) -> float:
        """A width on paper."""
        return width / self.span * WIDTH * 0.94 * 72

    def box(self, x: float, y: float, width: float, text: str, color: str, height: float = ROW) -> None:
        """A cell of a strip, its text inside: upright where it would not fit across, none where it fits neither way."""
        cell = Rectangle((x, y), width, height, facecolor=color, edgecolor=INK, linewidth=1.0, clip_on=False)
        self.axes.add_patch(cell)
        rotation = 0 if len(text) * 7.2 < 0.9 * self.points(width) else 90
        if self.points(width) > UPRIGHT:
            self.text(x + width / 2, y + height / 2, text, size=11, rotation=rotation, va="center")

    def text(self, x: float, y: float, text: str, **more: Any) -> None:
        self.axes.text(x, y, text, **({"ha": "center", "va": "bottom", "color": INK} | more))

    def title(self, y: float, name: str, text: str) -> None:
        """A strip's name and what it is."""
        self.text(0, y, name, ha="left", weight="bold", size=14)
        self.text(0, y - 2.8, text, ha="left", color=FAINT, size=11.5)

    def color(self, piece: Piece) -> str:
        if piece.item in self.walk.straddling:
            return STRADDLING
        return (PLAIN, SHADED)[piece.item % 2]

    def arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        line = ConnectionPatch(
            start,
            end,
            "data",
            "data",
            arrowstyle="-|>",
            mutation_scale=13,
            shrinkA=0,
            shrinkB=1,
            color=INK,
            linewidth=1.2,
        )
        self.axes.add_artist(line)

    def page_x(self, page: int) -> float:
        return page * (self.page + GAP)

    # --- The four strips ------------------------------------------------------------------------------------------------

    def window(self) -> None:
        """The positions in order, cut into items, and these into pieces."""
        last = self.walk.positions - 1
        turns = (
            "light and dark blue in turn; orange: it straddles"
            if self.walk.straddling
            else "light and dark blue in turn"
        )
        self.title(97, "Window", f"positions 0 to {last} side by side; attention copies items of {ITEM} keys, {turns}")
        for piece in self.walk.pieces:
            width = piece.last + 1 - piece.first
            self.box(self.left + piece.first, WINDOW_Y, width, piece.name, self.color(piece))
        for first in range(0, self.walk.positions, ITEM):
            x, width = self.left + first, min(ITEM, last + 1 - first)
            name = f"item {first // ITEM}" if self.points(width) > 45 else str(first // ITEM)
            self.text(x + width / 2, WINDOW_Y + ROW + 0.6, name, size=11)
            self.item_edge(x)
        self.item_edge(self.left + self.walk.positions)

    def item_edge(self, x: float) -> None:
        """Where an item begins or the last one ends."""
        self.axes.plot([x, x], [WINDOW_Y, WINDOW_Y + ROW + 2.5], color=INK, linewidth=1.8, clip_on=False)

    def table(self) -> None:
        """The page table, each entry below the positions that it is for."""
        self.title(TABLE_Y + FLAT_ROW + 6.0, "Page table", f"entry = position // {self.page}")
        for entry, page in enumerate(self.walk.table):
            x = self.left + entry * self.page
            self.page_edge(x)
            self.box(x, TABLE_Y, self.page, str(page), TABLE, FLAT_ROW)
            name = f"entry {entry}" if self.page > 24 else str(entry)
            self.text(x + self.page / 2, TABLE_Y + FLAT_ROW + 0.6, name, size=11)
            self.arrow((x + self.page / 2, TABLE_Y), (self.page_x(page) + self.page / 2, POOL_Y + ROW + 3.6))
        self.page_edge(self.left + self.walk.positions)

    def page_edge(self, x: float) -> None:
        """Dashes from the window down to the table."""
        self.axes.plot([x, x], [TABLE_Y + FLAT_ROW, WINDOW_Y], color=FAINT, linewidth=1.3, linestyle=(0, (4, 3)))

    def pool(self) -> None:
        """The pages where they lie in memory, filled with pieces of items."""
        for page in range(self.walk.pool_pages + 1):
            x = self.page_x(page)
            name = "null page" if page == self.walk.pool_pages else f"page {page}"
            short = "null" if page == self.walk.pool_pages else str(page)
            name = name if self.page > 24 else short
            self.text(x + self.page / 2, POOL_Y + ROW + 0.6, name, size=12, weight="bold")
            if page not in self.walk.table:
                self.box(x, POOL_Y, self.page, "unused", UNUSED)
        for piece in self.walk.pieces:
            x, width = self.page_x(piece.page) + piece.slot, piece.last + 1 - piece.first
            self.box(x, POOL_Y, width, piece.name, self.color(piece))
        self.title(
            POOL_Y - 5.0, "Pool", f"pages of {self.page} positions, in memory order; slot = position % {self.page}"
        )
        self.text(0, POOL_Y - 11.4, self.lesson(), ha="left", size=12)

    def lesson(self) -> str:
        """The first straddling item in words."""
        if not self.walk.straddling:
            return f"No item straddles: {ITEM} divides {self.page}, so one lookup finds all of an item's rows."
        item = self.walk.straddling[0]
        parts = [f"{p.name} in page {p.page} from slot {p.slot}" for p in self.walk.pieces if p.item == item]
        return f"Item {item} straddles: keys {', '.join(parts)}."

    def inside(self) -> None:
        """A page's planes, by word offset."""
        shape, words = self.walk.shape, self.walk.backend.page_words
        rows = f"in each of these, every KV head's {self.page} rows, slot by slot"
        self.title(INSIDE_Y + FLAT_ROW + 8.4, "Inside a page", f"each attention layer's keys, then its values; {rows}")
        width = shape.plane_words(self.page) / words * self.span
        for layer in shape.attention_layers:
            for plane, offset in zip("KV", shape.planes(layer, self.page)):
                x = offset / words * self.span
                for head in range(shape.kv_heads):
                    color, part = (PLAIN, TABLE)[plane == "V"], width / shape.kv_heads
                    self.box(x + head * part, INSIDE_Y, part, f"KV head {head}", color, height=FLAT_ROW)
                self.text(x + width / 2, INSIDE_Y + FLAT_ROW + 0.5, f"layer {layer} {plane}", size=11.5)
                self.text(x, INSIDE_Y - 3.2, f"word {offset:,}", ha="left", size=11, color=FAINT)


def picture(page_size: int, form: str) -> bytes:
    """The picture as a file of the given form, "svg" or "png"; an SVG has the same bytes each time."""
    out = BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = Drawing(PageWalk(page_size)).figure
        figure.savefig(out, format=form, metadata={"Date": None} if form == "svg" else None)
    data = out.getvalue()
    return data.replace(b"'DejaVu Sans'", FONTS.encode()) if form == "svg" else data


def main(
    path: Annotated[Path, typer.Argument(help="The file to write, .svg or .png.")],
    page_size: Annotated[int, typer.Option(help=f"Positions a page, {LEAST_PAGE} to {MOST_PAGE}.")] = 48,
) -> None:
    """Draw a window, a page table and the pages, with the items of 32 keys."""
    if not LEAST_PAGE <= page_size <= MOST_PAGE:
        fail(f"--page-size {page_size}: the picture has room for {LEAST_PAGE} to {MOST_PAGE}")
    if path.suffix not in (".svg", ".png"):
        fail(f"{path}: name a file that ends in .svg or .png")
    try:
        path.write_bytes(picture(page_size, path.suffix[1:]))
    except OSError as problem:
        fail(f"{path}: cannot be written: {problem.strerror}")


def fail(message: str) -> None:
    """One line on stderr, exit status 2."""
    typer.echo(f"page_picture: {message}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    typer.run(main)
