"""The picture of ``refengine pool``: who holds the memory, round by round, and how many requests wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from refengine.lab.pool_books import STATES
from refengine.lab.pool_run import Moment, Story
from refengine.serve.settings import GIB

INK, FAINT = "#1a1a1a", "#595959"
LOOKS = {
    "streams": ("#0072b2", "", "keys and values of one stream"),
    "shared": ("#e69f00", "xx", "of several streams"),
    "kept": ("#009e73", "..", "of kept prompts alone"),
    "promised": ("#a9d4f0", "//", "promised, not written yet"),
    "runs": ("#4a4a4a", "", "recurrent states"),
    "free": ("#f4f4f4", "", "free"),
}
"""Fill, hatch and meaning of each state, in the order of STATES; told apart by lightness and hatch, too."""
assert tuple(LOOKS) == STATES
WIDTH, HEIGHT, MARGIN = 3.6, 5.2, 1.0
"""Inches of a panel, and beside them."""
MOST_POINTS = 2000
"""Rounds that are drawn; of more, the fullest in each stretch."""
STYLE: Any = {"svg.hashsalt": "pool picture", "svg.fonttype": "none", "font.size": 10, "hatch.linewidth": 0.5}


@dataclass(frozen=True, eq=False)
class Panel:
    """A form of cache. story: what came of it; None: it was refused. reason: of that."""

    title: str
    story: Story | None
    reason: str = ""


def picture(question: str, panels: Sequence[Panel], form: str) -> bytes:
    """The picture as a file of the given form, "svg" or "png"; an SVG has the same bytes each time."""
    out = BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = drawn(question, panels)
        figure.savefig(out, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    return out.getvalue()


def drawn(question: str, panels: Sequence[Panel]) -> Figure:
    """A column a panel: the memory above, the line below."""
    width = MARGIN + WIDTH * max(2, len(panels))
    figure = Figure(figsize=(width, HEIGHT + MARGIN), facecolor="white", layout="constrained")
    axes = figure.subplots(2, len(panels), sharex="col", sharey="row", squeeze=False, height_ratios=(3, 1))
    figure.suptitle(fill(question, int(width * 8)), fontsize=13, weight="bold", color=INK)
    for panel, above, below in zip(panels, axes[0], axes[1]):
        above.set_title(panel.title, color=INK)
        below.set_xlabel("round")
        if panel.story is not None and panel.story.moments:
            draw_memory(above, panel.story)
            draw_line(below, panel.story)
        else:
            refuse(above, below, panel.reason or "no request could run")
    axes[0, 0].set_ylabel("memory for caches, GiB")
    axes[1, 0].set_ylabel("requests\nwaiting")
    below_zero(axes)
    patches = [Patch(facecolor=c, hatch=h, edgecolor=INK, linewidth=0.5, label=name) for c, h, name in LOOKS.values()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3 if len(panels) < 4 else 6, frameon=False)
    return figure


def below_zero(axes: np.ndarray) -> None:
    """Nothing is: the scales begin there, and count whole requests."""
    for one in axes.flat:
        one.set_ylim(bottom=0)
        one.spines[["top", "right"]].set_visible(False)
    axes[1, 0].yaxis.get_major_locator().set_params(integer=True)
    axes[1, 0].set_ylim(top=max(1.0, axes[1, 0].get_ylim()[1]))


def draw_memory(axes: Axes, story: Story) -> None:
    """Stacked areas of the states, each moment lasting until the next."""
    moments = thinned(story.moments)
    rounds = [one.round for one in moments] + [moments[-1].round + 1]
    bottom = np.zeros(len(rounds))
    for state, (color, hatch, _) in LOOKS.items():
        amounts = [getattr(one.books, state) / GIB for one in moments]
        top = bottom + np.array([*amounts, amounts[-1]])
        axes.fill_between(rounds, bottom, top, step="post", facecolor=color, hatch=hatch, edgecolor=INK, linewidth=0.3)
        bottom = top
    axes.set_xlim(rounds[0], rounds[-1])


def draw_line(axes: Axes, story: Story) -> None:
    """How many requests wait."""
    moments = thinned(story.moments)
    rounds, waiting = [one.round for one in moments], [one.waiting for one in moments]
    axes.step([*rounds, rounds[-1] + 1], [*waiting, waiting[-1]], where="post", color=INK, linewidth=1.5)


def refuse(above: Axes, below: Axes, reason: str) -> None:
    """Say why nothing ran."""
    above.text(0.5, 0.5, fill(f"refused: {reason}", 34), ha="center", va="center", color=INK, transform=above.transAxes)
    below.text(0.5, 0.5, "nobody", ha="center", va="center", color=FAINT, transform=below.transAxes)
    below.set_xticks([])


def thinned(moments: Sequence[Moment]) -> list[Moment]:
    """The moments, or of many the fullest in each of MOST_POINTS stretches."""
    stretch = -(-len(moments) // MOST_POINTS)
    groups = [moments[first : first + stretch] for first in range(0, len(moments), stretch)]
    return [max(group, key=lambda one: one.books.written) for group in groups]
