"""A checkpoint follows bit for bit from its seed; one that disagrees with its layout is refused before it is read."""

import dataclasses
import hashlib
import json
import os
import shutil
import struct
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from refengine.checkpoint import (
    AttentionWeights,
    GatedDeltaNetWeights,
    cached_checkpoint,
    load_mtp,
    load_weights,
    make_checkpoint,
    open_cached,
    open_checkpoint,
    spec_of_folder,
)
from refengine.checkpoint.config import config_of
from refengine.checkpoint.files import INDEX, SINGLE, read_header
from refengine.checkpoint.progress import progress
from refengine.checkpoint.values import distribution, synthetic
from refengine.errors import UserError
from refengine.registry import Attention, GatedDeltaNet, Mlp, Mtp, Tokens, load_model

SPEC = dataclasses.replace(
    load_model("qwen3.5-tiny"),
    name="small",
    hidden=32,
    layers=4,
    layer_types=("linear_attention", "full_attention") * 2,
    attention=Attention(heads=4, kv_heads=2, head_dim=64, output_gate=True),
    rope=dataclasses.replace(load_model("qwen3.5-tiny").rope, dims=16),
    gated_delta_net=GatedDeltaNet(key_heads=1, value_heads=2, key_dim=16, value_dim=16, conv_width=4),
    mlp=Mlp(width=48),
)
HEADLESS = dataclasses.replace(SPEC, mtp=Mtp(0))
MTP_NAMES = [tensor.name for tensor in SPEC.mtp_tensors()]
Q_PROJ_SHA256 = "78895481f50f1d074a5d2e82fdbbbed033bae88d294a2f4eb108840c766b8cd3"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
K_NORM = "model.layers.1.self_attn.k_norm.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A whole checkpoint in one file."""
    return make_checkpoint(SPEC, tmp_path_factory.mktemp("made") / "small")


@pytest.fixture(scope="module")
def pristine_shards(tmp_path_factory):
    """The same checkpoint in shards with an index."""
    return make_checkpoint(SPEC, tmp_path_factory.mktemp("made") / "small", shard_bytes=32 << 10)


@pytest.fixture
def folder(pristine, tmp_path):
    """A copy of the one-file checkpoint that a test may damage."""
    return shutil.copytree(pristine, tmp_path / "small")


@pytest.fixture
def shards(pristine_shards, tmp_path):
    """A copy of the sharded checkpoint that a test may damage."""
    return shutil.copytree(pristine_shards, tmp_path / "small")


def refusal(folder, spec=SPEC) -> str:
    """What open_checkpoint says of a folder that it must refuse, in one line."""
    with pytest.raises(UserError) as caught:
        open_checkpoint(folder, spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_json(path, **changes) -> None:
    """Set top-level keys of a JSON file; None removes one."""
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def edit_tensors(path, **changes) -> None:
    """Replace tensors of a safetensors file by name; None removes one."""
    tensors = load_file(path) | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, path, metadata={"format": "pt"})


def raw_file(header: str, data: bytes) -> bytes:
    """A safetensors file with this header text."""
    return struct.pack("<Q", len(header)) + header.encode() + data


# ---- making ----


def test_the_values_of_a_seed_are_recorded():
    tensor = next(tensor for tensor in load_model("qwen3.5-tiny").tensors() if tensor.role == "q_proj")
    values = synthetic(tensor, load_model("qwen3.5-tiny"), seed=0)
    assert hashlib.sha256(values.tobytes()).hexdigest() == Q_PROJ_SHA256


def test_two_runs_write_the_same_bytes(pristine, tmp_path):
    again = make_checkpoint(SPEC, tmp_path / "again")
    assert {path.name: path.read_bytes() for path in again.iterdir()} == {
        path.name: path.read_bytes() for path in pristine.iterdir()
    }


def test_shards_hold_the_same_tensors_as_one_file(pristine, pristine_shards):
    one, many = open_checkpoint(pristine, SPEC), open_checkpoint(pristine_shards, SPEC)
    assert len(list(pristine_shards.glob("*.safetensors"))) > 2
    for tensor in (*SPEC.tensors(), *SPEC.mtp_tensors()):
        assert one.tensor(tensor.name).tobytes() == many.tensor(tensor.name).tobytes()


def test_another_seed_changes_every_tensor():
    for tensor in (*SPEC.tensors(), *SPEC.mtp_tensors()):
        assert synthetic(tensor, SPEC, 0).tobytes() != synthetic(tensor, SPEC, 1).tobytes()


