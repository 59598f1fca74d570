"""The few SVG elements that the lab's pictures are made of. Lengths are in units of the picture's own width."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

WIDTH = 1000.0
"""Of every picture; a page scales it."""


@dataclass(frozen=True)
class Rect:
    """A rectangle. look: a CSS class. title: what a pointer shows."""

    x: float
    y: float
    width: float
    height: float
    look: str
    title: str = ""

    def svg(self) -> str:
        box = f'x="{self.x:g}" y="{self.y:g}" width="{self.width:g}" height="{self.height:g}"'
        inside = f"<title>{escape(self.title)}</title>" if self.title else ""
        return f'<rect class="{self.look}" {box}>{inside}</rect>'

    def data(self) -> list[object]:
        """For the page's script."""
        return [self.x, self.y, self.width, self.height, self.look]


@dataclass(frozen=True)
class Label:
    """Text with its middle at x (or its start), its foot at y."""

    x: float
    y: float
    text: str
    look: str = "label"

    def svg(self) -> str:
        return f'<text class="{self.look}" x="{self.x:g}" y="{self.y:g}">{escape(self.text)}</text>'

    def data(self) -> list[object]:
        """For the page's script."""
        return [self.x, self.y, self.text, self.look]


def tidy(length: float) -> float:
    """As long as a picture can show."""
    return round(length, 1)
