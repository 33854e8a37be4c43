"""Models that cannot be converted give one error that names the cause, and leave nothing behind."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from fastgpt.convert.__main__ import main
from fastgpt.data.tokenizers import ByteTokenizer
from fastgpt.errors import UserError
from tests.convert.models import V, converted, saved, saved_run, theirs


@pytest.fixture
def folder(tmp_path):
    """A small Llama in several files."""
    return saved(theirs("llama"), tmp_path / "llama")


def config(folder, **changes):
    """Changes fields of a folder's config.json; None removes one."""
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: x for name, x in fields.items() if x is not None}))


def index(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def edit(folder, name, change):
    """Changes a tensor in its file, or if the change gives None removes it."""
    path = folder / index(folder)[name]
    tensors = load_file(path)
    changed = change(tensors.pop(name))
    save_file(tensors | ({} if changed is None else {name: changed}), path)


def missing_shard(folder):
    (folder / sorted(set(index(folder).values()))[1]).unlink()


def cut_shard(folder):
    path = folder / sorted(set(index(folder).values()))[1]
    path.write_bytes(path.read_bytes()[:-10])


Q = "model.layers.1.self_attn.q_proj.weight"
BROKEN = {
    "architecture": (
        lambda f: config(f, model_type="mamba", architectures=["MambaForCausalLM"]),
        r"config\.json describes 'mamba': expected gpt2 or llama or qwen3",
    ),
    "activation": (
        lambda f: config(f, hidden_act="gelu"), r"hidden_act is 'gelu': expected silu",
    ),
    "rope": (
        lambda f: config(f, rope_parameters={"rope_type": "yarn", "factor": 4.0}),
        r"config\.json: rope_type is 'yarn': expected default or llama3",
    ),
    "no size": (lambda f: config(f, hidden_size=None), r"config\.json has no hidden_size"),
    "no heads": (
        lambda f: config(f, num_attention_heads=0, head_dim=None),
        r"config\.json: num_attention_heads is 0",
    ),
    "half a layer": (
        lambda f: config(f, num_hidden_layers=2.5),
        r"config\.json: num_hidden_layers is 2\.5: expected an integer",
    ),
    "tied as a word": (
        lambda f: config(f, tie_word_embeddings="false"), r"--model\.tied is 'false': expected Tr",
    ),
    "a list": (lambda f: config(f, model_type=["llama"]), r"describes a value of type list"),
    "no map": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": []}'),
        r"has the weight_map a value of type list and length 0: expected names and files",
    ),
    "no json": (lambda f: (f / "config.json").write_text("{"), r"config\.json cannot be read"),
    "heads": (
        lambda f: config(f, num_key_value_heads=3),
        r"num_attention_heads is 4: expected a multiple of num_key_value_heads, 3",
    ),
    "shard": (missing_shard, r"model-00002-of-\S+ cannot be read: No such file"),
    "cut": (cut_shard, r"model-00002-of-\d+\.safetensors cannot be read"),
    "tensor": (
        lambda f: edit(f, Q, lambda x: None), rf"has no tensor {Q}, which its settings ask for",
    ),
    "shape": (
        lambda f: edit(f, Q, lambda x: x[:30].clone()),
        rf"{Q} has the shape \(30, 32\): expected \(32, 32\)",
    ),
    "fewer layers": (
        lambda f: config(f, num_hidden_layers=1),
        r"model\.layers\.1\.\S+ belongs to no part of the model that it describes",
    ),
    "vocabulary": (
        lambda f: ByteTokenizer().save(f / "tokenizer.json"),
        rf"the tokenizer has 256 tokens, and config\.json has vocab_size {V}",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "said"), BROKEN.values(), ids=BROKEN)
def test_a_damaged_folder_is_named(damage, said, folder, tmp_path):
    damage(folder)
    with pytest.raises(UserError, match=said):
        converted(folder, tmp_path / "run", "run")
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


BEYOND = {
    "softcap and window": (
        {"softcap": 30.0, "window": 8},
        r"GPT2LMHeadModel cannot .*--model\.softcap is 30\.0, expected None;"
        r" --model\.window is 8, expected None",
    ),
    "post-norm": (
        {"norm": "post-layernorm"},
        r"--model\.norm is post-layernorm, expected layernorm",
    ),
    "rotary without SwiGLU": (
        {"position": "rotary", "norm": "rmsnorm", "bias": False},
        r"LlamaForCausalLM cannot .*--model\.activation is gelu_tanh, expected swiglu",
    ),
    "grouped heads": ({"num_kv_heads": 2}, r"--model\.num-kv-heads is 2, expected 4"),
}


@pytest.mark.parametrize(("options", "said"), BEYOND.values(), ids=BEYOND)
def test_what_a_format_cannot_express_is_refused_by_name(options, said, tmp_path):
    with pytest.raises(UserError, match=said):
        converted(saved_run(tmp_path / "run", **options), tmp_path / "hf", "hf")
    assert not (tmp_path / "hf").exists()


def test_existing_folders_and_missing_models_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = saved_run(tmp_path / "run")
    with pytest.raises(UserError, match=r"run exists: expected a new name"):
        converted(run, run, "hf")
    (tmp_path / "file").write_text("no folder")
    for to in ("hf", "run"):
        with pytest.raises(UserError, match=r"^cannot write .*file/x: "):
            converted(run, tmp_path / "file" / "x", to)
    with pytest.raises(UserError, match=r"^no/such/model does not exist: expected a run such as"):
        converted("no/such/model", tmp_path / "x", "hf")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"cannot be had from the hub .*: put the model's config"):
        converted("nobody/nothing", tmp_path / "x", "hf")


def test_a_folder_without_tokenizer_and_unknown_fields_are_warned_of(folder, tmp_path, capsys):
    config(folder, attn_logit_softcapping=50.0)
    main([str(folder), str(tmp_path / "run"), "--to", "run"])
    said = capsys.readouterr()
    assert "unknown and ignored: attn_logit_softcapping" in said.err
    assert "has no tokenizer: the model works on token ids only" in said.err
    assert said.out == f"wrote {tmp_path / 'run'}\n"


@pytest.mark.parametrize(("twice", "said"), [(True, "is in two files"), (False, "torch.int64")])
def test_tensors_twice_or_of_integers_are_refused(twice, said, folder, tmp_path):
    name = "model.norm.weight"
    here = folder / index(folder)[name]
    x = load_file(here)[name]
    where = min({folder / file for file in index(folder).values()} - {here}) if twice else here
    save_file(load_file(where) | {name: x if twice else x.long()}, where)
    with pytest.raises(UserError, match=rf"model\.norm\.weight .*{said}"):
        converted(folder, tmp_path / "run", "run")


def test_a_stored_head_that_is_not_the_embedding_is_no_tied_model(folder, tmp_path):
    config(folder, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"lm_head\.weight belongs to no part"):
        converted(folder, tmp_path / "run", "run")
    shutil.rmtree(folder)
    model = theirs("llama", tie_word_embeddings=True)
    saved(model, folder)
    file = folder / index(folder)["model.norm.weight"]
    table = model.get_input_embeddings().weight.detach().clone()
    save_file(load_file(file) | {"lm_head.weight": table}, file)
    assert converted(folder, tmp_path / "run", "run").is_dir()
