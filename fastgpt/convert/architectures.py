"""Architectures of Hugging Face that a GPT can be: GPT-2, Llama and Qwen3."""

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from fastgpt.config.checks import flag
from fastgpt.config.config import OpsConfig
from fastgpt.config.model import ModelConfig
from fastgpt.convert.architecture import (
    NONE_HAS,
    Architecture,
    ConfigReader,
    HFConfig,
    TensorMap,
    either,
)
from fastgpt.errors import UserError, reason, shown
from fastgpt.model.build import build_model
from fastgpt.ops import tables

ACTIVATIONS: dict[str, Any] = {
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_erf",
    "relu": "relu", "relu2": "relu_squared", "silu": "swiglu",
}  # fmt: skip
"""Name of an activation in transformers -> ours; of a gated layer that of its gate."""

# --- GPT-2 ----------------------------------------------------------------------------------------

GELUS = tuple(name for name in ACTIVATIONS if name != "silu")


def _gpt2_write(config: ModelConfig) -> HFConfig:
    return {
        "n_ctx": config.context,  # read by llama.cpp
        "activation_function": next(x for x in GELUS if ACTIVATIONS[x] == config.activation),
        # biases that are zero there because they do not exist here
        "fastgpt": {name: getattr(config, name) for name in GPT2.defaults},
    }


def _gpt2_read(fields: ConfigReader) -> HFConfig:
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    fields.require("add_cross_attention", False)
    extra = fields.inner("fastgpt")
    return {
        "activation": ACTIVATIONS[fields.require("activation_function", *GELUS)],
        "feed_forward_dropout": fields.get("resid_pdrop", float, 0.1),
        **{name: extra.get(name, bool, default) for name, default in GPT2.defaults.items()},
    }


def _gpt2_tensor(name: str, shape: torch.Size, _: ModelConfig) -> TensorMap:
    matrix = ".c_" in name and name.endswith(".weight")
    return TensorMap((f"transformer.{name}",), shape, transposed=matrix)


GPT2 = Architecture(
    class_name="GPT2LMHeadModel",
    model_type="gpt2",
    required=NONE_HAS | {
        "norm": ("layernorm",), "position": ("learned",), "qk_norm": (False,),
        "num_kv_heads": (None,), "head_size": (None,),
        "activation": tuple(ACTIVATIONS[name] for name in GELUS),
    },
    table={
        "n_layer": ("num_layers", int),
        "n_head": ("num_heads", int),
        "n_embd": ("dim", int),
        "n_inner": ("ffn_dim", int, None),
        "n_positions": ("context", int),
        "layer_norm_epsilon": ("norm_eps", float, 1e-5),
        "embd_pdrop": ("embedding_dropout", float, 0.1),
        "attn_pdrop": ("attention_dropout", float, 0.1),
        "resid_pdrop": ("residual_dropout", float, 0.1),
    },
    read=_gpt2_read,
    write=_gpt2_write,
    tensor=_gpt2_tensor,
    prefix="transformer.",
    defaults={"bias": True, "qkv_bias": None, "projection_bias": None},
)  # fmt: skip

# --- Llama, and Qwen3, which normalises queries and keys ------------------------------------------

SCALING = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
)  # fmt: skip
"""Names of the numbers in `ModelConfig.rotary_scaling`."""


def _llama_write(config: ModelConfig) -> HFConfig:
    if config.bias_at("qkv") != config.bias_at("projection"):
        raise UserError(
            "LlamaForCausalLM cannot express this model: --model.qkv-bias is"
            f" {config.bias_at('qkv')}, expected the same as --model.projection-bias,"
            f" {config.bias_at('projection')}"
        )
    numbers = config.rotary_scaling
    scaling = None if numbers is None else {"rope_type": "llama3"} | dict(zip(SCALING, numbers))
    return {"hidden_act": "silu", "rope_theta": config.rotary_base, "rope_scaling": scaling}


