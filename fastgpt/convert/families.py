"""Models of transformers that a GPT can be: GPT-2, Llama, and Qwen3, a Llama with QK-norm.

A family has a function that translates its config.json to our settings (`gpt2_settings`), one back
(`gpt2_fields`), and one that names its tensors (`gpt2_tensors`). What does not come back unchanged
when it is translated there and back, the other side cannot express: it is refused by name. Tensors
keep their bits: they are renamed, transposed, cut into query, key and value, or put together.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastgpt.checkpoint.tensors import Weights
from fastgpt.config.checks import flag
from fastgpt.config.config import OpsConfig
from fastgpt.config.model import BIAS_PLACES, ModelConfig, bias_of
from fastgpt.errors import UserError, reason, shown
from fastgpt.model.build import build_model
from fastgpt.ops import tables

Fields = dict[str, Any]
"""Fields of a config.json of Hugging Face, or settings of `ModelConfig`, by name."""

CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Field `model_type` -> class in transformers."""
IGNORED: tuple[str, ...] = (
    "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "gradient_checkpointing", "id2label", "initializer_range",
    "is_encoder_decoder", "label2id", "max_window_layers", "model_type", "n_ctx",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type",
    "reorder_and_upcast_attn", "return_dict", "sliding_window", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip
"""Fields that say nothing of what the model computes, or only together with one that is checked."""
READ = ("activation_function", "rope_parameters", "rope_scaling")
"""Fields that have several forms, and are checked where they are read."""
DROPOUT = {
    "embd_pdrop": ("embedding",), "attn_pdrop": ("attention",),
    "resid_pdrop": ("residual", "feed_forward"), "attention_dropout": ("attention",),
}  # fmt: skip
"""Field with a probability -> our places with that dropout."""
UNCOMPARED = ("vocab_multiple", "eot_id", "init", "rotary_base", "dropout", "dropout_places")
"""Our settings that change no weight and no output, or that every family with them has."""

# --- GPT-2 ----------------------------------------------------------------------------------------

GPT2_NAMES = {
    "n_layer": "num_layers", "n_head": "num_heads", "n_embd": "dim", "n_inner": "ffn_dim",
    "n_positions": "context", "layer_norm_epsilon": "norm_eps",
}  # fmt: skip
"""Field of theirs -> the setting of ours that has the same value."""
GPT2_DEFAULTS: Fields = {
    "n_inner": None, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
    "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "tie_word_embeddings": True,
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False, "fastgpt": {},
}  # fmt: skip
"""Values of fields that a file lacks, as in transformers."""
ACTIVATIONS: dict[str, Any] = {
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_erf",
    "relu": "relu", "relu2": "relu_squared",
}  # fmt: skip
"""Activation in transformers -> ours."""


def gpt2_settings(theirs: Fields) -> Fields:
    activation, own = theirs["activation_function"], _object(theirs, "fastgpt")
    if activation not in (*ACTIVATIONS,):
        expected = " or ".join(ACTIVATIONS)
        raise UserError(f"activation_function is {shown(activation)}: expected {expected}")
    mlp = own.get("bias", True)
    qkv, projection = own.get("qkv_bias", mlp), own.get("projection_bias", mlp)
    return {
        "activation": ACTIVATIONS[activation],
        "bias": bias_of(qkv=qkv, projection=projection, mlp=mlp),
    }


def gpt2_fields(config: ModelConfig) -> Fields:
    known = (name for name, ours in ACTIVATIONS.items() if ours == config.activation)
    biases = {"bias": "mlp", "qkv_bias": "qkv", "projection_bias": "projection"}
    return {
        "n_ctx": config.context,  # read by llama.cpp
        "activation_function": next(known, "gelu_new"),
        # biases that are zero there because they do not exist here
        "fastgpt": {name: config.bias_at(place) for name, place in biases.items()},
    }


def gpt2_tensors(name: str) -> list[str]:
    return [f"transformer.{name}"]


# --- Llama and Qwen3 ------------------------------------------------------------------------------

LLAMA_NAMES = {
    "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads", "head_dim": "head_size", "hidden_size": "dim",
    "intermediate_size": "ffn_dim", "max_position_embeddings": "context",
    "rms_norm_eps": "norm_eps",
}  # fmt: skip
LLAMA_DEFAULTS: Fields = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_theta": 10_000.0, "rope_scaling": {}, "rope_parameters": {}, "attention_bias": False,
    "mlp_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False, "pretraining_tp": 1,
}  # fmt: skip
QWEN3_DEFAULTS = LLAMA_DEFAULTS | {"head_dim": 128, "use_sliding_window": False, "fastgpt": {}}
SCALING = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
)  # fmt: skip
"""Names of the numbers in `ModelConfig.rotary_scaling`."""


