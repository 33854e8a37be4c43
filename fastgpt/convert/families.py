"""Model families of Hugging Face that a GPT can be: GPT-2, Llama and Qwen3."""

from dataclasses import replace
from typing import Any

from fastgpt.config.model import ModelConfig
from fastgpt.convert.family import (
    GPT2_NEEDS,
    NONE_HAS,
    Family,
    Fields,
    Settings,
    TensorMap,
    TensorMaps,
    check_expressed,
    either,
)
from fastgpt.errors import UserError, shown

ACTIVATIONS: dict[str, Any] = {
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_erf",
    "relu": "relu", "relu2": "relu_squared", "silu": "swiglu",
}  # fmt: skip
"""Name of an activation in transformers -> ours; of a gated layer that of its gate."""

# --- GPT-2 ----------------------------------------------------------------------------------------

GELUS = tuple(name for name in ACTIVATIONS if name != "silu")


def _gpt2_settings(config: ModelConfig) -> Settings:
    return {
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_embd": config.dim,
        "n_inner": config.ffn_width,
        "n_positions": config.context,
        "n_ctx": config.context,  # read by llama.cpp
        "activation_function": next(x for x in GELUS if ACTIVATIONS[x] == config.activation),
        "layer_norm_epsilon": config.epsilon,
        "embd_pdrop": config.dropout_at("embedding"),
        "attn_pdrop": config.dropout_at("attention"),
        "resid_pdrop": config.dropout_at("residual"),
        # biases that are zero there because they do not exist here
        "fastgpt": {name: getattr(config, name) for name in _BIASES},
    }


_BIASES = ("bias", "qkv_bias", "projection_bias")


def _gpt2_config(fields: Fields) -> ModelConfig:
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    fields.require("add_cross_attention", False)
    width, dropout = fields.get("n_embd", int), fields.get("resid_pdrop", float, 0.1)
    own = fields.inner("fastgpt")
    return ModelConfig(
        num_layers=fields.get("n_layer", int),
        num_heads=fields.get("n_head", int),
        dim=width,
        ffn_dim=fields.get("n_inner", int, 4 * width),
        context=fields.get("n_positions", int),
        activation=ACTIVATIONS[fields.require("activation_function", *GELUS)],
        norm_eps=fields.get("layer_norm_epsilon", float, 1e-5),
        embedding_dropout=fields.get("embd_pdrop", float, 0.1),
        attention_dropout=fields.get("attn_pdrop", float, 0.1),
        residual_dropout=dropout,
        feed_forward_dropout=dropout,
        bias=own.get("bias", bool, True),
        qkv_bias=own.get("qkv_bias", bool, None),
        projection_bias=own.get("projection_bias", bool, None),
    )


def _gpt2_maps(config: ModelConfig) -> TensorMaps:
    found = {f"w{kind}e.weight": TensorMap((f"transformer.w{kind}e.weight",)) for kind in "tp"}
    parts = {"ln_1": config.bias, "ln_2": config.bias, "ln_f": config.bias} | {
        "attn.c_attn": config.bias_at("qkv"), "attn.c_proj": config.bias_at("projection"),
        "mlp.c_fc": config.bias, "mlp.c_proj": config.bias,
    }  # fmt: skip
    for part, bias in parts.items():
        layers = range(config.num_layers) if part != "ln_f" else [None]
        for layer in layers:
            name = part if layer is None else f"h.{layer}.{part}"
            theirs = f"transformer.{name}"
            found[f"{name}.weight"] = TensorMap((f"{theirs}.weight",), transposed=".c_" in name)
            found[f"{name}.bias"] = TensorMap((f"{theirs}.bias",), constant=None if bias else 0.0)
    return found


GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    needs=GPT2_NEEDS | {"activation": tuple(ACTIVATIONS[name] for name in GELUS)},
    settings_of=_gpt2_settings,
    config_of=_gpt2_config,
    maps=_gpt2_maps,
    embedding="transformer.wte.weight",
    prefix="transformer.",
    buffers=(".attn.bias", ".attn.masked_bias"),
)  # fmt: skip

