"""Passes on paper: streams grow and replies get longer, and nothing is computed. For trying admission out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backends.base import PROMPT, Backend
from refengine.serve.forward import Pass, Work

TOKEN = 0
"""What every reply is made of."""


@dataclass(eq=False)
class PaperStep:
    """A Step without a model; the backend may be one whose arena is paper."""

    backend: Backend

    def __call__(self, phase: str, work: Work) -> Pass:
        self.backend.claim([(request.place, request.place.committed + len(rows.ids)) for request, rows in work.items()])
        for request, rows in work.items():
            draws = [TOKEN] * len(rows.asked)
            kept = len(rows.ids) if phase == PROMPT else len(rows.kept(draws, request.stop))
            request.place.commit(kept, prompt=phase == PROMPT)
            request.reply += rows.chosen(draws, request.stop)
        return Pass(phase, tuple(request.number for request in work), np.empty((len(work), 0), np.float32))
