"""GGUF files: what they hold, and that llama.cpp continues a text as we do."""

import inspect
import sys

import gguf
import numpy as np
import pytest
import torch

import fastgpt
from fastgpt.convert.__main__ import ConvertConfig
from fastgpt.convert.gguf import KINDS, write_gguf
from fastgpt.convert.gguf_reader import CUTS, _tokenizer
from fastgpt.convert.source import read
from fastgpt.convert.target import write_run, write_tokenizer
from fastgpt.data.tokenizers import LETTERS, Tokenizer
from fastgpt.errors import UserError
from fastgpt.sampling.chat import encode, template_of
from fastgpt.sampling.templating import CHATML
from tests.convert import models
from tests.convert.models import LLAMA, TEXTS, converted, files, saved, saved_run, theirs
from tests.data.sets import LEARNT, texts, tokenizer_of

MODELS = {
    "gpt2": {"tied": False}, "llama": LLAMA | {"num_kv_heads": 2, "head_size": 16},
    "qwen3": models.OURS["qwen3-without-weights"],
}  # fmt: skip
NAMES = {
    "gpt2": {
        "position_embd.weight": "wpe.weight", "output.weight": "lm_head.weight",
        "blk.1.attn_qkv.weight": "h.1.attn.c_attn.weight", "output_norm.bias": "ln_f.bias",
    },
    "llama": {
        "blk.1.attn_q.weight": "1.self_attn.q_proj.weight", "output_norm.weight": "l.norm.weight",
        "blk.1.attn_k.weight": "1.self_attn.k_proj.weight",
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "q8_0", None])
@pytest.mark.parametrize("family", NAMES)
def test_a_file_holds_the_tensors_of_hugging_faces_folder(family, dtype, tmp_path):
    run = saved_run(tmp_path / "a", tokenizer_of("bpe"), vocab_size=510, **MODELS[family])
    expected = files(converted(run, tmp_path / "hf", "hf"))
    reader = gguf.GGUFReader(converted(run, tmp_path / "a.gguf", "gguf", dtype=dtype))
    found = {x.name: gguf.dequantize(x.data, x.tensor_type) for x in reader.tensors}
    assert len(found) == len(expected)
    rounded = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(dtype, torch.float16)
    for name, same in NAMES[family].items():
        [x] = (x for other, x in expected.items() if other.endswith(same))
        x = x.T if ".c_" in same else x
        if ".attn_" in name and family == "llama":  # rows 0, 8, 1, 9, ... of each head
            x = torch.stack([x[16 * (i // 16) + i % 2 * 8 + i % 16 // 2] for i in range(len(x))])
        values, exact = torch.from_numpy(found[name].copy()), x.dim() == 1 or "position" in name
        if dtype == "q8_0" and not exact:
            step = x.reshape(-1, 32).abs().amax(1, keepdim=True) / 127
            assert ((values - x).reshape(-1, 32).abs() <= 0.56 * step).all(), name
        else:
            assert torch.equal(values, x if exact else x.to(rounded).float()), name


def test_settings_vocabulary_and_chat_template_are_in_the_file(tmp_path):
    folder = saved(theirs("llama", vocab_size=510, eos_token_id=[7, 9], bos_token_id=3), tmp_path)
    write_tokenizer(tokenizer_of("bpe"), folder, context=64)
    (folder / "chat_template.jinja").write_text("{{ messages }}\u00e9", encoding="utf-8")
    reader = gguf.GGUFReader(converted(folder, tmp_path / "a.gguf", "gguf"))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    sizes = ("block_count", "context_length", "feed_forward_length", "attention.head_count_kv")
    assert [fields[f"llama.{name}"] for name in sizes] == [2, 40, 50, 2]
    assert fields["tokenizer.ggml.tokens"][500:] == [f"[PAD{i}]" for i in range(500, 510)]
    assert fields["tokenizer.ggml.token_type"][:2] == [3, 1]  # control, normal
    names = ("chat_template", "ggml.bos_token_id", "ggml.eos_token_id")
    assert [fields[f"tokenizer.{name}"] for name in names] == ["{{ messages }}\u00e9", 3, 7]
    for ids in ({"eos_token_id": []}, {"eos_token_id": -1}, {"bos_token_id": 510}):
        models.change_config(folder, **{"eos_token_id": 7} | ids)
        with pytest.raises(UserError, match="expected an id below 510"):
            converted(folder, tmp_path / "b.gguf", "gguf")


@pytest.mark.parametrize(("family", "dtype"), [
    ("llama", "fp32"), ("qwen3", "bf16"), ("llama", "fp16"), ("qwen3", "q8_0"), ("llama", "q4_0"),
    ("llama", "q4_1"),
])  # fmt: skip
def test_a_file_is_read_as_the_folder_that_it_was_made_from(family, dtype, tmp_path, monkeypatch):
    options = {
        "hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "vocab_size": 520,
        "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    } | ({"attention_bias": True, "mlp_bias": True} if family == "llama" else {})  # fmt: skip
    folder = saved(theirs(family, **options), tmp_path / "there")
    write_tokenizer(tokenizer_of("bpe"), folder, context=64)
    template = CHATML.replace("<|im_end|>", "{{ eos_token }}")
    (folder / "chat_template.jinja").write_text(template)
    asked = KINDS.get(dtype, dtype.upper())
    monkeypatch.setitem(KINDS, dtype, asked)
    write_gguf(read(str(folder)), tmp_path / "a.gguf", dtype)
    there, here = read(str(folder)), read(str(tmp_path / "a.gguf"))
    assert here.config == there.config
    form = gguf.GGMLQuantizationType[asked]
    for name, x in there.weights.items():
        if x.dim() > 1:
            x = torch.from_numpy(gguf.dequantize(gguf.quantize(x.numpy(), form), form))
        assert torch.equal(here.weights[name], x), name
    ids = []
    for found in (there, here):
        tokenizer = found.known_tokenizer()
        pieces = template_of(found.hf_files).pieces([{"role": "user", "content": "hi"}])
        ids.append((*encode(tokenizer, pieces)[0].tolist(), *tokenizer.end_ids()))
        ids[-1] += tuple(tokenizer.encode("".join(TEXTS)).tolist())
    assert ids[0] == ids[1]


def test_words_are_cut_as_the_models_own_tokenizers_do():
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert CUTS["qwen2"] == PRETOKENIZE_REGEX
    pattern = inspect.signature(TikTokenConverter).parameters["pattern"].default
    assert CUTS["llama-bpe"] == pattern
    letters = [*LETTERS.values(), "ab", "<s>", "<unused>"]
    own = {
        "model": "gpt2", "tokens": letters, "token_type": [1] * 257 + [3, 5],
        "merges": ["a b", f"{LETTERS[0]} {LETTERS[0]}"], "bos_token_id": 257,
    }  # fmt: skip
    for cut in CUTS:
        said = {f"tokenizer.ggml.{name}": x for name, x in (own | {"pre": cut}).items()}
        tokenizer = Tokenizer(_tokenizer(said))
        assert tokenizer.begin_ids == ((257,) if cut == "llama-bpe" else ())
        assert tokenizer.encode_marked("<s>ab").tolist() == [257, 256]
        assert tokenizer.vocab_size == 258


def test_other_files_and_a_missing_package_are_named(tmp_path, monkeypatch):
    def refused(file, said):
        with pytest.raises(UserError, match=said):
            fastgpt.load(file)

    run = saved_run(tmp_path / "run", tokenizer_of("bpe"), vocab_size=510)
    other = converted(run, tmp_path / "other.gguf", "gguf")
    refused(other, "general.architecture is 'gpt2'")
    other.write_bytes(other.read_bytes()[:5000])
    refused(other, r"other.gguf cannot be read as GGUF: \w+Error: ")
    run = saved_run(tmp_path / "b", tokenizer_of("bpe"), vocab_size=510, **MODELS["llama"])
    file = converted(run, tmp_path / "b.gguf", "gguf", dtype="q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(file, "needs the package gguf")


@pytest.mark.parametrize(("options", "tokenizer", "dtype", "said"), [
    ({"activation": "gelu_erf"}, "bpe", "fp16", "activation is gelu_erf"),
    ({}, "wordpiece", "fp16", "this model has wordpiece"),
    ({"dim": 40}, "bpe", "q8_0", "expected rows of a multiple of 32"),
])  # fmt: skip
def test_what_a_file_cannot_hold_is_refused(options, tokenizer, dtype, said, tmp_path):
    run = saved_run(tmp_path / "run", tokenizer_of(tokenizer), vocab_size=500, **options)
    with pytest.raises(UserError, match=said):
        converted(run, tmp_path / "a.gguf", "gguf", dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with pytest.raises(UserError, match="--dtype is q8_0"):
        ConvertConfig(source="a", target=tmp_path / "b", to="hf", dtype="q8_0")


@pytest.mark.parametrize("family", MODELS)
def test_llama_cpp_continues_a_text_as_we_do(family, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is built from source")
    tokenizer, sizes = tokenizer_of("bpe"), {"dim": 64, "context": 96, "vocab_size": 500}
    run = saved_run(tmp_path / "untrained", tokenizer, **MODELS[family] | sizes)
    model, text = fastgpt.load(run)[0], tokenizer.encode(" ".join(texts(12))).astype(np.int64)
    optimizer, text = torch.optim.Adam(model.parameters(), lr=3e-3), torch.from_numpy(text)
    for _ in range(120):
        starts = torch.randint(len(text) - 96, (4, 1)) + torch.arange(97)
        optimizer.zero_grad()
        model(text[starts[:, :-1]], text[starts[:, 1:]]).backward()
        optimizer.step()
    source = read(str(run))
    source.weights._read = model.state_dict().__getitem__
    write_run(source, tmp_path / "run")
    tokens = model.generate(text[None, :20], max_new_tokens=64, temperature=0)
    assert len({*tokens[0, 20:].tolist()}) > 10
    logits = model(tokens)[0].detach().numpy()
    file = converted(tmp_path / "run", tmp_path / "a.gguf", "gguf")
    how = {"n_ctx": 96, "n_threads": 1, "logits_all": True, "verbose": False}
    theirs = llama_cpp.Llama(str(file), **how)
    for each in (*TEXTS, *LEARNT):
        ids = theirs.tokenize(each.encode(), add_bos=False, special=False)
        assert ids == tokenizer.encode(each).tolist()
    made = zip(theirs.generate(text[:20].tolist(), temp=0.0), range(64))
    assert [x for x, _ in made] == tokens[0, 20:].tolist()
    theirs.reset()
    theirs.eval(tokens[0].tolist())
    assert np.abs(theirs.scores[: len(logits)] - logits).max() < 0.005 * np.abs(logits).max()
