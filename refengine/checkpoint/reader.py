"""A checkpoint on disk, held against a model's layout before any tensor is built."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from refengine.checkpoint.config import check_config
from refengine.checkpoint.files import Stored, list_tensors
from refengine.checkpoint.values import synthetic
from refengine.errors import UserError
from refengine.registry import ModelSpec, Tensor
from refengine.registry.family import Family, load_family

WITHOUT_MTP = "--drafts ngram or none"
"""What runs without an MTP head."""
CENTRED = 0.5
"""Norm weights of a smaller mean are taken as gains less 1, of a larger one as gains."""


class Checkpoint:
    """A checked checkpoint; tensors are read when asked for.

    `tensors` has every tensor of the layout by (role, layer), layer None for those of the whole model; the MTP head's
    too, which the checkpoint may lack. `stored` says where each tensor is.
    """

    def __init__(
        self, folder: Path, spec: ModelSpec, tensors: tuple[Tensor, ...], stored: Mapping[str, Stored]
    ) -> None:
        self.folder = folder
        self.spec = spec
        self.tensors = {(tensor.role, tensor.layer): tensor for tensor in tensors}
        self._stored = stored
        self._open: dict[Path, Any] = {}

    def tensor(self, name: str) -> np.ndarray:
        """A copy of the tensor of that name: bfloat16 (ml_dtypes), float32 or int64, in the checkpoint's shape.

        Raises UserError if the checkpoint has no such tensor.
        """
        if name not in self._stored:
            raise UserError(f"{self.folder}: {name}: no such tensor")
        return self._handle(self._stored[name].file).get_tensor(name)

    def by_role(self, role: str, layer: int | None = None) -> np.ndarray:
        """The tensor with that role in the family, for example ("q_proj", 3) or ("embed", None)."""
        return self.tensor(self.tensors[role, layer].name)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the files have a tensor of this name."""
        return tensor.name in self._stored

    def check_mtp(self) -> None:
        """Raise UserError unless the checkpoint has the whole MTP head: names the layout, or the first bad tensor."""
        wanted = self.spec.mtp_tensors()
        if not wanted:
            raise UserError(f"{self.spec.name}: has no MTP head; {WITHOUT_MTP} would do")
        for tensor in wanted:
            if tensor.name not in self._stored:
                raise UserError(
                    f"{tensor.name}: missing from the checkpoint; the MTP head of {self.spec.name} needs it, "
                    f"{WITHOUT_MTP} would do"
                )
            _check_tensor(self._stored[tensor.name], tensor, self.spec)

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(file, framework="numpy")
        return self._open[file]


def open_checkpoint(folder: str | Path, spec: ModelSpec) -> Checkpoint:
    """Check a folder in the Hugging Face layout against `spec` and open it; no tensor is read yet.

    The MTP head's tensors are left to Checkpoint.check_mtp: without them the model still runs.

    Raises UserError, one line naming file and key or tensor: config.json disagrees, a tensor is missing, unknown, or
    of another shape or type, a file is missing or damaged, the index and the shards disagree.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: is not a folder; a checkpoint is a folder with config.json and model.safetensors")
    check_config(folder, spec)
    stored = list_tensors(folder)
    tensors = spec.tensors(_prefix(stored, spec))
    _check_tensors(stored, tensors, spec)
    checkpoint = Checkpoint(folder, spec, (*tensors, *spec.mtp_tensors()), stored)
    _check_hash(checkpoint, tensors)
    _check_centred(checkpoint, tensors)
    return checkpoint


def _prefix(stored: Mapping[str, Stored], spec: ModelSpec) -> str:
    """The family's longest prefix that is in use: a vision model's text part hides behind a longer one."""
    prefixes = sorted(load_family(spec.family).prefixes, key=len, reverse=True)
    return next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in stored)), prefixes[-1])


def _check_tensors(stored: Mapping[str, Stored], tensors: tuple[Tensor, ...], spec: ModelSpec) -> None:
    for tensor in tensors:
        if tensor.name not in stored:
            raise UserError(f"{tensor.name}: missing from the checkpoint; {spec.name} needs it")
        _check_tensor(stored[tensor.name], tensor, spec)
    known = {tensor.name for tensor in tensors}
    for name, entry in stored.items():
        if name not in known and not _ignored(name, load_family(spec.family)):
            raise UserError(f"{entry.file.name}: {name}: {spec.name} has no such tensor")


def _check_tensor(entry: Stored, tensor: Tensor, spec: ModelSpec) -> None:
    where = f"{entry.file.name}: {tensor.name}"
    if entry.shape != tensor.shape:
        raise UserError(f"{where}: shape {list(entry.shape)} where {spec.name} has {list(tensor.shape)}")
    if entry.dtype not in tensor.dtypes:
        raise UserError(f"{where}: type {entry.dtype} where {' or '.join(tensor.dtypes)} is needed")


def _check_hash(checkpoint: Checkpoint, tensors: tuple[Tensor, ...]) -> None:
    """Refuse a table of n-grams that another hash was made for."""
    for tensor in tensors:
        if tensor.dtype != "I64":
            continue
        if (checkpoint.tensor(tensor.name) != synthetic(tensor, checkpoint.spec, seed=0)).any():
            raise UserError(
                f"{tensor.name}: holds other numbers than the seed and sizes of {checkpoint.spec.name} make"
            )


def _check_centred(checkpoint: Checkpoint, tensors: tuple[Tensor, ...]) -> None:
    """Refuse a conversion of a model with hyper-connections whose norms hold their gains, not what they add to 1.

    The norms of streams tell: trained ones stay near a gain of 1.
    """
    if checkpoint.spec.hyper is None:
        return
    norms = [
        tensor for tensor in tensors if tensor.gain == "one_plus" and tensor.shape == (checkpoint.spec.stream_width,)
    ]
    mean = float(np.median([checkpoint.tensor(norm.name).astype(np.float32).mean() for norm in norms]))
    if mean > CENTRED:
        raise UserError(
            f"{norms[0].name}: {mean:.2f} on average, as the other norms of streams: they hold gains, and "
            f"{checkpoint.spec.family} stores gains less 1; subtract 1 from every norm's weight except linear_attn.norm's"
        )


def _ignored(name: str, family: Family) -> bool:
    return name.startswith(family.ignored)
