"""Forward passes: layer by layer over a backend, which owns all that a layer remembers."""

from __future__ import annotations

from refengine.checkpoint import FlashNextMtpWeights, FlashNextWeights, ModelWeights, MtpWeights
from refengine.device import Device
from refengine.model.cache_shape import cache_shape
from refengine.model.dims import check_dims
from refengine.model.flash_next import FlashNext
from refengine.model.flash_next_mtp import FlashNextHead
from refengine.model.model import Head, Model, Tap
from refengine.model.mtp import MtpHead
from refengine.model.qwen3_5 import Qwen35
from refengine.registry import ModelSpec

__all__ = [
    "FlashNext",
    "FlashNextHead",
    "Head",
    "Model",
    "MtpHead",
    "Qwen35",
    "Tap",
    "cache_shape",
    "check_dims",
    "open_head",
    "open_model",
]


def open_model(spec: ModelSpec, weights: ModelWeights | FlashNextWeights, device: Device, positions: int) -> Model:
    """The model of a layout on a device. positions: how far its rotary table goes.

    Raises UserError for a layout that the kernels cannot run.
    """
    if isinstance(weights, FlashNextWeights):
        return FlashNext(spec, weights, device, positions)
    return Qwen35(spec, weights, device, positions)


def open_head(spec: ModelSpec, weights: MtpWeights | FlashNextMtpWeights, model: Model, device: Device) -> Head:
    """The MTP head of a model."""
    if isinstance(weights, FlashNextMtpWeights):
        return FlashNextHead(spec, weights, model, device)
    return MtpHead(spec, weights, model, device)
