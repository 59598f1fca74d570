"""A prompt in passes, then decode, greedy: the loop that ``compare`` runs for each backend. Spec serving §0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backends.base import DECODE, PROMPT, Backend, Batch, Stream
from kernels_numba.sampling import argmax
from refengine.device import Device
from refengine.model import Qwen35
from refengine.model.qwen3_5 import Tap


@dataclass(frozen=True, eq=False)
class Pass:
    """One forward pass. stream: whose prompt it is (-1: a decode step of all). logits: float32 [rows wanted, vocabulary]."""

    phase: str
    stream: int
    start: int
    rows: int
    logits: np.ndarray


@dataclass(eq=False)
class Session:
    """Prompts through a backend. prompts: token ids of each stream. prompt_rows: rows a prompt pass, at most."""

    model: Qwen35
    backend: Backend
    device: Device
    prompts: Sequence[Sequence[int]]
    prompt_rows: int

    def __post_init__(self) -> None:
        self.streams: list[Stream] = []
        self.replies: list[list[int]] = [[] for _ in self.prompts]

    def run(self, tokens: int, tap: Tap | None = None) -> Iterator[Pass]:
        """Every prompt pass, stream by stream, then ``tokens`` - 1 decode steps of all streams together.

        The first generated token comes from a prompt's last row. Yields each pass as it ends.
        """
        for number, prompt in enumerate(self.prompts):
            self.streams.append(self.backend.open(len(prompt) + tokens))
            for start in range(0, len(prompt), self.prompt_rows):
                yield self.step(PROMPT, number, start, prompt[start : start + self.prompt_rows], tap)
        for _ in range(tokens - 1):
            yield self.step(DECODE, -1, 0, [reply[-1] for reply in self.replies], tap)

    def step(self, phase: str, number: int, start: int, ids: Sequence[int], tap: Tap | None) -> Pass:
        """One pass, and the tokens that follow from it."""
        work = [(self.streams[number], len(ids))] if phase == PROMPT else [(s, 1) for s in self.streams]
        batch = self.backend.batch(phase, work)
        wanted = [len(ids) - 1] if phase == PROMPT else list(range(len(ids)))
        logits = self.forward(ids, batch, wanted, tap)
        self.model.finish(self.backend, batch)
        chosen = self.greedy(logits)
        if phase == DECODE:
            for reply, token in zip(self.replies, chosen):
                reply.append(token)
        elif start + len(ids) == len(self.prompts[number]):
            self.replies[number].append(chosen[0])
        return Pass(phase, number, start, len(ids), self.device.get(logits))

    def forward(self, ids: Sequence[int], batch: Batch, wanted: list[int], tap: Tap | None) -> Any:
        put = self.device.put
        return self.model.forward(put(np.array(ids, np.int32)), self.backend, batch, put(np.array(wanted)), tap)

    def greedy(self, logits: Any) -> list[int]:
        """The largest logit of each row, ties to the lower id."""
        ids = self.device.xp.empty(logits.shape[0], dtype=np.int32)
        argmax(ids, logits)
        return [int(i) for i in self.device.get(ids)]
