"""A checkpoint's config.json: written from a model's layout, read into one, and compared with one."""

import re
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from refengine.checkpoint.strict_json import load_json
from refengine.errors import UserError
from refengine.registry import FULL_ATTENTION, ModelSpec, check_spec
from refengine.registry.loader import layer_pattern
from refengine.registry.reader import Where, read

CONFIG = "config.json"

# Key of config.json -> field of ModelSpec.
_KEYS = {
    "hidden_size": "hidden",
    "vocab_size": "vocabulary",
    "num_hidden_layers": "layers",
    "layer_types": "layer_types",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_head",
    "max_position_embeddings": "max_positions",
    "num_attention_heads": "attention.heads",
    "num_key_value_heads": "attention.kv_heads",
    "head_dim": "attention.head_dim",
    "linear_num_key_heads": "gated_delta_net.key_heads",
    "linear_num_value_heads": "gated_delta_net.value_heads",
    "linear_key_head_dim": "gated_delta_net.key_dim",
    "linear_value_head_dim": "gated_delta_net.value_dim",
    "linear_conv_kernel_dim": "gated_delta_net.conv_width",
    "rope_parameters.rope_theta": "rope.theta",
}
_EXPERT_KEYS = {
    "num_experts": "experts.count",
    "num_experts_per_tok": "experts.picks",
    "moe_intermediate_size": "experts.width",
    "shared_expert_intermediate_size": "mlp.width",
}
# The same of a family's own parts.
_FAMILY_KEYS = {
    "qwen3_5": {"intermediate_size": "mlp.width"},
    "qwen3_5_moe": _EXPERT_KEYS,
    "qwen4_exp": _EXPERT_KEYS
    | {
        "output_gate_type": "gated_delta_net.gate",
        "indexer_n_heads": "indexer.heads",
        "indexer_head_dim": "indexer.head_dim",
        "indexer_budget": "indexer.budget",
        "indexer_compress_ratio": "indexer.block",
        "hc_count": "hyper.streams",
        "hc_lowrank": "hyper.rank",
        "ple_embed_dim": "ngrams.width",
        "ple_conv_kernel_size": "ngrams.conv_width",
        "ngram_size": "ngrams.size",
        "heads_per_ngram": "ngrams.heads",
        "ngram_vocab_size_base": "ngrams.base",
        "make_ngram_vocab_size_divisible_by": "ngrams.divisor",
        "split_ngram_parts": "ngrams.parts",
        "seed": "ngrams.seed",
    },
}
# A list of layers that counts from 1, for ngrams.layer.
_NGRAM_LAYERS = "ple_layer_ids"
# Of a text: the model's own end is the first here; a generation_config.json may say other ends of replies.
_END = "eos_token_id"
# Kinds of layers as files name them, where we have other names.
_KINDS = dict.fromkeys(("deepseek_sparse_attention", "hybrid_indexed", "indexed_attention"), FULL_ATTENTION)
_FACTOR = "rope_parameters.partial_rotary_factor"
_MTP = "mtp_num_hidden_layers"
# Keys that the family fixes, with their value; absent means this value.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "rope_parameters.rope_type": "default",
}
_FAMILY_FIXED: dict[str, dict[str, Any]] = {
    "qwen3_5": {},
    "qwen3_5_moe": {"norm_topk_prob": True},
    "qwen4_exp": {"norm_topk_prob": True, "indexer_kv_heads": 1},
}
# Keys that other models have and the family does not: anything but absent or this value would be ignored.
_UNKNOWN = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_sliding_window": False,
    "mlp_bias": False,
    "mtp_use_dedicated_embeddings": False,
}
_ARCHITECTURES = {
    "qwen3_5": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    "qwen4_exp": ("qwen4_exp_text", "Qwen4ExpForCausalLM"),
}
_FAMILIES = {model_type: family for family, (model_type, _) in _ARCHITECTURES.items()}


def keys_of(family: str) -> dict[str, str]:
    """Key of config.json -> field of ModelSpec, for a family."""
    return _KEYS | _FAMILY_KEYS[family]


def names_of(family: str) -> dict[str, str]:
    """Field -> key; of fields that a key gives in another form, too."""
    other = {"rope.dims": _FACTOR, "mtp.layers": _MTP} | (
        {"ngrams.layer": _NGRAM_LAYERS, "ngrams.end": _END} if family == "qwen4_exp" else {}
    )
    return {field: key for key, field in keys_of(family).items()} | other


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """config.json of a checkpoint with this layout, as the Hugging Face text model of the family writes it."""
    model_type, architecture = _ARCHITECTURES[spec.family]
    config: dict[str, Any] = {"architectures": [architecture], "model_type": model_type, "dtype": "bfloat16"}
    config |= {"use_cache": True, "bos_token_id": None, "pad_token_id": None, _END: _ends(spec)}
    for key, value in (_FIXED | _FAMILY_FIXED[spec.family]).items():
        _put(config, key, value)
    for key, field in keys_of(spec.family).items():
        value = attrgetter(field)(spec)
        _put(config, key, list(value) if isinstance(value, tuple) else value)
    _put(config, _FACTOR, spec.rope.dims / spec.attention.head_dim)
    _put(config, _MTP, spec.mtp.layers)
    if spec.ngrams is not None:
        _put(config, _NGRAM_LAYERS, [spec.ngrams.layer + 1])
    return config


def spec_of_folder(folder: str | Path) -> ModelSpec:
    """The layout that a checkpoint's config.json describes; its name is the folder's.

    Raises UserError naming the folder or the key.
    """
    return _spec_of(Path(folder), mtp_layers=0)