def test_a_tensor_does_not_depend_on_the_layers_around_it():
    deeper = dataclasses.replace(SPEC, layers=8, layer_types=SPEC.layer_types * 2)
    tensor = next(tensor for tensor in SPEC.tensors() if tensor.name == Q_PROJ)
    assert synthetic(tensor, SPEC, 0).tobytes() == synthetic(tensor, deeper, 0).tobytes()


@pytest.mark.parametrize("role", ["embed", "q_proj", "o_proj", "in_proj_qkv", "conv", "q_norm", "a_log", "dt_bias"])
def test_values_have_the_stated_mean_and_deviation(role):
    spec = load_model("qwen3.5-tiny")
    tensors = [tensor for tensor in spec.tensors() if tensor.role == role]
    values = np.concatenate([synthetic(tensor, spec, 0).astype(np.float64).ravel() for tensor in tensors])
    mean, deviation = distribution(tensors[0], spec)
    assert np.isfinite(values).all()
    assert abs(values.mean() - mean) < 4 * deviation / np.sqrt(values.size)
    assert abs(values.std() / deviation - 1) < 4 / np.sqrt(values.size)


def test_an_existing_folder_is_left_alone(folder):
    before = (folder / SINGLE).read_bytes()
    with pytest.raises(UserError, match="already exists"):
        make_checkpoint(SPEC, folder, seed=1)
    assert (folder / SINGLE).read_bytes() == before


