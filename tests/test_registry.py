"""A model's layout is read exactly: every shipped one loads, and any file that bends a rule is refused in one line."""

import dataclasses
from pathlib import Path

import pytest

from refengine import registry
from refengine.errors import UserError
from refengine.registry import available, check_spec, load_model
from refengine.registry.family import family_names, load_family

TINY = Path(registry.__file__).parent / "qwen3.5-tiny.yaml"


def refusal(tmp_path: Path, text: str) -> str:
    """What load_model says of a YAML file with this text; it must be one line that starts with the file's name."""
    path = tmp_path / "model.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_model(path)
    message = str(caught.value)
    assert "\n" not in message and message.startswith("model.yaml: ")
    return message.removeprefix("model.yaml: ")


def changed(old: str, new: str) -> str:
    """The tiny model's YAML with one place changed."""
    text = TINY.read_text(encoding="utf-8")
    assert text.count(old) == 1
    return text.replace(old, new)


@pytest.mark.parametrize("name", available())
def test_every_shipped_layout_loads_under_its_file_name(name):
    assert load_model(name).name == name


def test_a_path_loads_the_same_layout_as_the_name():
    assert load_model(TINY) == load_model("qwen3.5-tiny")


@pytest.mark.parametrize("name", ["qwen3.5-tiny", "qwen3.8-27b", "qwen3.5-9b"])
def test_every_fourth_layer_has_full_attention(name):
    spec = load_model(name)
    assert spec.attention_layers == tuple(range(3, spec.layers, 4))
    assert sorted(spec.attention_layers + spec.linear_layers) == list(range(spec.layers))


def test_explicit_layer_types_equal_the_interval(tmp_path):
    path = tmp_path / "model.yaml"
    kinds = ", ".join((["linear_attention"] * 3 + ["full_attention"]) * 2)
    path.write_text(changed("full_attention_interval: 4", f"layer_types: [{kinds}]"), encoding="utf-8")
    assert load_model(path) == load_model("qwen3.5-tiny")


@pytest.mark.parametrize(
    ("name", "kv_kib", "recurrent_mib"),
    [("qwen3.8-27b", 64, 144), ("qwen3.5-9b", 32, 48), ("qwen3.5-tiny", 4, 2.25)],
)
def test_cache_bytes_follow_from_the_layout(name, kv_kib, recurrent_mib):
    spec = load_model(name)
    history = len(spec.linear_layers) * 3 * spec.gated_delta_net.conv_channels * 2
    assert spec.kv_bytes_per_token() == kv_kib * 1024
    assert spec.state_bytes == recurrent_mib * 2**20 + history


@pytest.mark.parametrize("page_size", [1, 16, 48, 256, 544])
def test_a_bf16_page_is_its_positions(page_size):
    spec = load_model("qwen3.5-tiny")
    assert spec.bytes_a_page(page_size) == page_size * spec.kv_bytes_per_token()