def spec_beside(folder: Path, spec: ModelSpec) -> ModelSpec:
    """spec_of_folder, to be held against `spec`: a config.json that says nothing of an MTP head does not contradict it."""
    return _spec_of(folder, spec.mtp.layers)


def _spec_of(folder: Path, mtp_layers: int) -> ModelSpec:
    """mtp_layers: of a config.json that does not say."""
    config = _Config(load_json(folder / CONFIG))
    family = config.family()
    where = Where(CONFIG, names_of(family))
    data: dict[str, Any] = {"name": _model_name(folder), "family": family, "tokens": _tokens(folder, config)}
    for key, value in (_FIXED | _FAMILY_FIXED[family] | _UNKNOWN).items():
        if config.get(key, value) != value:
            raise where.error(key, f"must be {value!r}, not {config.get(key)!r}")
    for key, field in keys_of(family).items():
        _put(data, field, config.require(key))
    if family == "qwen4_exp":
        _put(data, "ngrams.layer", _ngram_layer(config, where))
        _put(data, "ngrams.end", _ngram_end(config, where))
    _put(data, "attention.output_gate", True)
    _put(data, "rope.dims", _rotary_dims(config, where))
    _put(data, "mtp.layers", config.get(_MTP, mtp_layers))
    return check_spec(read(ModelSpec, data, where), where)


def check_config(folder: Path, spec: ModelSpec) -> None:
    """Raise UserError naming the first key of the folder's config.json that disagrees with `spec`."""
    found = spec_beside(folder, spec)
    if found.family != spec.family:
        raise UserError(f"{CONFIG}: model_type: family {found.family} where {spec.name} has {spec.family}")
    for field, key in names_of(spec.family).items():
        have, want = attrgetter(field)(found), attrgetter(field)(spec)
        if have != want:
            raise UserError(f"{CONFIG}: {key}: {_show(have, field)} where {spec.name} has {_show(want, field)}")


class _Config:
    """Look-up of dotted keys in a text model's config, or in the text part of a vision model's."""

    def __init__(self, data: dict[str, Any]) -> None:
        text = data.get("text_config", {})
        if not isinstance(text, dict):
            raise UserError(f"{CONFIG}: text_config: must be an object")
        self._data = {key: value for key, value in data.items() if key != "model_type" or not text} | text

    def get(self, key: str, default: Any = None) -> Any:
        value: Any = self._data
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None and key == "layer_types":
            return self._pattern()
        if value is None:
            raise UserError(f"{CONFIG}: {key}: missing key")
        if key == "layer_types" and isinstance(value, list):
            return [_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in value]
        return value

    def family(self) -> str:
        model_type = self.get("model_type")
        if model_type not in _FAMILIES:
            raise UserError(f'{CONFIG}: model_type: "{model_type}" is unknown; known: {", ".join(_FAMILIES)}')
        return _FAMILIES[model_type]

    def _pattern(self) -> list[str]:
        interval, layers = self.get("full_attention_interval"), self.require("num_hidden_layers")
        if type(interval) is not int or interval < 1 or type(layers) is not int:
            raise UserError(f"{CONFIG}: layer_types: missing key, and full_attention_interval does not stand in for it")
        return layer_pattern(layers, interval)


def _rotary_dims(config: _Config, where: Where) -> int:
    factor, head_dim = config.require(_FACTOR), config.require("head_dim")
    if type(factor) not in (int, float) or type(head_dim) is not int:
        raise where.error("rope.dims", f"must be a number, not {factor!r}")
    dims = factor * head_dim
    if abs(dims - round(dims)) > 1e-6:
        raise where.error("rope.dims", f"{factor} of {head_dim} dims is not a whole number")
    return round(dims)


def _ngram_layer(config: _Config, where: Where) -> int:
    layers = config.require(_NGRAM_LAYERS)
    if not isinstance(layers, list) or len(layers) != 1 or type(layers[0]) is not int:
        raise where.error("ngrams.layer", f"must be a list of one layer, not {layers!r}")
    return layers[0] - 1


def _ngram_end(config: _Config, where: Where) -> int:
    ends = config.require(_END)
    first = ends[0] if isinstance(ends, list) and ends else ends
    if type(first) is not int:
        raise where.error("ngrams.end", f"must be a token id or a list of them, not {ends!r}")
    return first


def _ends(spec: ModelSpec) -> list[int]:
    """The ids that end a reply, behind the one that ends a text for the n-gram branch."""
    ends = list(spec.tokens.end)
    return ends if spec.ngrams is None else [spec.ngrams.end, *(end for end in ends if end != spec.ngrams.end)]


def _tokens(folder: Path, config: _Config) -> dict[str, Any]:
    generation = folder / "generation_config.json"
    end = _Config(load_json(generation)).get(_END) if generation.exists() else None
    end = config.get(_END) if end is None else end
    text = "tokenizer" if (folder / "tokenizer.json").exists() else "bytes"
    return {"text": text, "end": [] if end is None else end if isinstance(end, list) else [end]}


def _model_name(folder: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).lstrip("._-") or "checkpoint"


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *groups, last = key.split(".")
    for group in groups:
        data = data.setdefault(group, {})
    data[last] = value


def _show(value: Any, field: str) -> str:
    if field == "layer_types":
        return f"{value.count('full_attention')} of {len(value)} full, {'-'.join(kind[0] for kind in value)}"
    if field == "ngrams.layer":
        return f"[{value + 1}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
