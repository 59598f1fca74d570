"""The public implementation of the family, transformers' Qwen3_5ForCausalLM, run on a checkpoint folder.

Needs the extra ``oracle`` (torch and transformers). Attention is the eager one, in which every step is plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3_5ForCausalLM

from refengine.verify.oracle_cases import Oracle


def run_oracle(folder: Path, ids: np.ndarray, inputs: np.ndarray | None = None) -> Oracle:
    """Run a checkpoint over token ids [W].

    inputs: [layers + 1, W, hidden], what the layers and the final norm get in place of the rounded outputs before
    them. Raises what transformers raises for a folder that it cannot read.
    """
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        bf16_logits = logits(load(folder, torch.bfloat16), tokens)
        model = load(folder, torch.float32)
        return Oracle(logits(model, tokens), bf16_logits, *layer_by_layer(model, tokens, inputs))


def load(folder: Path, dtype: torch.dtype) -> Any:
    """The model, its weights as ``dtype``."""
    return Qwen3_5ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def logits(model: Any, tokens: torch.Tensor) -> np.ndarray:
    """[W, vocabulary] of the one sequence."""
    return model(input_ids=tokens, use_cache=False).logits[0].float().numpy()


def layer_by_layer(model: Any, tokens: torch.Tensor, inputs: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """(layers, head): see Oracle."""
    outputs: list[np.ndarray] = []
    for number, module in enumerate([*model.model.layers, model.model.norm]):
        module.register_forward_pre_hook(rounding if inputs is None else giving(inputs[number]))
        module.register_forward_hook(lambda module, args, output: outputs.append(output[0].numpy().copy()))
    head = logits(model, tokens)
    return np.stack(outputs[:-1]), head


def rounding(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A module's input, rounded to bfloat16 and back."""
    return (args[0].to(torch.bfloat16).to(args[0].dtype), *args[1:])


def giving(value: np.ndarray) -> Callable[[Any, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """Puts [W, hidden] in place of a module's input."""
    return lambda module, args: (torch.from_numpy(value.astype(np.float32))[None], *args[1:])
