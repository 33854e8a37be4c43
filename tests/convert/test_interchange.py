"""Models between fastgpt and Hugging Face: the same bits, the same logits, the same ids."""

import json
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

import fastgpt
from fastgpt.config.model import ModelConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.convert.families import config_from, settings_for
from fastgpt.convert.source import read
from fastgpt.convert.target import write_folder, write_tokenizer
from fastgpt.data.tokenizers import load_tokenizer, make_tokenizer, same_tokenizer
from tests.convert import models
from tests.convert.models import OURS, converted, files, same, saved, saved_run, theirs, weights
from tests.data.sets import gpt2_files, tokenizer_of

FAMILIES = {
    "gpt2": {"activation_function": ("gelu_new", "gelu", "relu"), "n_inner": (None, 48)},
    "llama": {
        "attention_bias": (False, True), "mlp_bias": (False, True), "head_dim": (8, 16),
        "num_key_value_heads": (1, 2, 4), "rope_scaling": (None, models.LLAMA3),
        "rope_theta": (1e4, 5e5), "rms_norm_eps": (1e-6, 1e-3),
    },
    "qwen3": {
        "head_dim": (8, 16), "num_key_value_heads": (2, 4), "attention_bias": (False, True),
        "rms_norm_eps": (1e-6, 1e-2),
    },
}  # fmt: skip


def test_each_recipe_of_gpt2s_size_can_be_written():
    names = [name for name in RECIPES if "gpt2" in name]
    found = {name: settings_for(RECIPES[name][1].model)["model_type"] for name in names}
    assert found == dict.fromkeys(names, "gpt2") | {"gpt2-124m-modern": "qwen3"}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, derandomize=True, deadline=None)
@given(data=st.data())
def test_there_and_back_every_bit_is_the_same(family, data):
    grid = FAMILIES[family] | {"tie_word_embeddings": (False, True)}
    options = {name: data.draw(st.sampled_from(values), name) for name, values in grid.items()}
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16)), "dtype")
    with tempfile.TemporaryDirectory() as name:
        there = saved(theirs(family, **options), Path(name) / "there", dtype)
        run = converted(there, Path(name) / "run", "run")
        back = converted(run, Path(name) / "back", "hf", shard_gb=2e-5)
        assert len(list(back.glob("*.safetensors"))) > 1
        before, after = files(there), files(back)
        assert same(before, {name: after[name] for name in before})
        assert after.keys() - before.keys() <= {"lm_head.weight"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in OURS), ("qwen3-without-weights", torch.bfloat16)],
)
def test_back_and_forth_every_bit_is_the_same(name, dtype, tmp_path):
    run = saved_run(tmp_path / "run", dtype=dtype, **OURS[name])
    folder = converted(run, tmp_path / "hf", "hf")
    again = converted(folder, tmp_path / "again", "run")
    assert same(weights(run), weights(again))
    tokens = torch.randint(models.V, (2, models.CONTEXT))
    expected = fastgpt.load(run)[0](tokens)
    logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def test_weights_are_rounded(tmp_path):
    run = saved_run(tmp_path / "run")
    half = converted(run, tmp_path / "half", "hf", dtype="bf16")
    assert same(weights(half), {name: x.bfloat16() for name, x in weights(run).items()})
    assert json.loads((half / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_one_file_is_in_memory_at_a_time(tmp_path):
    source, alive, most = read(str(saved_run(tmp_path / "run"))), [], []
    read_one = source.weights._read

    def counted(name):
        x = read_one(name)
        alive.append(weakref.ref(x))
        most.append(sum(reference() is not None for reference in alive))
        return x

    source.weights._read = counted
    write_folder(source, tmp_path / "hf", 20_000)
    source.build_gpt()
    assert max(most) < 8 < len(source.weights) / 2


def test_names_of_tensors_may_lack_the_prefix(tmp_path):
    folder = saved(theirs("llama"), tmp_path / "with")
    stripped = {name.removeprefix("model."): x for name, x in files(folder).items()}
    assert stripped.keys() != files(folder).keys()
    without = tmp_path / "without"
    without.mkdir()
    save_file(stripped, without / "model.safetensors")
    (without / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert same(weights(without), weights(folder))


@pytest.mark.parametrize(("given", "expected"), [
    ({"bos_token_id": 3, "eos_token_id": [4, 5]}, (3, [4, 5])),
    ({"bos_token_id": None, "eos_token_id": 7}, (0, 7)),  # the tokenizer's in place of none
])  # fmt: skip
def test_ids_of_begin_and_end_and_a_chat_template_are_kept(given, expected, tmp_path):
    folder = saved(theirs("llama", vocab_size=500), tmp_path / "hf")
    models.change_config(folder, **given)
    write_tokenizer(tokenizer_of("bpe"), folder, context=models.CONTEXT)
    template = "{% for m in messages %}\u00e9 {{ m['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    back = converted(converted(folder, tmp_path / "run", "run"), tmp_path / "back", "hf")
    config = json.loads((back / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == expected
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        assert (back / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("kind", ["bytes", "chars", "gpt2", "bpe"])
def test_tokenizers_of_other_programs_give_the_same_ids(kind, tmp_path):
    if kind == "gpt2":
        gpt2_files()
    tokenizer = make_tokenizer(kind, lambda: iter(models.TEXTS))
    write_tokenizer(tokenizer, tmp_path, context=64)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert theirs.model_max_length == 64
    assert theirs.eos_token_id == tokenizer.eot_id == ours.eot_id
    assert same_tokenizer(tokenizer, ours)
    for text in models.TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert ours.encode(text).tolist() == ids
        assert theirs.decode(ids) == text == ours.decode(ids)


NEEDED = (
    "model_type vocab_size n_layer n_head n_embd n_positions num_hidden_layers num_attention_heads"
    " hidden_size intermediate_size max_position_embeddings"
)


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_are_missing_have_the_values_of_transformers(family):
    needed = {*NEEDED.split(), *(["num_key_value_heads"] if family == "qwen3" else [])}
    given = {name: x for name, x in theirs(family).config.to_dict().items() if name in needed}
    full = CONFIG_MAPPING[family].from_dict(given).to_dict()
    a, b = (
        replace(x, num_kv_heads=x.kv_heads, head_size=x.head_dim)
        for x in (config_from(given)[0], config_from(full)[0])
    )
    assert a == b


@pytest.mark.parametrize("options", [{}, OURS["llama"]], ids=["gpt2", "llama"])
def test_dropout_is_carried_over_where_it_has_one_probability(options):
    model = ModelConfig(vocab_size=models.V, dropout=0.2, dropout_places=("attention",), **options)
    there = settings_for(model)
    config, unknown = config_from(there)
    assert (config.dropout, config.dropout_places, unknown) == (0.2, ("attention",), [])
    if not options:
        config, unknown = config_from(there | {"embd_pdrop": 0.1})
        assert (config.dropout, unknown) == (0.0, ["attn_pdrop", "embd_pdrop"])
