"""A traced block as one HTML file that needs nothing else, and its picture at one step as an SVG file."""

from __future__ import annotations

import json
import re
from html import escape
from importlib.resources import files
from typing import Any

from refengine.errors import UserError
from refengine.lab.svg import WIDTH
from refengine.lab.trace_data import Traced, page_data, turns_and_item
from refengine.lab.trace_picture import MemoryPicture, plain_colours, still


def template(name: str) -> str:
    """A file of the page, as it stands in refengine/lab/page."""
    return (files("refengine.lab") / "page" / name).read_text(encoding="utf-8")


def html(traced: Traced) -> str:
    """The page of a trace."""
    picture = MemoryPicture(traced.trace, traced.found)
    title = f"{traced.trace.program.name}: one block, step by step"
    data = page_data(traced, picture, title)
    parts = {
        "TITLE": escape(title),
        "STYLE": template("trace.css") + template("picture.css"),
        "PICTURE": svg(picture),
        "SCRIPT": template("trace.js"),
        "DATA": embedded(data),
    }
    return re.sub("|".join(parts), lambda found: parts[found[0]], template("trace.html"))


def embedded(data: dict[str, Any]) -> str:
    """JSON that may stand inside a script element: nothing in it opens or closes a tag."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def svg(picture: MemoryPicture) -> str:
    """The picture at rest, with an empty group for what a step lights."""
    inside = "\n".join(shape.svg() for shape in picture.drawn())
    box = f"-6 0 {WIDTH + 12:g} {picture.height:g}"
    return f'<svg viewBox="{box}" role="img" aria-label="Memory">\n{inside}\n<g id="lit"></g>\n</svg>'


def still_svg(traced: Traced, number: int | None) -> str:
    """The picture at a step, from 1 on; None: the first that looks up a second page, or else the last.

    Raises UserError for a step that the trace does not have, and for a block that did nothing.
    """
    steps = traced.trace.steps
    if not steps:
        raise UserError("--svg: this block touches no memory; name another with --block")
    if number is not None and not 1 <= number <= len(steps):
        raise UserError(f"--step {number}: the trace has {len(steps)} steps; name one from 1 on")
    picture = MemoryPicture(traced.trace, traced.found)
    for count, step in enumerate(steps, 1):
        lit = picture.lit(step)
        if count == number or (number is None and lit.second):
            break
    told = [f"lookup {n}: entry {entry} → page {page}" for n, (entry, page, *_) in enumerate(lit.lookups, 1)]
    parts = [traced.trace.program.name, turns_and_item(step), *told]
    return still(picture, lit, plain_colours(template("picture.css")), ", ".join(filter(None, parts)))
