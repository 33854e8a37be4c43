"""Folders for Hugging Face as llama.cpp reads them, and warnings of what others cannot take."""

import os
import re
from pathlib import Path

import pytest
import torch

from fastgpt.data.tokenizers import make_tokenizer
from tests.convert.models import OURS, converted, saved_run, weights
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
    kv, D = options.get("num_kv_heads", 4), options.get("head_size", 8)
    rows = {"attn.c_attn": (4 * D, kv * D, kv * D), "mlp.c_fc": (128, 128)}
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
        ({}, "bpe", ["llama.cpp's converter does not know the tokenizer (bpe)"]),
        (OURS["gpt2-untied"], None, ["gelu_tanh in a GPT-2", "4 x 32 in a GPT-2"]),
        (OURS["qwen3"] | {"qkv_bias": True, "projection_bias": True}, None, ["vLLM's Qwen3"]),
        (OURS["llama"], None, []),
    ],
)
def test_what_others_cannot_take_is_named(options, tokenizer, said, tmp_path, capsys):
    made = tokenizer and tokenizer_of(tokenizer)
    run = saved_run(tmp_path / "run", made, vocab_size=500, **options)
    converted(run, tmp_path / "hf", "hf", verify=False)
    lines = capsys.readouterr().err.splitlines()
    assert ("has no tokenizer: " in lines[0]) == (made is None)
    lines = lines[made is None :]
    assert len(lines) == len(said)
    assert all(text in line for text, line in zip(said, lines))
