"""What the engine asks of a model and of its MTP head, whatever their layers are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from backends.base import Backend, BackendError, Batch
from refengine.registry import ModelSpec

Tap = Callable[[int, Any], None]
"""Called with (layer, attention output bf16 [W, H, D]) after each full attention."""
NGRAMS = "ngrams"
"""Of the recurrent parts of a model, the n-gram branch by name; the others are linear layers, by number."""


class Model(ABC):
    """A model on a device. xp: numpy or cupy. rope: float32 [positions, 2, dims / 2]. embedding, head: bf16 [vocabulary,
    hidden]."""

    spec: ModelSpec
    xp: Any
    rope: Any
    embedding: Any
    head: Any

    def forward(self, ids: Any, backend: Backend, batch: Batch, rows: Any, tap: Tap | None = None) -> Any:
        """One pass over the batch's rows. Writes keys, values and recurrent states; ``finish`` commits them.

        ids: int32 [W]. rows: int [n], the rows whose logits are wanted. Returns float32 [n, vocabulary].
        """
        return self.logits(self.hidden(ids, backend, batch, tap), rows)

    @abstractmethod
    def hidden(self, ids: Any, backend: Backend, batch: Batch, tap: Tap | None = None) -> Any:
        """``forward`` without logits: what ``logits`` takes, and an MTP head beside it, bf16 [W, the residual's width]."""

    @abstractmethod
    def logits(self, hidden: Any, rows: Any) -> Any:
        """The logits of ``rows`` of what ``hidden`` gives: float32 [n, vocabulary]."""

    def finish(self, backend: Backend, batch: Batch, accepted: Sequence[int] | None = None) -> None:
        """Commit a pass. accepted: of a drafted one, as ``backend.finish`` takes it; the recurrent states take those rows now.

        Raises BackendError as ``backend.finish`` does, and for drafts that have not been through ``forward``, before anything
        has changed.
        """
        backend.check_current(batch)
        if batch.drafted and set(batch.held) != self.recurrent_parts:
            raise BackendError("drafts: have not been through the model; run forward before finish")
        if batch.held:
            path = batch.kept_path(backend.kept_rows(batch, accepted), self.xp)
            for take in batch.held.values():
                take(path)
            batch.held.clear()
        backend.finish(batch, accepted)

    @property
    def recurrent_parts(self) -> set[int | str]:
        """What a stream remembers besides keys and values: linear layers by number, the n-gram branch by name."""
        return {*self.spec.linear_layers, *([] if self.spec.ngrams is None else [NGRAMS])}


class Head(ABC):
    """A model's MTP head: from what a position gave and the token that follows, the token after that. Spec attention §6.

    The backends that it runs on are made for ``cache_shape(spec, mtp=True)``.
    """

    spec: ModelSpec

    @abstractmethod
    def forward(self, ids_next: Any, hidden: Any, backend: Backend, batch: Batch, rows: Any) -> tuple[Any, Any]:
        """One pass of the head over the batch's rows, prompt rows or a window's. Writes keys and values of its layer.

        ids_next: int32 [W], the token after each row's. hidden: bf16 [W, width], as ``Model.hidden`` gives it, or this head for
        the row before. rows: int [n], those whose results are wanted. Returns (logits float32 [n, vocabulary], hidden bf16 [n,
        width]).
        """