# --- Llama, and Qwen3, which normalises queries and keys ------------------------------------------


def _llama_settings(config: ModelConfig) -> Settings:
    if config.bias_at("qkv") != config.bias_at("projection"):
        raise UserError(
            "LlamaForCausalLM cannot express this model: --model.qkv-bias is"
            f" {config.bias_at('qkv')}, expected the same as --model.projection-bias,"
            f" {config.bias_at('projection')}"
        )
    settings = {
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_width,
        "max_position_embeddings": config.context,
        "hidden_act": "silu",
        "rms_norm_eps": config.epsilon,
        "rope_theta": config.rotary_base,
        "rope_scaling": None,
        "attention_bias": config.bias_at("qkv"),
        "mlp_bias": config.bias,
        "attention_dropout": config.dropout_at("attention"),
    }
    if config.rotary_scaling is not None:
        settings["rope_scaling"] = {"rope_type": "llama3"} | dict(
            zip(SCALING, config.rotary_scaling)
        )
    return settings


SCALING = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
)  # fmt: skip
"""Names of the numbers in `ModelConfig.rotary_scaling`."""


def _llama_config(fields: Fields, head_size: int | None = None) -> ModelConfig:
    """Translates settings of Llama.

    Args:
        head_size: width of a head where the settings have none; None: that of equal shares.
    """
    fields.require("hidden_act", "silu")
    fields.require("pretraining_tp", 1)
    # transformers 5 writes one field, earlier ones two
    base = fields.get("rope_theta", float, 10_000.0)
    scaling, parameters = fields.inner("rope_scaling"), fields.inner("rope_parameters")
    rope = scaling if parameters.empty else parameters
    kinds = "default", "llama3"
    old, new = (rope.require(name, *kinds) for name in ("type", "rope_type"))
    kind = new if old == "default" else old  # one of the two names is missing
    rope.require("partial_rotary_factor", 1.0)
    heads, width = fields.get("num_attention_heads", int), fields.get("hidden_size", int)
    size = fields.get("head_dim", int, head_size or width // max(heads, 1))
    attention_bias = fields.get("attention_bias", bool, False)
    return ModelConfig(
        num_layers=fields.get("num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads", int, heads),
        head_size=None if size * heads == width else size,
        dim=width,
        ffn_dim=fields.get("intermediate_size", int),
        context=fields.get("max_position_embeddings", int),
        norm="rmsnorm",
        norm_eps=fields.get("rms_norm_eps", float, 1e-6),
        activation="swiglu",
        position="rotary",
        rotary_base=rope.get("rope_theta", float, base),
        rotary_scaling=_scaling(rope) if kind == "llama3" else None,
        bias=fields.get("mlp_bias", bool, False),
        qkv_bias=attention_bias,
        projection_bias=attention_bias,
        attention_dropout=fields.get("attention_dropout", float, 0.0),
    )


def _scaling(rope: Fields) -> tuple[float, float, float, int]:
    factor, low, high = (rope.get(name, float) for name in SCALING[:3])
    return factor, low, high, rope.get(SCALING[3], int)


def _llama_maps(config: ModelConfig) -> TensorMaps:
    H, K, D, F = config.num_heads, config.kv_heads, config.head_dim, config.ffn_width
    found = {
        "wte.weight": TensorMap(("model.embed_tokens.weight",)),
        "ln_f.weight": TensorMap(("model.norm.weight",)),
    }
    parts = {
        "ln_1": ("input_layernorm",), "ln_2": ("post_attention_layernorm",),
        "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.c_proj": ("self_attn.o_proj",),
        "mlp.c_fc": ("mlp.gate_proj", "mlp.up_proj"), "mlp.c_proj": ("mlp.down_proj",),
    }  # fmt: skip
    rows = {"attn.c_attn": (H * D, K * D, K * D), "mlp.c_fc": (F, F)}
    biased = {
        "attn.c_attn": config.bias_at("qkv"), "attn.c_proj": config.bias_at("projection"),
        "mlp.c_fc": config.bias, "mlp.c_proj": config.bias,
    }  # fmt: skip
    for layer in range(config.num_layers):
        for part, names in parts.items():
            for kind in ("weight", "bias") if biased.get(part) else ("weight",):
                theirs = tuple(f"model.layers.{layer}.{name}.{kind}" for name in names)
                found[f"h.{layer}.{part}.{kind}"] = TensorMap(theirs, rows.get(part, ()))
    return found


_LLAMA_NEEDS = NONE_HAS | {
    "norm": ("rmsnorm",), "position": ("rotary",), "activation": ("swiglu",),
}  # fmt: skip
LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    needs=_LLAMA_NEEDS | {"qk_norm": (False,)},
    settings_of=_llama_settings,
    config_of=_llama_config,
    maps=_llama_maps,
    embedding="model.embed_tokens.weight",
    buffers=(".rotary_emb.inv_freq",),
)