def _llama_read(fields: ConfigReader) -> HFConfig:
    fields.require("hidden_act", "silu")
    fields.require("pretraining_tp", 1)
    # transformers 5 writes one field, earlier ones two
    base = fields.get("rope_theta", float, 10_000.0)
    scaling, parameters = fields.inner("rope_scaling"), fields.inner("rope_parameters")
    rope = parameters if fields.get("rope_parameters", dict, {}) else scaling
    kinds = "default", "llama3"
    old, new = (rope.require(name, *kinds) for name in ("type", "rope_type"))
    kind = new if old == "default" else old  # one of the two names is missing
    rope.require("partial_rotary_factor", 1.0)
    scaled = [rope.get(name, float) for name in SCALING[:3]] if kind == "llama3" else None
    return {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rotary",
        "rotary_base": rope.get("rope_theta", float, base),
        "rotary_scaling": scaled and (*scaled, rope.get(SCALING[3], int)),
        "projection_bias": fields.get("attention_bias", bool, False),
    }


PARTS = {
    "wte": ("embed_tokens",), "ln_f": ("norm",),
    "ln_1": ("input_layernorm",), "ln_2": ("post_attention_layernorm",),
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q_norm": ("self_attn.q_norm",), "attn.k_norm": ("self_attn.k_norm",),
    "attn.c_proj": ("self_attn.o_proj",),
    "mlp.c_fc": ("mlp.gate_proj", "mlp.up_proj"), "mlp.c_proj": ("mlp.down_proj",),
}  # fmt: skip
"""Our name of a part of the model -> theirs."""


def _llama_tensor(name: str, shape: torch.Size, config: ModelConfig) -> TensorMap:
    found = re.fullmatch(r"(?:h\.(\d+)\.)?(.+)\.(\w+)", name)
    assert found is not None
    layer, part, kind = found.groups()
    place = "model" if layer is None else f"model.layers.{layer}"
    H, K, D, F = config.num_heads, config.kv_heads, config.head_dim, config.ffn_width
    rows = {"attn.c_attn": (H * D, K * D, K * D), "mlp.c_fc": (F, F)}.get(part, ())
    return TensorMap(tuple(f"{place}.{x}.{kind}" for x in PARTS[part]), shape, rows)


_LLAMA_REQUIRED = NONE_HAS | {
    "norm": ("rmsnorm",), "position": ("rotary",), "activation": ("swiglu",),
}  # fmt: skip
LLAMA = Architecture(
    class_name="LlamaForCausalLM",
    model_type="llama",
    required=_LLAMA_REQUIRED | {"qk_norm": (False,)},
    table={
        "num_hidden_layers": ("num_layers", int),
        "num_attention_heads": ("num_heads", int),
        "num_key_value_heads": ("num_kv_heads", int, None),
        "head_dim": ("head_size", int, None),
        "hidden_size": ("dim", int),
        "intermediate_size": ("ffn_dim", int),
        "max_position_embeddings": ("context", int),
        "rms_norm_eps": ("norm_eps", float, 1e-6),
        "attention_bias": ("qkv_bias", bool, False),
        "mlp_bias": ("bias", bool, False),
        "attention_dropout": ("attention_dropout", float, 0.0),
    },
    read=_llama_read,
    write=_llama_write,
    tensor=_llama_tensor,
    prefix="model.",
)


def _qwen3_write(config: ModelConfig) -> HFConfig:
    # weights that are 1 there because they do not exist here
    extra = {"qk_norm_weight": config.qk_norm_weight}
    return _llama_write(config) | {"use_sliding_window": False, "fastgpt": extra}


def _qwen3_read(fields: ConfigReader) -> HFConfig:
    fields.require("use_sliding_window", False)
    for kind in fields.get("layer_types", list, []):
        if kind != "full_attention":
            raise UserError(f"config.json: layer_types has {kind}: expected full_attention alone")
    weighted = fields.inner("fastgpt").get("qk_norm_weight", bool, True)
    return _llama_read(fields) | {
        "qk_norm": True,
        "qk_norm_weight": weighted,
        "bias": fields.require("mlp_bias", False),  # earlier exports have it
    }