def test_a_layout_that_breaks_a_rule_is_not_written(tmp_path):
    with pytest.raises(UserError, match="small: layer_types: 4 types for 5 layers"):
        make_checkpoint(dataclasses.replace(SPEC, layers=5), tmp_path / "bad")
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("refengine.checkpoint.make.save_file", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        make_checkpoint(SPEC, tmp_path / "small")
    assert not list(tmp_path.iterdir())


def test_a_cached_checkpoint_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("REFENGINE_CACHE", str(tmp_path))
    first = cached_checkpoint(SPEC)
    stamp = (first / SINGLE).stat().st_mtime_ns
    assert first.is_relative_to(tmp_path)
    assert cached_checkpoint(SPEC) == first and (first / SINGLE).stat().st_mtime_ns == stamp


def test_the_cache_tells_layouts_and_seeds_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("REFENGINE_CACHE", str(tmp_path))
    wider = dataclasses.replace(SPEC, mlp=Mlp(width=64))
    made = {cached_checkpoint(SPEC), cached_checkpoint(SPEC, seed=1), cached_checkpoint(wider)}
    assert len({*made, cached_checkpoint(HEADLESS)}) == 4


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("REFENGINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot be written"):
        cached_checkpoint(SPEC)


DAMAGE = {
    "cut short": (lambda folder: os.truncate(folder / SINGLE, 1000), f"{SINGLE}: damaged or cut short: "),
    "no weights": (lambda folder: (folder / SINGLE).unlink(), f"{{folder}}: holds neither {SINGLE} nor {INDEX}"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "{folder}/config.json: cannot be read: "),
    "other config": (lambda folder: edit_json(folder / "config.json", hidden_size=16), "config.json: hidden_size: "),
    "a file": (lambda folder: (shutil.rmtree(folder), folder.touch()), "{folder}: is not a folder; "),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_cached_checkpoint_names_what_to_delete(tmp_path, monkeypatch, damage, message):
    monkeypatch.setenv("REFENGINE_CACHE", str(tmp_path))
    folder = open_cached(SPEC).folder
    damage(folder)
    with pytest.raises(UserError) as caught:
        open_cached(SPEC)
    assert str(caught.value).startswith(message.format(folder=folder))
    assert str(caught.value).endswith(f"; delete {folder} to have it made again")
    shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    assert open_cached(SPEC).tensor(Q_PROJ).shape == (512, 32)


@pytest.mark.parametrize("after", [0.0, 1e9])
def test_progress_passes_every_item_on(after):
    assert list(progress(range(5), "counting", after)) == list(range(5))


# ---- reading ----


def test_config_and_layout_describe_each_other(pristine):
    found = spec_of_folder(pristine)
    assert dataclasses.replace(found, tokens=SPEC.tokens) == SPEC
    assert found.tokens == Tokens("bytes", SPEC.tokens.end)


def test_a_vision_model_s_text_part_opens(folder):
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: value
        for name, value in load_file(folder / SINGLE).items()
    }
    tensors |= {"model.visual.patch": np.zeros(1, np.float32), "mtp.fc.weight": np.zeros(1, np.float32)}
    save_file(tensors, folder / SINGLE)
    text = {key: value for key, value in config_of(SPEC).items() if key != "tie_word_embeddings"}
    config = {"model_type": "qwen3_5", "tie_word_embeddings": False, "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_weights(open_checkpoint(folder, SPEC), SPEC).embed.shape == (320, 32)


def test_an_interval_stands_in_for_layer_types(folder):
    edit_json(folder / "config.json", layer_types=None, full_attention_interval=2)
    assert open_checkpoint(folder, SPEC).spec == SPEC


def test_stray_files_are_ignored(shards):
    (shards / SINGLE).write_bytes(b"not a checkpoint")
    (shards / "model-00099-of-00099.safetensors").write_bytes(b"")
    open_checkpoint(shards, SPEC)


def test_a_per_head_vector_may_be_float32(folder):
    name = "model.layers.0.linear_attn.A_log"
    edit_tensors(folder / SINGLE, **{name: load_file(folder / SINGLE)[name].astype(np.float32)})
    assert open_checkpoint(folder, SPEC).tensor(name).dtype == np.float32


def test_a_tensor_of_no_such_name_is_refused(pristine):
    with pytest.raises(UserError, match="lm_tail.weight: no such tensor"):
        open_checkpoint(pristine, SPEC).tensor("lm_tail.weight")


# ---- refusals: config.json ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 4}, "config.json: num_key_value_heads: 4 where small has 2"),
        ({"num_key_value_heads": "2"}, 'config.json: num_key_value_heads: must be a whole number, not the text "2"'),
        ({"num_key_value_heads": 0}, "config.json: num_key_value_heads: 4 heads do not divide over 0 KV heads"),
        ({"hidden_size": True}, "config.json: hidden_size: must be a whole number, not true"),
        ({"hidden_size": None}, "config.json: hidden_size: missing key"),
        ({"tie_word_embeddings": True}, "config.json: tie_word_embeddings: true where small has false"),
        ({"rms_norm_eps": 1e-5}, "config.json: rms_norm_eps: 1e-05 where small has 1e-06"),
        (
            {"model_type": "llama"},
            'config.json: model_type: "llama" is unknown; known: qwen3_5_text, qwen3_5_moe_text, qwen4_exp_text',
        ),
        ({"hidden_act": "gelu"}, "config.json: hidden_act: must be 'silu', not 'gelu'"),
        ({"attention_bias": True}, "config.json: attention_bias: must be False, not True"),
        ({"attn_logit_softcapping": 50.0}, "config.json: attn_logit_softcapping: must be None, not 50.0"),
        ({"final_logit_softcapping": 30.0}, "config.json: final_logit_softcapping: must be None, not 30.0"),
        ({"use_sliding_window": True}, "config.json: use_sliding_window: must be False, not True"),
        ({"mlp_bias": True}, "config.json: mlp_bias: must be False, not True"),
        ({"mtp_num_hidden_layers": 0}, "config.json: mtp_num_hidden_layers: 0 where small has 1"),
        ({"mtp_num_hidden_layers": 2}, "config.json: mtp_num_hidden_layers: must be 0 or 1, not 2"),
        (
            {"mtp_num_hidden_layers": "1"},
            'config.json: mtp_num_hidden_layers: must be a whole number, not the text "1"',
        ),
        ({"mtp_use_dedicated_embeddings": True}, "config.json: mtp_use_dedicated_embeddings: must be False, not True"),
        ({"layer_types": ["full_attention"]}, "config.json: layer_types: 1 types for 4 layers"),
        (
            {"layer_types": ["full_attention", "linear_attention"] * 2},
            "config.json: layer_types: 2 of 4 full, f-l-f-l where small has 2 of 4 full, l-f-l-f",
        ),
        ({"layer_types": None}, "config.json: layer_types: missing key"),
        ({"rope_parameters": None}, "config.json: rope_parameters.rope_theta: missing key"),
        ({"rope_parameters": {"rope_theta": 1e7}}, "config.json: rope_parameters.partial_rotary_factor: missing key"),
        (
            {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.3}},
            "config.json: rope_parameters.partial_rotary_factor: 0.3 of 64 dims is not a whole number",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5}},
            "config.json: rope_parameters.partial_rotary_factor: 32 where small has 16",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "yarn"}},
            "config.json: rope_parameters.rope_type: must be 'default', not 'yarn'",
        ),
        ({"text_config": 3}, "config.json: text_config: must be an object"),
    ],
)
def test_a_config_that_disagrees_is_refused_by_key(folder, changes, message):
    edit_json(folder / "config.json", **changes)
    assert refusal(folder).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hidden_size": 32, "hidden_size": 64}', "config.json: is not valid JSON: repeated key hidden_size"),
        ('{"rope_parameters": {"a": 1, "a": 1}}', "config.json: is not valid JSON: repeated key a"),
        ('{"rms_norm_eps": NaN}', "config.json: is not valid JSON: NaN is not a JSON number"),
        ("[]", "config.json: must hold a JSON object"),
        ("{", "config.json: is not valid JSON: "),
        ("\xff", "config.json: is not valid JSON: "),
    ],
)
def test_a_config_that_is_no_strict_json_is_refused(folder, text, message):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert refusal(folder).startswith(message)