def _qwen3_settings(config: ModelConfig) -> Settings:
    settings = _llama_settings(config)
    del settings["mlp_bias"]
    # weights that are 1 there because they do not exist here
    return settings | {
        "use_sliding_window": False,
        "fastgpt": {"qk_norm_weight": config.qk_norm_weight},
    }


def _qwen3_config(fields: Fields) -> ModelConfig:
    fields.require("use_sliding_window", False)
    for kind in fields.get("layer_types", list, []):
        if kind != "full_attention":
            raise UserError(f"config.json: layer_types has {kind}: expected full_attention alone")
    weighted = fields.inner("fastgpt").get("qk_norm_weight", bool, True)
    config = _llama_config(fields, head_size=128)  # transformers' default
    return replace(config, qk_norm=True, qk_norm_weight=weighted)


def _qwen3_maps(config: ModelConfig) -> TensorMaps:
    constant = None if config.qk_norm_weight else 1.0
    return _llama_maps(config) | {
        f"h.{layer}.attn.{part}_norm.weight": TensorMap(
            (f"model.layers.{layer}.self_attn.{part}_norm.weight",), constant=constant
        )
        for layer in range(config.num_layers)
        for part in "qk"
    }


QWEN3 = replace(
    LLAMA,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    needs=_LLAMA_NEEDS | {"qk_norm": (True,), "bias": (False,)},
    settings_of=_qwen3_settings,
    config_of=_qwen3_config,
    maps=_qwen3_maps,
)

# --- choice ---------------------------------------------------------------------------------------

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, QWEN3)}


def family_for(config: ModelConfig) -> Family:
    """Returns the family that comes closest to a model, by its positions and QK-norm.

    Raises:
        UserError: it cannot express the model.
    """
    family = GPT2 if config.position != "rotary" else QWEN3 if config.qk_norm else LLAMA
    check_expressed(family.architecture, family.needs, config)
    return family


def settings_for(config: ModelConfig, eot_id: int | None) -> Settings:
    """Returns the config.json of a model.

    Raises:
        UserError: no family can express it.
    """
    family = family_for(config)
    return family.settings_of(config) | {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
    }


def config_from(settings: Settings) -> tuple[ModelConfig, Family, list[str]]:
    """Translates a config.json: (our settings, the family, fields that nothing here knows).

    Raises:
        UserError: the family is unknown, or it has settings that our model cannot express.
    """
    kind = settings.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UserError(f"config.json describes {shown(kind)}: expected {either(tuple(FAMILIES))}")
    fields = Fields(settings)
    size = fields.get("vocab_size", int)
    tied = fields.get("tie_word_embeddings", bool, family is GPT2)
    try:
        config = replace(family.config_of(fields), vocab_size=size, tied=tied)
    except UserError as error:
        if str(error).startswith("config.json"):
            raise
        raise UserError(f"config.json does not go together: {error}") from error
    return config, family, fields.unknown()


def tensor_maps(family: Family, config: ModelConfig) -> TensorMaps:
    """Returns where each tensor of a model is, the output head included."""
    head = {} if config.tied else {"lm_head.weight": TensorMap(("lm_head.weight",))}
    return family.maps(config) | head
