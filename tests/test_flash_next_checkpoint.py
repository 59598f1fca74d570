"""Checkpoints of the tiny Flash Next and of a small mixture of experts: made, opened, and refused where they disagree."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from refengine.checkpoint import load_weights, make_checkpoint, open_checkpoint, spec_of_folder
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


def test_a_table_is_read_with_one_part_beside_it(tmp_path):
    """Of the real layout it takes 102 GB."""
    kinds, ngrams = FLASH.layer_types[:2], replace(FLASH.ngrams, base=60000, parts=8)
    spec = replace(FLASH, layers=2, layer_types=kinds, ngrams=ngrams)
    checkpoint = open_checkpoint(make_checkpoint(spec, tmp_path / "wide"), spec)
    tracemalloc.start()
    try:
        weights = load_weights(checkpoint, spec)
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    table = weights.layers[1].ngrams.table
    assert len(table) == spec.ngram_hash.rows and most - held <= table.nbytes / 4


@pytest.mark.parametrize("kind", ["deepseek_sparse_attention", "indexed_attention"])
def test_layers_as_newer_files_name_them(flash, kind):
    kinds = ["linear_attention"] * 3 + [kind]
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
    ({"eos_token_id": 258}, "config.json: eos_token_id: 258 where flash-next-tiny has 256"),
    ({"eos_token_id": None}, "config.json: eos_token_id: missing key"),
    ({"eos_token_id": []}, "config.json: eos_token_id: must be a token id or a list of them, not []"),
    ({"eos_token_id": 320}, "config.json: eos_token_id: 320 is not in the vocabulary of 320"),
    ({"heads_per_ngram": 3}, "config.json: ple_embed_dim: 128 features do not divide over 6 heads"),
]


@pytest.mark.parametrize(("changes", "says"), CONFIGS)
def test_a_config_that_disagrees_is_refused_by_key(flash, changes, says):
    edit_config(flash, **changes)
    assert refusal(flash) == says


@pytest.mark.parametrize("ends", [256, [256], [256, 258]])
def test_the_end_of_a_text_is_the_config_s_whatever_ends_a_reply(flash, ends):
    """The hash of n-grams is trained with config.json's; a generation config lists what ends a reply, in an order of its own."""
    edit_config(flash, eos_token_id=ends)
    (flash / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 256]}))
    found = spec_of_folder(flash)
    assert (found.ngrams, found.tokens.end) == (FLASH.ngrams, (258, 256))


def test_a_written_config_has_the_end_of_a_text_first(tmp_path):
    """Whatever order a layout lists the ends of replies in."""
    turned = replace(FLASH, tokens=replace(FLASH.tokens, end=(258, 256)))
    folder = make_checkpoint(turned, tmp_path / "turned")
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [256, 258]
    assert spec_of_folder(folder).ngrams == FLASH.ngrams


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


def test_norms_that_hold_their_gains_are_refused(flash):
    """A conversion that stores 1 + w, which would be taken as a gain of 2 + w."""
    path, family = flash / "model.safetensors", [t for t in FLASH.tensors() if t.gain == "one_plus"]
    tensors = load_file(path)
    one = np.ones((), tensors[family[0].name].dtype)
    save_file(tensors | {t.name: tensors[t.name] + one for t in family}, path, metadata={"format": "pt"})
    assert refusal(flash) == (
        "model.hyper_connection_mixer.hc_norm.weight: 1.00 on average, as the other norms of streams: they hold gains, and "
        "qwen4_exp stores gains less 1; subtract 1 from every norm's weight except linear_attn.norm's"
    )