QWEN3 = replace(
    LLAMA,
    class_name="Qwen3ForCausalLM",
    model_type="qwen3",
    required=_LLAMA_REQUIRED | {"qk_norm": (True,), "bias": (False,)},
    table={name: how for name, how in LLAMA.table.items() if name != "mlp_bias"}
    | {"head_dim": ("head_size", int, 128)},  # transformers' default
    read=_qwen3_read,
    write=_qwen3_write,
    defaults={"qk_norm_weight": True},
)

# --- choice ---------------------------------------------------------------------------------------

ARCHITECTURES = {architecture.model_type: architecture for architecture in (GPT2, LLAMA, QWEN3)}


def architecture_for(config: ModelConfig) -> Architecture:
    """Returns the architecture that comes closest to a model, by its positions and QK-norm.

    Raises:
        UserError: it cannot express the model; the message names all settings that are the cause.
    """
    architecture = GPT2 if config.position != "rotary" else QWEN3 if config.qk_norm else LLAMA
    if config.kv_heads == config.num_heads:
        config = replace(config, num_kv_heads=None)
    if config.head_dim * config.num_heads == config.dim:
        config = replace(config, head_size=None)
    wrong = [
        f"{flag(f'model.{name}')} is {getattr(config, name)}, expected {either(allowed)}"
        for name, allowed in architecture.required.items()
        if getattr(config, name) not in allowed
    ]
    if wrong:
        raise UserError(f"{architecture.class_name} cannot express this model: {'; '.join(wrong)}")
    return architecture


def settings_for(config: ModelConfig) -> HFConfig:
    """Returns the config.json of a model.

    Raises:
        UserError: no architecture can express it.
    """
    architecture = architecture_for(config)
    plain = replace(  # without the defaults that depend on other settings
        config,
        num_kv_heads=config.kv_heads,
        head_size=config.head_dim,
        ffn_dim=config.ffn_width,
        norm_eps=config.epsilon,
        qkv_bias=config.bias_at("qkv"),
        embedding_dropout=config.dropout_at("embedding"),
        attention_dropout=config.dropout_at("attention"),
        residual_dropout=config.dropout_at("residual"),
    )
    found = {theirs: getattr(plain, ours) for theirs, (ours, *_) in architecture.table.items()}
    return found | architecture.write(config) | {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
    }  # fmt: skip


def config_from(settings: HFConfig) -> tuple[ModelConfig, Architecture, list[str]]:
    """Translates a config.json: (our settings, the architecture, fields that nothing here knows).

    Raises:
        UserError: the architecture is unknown, or it has settings that our model cannot express.
    """
    kind = settings.get("model_type")
    architecture = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if architecture is None:
        raise UserError(
            f"config.json describes {shown(kind)}: expected {either(tuple(ARCHITECTURES))}"
        )
    fields = ConfigReader(settings)
    ours = {name: fields.get(theirs, *how) for theirs, (name, *how) in architecture.table.items()}
    ours |= {
        "vocab_size": fields.get("vocab_size", int),
        "tied": fields.get("tie_word_embeddings", bool, architecture is GPT2),
    } | architecture.read(fields)  # fmt: skip
    try:
        return ModelConfig(**ours), architecture, fields.unknown()
    except UserError as error:
        raise UserError(f"config.json does not go together: {error}") from error


# --- tensors --------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Returns the shapes of a model's weights, without padding of the vocabulary."""
    try:
        with torch.device("meta"):
            model = build_model(config, tables.select(OpsConfig(), "cpu"))
    except RuntimeError as error:
        raise UserError(f"the model's sizes are too large: {reason(error)}") from error
    return {name: x.shape for name, x in model.state_dict().items()}


def tensor_maps(architecture: Architecture | None, config: ModelConfig) -> dict[str, TensorMap]:
    """Returns where each tensor of a model is, by our names; without one they are theirs.

    Tensors that our model lacks have a constant.
    """
    present, maps = shapes(config), {}
    filled = present if architecture is None else shapes(replace(config, **architecture.defaults))
    for name, shape in filled.items():
        if architecture is None or name == "lm_head.weight":
            maps[name] = TensorMap((name,), shape)
        else:
            maps[name] = architecture.tensor(name, shape, config)
        if name not in present:
            maps[name] = replace(maps[name], constant=0.0 if name.endswith(".bias") else 1.0)
    return maps
