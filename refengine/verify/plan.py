"""What ``equal`` is asked to run, and on what. Spec serving §5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from backends.base import Sizes
from refengine.device import Device
from refengine.model import Head, Model
from refengine.serve.sampling import GREEDY, Sampling
from refengine.verify.equalities import Form
from refengine.verify.transcripts import Progress

SPARE_PAGES = 5
"""Pages that no stream owns: poison among the pages that are read."""
TURN_TOKENS = 3
"""Tokens of a turn's reply, where nothing else is said."""
OVERCOMMITTED = 16
"""Streams of equality 6."""
WINDOW = Form("window")
SAMPLINGS = {"greedy": GREEDY, "seeded": Sampling(0.4, 20, 0.95)}


@dataclass(frozen=True, eq=False)
class Engine:
    """A model on a device, and the prompts of its streams. head: None where equality 4 is not asked for, or has none."""

    model: Model
    head: Head | None
    device: Device
    prompts: Sequence[Sequence[int]]

    @property
    def drafts_trees(self) -> bool:
        """Whether drafts of the model may branch."""
        return self.model.spec.drafts_trees


@dataclass(frozen=True)
class Plan:
    """What is asked for. equalities: by number. counts: of streams, ascending. tokens: of each reply; turn_tokens: of a turn's in
    3. chunks: rows a pass of equality 5a. seed: of the page order and the draws."""

    equalities: tuple[str, ...]
    counts: tuple[int, ...]
    page_sizes: tuple[int, ...]
    tokens: int
    chunks: tuple[int, ...]
    kv: str
    attention: str
    seed: int
    turn_tokens: int = TURN_TOKENS

    @property
    def paged(self) -> list[Form]:
        """Pages of each size."""
        return [Form("paged", size) for size in self.page_sizes]

    @property
    def side_by_side(self) -> list[int]:
        """The numbers of streams that have company."""
        return [count for count in self.counts if count > 1]

    @property
    def forms(self) -> list[Form]:
        """The forms whose streams are run together: windows, pages, and pages beside a window."""
        forms = list(self.paged) if {"1", "2", "5a"} & set(self.equalities) else []
        if {"1", "2"} & set(self.equalities):
            forms = [WINDOW, *forms, *[Form("paged-p256")] * (256 in self.page_sizes)]
        if "2" in self.equalities and self.side_by_side:
            forms.append(Form("mixed", self.page_sizes[0]))
        return forms

    @property
    def overcommitted(self) -> list[Form]:
        """The forms that have a pool."""
        return [*self.paged, *[Form("paged-p256")] * (256 in self.page_sizes), Form("mixed", self.page_sizes[0])]

    @property
    def most_streams(self) -> int:
        """Streams that some backend has room for: twice as many where their prompts are kept, and those of equality 6."""
        kept = 2 * self.counts[-1] if "3" in self.equalities else self.counts[-1]
        return max(kept, OVERCOMMITTED if "6" in self.equalities else 0)

    @property
    def alone(self) -> int:
        """Streams that are held against themselves alone."""
        if "6" in self.equalities:
            return max(OVERCOMMITTED, self.counts[-1])
        together = self.counts[-1] if "5b" in self.equalities else max(self.side_by_side, default=0)
        return together if {"2", "5b"} & set(self.equalities) else 0


Key = tuple[Any, ...]
Job = Callable[[Progress], Any]
Planned = dict[Key, tuple[int, Job]]
"""Runs by a key, each with its number of steps."""


def sizes_of(plan: Plan, form: Form, context: int, streams: int, window_rows: int) -> Sizes:
    """What a backend of the form is built for."""
    return Sizes(
        context, streams, form.page_size, window_rows, SPARE_PAGES, plan.seed, kv=plan.kv, attention=plan.attention
    )