def llama_settings(theirs: Fields) -> Fields:
    # transformers 5 writes one object, earlier ones a number and an object
    new, old = _object(theirs, "rope_parameters"), _object(theirs, "rope_scaling")
    rope = new or old
    kinds = [rope[name] for name in ("rope_type", "type") if name in rope] or ["default"]
    for kind in kinds:
        if kind not in ("default", "llama3") or kind != kinds[0]:
            raise UserError(f"rope_type is {shown(kind)}: expected default or llama3, and one type")
    if rope.get("partial_rotary_factor", 1) != 1:
        found = shown(rope["partial_rotary_factor"])
        raise UserError(f"partial_rotary_factor is {found}: expected 1")
    scaling = [_number(rope, name) for name in SCALING] if "llama3" in kinds else []
    attention, own = theirs["attention_bias"], _object(theirs, "fastgpt")
    weighted = own.get("qk_norm_weight", True)
    return {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rotary",
        "rotary_base": _float(rope.get("rope_theta", theirs["rope_theta"])),
        "rotary_scaling": (*map(_float, scaling[:3]), scaling[3]) if scaling else None,
        "bias": bias_of(qkv=attention, projection=attention, mlp=theirs["mlp_bias"]),
        "qk_norm": ("weighted" if weighted else True) if theirs["model_type"] == "qwen3" else False,
    }


def llama_fields(config: ModelConfig) -> Fields:
    numbers = config.rotary_scaling
    found = {
        "hidden_act": "silu",
        "rope_theta": config.rotary_base,
        "rope_scaling": numbers and {"rope_type": "llama3"} | dict(zip(SCALING, numbers)),
        "attention_bias": config.bias_at("qkv"),
    }
    if not config.qk_norm:
        return found | {"mlp_bias": config.bias_at("mlp")}
    # weights that are 1 there because they do not exist here
    own = {"qk_norm_weight": config.qk_norm == "weighted"}
    return found | {"use_sliding_window": False, "fastgpt": own}


def llama_tensors(name: str) -> list[str]:
    part, _, kind = name.rpartition(".")
    place = "model"
    if part.startswith("h."):
        _, layer, part = part.split(".", 2)
        place = f"model.layers.{layer}"
    theirs = {
        "wte": ["embed_tokens"],
        "ln_1": ["input_layernorm"],
        "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attn.q_norm": ["self_attn.q_norm"],
        "attn.k_norm": ["self_attn.k_norm"],
        "attn.c_proj": ["self_attn.o_proj"],
        "ln_2": ["post_attention_layernorm"],
        "mlp.c_fc": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.c_proj": ["mlp.down_proj"],
        "ln_f": ["norm"],
    }
    return [f"{place}.{x}.{kind}" for x in theirs[part]]


# --- settings -------------------------------------------------------------------------------------

DEFAULTS = {"gpt2": GPT2_DEFAULTS, "llama": LLAMA_DEFAULTS, "qwen3": QWEN3_DEFAULTS}


def model_type(config: ModelConfig) -> str:
    """Returns the family that comes closest to a model, by its positions and QK-norm."""
    return "gpt2" if config.position != "rotary" else "qwen3" if config.qk_norm else "llama"