def test_a_folder_without_config_is_refused(folder):
    (folder / "config.json").unlink()
    assert refusal(folder).endswith("config.json: cannot be read: No such file or directory")


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    assert "is not a folder" in refusal(tmp_path / "absent")


# ---- refusals: tensors ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({K_NORM: None}, f"{K_NORM}: missing from the checkpoint; small needs it"),
        ({Q_PROJ: np.zeros((512, 16), ml_dtypes.bfloat16)}, f"{SINGLE}: {Q_PROJ}: shape [512, 16] where small has"),
        ({K_NORM: np.zeros(64, np.float16)}, f"{SINGLE}: {K_NORM}: type F16 where BF16 or F32 is needed"),
        ({Q_PROJ: np.zeros((512, 32), np.float32)}, f"{SINGLE}: {Q_PROJ}: type F32 where BF16 is needed"),
        ({"extra": np.zeros(1, np.float32)}, f"{SINGLE}: extra: small has no such tensor"),
    ],
)
def test_tensors_that_disagree_are_refused_by_name(folder, changes, message):
    edit_tensors(folder / SINGLE, **changes)
    assert refusal(folder).startswith(message)


@pytest.mark.parametrize("cut", [1, 8, 1000])
def test_a_truncated_file_is_refused(folder, cut):
    os.truncate(folder / SINGLE, (folder / SINGLE).stat().st_size - cut)
    assert refusal(folder).startswith(f"{SINGLE}: damaged or cut short: ")


def test_trailing_bytes_are_refused(folder):
    with (folder / SINGLE).open("ab") as file:
        file.write(b"\0" * 8)
    assert refusal(folder).startswith(f"{SINGLE}: damaged or cut short: ")


@pytest.mark.parametrize(
    ("header", "size"),
    [
        pytest.param('{"x": {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [0, 4]}}', 4, id="shape"),
        pytest.param(
            '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
            ' "y": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            4,
            id="overlap",
        ),
        pytest.param(
            '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
            ' "y": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}}',
            12,
            id="hole",
        ),
        pytest.param(
            '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
            ' "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            4,
            id="name twice",
        ),
        pytest.param('{"x": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}', 4, id="text"),
        pytest.param('{"x": ', 0, id="json"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, header, size):
    (tmp_path / SINGLE).write_bytes(raw_file(header, bytes(size)))
    with pytest.raises(UserError, match=f"^{SINGLE}: "):
        read_header(tmp_path / SINGLE)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64])
def test_a_file_that_is_no_safetensors_is_refused(folder, content):
    (folder / SINGLE).write_bytes(content)
    assert refusal(folder).startswith(f"{SINGLE}: damaged or cut short: ")


def test_a_folder_without_weights_is_refused(folder):
    (folder / SINGLE).unlink()
    assert refusal(folder).endswith(f"holds neither {SINGLE} nor {INDEX}")


# ---- refusals: shards and index ----


