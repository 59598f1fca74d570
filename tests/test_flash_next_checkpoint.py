"""Checkpoints of the tiny Flash Next and of a small mixture of experts: made, opened, and refused where they disagree."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from refengine.checkpoint import make_checkpoint, open_checkpoint, spec_of_folder
from refengine.errors import UserError
from refengine.registry import Experts, ModelSpec, load_model

FLASH = load_model("flash-next-tiny")
DENSE = load_model("qwen3.5-tiny")
MOE = replace(DENSE, name="moe-tiny", family="qwen3_5_moe", experts=Experts(count=4, picks=2, width=32))
SPECS = {"flash-next": FLASH, "moe": MOE}
PLE = "model.layers.1.ple.ple_embedding."


@pytest.fixture(scope="module", params=list(SPECS))
def made(request, tmp_path_factory):
    """(layout, folder) of a synthetic checkpoint that no test may change."""
    spec = SPECS[request.param]
    return spec, make_checkpoint(spec, tmp_path_factory.mktemp("made") / spec.name)


@pytest.fixture
def flash(tmp_path):
    """A checkpoint of the tiny Flash Next that a test may damage."""
    return make_checkpoint(FLASH, tmp_path / FLASH.name)


def refusal(folder, spec: ModelSpec = FLASH) -> str:
    with pytest.raises(UserError) as caught:
        open_checkpoint(folder, spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_config(folder, **changes) -> None:
    """Set keys of config.json; None removes one."""
    path = folder / "config.json"
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def edit_tensor(folder, name: str, value: np.ndarray) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: value}, path, metadata={"format": "pt"})


def test_a_made_checkpoint_is_its_layout_whole(made):
    spec, folder = made
    checkpoint = open_checkpoint(folder, spec)
    checkpoint.check_mtp()
    for tensor in (*spec.tensors(), *spec.mtp_tensors()):
        assert checkpoint.tensor(tensor.name).shape == tensor.shape
    found = spec_of_folder(folder)
    assert replace(found, tokens=spec.tokens) == spec


def test_the_same_seed_makes_the_same_bits(made, tmp_path):
    spec, folder = made
    again = make_checkpoint(spec, tmp_path / spec.name)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_table_in_parts_is_the_whole_table(flash):
    checkpoint, hashed = open_checkpoint(flash, FLASH), FLASH.ngram_hash
    parts = [checkpoint.by_role(f"ngram_table_{part}", 1) for part in range(4)]
    assert np.concatenate(parts).shape == (hashed.rows, 8)
    assert checkpoint.by_role("ngram_sizes", 1).tolist() == list(hashed.sizes)


def test_layers_as_newer_files_name_them(flash):
    kinds = ["linear_attention"] * 3 + ["deepseek_sparse_attention"]
    edit_config(flash, layer_types=kinds * 2)
    assert open_checkpoint(flash, FLASH).spec == FLASH


CONFIGS = [
    ({"indexer_budget": 128}, "config.json: indexer_budget: 128 where flash-next-tiny has 64"),
    ({"num_experts_per_tok": 3}, "config.json: num_experts_per_tok: 3 where flash-next-tiny has 2"),
    ({"ple_layer_ids": [3]}, "config.json: ple_layer_ids: [3] where flash-next-tiny has [2]"),
    ({"ple_layer_ids": [2, 3]}, "config.json: ple_layer_ids: must be a list of one layer, not [2, 3]"),
    ({"seed": 7}, "config.json: seed: 7 where flash-next-tiny has 1234"),
    ({"hc_count": None}, "config.json: hc_count: missing key"),
    ({"norm_topk_prob": False}, "config.json: norm_topk_prob: must be True, not False"),
    ({"indexer_kv_heads": 2}, "config.json: indexer_kv_heads: must be 1, not 2"),
    ({"output_gate_type": "silu"}, "config.json: output_gate_type: silu where flash-next-tiny has sigmoid"),
    ({"heads_per_ngram": 3}, "config.json: ple_embed_dim: 128 features do not divide over 6 heads"),
]


@pytest.mark.parametrize(("changes", "says"), CONFIGS)
def test_a_config_that_disagrees_is_refused_by_key(flash, changes, says):
    edit_config(flash, **changes)
    assert refusal(flash) == says


def test_a_checkpoint_of_another_family_is_refused(flash):
    assert refusal(flash, MOE) == "config.json: model_type: family qwen4_exp where moe-tiny has qwen3_5_moe"


def test_numbers_of_another_hash_are_refused(flash):
    numbers = np.array(FLASH.ngram_hash.multipliers, np.int64)
    edit_tensor(flash, f"{PLE}layer_multipliers", numbers + 2)
    says = f"{PLE}layer_multipliers: holds other numbers than the seed and sizes of flash-next-tiny make"
    assert refusal(flash) == says


def test_tensors_of_another_shape_or_type_are_refused(flash):
    whole = shutil.copytree(flash, flash.parent / "whole")
    edit_tensor(flash, f"{PLE}ngram_heads_offsets", np.zeros(16, np.float32))
    assert refusal(flash).endswith("ngram_heads_offsets: type F32 where I64 is needed")
    edit_tensor(whole, "model.layers.0.mlp.gate.weight", load_file(whole / "model.safetensors")["lm_head.weight"])
    assert refusal(whole).endswith("mlp.gate.weight: shape [320, 128] where flash-next-tiny has [8, 128]")