@pytest.mark.parametrize("page_size", [1, 3, 48])
def test_an_fp8_page_rounds_each_plane_up_to_16_bytes(page_size):
    codes, exponents = 2 * page_size * 256, -(-2 * page_size // 16) * 16
    assert load_model("qwen3.5-tiny").bytes_a_page(page_size, "fp8") == 2 * 2 * (codes + exponents)


@pytest.mark.parametrize("page_size", [0, -1])
def test_an_empty_page_is_refused(page_size):
    with pytest.raises(UserError, match="at least 1 position"):
        load_model("qwen3.5-tiny").bytes_a_page(page_size)


def test_an_unknown_kv_type_is_refused():
    with pytest.raises(UserError, match="use bf16 or fp8"):
        load_model("qwen3.5-tiny").kv_bytes_per_token("int4")


def test_tensor_shapes_of_the_tiny_model():
    shapes = {(tensor.role, tensor.layer): tensor.shape for tensor in load_model("qwen3.5-tiny").tensors()}
    assert shapes["q_proj", 3] == (12 * 2 * 256, 128)
    assert shapes["o_proj", 3] == (128, 12 * 256)
    assert shapes["in_proj_qkv", 0] == (2 * 2 * 128 + 6 * 128, 128)
    assert shapes["conv", 0] == (1280, 1, 4)
    assert ("q_proj", 0) not in shapes and ("conv", 3) not in shapes


HEADS = {"qwen3_5": (4, 11), "qwen3_5_moe": (4, 15), "qwen4_exp": (7, 24)}
"""Tensors of a family's MTP head: of its own, of its layer."""


@pytest.mark.parametrize("name", available())
def test_every_shipped_layout_has_an_mtp_head_of_one_layer(name):
    spec = load_model(name)
    shapes = {tensor.name: tensor.shape for tensor in spec.mtp_tensors()}
    assert spec.mtp_layers == (spec.layers,) and len(shapes) == sum(HEADS[spec.family])
    if spec.family != "qwen4_exp":
        assert shapes["mtp.fc.weight"] == (spec.hidden, 2 * spec.hidden)
    own = {t.name.replace("model.layers.3.", "mtp.layers.0."): t.shape for t in spec.tensors() if t.layer == 3}
    assert own.items() <= shapes.items() and len(own) == HEADS[spec.family][1]


def test_the_head_adds_nothing_to_the_model_s_own_figures(tmp_path):
    path, spec = tmp_path / "model.yaml", load_model("qwen3.5-tiny")
    path.write_text(changed("mtp: {layers: 1}\n", ""), encoding="utf-8")
    without = load_model(path)
    assert without.mtp_tensors() == () and without.mtp_layers == ()
    assert without.tensors() == spec.tensors() and without.bytes_a_page(48) == spec.bytes_a_page(48)


def test_a_tied_head_has_no_tensor_of_its_own():
    roles = {name: {tensor.role for tensor in load_model(name).tensors()} for name in ("qwen3.5-2b", "qwen3.5-9b")}
    assert "lm_head" not in roles["qwen3.5-2b"] and "lm_head" in roles["qwen3.5-9b"]


@pytest.mark.parametrize("name", available())
def test_tensor_names_are_unique(name):
    spec = load_model(name)
    names = [tensor.name for tensor in (*spec.tensors(), *spec.mtp_tensors())]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", family_names())
def test_only_the_delta_net_output_norm_is_not_centred(name):
    family = load_family(name)
    groups = (family.model, family.layer, family.full_attention, family.linear_attention, family.ngrams, family.mtp)
    templates = {role: template for group in groups for role, template in group.items()}
    assert {role for role, template in templates.items() if template.gain == "plain"} == {"norm"}
    norms = {role for role, template in templates.items() if "norm" in template.name.rpartition("weight")[0]}
    assert {role for role in norms if templates[role].gain is None} == set(), "a norm that says nothing of its gain"


def test_special_tokens_follow_the_bytes():
    tokens = load_model("qwen3.5-tiny").tokens
    assert tokens.id_of("<|endoftext|>") == 256 and tokens.end == (256, tokens.id_of("<|im_end|>"))


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r'model "qwen3.5-tyni" is not in the registry; did you mean qwen3.5-tiny\?'):
        load_model("qwen3.5-tyni")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"absent.yaml: cannot be read"):
        load_model(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hidden: 128", 'hidden: "128"', 'hidden: must be a whole number, not the text "128"'),
        ("hidden: 128", "hidden: 128.0", "hidden: must be a whole number, not 128.0"),
        ("hidden: 128", "hidden: 0128", 'hidden: must be a whole number, not the text "0128"'),
        ("hidden: 128", "hidden: 1_28", 'hidden: must be a whole number, not the text "1_28"'),
        ("hidden: 128", "hidden: true", "hidden: must be a whole number, not true"),
        ("hidden: 128", "hidden: null", "hidden: must be a whole number, not nothing"),
        ("hidden: 128", "hidden: [128]", "hidden: must be a whole number, not a list"),
        ("hidden: 128", "hidden: 0", "hidden: must be above 0, not 0"),
        ("tied_head: false", "tied_head: 0", "tied_head: must be true or false, not 0"),
        ("tied_head: false", "tied_head: no", 'tied_head: must be true or false, not the text "no"'),
        ("norm_eps: 1e-6", 'norm_eps: "1e-6"', 'norm_eps: must be a number, not the text "1e-6"'),
        ("norm_eps: 1e-6", "norm_eps: 1e999", "norm_eps: must be a finite number, not inf"),
        ("norm_eps: 1e-6", "norm_eps: .nan", 'norm_eps: must be a number, not the text ".nan"'),
        (
            "family: qwen3_5",
            "family: ../qwen3_5",
            'family: "../qwen3_5" is unknown; known: qwen3_5, qwen3_5_moe, qwen4_exp',
        ),
        ("name: qwen3.5-tiny", "name: ../tiny", "name: use letters, digits, '.', '_' and '-'"),
        ("mlp: {width: 256}", "mlp: 256", "mlp: must be a mapping, not 256"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(tmp_path, old, new, message):
    assert refusal(tmp_path, changed(old, new)) == message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hidden: 128\n", "hidden: 128\nhiden: 128\n", "hiden: unknown key; did you mean hidden?"),
        ("kv_heads: 2,", "kv_head: 2,", "attention.kv_head: unknown key; did you mean kv_heads?"),
        ("hidden: 128\n", "", "hidden: missing key"),
        ("kv_heads: 2, ", "", "attention.kv_heads: missing key"),
        ("hidden: 128\n", "hidden: 128\nhidden: 128\n", "line 4: hidden: repeated key; keep one"),
        ("kv_heads: 2,", "kv_heads: 2, kv_heads: 4,", "line 11: kv_heads: repeated key; keep one"),
        ("hidden: 128\n", "hidden: 128\n12: 3\n", "line 4: a key must be text"),
    ],
)
def test_unknown_missing_and_repeated_keys_are_refused(tmp_path, old, new, message):
    assert refusal(tmp_path, changed(old, new)) == message


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(33, 2), (24, 0), (3, 2), (0, 2), (12, -2)],
)
def test_heads_that_do_not_divide_over_kv_heads_are_refused(tmp_path, heads, kv_heads):
    text = changed("heads: 12, kv_heads: 2", f"heads: {heads}, kv_heads: {kv_heads}")
    assert refusal(tmp_path, text) == f"attention.kv_heads: {heads} heads do not divide over {kv_heads} KV heads"


