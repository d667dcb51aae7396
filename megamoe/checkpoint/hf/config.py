"""config.json of a release <-> `ModelConfig`.

A K3 release nests the text model's keys under `text_config` and adds `vision_config`; Kimi-Linear's are flat. What a
release does not say (initial spread aside: balancing rule, backends) keeps the value it had in the given base.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from megamoe.checkpoint.hf.names import KIMI_LINEAR, Release, VisionShape
from megamoe.model.config import Activation, AttnResKind, GateKind, ModelConfig, OutputGate, RopeKind
from megamoe.utils.errors import check

# ours                          config.json (of the text model)
FIELDS = (
    ("vocab_size",              "vocab_size"),
    ("d_model",                 "hidden_size"),
    ("num_layers",              "num_hidden_layers"),
    ("norm_eps",                "rms_norm_eps"),
    ("init_std",                "initializer_range"),
    ("tie_embeddings",          "tie_word_embeddings"),
    ("full_attn_layers",        "linear_attn_config.full_attn_layers"),
    ("kda.num_heads",           "linear_attn_config.num_heads"),
    ("kda.head_dim",            "linear_attn_config.head_dim"),
    ("kda.conv_kernel",         "linear_attn_config.short_conv_kernel_size"),
    ("mla.num_heads",           "num_attention_heads"),
    ("mla.q_lora_rank",         "q_lora_rank"),
    ("mla.kv_lora_rank",        "kv_lora_rank"),
    ("mla.qk_nope_head_dim",    "qk_nope_head_dim"),
    ("mla.qk_rope_head_dim",    "qk_rope_head_dim"),
    ("mla.v_head_dim",          "v_head_dim"),
    ("ffn.dense_size",          "intermediate_size"),
    ("moe.num_experts",         "num_experts"),
    ("moe.top_k",               "num_experts_per_token"),
    ("moe.expert_size",         "moe_intermediate_size"),
    ("moe.num_shared_experts",  "num_shared_experts"),
    ("moe.first_dense_layers",  "first_k_dense_replace"),
    ("moe.routed_scaling_factor", "routed_scaling_factor"),
)  # fmt: skip

# Switches of the family that have one value in every release this reads: anything else is another model.
FIXED = {"moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "num_expert_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}

# What the released quantisation says; classification of tensors goes by their names, not by its ignore list.
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "observer": "minmax"}}},
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"],
    "kv_cache_scheme": None,
}  # fmt: skip


def read_config(raw: dict[str, Any], base: ModelConfig, where: str) -> ModelConfig:
    """The model that a config.json describes.

    Args:
        raw: parsed config.json.
        base: gives what the file does not say (balancing, backends, name).
        where: of the file, for messages.

    Raises:
        UserError: a key is missing or of the wrong type, or the model is not of this family.
    """
    text = _text(raw)
    found: dict[str, Any] = {}
    for ours, theirs in FIELDS:
        value = _get(text, theirs)
        optional = theirs == "q_lora_rank" or (theirs in ("initializer_range", "tie_word_embeddings"))
        check(value is not None or optional, theirs, value, f"missing in {where}; is this the config.json of a Kimi model?")
        if value is not None or theirs == "q_lora_rank":
            found[ours] = float(value) if isinstance(_value(base, ours), float) else value
    for key, expected in FIXED.items():
        value = text.get(key, expected)
        check(value == expected, key, value, f"only {expected} is known here, see {where}")
    linear = text["linear_attn_config"]
    bounded = linear.get("gate_lower_bound") is not None
    latent = text.get("routed_expert_hidden_size")
    act = text.get("hidden_act", "silu")
    check(act in Activation.__members__, "hidden_act", act, f"only {', '.join(Activation.__members__)} are known here, see {where}")
    check(text.get("mla_use_nope", False) is True, "mla_use_nope", text.get("mla_use_nope", False), f"only true is known here, see {where}")
    block = text.get("attn_res_block_size")
    found |= {
        "attn_res": AttnResKind.off if block is None else AttnResKind.block,
        "attn_res_block_size": block or base.attn_res_block_size,
        "kda.norm_eps": found["norm_eps"],
        "kda.gate": GateKind.bounded if bounded else GateKind.softplus,
        "kda.lower_bound": float(linear["gate_lower_bound"]) if bounded else base.kda.lower_bound,
        "kda.output_gate": OutputGate.full if linear.get("use_full_rank_gate", False) else OutputGate.lowrank,
        "mla.output_gate": bool(text.get("mla_use_output_gate", False)),
        "mla.rope": RopeKind.none,
        "ffn.act": Activation[act],
        "moe.latent": latent,
        "moe.latent_norm": bool(text.get("latent_moe_use_norm", False)) if latent else base.moe.latent_norm,
    }
    for ours, theirs in (("ffn.situ_beta", "activation_situ_beta"), ("ffn.situ_linear_beta", "activation_situ_linear_beta")):
        if text.get(theirs) is not None:
            found[ours] = float(text[theirs])
    return _replaced(replace(base, mtp=replace(base.mtp, num_layers=0)), found)


def differences(ours: ModelConfig, theirs: ModelConfig) -> list[tuple[str, Any, Any]]:
    """(key, ours, theirs) wherever two configurations are different models. Names, initial spread, balancing and backends do not count."""
    keys = [key for key, _ in FIELDS if key != "init_std"]
    keys += ["attn_res", "kda.norm_eps", "kda.gate", "kda.output_gate", "mla.output_gate", "mla.rope", "ffn.act", "moe.latent"]
    if ours.attn_res is AttnResKind.block:
        keys.append("attn_res_block_size")
    if ours.kda.gate is GateKind.bounded:
        keys.append("kda.lower_bound")
    if ours.moe.latent is not None:
        keys.append("moe.latent_norm")
    if ours.ffn.act is Activation.situ:
        keys += ["ffn.situ_beta", "ffn.situ_linear_beta"]
    pairs = ((key, _value(ours, key), _value(theirs, key)) for key in keys)
    return [(key, a, b) for key, a, b in pairs if a != b]


def write_config(config: ModelConfig, release: Release) -> dict[str, Any]:
    """config.json for a model that came from no release.

    Raises:
        UserError: the model has what a release cannot say (rotary MLA, full AttnRes).
    """
    c = config
    check(c.mla.rope is RopeKind.none, "model.mla.rope", c.mla.rope.name, "a release has no rotary MLA; only none can be exported")
    check(c.attn_res is not AttnResKind.full, "model.attn_res", c.attn_res.name, "a release has blocks or none; attn_res=full cannot be exported")
    text: dict[str, Any] = {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "dtype": "bfloat16"}
    for ours, theirs in FIELDS:
        _put(text, theirs, _value(c, ours))
    linear = text["linear_attn_config"]
    linear["kda_layers"] = [n + 1 for n in range(c.num_layers) if not c.is_full_attn(n)]
    text |= {
        "num_key_value_heads": c.mla.num_heads, "hidden_act": c.ffn.act.name, "mla_use_nope": True, "max_position_embeddings": 1048576, "model_max_length": 1048576,
        "use_grouped_topk": True, "topk_method": "noaux_tc", "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839, **FIXED,
    }  # fmt: skip
    if c.vocab_size <= 163839:
        # The released ids lie outside of a smaller vocabulary, and loaders index the embedding with the padding id.
        text |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if c.kda.gate is GateKind.bounded:
        linear["gate_lower_bound"] = c.kda.lower_bound
    if c.kda.output_gate is OutputGate.full:
        linear["use_full_rank_gate"] = True
    if c.attn_res is AttnResKind.block:
        text["attn_res_block_size"] = c.attn_res_block_size
    if c.mla.output_gate:
        text["mla_use_output_gate"] = True
    if c.moe.latent is not None:
        text |= {"routed_expert_hidden_size": c.moe.latent, "latent_moe_use_norm": c.moe.latent_norm}
    if c.ffn.act is Activation.situ:
        text |= {"activation_situ_beta": c.ffn.situ_beta, "activation_situ_linear_beta": c.ffn.situ_linear_beta}
    if release.mxfp4:
        text["quantization_config"] = QUANTIZATION
    if release.name == KIMI_LINEAR.name:
        return text
    outer = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], "dtype": "bfloat16", "media_placeholder_token_id": 163605, "ignore_index": -100, "text_config": text}
    if release.vision is not None:
        outer["vision_config"] = {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(release.vision).items()} | {"text_hidden_size": c.d_model}
    return outer


def vision_shape(raw: dict[str, Any]) -> VisionShape:
    """Sizes of the vision part from config.json; released sizes where it is silent."""
    given = raw.get("vision_config") or {}
    values = {f.name: given[f.name] for f in dataclasses.fields(VisionShape) if f.name in given}
    if "merge_kernel_size" in values:
        values["merge_kernel_size"] = tuple(values["merge_kernel_size"])
    return VisionShape(**values)


def without_quantization(raw: dict[str, Any]) -> dict[str, Any]:
    """A copy for an export without MXFP4."""
    copy = {key: value for key, value in raw.items() if key != "quantization_config"}
    if isinstance(copy.get("text_config"), dict):
        copy["text_config"] = {key: value for key, value in copy["text_config"].items() if key != "quantization_config"}
    return copy


def _text(raw: dict[str, Any]) -> dict[str, Any]:
    inner = raw.get("text_config")
    return inner if isinstance(inner, dict) else raw


def _get(tree: dict[str, Any], path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *places, key = path.split(".")
    for place in places:
        tree = tree.setdefault(place, {})
    tree[key] = value


def _value(config: ModelConfig, path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = getattr(value, key)
    return value


def _replaced(config: ModelConfig, values: dict[str, Any]) -> ModelConfig:
    """Sections first, so that every section is checked with all its new values at once."""
    here = {key: value for key, value in values.items() if "." not in key}
    for section in {key.split(".")[0] for key in values if "." in key}:
        inner = {key.split(".")[1]: value for key, value in values.items() if key.startswith(section + ".")}
        here[section] = replace(getattr(config, section), **inner)
    return replace(config, **here)