def config_from(found: Fields) -> tuple[ModelConfig, list[str]]:
    """Translates a config.json: (our settings, fields of it that nothing here knows).

    Raises:
        UserError: the family is unknown, or it has settings that our model cannot express.
    """
    kind = found.get("model_type")
    if kind not in (*CLASSES,):
        raise UserError(f"config.json describes {shown(kind)}: expected {' or '.join(CLASSES)}")
    given = {name: x for name, x in found.items() if x is not None}
    try:
        config = ModelConfig(**_settings(given))
    except KeyError as error:
        raise UserError(f"config.json has no {error.args[0]}") from error
    except (OverflowError, UserError) as error:
        said = str(error)
        for theirs, ours in (GPT2_NAMES if kind == "gpt2" else LLAMA_NAMES).items():
            said = said.replace(flag(f"model.{ours}"), theirs)
        raise UserError(f"config.json: {said}") from error
    layers = {"layer_types": ["full_attention"] * config.num_layers}
    back, unknown = DEFAULTS[kind] | layers | _fields(config), []
    for name in sorted(given.keys() - IGNORED):
        x, expected = given[name], back.get(name)
        same = x.items() <= expected.items() if name == "fastgpt" and expected else x == expected
        if name not in back or (name in DROPOUT and not same):
            unknown.append(name)
        elif name not in READ and not same:
            raise UserError(f"config.json: {name} is {shown(x)}: expected {expected}")
    return config, unknown


def settings_for(config: ModelConfig) -> Fields:
    """Returns the config.json of a model.

    Raises:
        UserError: no family can express it; the message names all settings that are the cause.
    """
    found, ours = _fields(config), _explicit(config)
    back = asdict(ModelConfig()) | {
        "num_kv_heads": config.num_heads,
        "head_size": config.dim // config.num_heads,
        **_settings({name: x for name, x in found.items() if x is not None}),
    }
    wrong = [
        f"{flag(f'model.{name}')} is {ours[name]}, expected {x}"
        for name, x in back.items()
        if name not in UNCOMPARED and x != ours[name]
    ]
    if wrong:
        name = CLASSES[model_type(config)]
        raise UserError(f"{name} cannot express this model: {'; '.join(wrong)}")
    return found


def _settings(given: Fields) -> Fields:
    """Translates the fields of a config.json that are not null."""
    theirs = DEFAULTS[given["model_type"]] | given
    gpt2 = theirs["model_type"] == "gpt2"
    names, translate = (GPT2_NAMES, gpt2_settings) if gpt2 else (LLAMA_NAMES, llama_settings)
    found = {ours: theirs[name] for name, ours in names.items()} | translate(theirs)
    found |= {"vocab_size": theirs["vocab_size"], "tied": theirs["tie_word_embeddings"]}
    for name in DROPOUT:
        if name in DEFAULTS[theirs["model_type"]] and not 0 <= _number(theirs, name) < 1:
            raise UserError(f"{name} is {shown(theirs[name])}: expected a probability")
    used = [name for name in DROPOUT if name in DEFAULTS[theirs["model_type"]] and theirs[name]]
    if used and all(theirs[name] == theirs[used[0]] for name in used):  # ours has one probability
        found["dropout"] = theirs[used[0]]
        found["dropout_places"] = tuple(place for name in used for place in DROPOUT[name])
    return found | {"norm_eps": _float(found["norm_eps"])}


def _fields(config: ModelConfig) -> Fields:
    """Translates settings to a config.json of the closest family."""
    kind, ours = model_type(config), _explicit(config)
    gpt2 = kind == "gpt2"
    names, translate = (GPT2_NAMES, gpt2_fields) if gpt2 else (LLAMA_NAMES, llama_fields)
    dropouts = {name: config.dropout_at(places[0]) for name, places in DROPOUT.items()}
    return {
        **{name: ours[x] for name, x in names.items()},
        **{name: x for name, x in dropouts.items() if name in DEFAULTS[kind]},
        **translate(config),
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
    }