@pytest.mark.parametrize(
    ("dims", "message"),
    [(0, "even and above 0, not 0"), (3, "even and above 0, not 3"), (-2, "above 0, not -2"), (258, "head_dim 256")],
)
def test_a_rotary_width_that_would_rotate_part_of_a_pair_is_refused(tmp_path, dims, message):
    assert message in refusal(tmp_path, changed("dims: 64", f"dims: {dims}"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("key_heads: 2", "key_heads: 4", "gated_delta_net.key_heads: 6 value heads do not divide over 4 key heads"),
        ("conv_width: 4", "conv_width: 1", "gated_delta_net.conv_width: must be 2 or more, not 1"),
        ("mtp: {layers: 1}", "mtp: {layers: 2}", "mtp.layers: must be 0 or 1, not 2"),
        ("mtp: {layers: 1}", "mtp: {layers: -1}", "mtp.layers: must be 0 or 1, not -1"),
        ("mtp: {layers: 1}", "mtp: {layers: true}", "mtp.layers: must be a whole number, not true"),
        ("mtp: {layers: 1}", "mtp: {}", "mtp.layers: missing key"),
        ("mtp: {layers: 1}", "mtp: {layer: 1}", "mtp.layer: unknown key; did you mean layers?"),
        ("mtp: {layers: 1}", "mtp: 1", "mtp: must be a mapping, not 1"),
        ("output_gate: true", "output_gate: false", "attention.output_gate: must be true: family qwen3_5 always gates"),
        ("vocabulary: 320", "vocabulary: 255", "tokens.text: bytes need 256 ids, vocabulary is 255"),
        ("vocabulary: 320", "vocabulary: 258", "tokens.specials: ids 256 to 258 leave the vocabulary of 258"),
        ("end: [256, 258]", "end: [256, 320]", "tokens.end[1]: 320 is not in the vocabulary of 320"),
        ("end: [256, 258]", 'end: [256, "258"]', 'tokens.end[1]: must be a whole number, not the text "258"'),
        ("text: bytes", "text: words", 'tokens.text: "words" is unknown; use bytes or tokenizer'),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(tmp_path, old, new, message):
    assert refusal(tmp_path, changed(old, new)) == message


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layer_types: [linear_attention]", "layer_types: 1 types for 8 layers"),
        ("layer_types: []", "layer_types: 0 types for 8 layers"),
        ("layer_types: [window, a, b, c, d, e, f, g]", 'layer_types[0]: "window" is unknown'),
        ("layer_types: full_attention", "layer_types: must be a list"),
        ("full_attention_interval: 4\nlayer_types: []", "full_attention_interval: give either this or layer_types"),
        ("full_attention_interval: 0", "full_attention_interval: must be a whole number above 0, not 0"),
        ('full_attention_interval: "4"', "full_attention_interval: must be a whole number above 0, not '4'"),
        ("", "layer_types: missing key"),
    ],
)
def test_a_layer_pattern_that_does_not_fit_is_refused(tmp_path, pattern, message):
    assert refusal(tmp_path, changed("full_attention_interval: 4", pattern)).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a mapping, not nothing"),
        ("- 1\n", "must be a mapping, not a list"),
        ("a: [1\n", "line 2: expected"),
        ("a: 1\n---\nb: 2\n", "line 2: but found another document"),
        ("a: &x 1\nb: *x\n", "line 2: aliases are not allowed"),
        ("a: !!python/object:os.system 1\n", "line 1: could not determine a constructor"),
        ("a: !!int x\n", "is not YAML: "),
        ("a: \x07\n", "is not YAML: "),
    ],
)
def test_text_that_is_no_strict_yaml_is_refused(tmp_path, text, message):
    assert refusal(tmp_path, text).startswith(message)


