"""The engine over a given sequence, prompt passes first, then decode: whole, or each layer fed an input of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from backends.base import DECODE, PROMPT, Backend, Batch
from refengine.model import FlashNext, Model, Qwen35
from refengine.verify.choices import Choices, choices_of


def forced_passes(backend: Backend, rows: int, prompt_passes: Sequence[int]) -> Iterator[tuple[Batch, slice]]:
    """Each pass of one stream over ``rows`` rows, with the rows it covers: prompt passes of the given sizes, then
    decode steps of one row."""
    stream, start = backend.open(rows), 0
    for count in (*prompt_passes, *[1] * (rows - sum(prompt_passes))):
        phase = PROMPT if start < sum(prompt_passes) else DECODE
        batch = backend.batch(phase, [(stream, count)])
        yield batch, slice(start, start + count)
        backend.finish(batch)
        start += count
    stream.release()


def forced_logits(model: Model, backend: Backend, ids: np.ndarray, prompt_passes: Sequence[int]) -> np.ndarray:
    """Logits of every row, float32 [W, vocabulary], with the tokens given: ids int32 [W]."""
    passes = forced_passes(backend, len(ids), prompt_passes)
    return np.concatenate([model.forward(ids[at], backend, batch, np.arange(batch.rows)) for batch, at in passes])


def forced_layer(
    model: Model, number: int, backend: Backend, ids: np.ndarray, inputs: np.ndarray, prompt_passes: Sequence[int]
) -> tuple[np.ndarray, Choices]:
    """A layer's output for an input of its own, both bf16 [W, the residual's width], and what it chose; ids: int32 [W]."""
    out, parts = np.empty_like(inputs), []
    for batch, at in forced_passes(backend, len(ids), prompt_passes):
        with choices_of(len(ids)) as chosen:
            out[at] = layer_output(model, number, ids[at], inputs[at], backend, batch)
        parts.append(chosen)
    return out, joined(parts)


def joined(parts: Sequence[Choices]) -> Choices:
    """The choices of a layer, pass by pass, as one."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def layer_output(
    model: Model, number: int, ids: np.ndarray, h: np.ndarray, backend: Backend, batch: Batch
) -> np.ndarray:
    """The residual [rows, width] after one layer of a pass; h, before it, stays as it is. Raises TypeError for a model of neither
    family."""
    h = h.copy()
    if isinstance(model, Qwen35):
        model.normed(h, model.layer_update(number, h, None, backend, batch), model.final_norm)
    elif isinstance(model, FlashNext):
        model.layer(number, ids, h, backend, batch)
    else:
        raise TypeError(f"{type(model).__name__}: has no layers to force; give a Qwen35 or a FlashNext")
    return h


def forced_head(model: Model, h: np.ndarray) -> np.ndarray:
    """Logits of every row, float32 [W, vocabulary], from the residual after the last layer, bf16 [W, width]."""
    hidden = model.normed(h, None, model.final_norm) if isinstance(model, Qwen35) else h
    return model.logits(hidden, np.arange(len(h)))