def edit_index(folder, **changes) -> None:
    """Change entries of the weight map; None removes one."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"] | changes
    edit_json(folder / INDEX, weight_map={name: shard for name, shard in weight_map.items() if shard is not None})


def shard_of(folder, name: str) -> str:
    return json.loads((folder / INDEX).read_text())["weight_map"][name]


def test_a_missing_shard_is_named(shards):
    (shards / shard_of(shards, Q_PROJ)).unlink()
    assert refusal(shards) == f"{shard_of(shards, Q_PROJ)}: missing, though {INDEX} lists it"


def test_an_index_entry_without_tensor_is_named(shards):
    edit_index(shards, phantom=shard_of(shards, Q_PROJ))
    assert refusal(shards).startswith(f"{INDEX}: phantom: listed in {shard_of(shards, Q_PROJ)}")


def test_a_tensor_without_index_entry_is_named(shards):
    shard = shard_of(shards, K_NORM)
    edit_index(shards, **{K_NORM: None})
    assert refusal(shards) == f"{shard}: {K_NORM}: not listed for this shard in {INDEX}"


def test_a_tensor_in_two_shards_is_named(shards):
    other = shard_of(shards, "lm_head.weight")
    assert other != shard_of(shards, K_NORM)
    edit_tensors(shards / other, **{K_NORM: np.zeros(64, ml_dtypes.bfloat16)})
    assert refusal(shards) == f"{other}: {K_NORM}: not listed for this shard in {INDEX}"


@pytest.mark.parametrize("shard", ["../small/model.safetensors", "/etc/passwd", "", 3, None, ".."])
def test_a_shard_outside_the_folder_is_refused(shards, shard):
    weight_map = json.loads((shards / INDEX).read_text())["weight_map"]
    edit_json(shards / INDEX, weight_map=weight_map | {Q_PROJ: shard})
    assert refusal(shards).startswith(f"{INDEX}: {Q_PROJ}: shard {shard!r} is not the name of a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"a": "x", "a": "y"}}', f"{INDEX}: is not valid JSON: repeated key a"),
        ('{"weight_map": []}', f"{INDEX}: weight_map: must be an object"),
        ("{}", f"{INDEX}: weight_map: must be an object"),
    ],
)
def test_an_index_that_is_none_is_refused(shards, text, message):
    (shards / INDEX).write_text(text)
    assert refusal(shards).startswith(message)


# ---- weights ----


def test_weights_are_the_checkpoint_s_tensors(pristine):
    checkpoint = open_checkpoint(pristine, SPEC)
    weights = load_weights(checkpoint, SPEC)
    assert weights.embed.dtype == ml_dtypes.bfloat16
    assert weights.layers[1].mixer.q_proj.tobytes() == checkpoint.tensor(Q_PROJ).tobytes()
    conv = checkpoint.tensor("model.layers.0.linear_attn.conv1d.weight")
    assert weights.layers[0].mixer.conv.tobytes() == conv.tobytes() and weights.layers[0].mixer.conv.shape == (64, 4)


def test_layers_have_the_mixer_of_their_type(pristine):
    weights = load_weights(open_checkpoint(pristine, SPEC), SPEC)
    mixers = [type(layer.mixer) for layer in weights.layers]
    assert mixers == [GatedDeltaNetWeights, AttentionWeights] * 2


def test_gains_are_one_plus_the_weight_except_after_the_delta_net(pristine):
    checkpoint = open_checkpoint(pristine, SPEC)
    weights = load_weights(checkpoint, SPEC)
    stored = checkpoint.tensor(K_NORM).astype(np.float32)
    plain = checkpoint.tensor("model.layers.0.linear_attn.norm.weight").astype(np.float32)
    assert weights.layers[1].mixer.k_norm.tobytes() == (np.float32(1) + stored).tobytes()
    assert weights.layers[0].mixer.norm.tobytes() == plain.tobytes()
    assert all(layer.input_norm.dtype == np.float32 for layer in weights.layers)


def test_a_tied_head_is_the_embedding(tmp_path):
    spec = dataclasses.replace(SPEC, tied_head=True)
    weights = load_weights(open_checkpoint(make_checkpoint(spec, tmp_path / "tied"), spec), spec)
    assert weights.lm_head is weights.embed


# ---- the MTP head ----


def test_the_head_takes_nothing_from_the_model(pristine, tmp_path):
    """The same values with a head and without, and every name of the head is under mtp."""
    without = open_checkpoint(make_checkpoint(HEADLESS, tmp_path / "small"), HEADLESS)
    whole = open_checkpoint(pristine, SPEC)
    for tensor in HEADLESS.tensors():
        assert whole.tensor(tensor.name).tobytes() == without.tensor(tensor.name).tobytes()
    assert len(MTP_NAMES) == 15 and all(name.startswith("mtp.") for name in MTP_NAMES)
    assert not HEADLESS.mtp_tensors() and set(read_header(whole.folder / SINGLE)) == {
        *(tensor.name for tensor in SPEC.tensors()),
        *MTP_NAMES,
    }


def test_the_head_is_read_as_it_is_stored(pristine):
    checkpoint = open_checkpoint(pristine, SPEC)
    head = load_mtp(checkpoint, SPEC)
    assert head.fc.tobytes() == checkpoint.tensor("mtp.fc.weight").tobytes() and head.fc.shape == (32, 64)
    assert head.layer.mixer.q_proj.tobytes() == checkpoint.tensor("mtp.layers.0.self_attn.q_proj.weight").tobytes()
    assert head.layer.mlp.down_proj.tobytes() == checkpoint.tensor("mtp.layers.0.mlp.down_proj.weight").tobytes()
    gains = {
        "pre_fc_norm_embedding": head.embedding_norm,
        "pre_fc_norm_hidden": head.hidden_norm,
        "norm": head.final_norm,
        "layers.0.input_layernorm": head.layer.input_norm,
        "layers.0.post_attention_layernorm": head.layer.post_norm,
    }
    for name, gain in gains.items():
        stored = checkpoint.tensor(f"mtp.{name}.weight").astype(np.float32)
        assert gain.tobytes() == (np.float32(1) + stored).tobytes()


@pytest.mark.parametrize("config", [1, None])
def test_without_its_head_a_checkpoint_still_loads_for_everything_else(folder, config):
    """Its config.json may say that there is one, or nothing; the head alone is refused, and what would do is said."""
    edit_tensors(folder / SINGLE, **dict.fromkeys(MTP_NAMES))
    edit_json(folder / "config.json", mtp_num_hidden_layers=config)
    checkpoint = open_checkpoint(folder, SPEC)
    assert load_weights(checkpoint, SPEC).embed.shape == (320, 32)
    assert head_refusal(checkpoint, SPEC) == (
        "mtp.fc.weight: missing from the checkpoint; the MTP head of small needs it, --drafts ngram or none would do"
    )


def head_refusal(checkpoint, spec) -> str:
    """What load_mtp says, in one line."""
    with pytest.raises(UserError) as caught:
        load_mtp(checkpoint, spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (MTP_NAMES[-1], None, "missing from the checkpoint"),
        ("mtp.fc.weight", np.zeros((64, 32), ml_dtypes.bfloat16), "shape [64, 32] where small has [32, 64]"),
        ("mtp.norm.weight", np.zeros(32, np.float16), "type F16 where BF16 or F32 is needed"),
    ],
)
def test_a_damaged_head_is_refused_by_name_and_only_when_it_is_asked_for(folder, name, value, says):
    edit_tensors(folder / SINGLE, **{name: value})
    checkpoint = open_checkpoint(folder, SPEC)
    assert f"{name}: {says}" in head_refusal(checkpoint, SPEC)


def test_a_layout_without_a_head_has_none_to_load(tmp_path):
    checkpoint = open_checkpoint(make_checkpoint(HEADLESS, tmp_path / "small"), HEADLESS)
    assert head_refusal(checkpoint, HEADLESS) == "small: has no MTP head; --drafts ngram or none would do"


def test_a_head_s_embedding_half_carries_the_embedding(pristine):
    """Ones on the diagonal of fc, small numbers beside them."""
    fc = load_mtp(open_checkpoint(pristine, SPEC), SPEC).fc.astype(np.float32)
    assert (np.diag(fc) == 1).all() and np.abs(fc - np.eye(*fc.shape)).max() < 0.1


# ---- the public implementation ----


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_a_synthetic_checkpoint_whole(tmp_path, tied):
    torch = pytest.importorskip("torch")
    qwen = pytest.importorskip("transformers.models.qwen3_5")
    folder = make_checkpoint(dataclasses.replace(SPEC, tied_head=tied), tmp_path / "small", shard_bytes=32 << 10)
    model, info = qwen.Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_what_transformers_saves_opens_here_with_the_same_bits(pristine, tmp_path):
    torch = pytest.importorskip("torch")
    qwen = pytest.importorskip("transformers.models.qwen3_5")
    qwen.Qwen3_5ForCausalLM.from_pretrained(pristine, dtype=torch.bfloat16).save_pretrained(tmp_path / "saved")
    ours, theirs = open_checkpoint(pristine, SPEC), open_checkpoint(tmp_path / "saved", SPEC)
    for tensor in SPEC.tensors():
        assert ours.tensor(tensor.name).tobytes() == theirs.tensor(tensor.name).tobytes()


def test_a_checkpoint_that_the_disk_has_no_room_for_is_refused_before_a_byte_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match="GiB are free; name a larger disk"):
        make_checkpoint(load_model("qwen3.5-tiny"), tmp_path / "here")
    assert list(tmp_path.iterdir()) == []
