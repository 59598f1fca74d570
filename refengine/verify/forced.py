"""The engine over a given sequence, prompt passes first, then decode: whole, or each layer fed an input of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from backends.base import DECODE, PROMPT, Backend, Batch
from refengine.model import Qwen35


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


def forced_logits(model: Qwen35, backend: Backend, ids: np.ndarray, prompt_passes: Sequence[int]) -> np.ndarray:
    """Logits of every row, float32 [W, vocabulary], with the tokens given: ids int32 [W]."""
    passes = forced_passes(backend, len(ids), prompt_passes)
    return np.concatenate([model.forward(ids[at], backend, batch, np.arange(batch.rows)) for batch, at in passes])


def forced_layers(model: Qwen35, backend: Backend, inputs: np.ndarray, prompt_passes: Sequence[int]) -> np.ndarray:
    """Each layer's output for an input of its own; both bf16 [layers, W, hidden]."""
    out = np.empty_like(inputs)
    for batch, at in forced_passes(backend, inputs.shape[1], prompt_passes):
        for number in range(len(inputs)):
            out[number, at] = layer_output(model, number, inputs[number, at], backend, batch)
    return out


def layer_output(model: Qwen35, number: int, h: np.ndarray, backend: Backend, batch: Batch) -> np.ndarray:
    """The residual stream [rows, hidden] after one layer of a pass; h, before it, stays as it is."""
    h = h.copy()
    update = model.layer_update(number, h, None, backend, batch)
    model.normed(h, update, model.final_norm)
    return h


def forced_head(model: Qwen35, h: np.ndarray) -> np.ndarray:
    """Logits of every row, float32 [W, vocabulary], from the residual stream after the last layer, bf16 [W, hidden]."""
    return model.logits(model.normed(h, None, model.final_norm), np.arange(len(h)))
