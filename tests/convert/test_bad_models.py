"""Models that cannot be converted give one error that names the cause, and leave nothing behind."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from fastgpt.convert.__main__ import main
from fastgpt.data.tokenizers import ByteTokenizer
from fastgpt.errors import UserError
from tests.convert.models import change_config, converted, saved, saved_run, theirs


@pytest.fixture
def folder(tmp_path):
    return saved(theirs("llama"), tmp_path / "llama")


def index(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"]


def edit(folder, change):
    """Changes the tensor `Q` in its file, or if the change gives None removes it."""
    path = folder / index(folder)[Q]
    tensors = load_file(path)
    changed = change(tensors.pop(Q))
    save_file(tensors | ({} if changed is None else {Q: changed}), path)


def cut_shard(folder):
    path = folder / sorted(set(index(folder).values()))[1]
    path.write_bytes(path.read_bytes()[:-10])


def put_twice(folder):
    first, second = sorted({folder / file for file in index(folder).values()})[:2]
    name, x = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: x}, second)


INDEX = "model.safetensors.index.json"
Q = "model.layers.1.self_attn.q_proj.weight"
FIELDS = {
    "hidden_act is 'gelu'": {"hidden_act": "gelu"},
    "describes 'mamba'": {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
    "rope_type is 'yarn'": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    "no hidden_size": {"hidden_size": None},
    "expected a multiple of num_key_value_heads, 3": {"num_key_value_heads": 3},
    r"lm_head\.weight belongs to no part": {"tie_word_embeddings": True},
}
FILES = {
    "weight_map a value of type list": lambda f: (f / INDEX).write_text('{"weight_map": []}'),
    r"config\.json cannot be read": lambda f: (f / "config.json").write_text("{"),
    r"model-00002-of-\d+\.safetensors cannot be read": cut_shard,
    "is in two files": put_twice,
    f"no tensor {Q}": lambda f: edit(f, lambda x: None),
    rf"{Q} has the shape \(30, 32\)": lambda f: edit(f, lambda x: x[:30].clone()),
    r"torch\.int64": lambda f: edit(f, lambda x: x.long()),
    "the tokenizer has 256 tokens": lambda f: ByteTokenizer().save(f / "tokenizer.json"),
}


@pytest.mark.parametrize("said", [*FIELDS, *FILES])
def test_a_damaged_folder_is_named(said, folder, tmp_path):
    if said in FILES:
        FILES[said](folder)
    else:
        change_config(folder, **FIELDS[said])
    with pytest.raises(UserError, match=said):
        converted(folder, tmp_path / "run", "run")
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


@pytest.mark.parametrize(("options", "said"), [
    ({"softcap": 30.0, "window": 8}, r"softcap is 30\.0, .*--model\.window is 8"),
    ({"position": "rotary", "norm": "rmsnorm", "bias": False}, r"--model\.activation is gelu_tanh"),
])  # fmt: skip
def test_what_a_format_cannot_express_is_refused_by_name(options, said, tmp_path):
    with pytest.raises(UserError, match=said):
        converted(saved_run(tmp_path / "run", **options), tmp_path / "hf", "hf")
    assert not (tmp_path / "hf").exists()


def test_existing_folders_and_missing_models_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = saved_run(tmp_path / "run")
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for source, target, said in (
        ("baby-20261120", "x", "^baby-20261120 does not exist"),
        ("out/ckpt.pt", "x", "^out/ckpt.pt does not exist"),
        (run, "run", "run exists"),
        (run, "file/x", "^cannot write .*file/x: "),
        (tmp_path, "x", "is not a model"),
        ("nobody/nothing", "x", "cannot be had from the hub"),
    ):
        with pytest.raises(UserError, match=said):
            converted(source, tmp_path / target, "hf")


def test_a_folder_without_tokenizer_and_unknown_fields_are_warned_of(folder, tmp_path, capsys):
    change_config(folder, attn_logit_softcapping=50.0)
    main([str(folder), str(tmp_path / "run"), "--to", "run"])
    said = capsys.readouterr()
    assert "unknown and ignored: attn_logit_softcapping" in said.err
    assert "has no tokenizer" in said.err


def test_a_stored_head_that_is_the_embedding_is_left_out(folder, tmp_path):
    shutil.rmtree(folder)
    model = theirs("llama", tie_word_embeddings=True)
    saved(model, folder)
    file = folder / index(folder)["model.norm.weight"]
    table = model.get_input_embeddings().weight.detach().clone()
    save_file(load_file(file) | {"lm_head.weight": table}, file)
    assert converted(folder, tmp_path / "run", "run").is_dir()