def _explicit(config: ModelConfig) -> Fields:
    """Returns settings by name, without the defaults that depend on other settings."""
    return asdict(config) | {
        "num_kv_heads": config.kv_heads,
        "head_size": config.head_dim,
        "ffn_dim": config.ffn_width,
        "norm_eps": config.epsilon,
        "bias": bias_of(**{place: config.bias_at(place) for place in BIAS_PLACES}),
    }


def _float(x: Any) -> Any:
    """Returns a number as a float; files may write 10000 for 10000.0."""
    return float(x) if type(x) is int else x


def _number(fields: Fields, name: str) -> int | float:
    found: Any = fields.get(name)
    if type(found) not in (int, float):
        raise UserError(f"{name} is {shown(found)}: expected a number")
    return found


def _object(fields: Fields, name: str) -> Fields:
    """Returns the fields of an object that are not null; it may be missing."""
    found = fields.get(name, {})
    if not isinstance(found, dict):
        raise UserError(f"{name} is {shown(found)}: expected an object")
    return {inner: x for inner, x in found.items() if x is not None}


# --- tensors --------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def tensors_of(config: ModelConfig) -> dict[str, Tensor]:
    """Returns a model's weights on the device `meta`, without padding of the vocabulary."""
    try:
        with torch.device("meta"):
            return dict(build_model(config, tables.select(OpsConfig(), "cpu")).state_dict())
    except RuntimeError as error:
        raise UserError(f"the model's sizes are too large: {reason(error)}") from error


def names_of(name: str, config: ModelConfig) -> list[str]:
    """Returns the names of the tensors there that hold the rows of ours, one after the other."""
    if name == "lm_head.weight":
        return [name]
    return (gpt2_tensors if model_type(config) == "gpt2" else llama_tensors)(name)


def is_transposed(name: str, config: ModelConfig) -> bool:
    """Returns True for the matrices of GPT-2's `Conv1D`, which have the shape (inputs, outputs)."""
    return model_type(config) == "gpt2" and ".c_" in name and name.endswith(".weight")


def to_theirs(weights: Weights, config: ModelConfig) -> Weights:
    """Returns the tensors of our model by their names, with constants where ours has none."""
    always = {"gpt2": {"bias": True}, "llama": {}, "qwen3": {"qk_norm": "weighted"}}
    whole = tensors_of(replace(config, **always[model_type(config)]))
    dtype = weights.plan["wte.weight"].dtype
    H, K, D, F = config.num_heads, config.kv_heads, config.head_dim, config.ffn_width

    def parts(name: str, source: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if name in weights.plan:
            x = source[name]
        else:
            constant = 0.0 if name.endswith(".bias") else 1.0
            x = torch.full(whole[name].shape, constant, dtype=dtype)
        if is_transposed(name, config):
            x = x.T.contiguous()
        names, rows = names_of(name, config), {1: [len(x)], 2: [F, F], 3: [H * D, K * D, K * D]}
        return dict(zip(names, x.split(rows[len(names)])))

    plans = {name: parts(name, weights.plan) for name in whole}
    where = {theirs: name for name, plan in plans.items() for theirs in plan}
    plan = {theirs: plans[name][theirs] for theirs, name in where.items()}
    return Weights(plan, lambda theirs: parts(where[theirs], weights)[theirs])


def to_ours(weights: Weights, config: ModelConfig) -> Weights:
    """Returns the tensors of one of their models by our names."""

    def joined(name: str, source: Mapping[str, Tensor]) -> Tensor:
        parts = [source[theirs] for theirs in names_of(name, config)]
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        return x.T.contiguous() if is_transposed(name, config) else x

    plan = {name: joined(name, weights.plan) for name in tensors_of(config)}
    return Weights(plan, lambda name: joined(name, weights))
