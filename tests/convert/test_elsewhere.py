"""Folders for Hugging Face as llama.cpp and vLLM read them."""

import os
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from fastgpt.convert.source import read
from fastgpt.data.tokenizers import make_tokenizer
from tests.convert.models import OURS, converted, files, saved_run, weights
from tests.data.sets import gpt2_files, tokenizer_of
from tests.processes import python

GGUF = {
    "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output",
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm",
    "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
PARTS = {"attn.c_attn": ("attn_q", "attn_k", "attn_v"), "mlp.c_fc": ("ffn_gate", "ffn_up")}


def in_llama_cpp(ours, options):
    """Names tensors as llama.cpp does; of a Llama it turns neighbours, not halves, of q and k."""
    heads, kv = 4, options.get("num_kv_heads", 4)
    D, F = options.get("head_size", 8), 128
    rows = {"attn.c_attn": (heads * D, kv * D, kv * D), "mlp.c_fc": (F, F)}
    found = {}
    for name, x in ours.items():
        layer, part, kind = re.fullmatch(r"(?:h\.(\d+)\.)?(.*)\.(\w+)", name).groups()
        prefix = "" if layer is None else f"blk.{layer}."
        split = "position" in options and part in PARTS
        names = PARTS[part] if split else (GGUF[part],)
        for theirs, piece in zip(names, x.split(rows[part]) if split else (x,)):
            if theirs in ("attn_q", "attn_k") and not options.get("qk_norm"):
                piece = piece.unflatten(0, (-1, 2, D // 2)).transpose(1, 2).flatten(0, 2)
            found[f"{prefix}{theirs}.{kind}"] = piece
    return found


@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names no checkout")
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_llama_cpp_converts_our_folders(name, tmp_path, monkeypatch):
    gpt2_files()
    if name != "gpt2":
        pytest.importorskip("sentencepiece", reason="llama.cpp's converter needs sentencepiece")
    options, checkout = OURS[name], Path(os.environ["LLAMA_CPP"])
    tokenizer = make_tokenizer("gpt2", None)
    run = saved_run(tmp_path / "run", tokenizer, vocab_size=tokenizer.vocab_size, **options)
    folder, file = converted(run, tmp_path / "hf", "hf", verify=False), tmp_path / "x.gguf"
    flags = (folder, "--outfile", file, "--outtype", "f32")
    done = python(checkout / "convert_hf_to_gguf.py", *flags)
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(checkout / "gguf-py")
    from gguf import GGUFReader

    made = GGUFReader(file)
    theirs = {x.name: torch.from_numpy(x.data.copy()) for x in made.tensors}
    ours = in_llama_cpp(weights(run), options)
    assert theirs.keys() == ours.keys()
    for tensor, x in ours.items():
        assert torch.equal(theirs[tensor], x), tensor
    assert made.fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert made.fields[f"{name}.context_length"].contents() == 40


@pytest.mark.parametrize(
    ("options", "tokenizer", "said"),
    [
        ({}, "bytes", ["llama.cpp's converter does not know the tokenizer (bytes)"]),
        ({}, "bpe", ["llama.cpp's converter does not know the tokenizer (bpe)"]),
        (OURS["gpt2-untied"], None, ["gelu_tanh in a GPT-2", "4 x 32 in a GPT-2"]),
        (OURS["qwen3"] | {"qkv_bias": True, "projection_bias": True}, None, ["vLLM's Qwen3"]),
        (OURS["llama"], None, []),
    ],
)
def test_what_others_cannot_take_is_named(options, tokenizer, said, tmp_path, capsys):
    size = 100 if tokenizer is None else tokenizer_of(tokenizer).vocab_size
    made = None if tokenizer is None else tokenizer_of(tokenizer)
    run = saved_run(tmp_path / "run", made, vocab_size=size, **options)
    converted(run, tmp_path / "hf", "hf", verify=False)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(said)
    assert all(text in line for text, line in zip(said, lines))


# vLLM 0.33.0, vllm/model_executor/models/{gpt2,llama,qwen2,qwen3}.py: names that its loaders take,
# with a weight and, where the second value says so, a bias
BLOCK = {
    "gpt2": {
        "ln_1": True, "ln_2": True, "attn.c_attn": True, "attn.c_proj": True, "mlp.c_fc": True,
        "mlp.c_proj": True,
    },
    "llama": {
        "input_layernorm": False, "post_attention_layernorm": False,
        **dict.fromkeys((f"self_attn.{x}_proj" for x in "qkvo"), "attention_bias"),
        **dict.fromkeys((f"mlp.{x}_proj" for x in ("gate", "up", "down")), "mlp_bias"),
    },
}  # fmt: skip
BLOCK["qwen3"] = BLOCK["llama"] | {"self_attn.q_norm": False, "self_attn.k_norm": False}
AROUND = {
    "gpt2": ("transformer.", "h", {"wte": False, "wpe": False, "ln_f": True}),
    "llama": ("model.", "layers", {"embed_tokens": False, "norm": False}),
}
READ = {  # fields of the settings -> ours
    "vocab_size": "vocab_size", "num_hidden_layers": "num_layers", "hidden_size": "dim",
    "num_attention_heads": "num_heads", "max_position_embeddings": "context",
    "tie_word_embeddings": "tied",
}  # fmt: skip
ROTARY = {
    "num_key_value_heads": "kv_heads", "head_dim": "head_dim", "intermediate_size": "ffn_width",
    "rms_norm_eps": "epsilon",
}  # fmt: skip
MUST_BE = {
    "gpt2": {
        "add_cross_attention": False, "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
    },
    "llama": {"hidden_act": "silu", "qkv_bias": None, "bias": None, "logit_scale": None},
    "qwen3": {"hidden_act": "silu", "dual_chunk_attention_config": None, "bias": None},
}  # fmt: skip
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "silu")


@pytest.mark.parametrize("scaling", [None, (8.0, 1.0, 4.0, 20)], ids=["plain", "scaled"])
@pytest.mark.parametrize("options", OURS.values(), ids=OURS)
def test_vllm_finds_its_names_and_settings(options, scaling, tmp_path):
    options = options | ({"rotary_scaling": scaling} if "position" in options else {})
    run = saved_run(tmp_path / "run", **options)
    folder = converted(run, tmp_path / "hf", "hf", verify=False)
    config, ours = AutoConfig.from_pretrained(folder), read(str(run)).config
    kind = config.model_type
    before, layers, outer = AROUND.get(kind, AROUND["llama"])
    names = {f"{before}{name}": bias for name, bias in outer.items()}
    for i in range(2):
        names |= {f"{before}{layers}.{i}.{name}": bias for name, bias in BLOCK[kind].items()}
    expected = {f"{name}.weight" for name in names} | {
        f"{name}.bias"
        for name, bias in names.items()
        if (getattr(config, bias, False) if isinstance(bias, str) else bias)
    }
    assert files(folder).keys() == expected | ({"lm_head.weight"} if not ours.tied else set())
    for theirs, name in (READ | (ROTARY if kind != "gpt2" else {})).items():
        assert getattr(config, theirs) == getattr(ours, name), theirs
    for name, value in MUST_BE[kind].items():
        assert getattr(config, name, None) == value, name
    if kind == "gpt2":
        assert config.activation_function in ACTIVATIONS
        assert (config.n_inner, config.layer_norm_epsilon) == (ours.ffn_width, ours.epsilon)
    else:
        rope = config.rope_parameters
        assert rope["rope_theta"] == ours.rotary_base
        assert scaling is None or tuple(rope[name] for name in SCALING) == scaling