def test_a_layout_built_in_code_keeps_the_same_rules():
    spec = dataclasses.replace(load_model("qwen3.5-tiny"), layers=9)
    with pytest.raises(UserError, match="qwen3.5-tiny: layer_types: 8 types for 9 layers"):
        check_spec(spec)


def test_every_family_file_names_itself():
    assert [load_family(name).family for name in family_names()] == family_names()


# --- Families with more parts -----------------------------------------------------------------------------------------

FLASH_TINY = TINY.parent / "flash-next-tiny.yaml"


@pytest.mark.parametrize(("name", "billions"), [("qwen3.6-35b-a3b", 34.66), ("qwen3.8-flash-next", 176.94)])
def test_a_layout_has_the_parameters_of_its_model(name, billions):
    assert round(sum(tensor.size for tensor in load_model(name).tensors()) / 1e9, 2) == billions


def test_a_position_of_flash_next_has_an_index_key_and_a_quarter_of_a_pooled_one():
    spec, a_layer = load_model("qwen3.8-flash-next"), 2 * 2 * 2 * 256 + 256 + 64
    assert a_layer == 2368 and spec.kv_bytes_per_token() == 12 * a_layer
    assert spec.bytes_a_page(48) == 48 * 12 * a_layer
    assert spec.bytes_a_page(5) == 12 * (5 * (2048 + 256) + 2 * 256), "a block that is begun has a row"
    assert spec.state_bytes == 113_246_208 + 36 * 3 * 10_240 * 2 + 9 * 10_240 * 2 + 2 * 4


def test_tensor_shapes_of_flash_next():
    tensors = {t.name: t for t in load_model("qwen3.8-flash-next").tensors()}
    shapes = {name.removeprefix("model.layers."): tensor.shape for name, tensor in tensors.items()}
    assert shapes["3.self_attn.indexer.index_qk_proj.weight"] == (5 * 128, 2560)
    assert shapes["0.attn_hyper_connection.block_inject_weight.weight"] == (4, 10_240)
    assert shapes["47.mlp_hyper_connection.input_mix_weight_down.weight"] == (320, 10_240)
    assert shapes["5.mlp.experts.gate_up_proj"] == (512, 1280, 2560)
    assert shapes["1.ple.ple_embedding.ngram_embedding.shard_127.weight"] == (320_001_536 // 128, 160)
    assert not any(name.startswith("0.ple.") for name in shapes)
    assert tensors["model.layers.1.ple.ple_embedding.layer_multipliers"].dtypes == ("I64",)


def test_a_short_prompt_of_the_tiny_model_is_sparse():
    indexer = load_model("flash-next-tiny").indexer
    assert indexer.budget < 200 and indexer.budget % indexer.block == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("experts: {count: 8, picks: 2, width: 64}\n", "", "experts: missing key: family qwen4_exp has it"),
        ("family: qwen4_exp", "family: qwen3_5", "experts: family qwen3_5 has none"),
        ("picks: 2", "picks: 9", "experts.picks: must be 1 to the 8 experts, not 9"),
        ("picks: 2", "pick: 2", "experts.pick: unknown key; did you mean picks?"),
        ("budget: 64", "budget: 66", "indexer.budget: 66 positions are not whole blocks of 4"),
        ("heads: 4, head_dim: 128", "heads: 4, head_dim: 32", "indexer.head_dim: 64 rotary dims do not fit into 32"),
        ("streams: 4", "streams: 3", "hyper.streams: must be even and above 0, not 3"),
        ("layer: 1,", "layer: 8,", "ngrams.layer: 8 is none of the 8 layers"),
        ("width: 128,", "width: 120,", "ngrams.width: 120 features do not divide over 16 heads"),
        ("end: 256,", "end: 320,", "ngrams.end: 320 is not in the vocabulary of 320"),
        ("parts: 4", "parts: 3", "ngrams.divisor: tables of multiples of 128 rows do not divide over 3 parts"),
        ("gate: sigmoid", "gate: relu", 'gated_delta_net.gate: "relu" is unknown; use silu or sigmoid'),
    ],
)
def test_parts_that_do_not_fit_the_family_are_refused(tmp_path, old, new, message):
    text = FLASH_TINY.read_text(encoding="utf-8")
    assert text.count(old) == 1
    assert refusal(tmp_path, text.replace(old, new)) == message
