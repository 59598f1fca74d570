"""The public implementations of the families, in transformers, run on a checkpoint folder.

Needs the extra ``oracle`` (torch and transformers). Attention is the eager one, in which every step is plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from refengine.verify.oracle_cases import Oracle


def run_oracle(folder: Path, ids: np.ndarray, inputs: np.ndarray | None = None) -> Oracle:
    """Run a checkpoint over token ids [W].

    inputs: [layers + 1, W, the residual's width], what the layers and the final norm get in place of the rounded outputs
    before them. Raises what transformers raises for a folder that it cannot read.
    """
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        bf16_logits = logits(load(folder, torch.bfloat16), tokens)
        model = load(folder, torch.float32)
        return Oracle(logits(model, tokens), bf16_logits, **layer_by_layer(model, tokens, inputs))


def load(folder: Path, dtype: torch.dtype) -> Any:
    """The model, its weights as ``dtype``."""
    how = {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **how).eval()


def logits(model: Any, tokens: torch.Tensor) -> np.ndarray:
    """[W, vocabulary] of the one sequence."""
    return model(input_ids=tokens, use_cache=False).logits[0].float().numpy()


def layer_by_layer(model: Any, tokens: torch.Tensor, inputs: np.ndarray | None) -> dict[str, np.ndarray]:
    """layers, head, experts, keys: see Oracle."""
    outputs: list[np.ndarray] = []
    experts: list[np.ndarray] = []
    keys = {number: watch_keys(layer) for number, layer in enumerate(model.model.layers)}
    for number, module in enumerate([*model.model.layers, final_norm(model.model)]):
        module.register_forward_pre_hook(rounding if inputs is None else giving(inputs[number]))
        module.register_forward_hook(lambda module, args, output: outputs.append(output[0].numpy().copy()))
        if hasattr(module, "mlp") and hasattr(module.mlp, "experts"):
            module.mlp.gate.register_forward_hook(lambda module, args, output: experts.append(output[2].numpy()))
    found = {"head": logits(model, tokens), "layers": np.stack(outputs[:-1])}
    if experts:
        found["experts"] = np.stack(experts).astype(np.int8)
    if any(keys.values()):
        nothing = np.zeros((tokens.shape[1], tokens.shape[1]), bool)
        found["keys"] = np.stack([one[0] if one else nothing for one in keys.values()])
    return found


def watch_keys(layer: Any) -> list[np.ndarray]:
    """Where a layer's indexer will leave what its rows read: bool [W, W]."""
    seen: list[np.ndarray] = []
    if hasattr(layer, "self_attn") and hasattr(layer.self_attn, "indexer"):
        layer.self_attn.indexer.register_forward_hook(lambda module, args, mask: seen.append(mask[0, 0].numpy()))
    return seen


def final_norm(model: Any) -> Any:
    """What follows the last layer."""
    return model.norm if hasattr(model, "norm") else model.hyper_connection_mixer


def rounding(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A module's input, rounded to bfloat16 and back."""
    return (args[0].to(torch.bfloat16).to(args[0].dtype), *args[1:])


def giving(value: np.ndarray) -> Callable[[Any, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """Puts [W, width] in place of a module's input."""
    return lambda module, args: (torch.from_numpy(value.astype(np.float32))[None], *args[1:])
