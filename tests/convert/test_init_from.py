"""Runs that start from a model: its loss, its tokenizer, its architecture, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by
from transformers import AutoModelForCausalLM

import fastgpt
from fastgpt.cli import configure, main
from fastgpt.config.files import to_yaml
from fastgpt.config.model import ModelConfig
from fastgpt.convert.saved import from_json
from fastgpt.convert.source import read
from fastgpt.convert.target import write_tokenizer
from fastgpt.data.tokenizers import ByteTokenizer, CharTokenizer, load_tokenizer, same_tokenizer
from fastgpt.errors import UserError
from fastgpt.train.build import build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import Trainer, train
from tests import runs
from tests.convert.models import CONTEXT, V, converted, foreign, refused, saved, saved_run, theirs
from tests.data.sets import prepared, texts, tokenizer_of

BYTES = 300
"""Vocabulary of models for the 256 bytes; 64 does not divide it."""
LLAMA = {"norm": "rmsnorm", "position": "rotary", "activation": "swiglu", "bias": False}


@pytest.fixture
def hf(tmp_path):
    """Folder of a GPT-2 with dropout, which has the tokenizer of bytes in Hugging Face's format."""
    folder = saved(theirs("gpt2", vocab_size=BYTES, resid_pdrop=0.1), tmp_path / "tiny-gpt2")
    write_tokenizer(ByteTokenizer(), folder, CONTEXT)
    return folder


def begins_with_the_loss_of(run, logits):
    x, y = run.loader.next()
    assert x.shape[1] == run.plan.config.model.context
    with torch.no_grad():
        expected = F.cross_entropy(logits(x).flatten(0, 1), y.flatten())
        torch.testing.assert_close(run.model(x, y), expected, rtol=1e-5, atol=0)


def test_the_command_reads_the_model_once(hf, argv, monkeypatch, capsys):
    times = []

    def counted(source):
        times.append(source)
        return read(source)

    monkeypatch.setattr("fastgpt.train.plan.read", counted)
    monkeypatch.setattr("sys.argv", ["train.py", *argv(hf, "--steps 1")])
    main()
    assert times == [str(hf)]


@pytest.mark.parametrize("context", [CONTEXT, 16])
def test_the_loss_begins_at_the_models_own_and_falls(context, hf, argv, tmp_path):
    shorter = configure(["finetune-gpt2", "--init-from", str(hf)])
    assert shorter.train.batch_tokens == 32 * 1024 // CONTEXT * CONTEXT
    model = AutoModelForCausalLM.from_pretrained(hf)
    run = saved_run(tmp_path / "llama", ByteTokenizer(), vocab_size=BYTES, **LLAMA)
    for source, logits in ((hf, lambda x: model(x).logits), (run, fastgpt.load(run)[0])):
        live = build(
            resolve(configure(argv(source, f"--model.context {context}", "finetune-gpt2")))
        )
        assert live.plan.config.model.dropout_at("residual") == 0
        begins_with_the_loss_of(live, logits)
        [(before, _)] = live.evaluate("val")
        for _ in range(5):
            train(live, live.step + 1)
        [(after, _)] = live.evaluate("val")
        assert after < before - 0.1


def test_files_of_other_programs_need_a_tokenizer(argv, tmp_path):
    for kind, file in (("nanogpt", "ckpt.pt"), ("llmc", "gpt2.bin")):
        activation = {"nanogpt": "gelu_erf", "llmc": "gelu_tanh"}[kind]
        run = saved_run(tmp_path / kind, vocab_size=BYTES, activation=activation)
        source = foreign(run, kind, tmp_path / file)
        refused(argv(source), rf"{file} has no tokenizer: pass .*tokenizer gpt2")
        live = build(resolve(configure(argv(source, "--data.tokenizer bytes"))))
        begins_with_the_loss_of(live, fastgpt.load(run)[0])


def test_a_run_says_where_it_came_from_and_resumes_without_its_source(hf, argv, tmp_path):
    (hf / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    Trainer(configure(argv(hf, "--steps 2"))).fit()
    run = tmp_path / "run"
    assert json.loads((run / "config.json").read_text())["init_from"] == str(hf)
    assert json.loads((run / "manifest.json").read_text())["started_from"] == str(hf)
    assert list(runs.series(run, "val_loss")) == [0, 2]
    kept = load_tokenizer(run / "checkpoints" / "step_00000002")
    assert kept.to_json() == (hf / "tokenizer.json").read_text()
    shutil.rmtree(hf)
    Trainer(configure(argv(hf, "--steps 3 --resume auto"))).fit()
    assert list(runs.series(run, "train_loss")) == [1, 2, 3]
    for step in (2, 3):
        found = read(str(run / "checkpoints" / f"step_0000000{step}"))
        assert found.known_tokenizer().stop_ids >= {7, 9}, "what ends an answer of the model stays"
    refused(argv(hf, f"--resume {run}"), rf"--init-from is {hf}: .*run is resumed, which")
    refused(argv("gpt2", "--resume auto"), r"--init-from is gpt2: .*run is resumed, which")


def test_two_ranks_start_from_the_same_weights(hf, argv, tmp_path):
    flags = argv(hf, "--steps 2")
    Trainer(configure(flags)).fit()
    runs.finish(
        runs.torchrun(2, "train.py", *flags, "--run-dir", str(tmp_path / "two"), forks=True)
    )
    runs.assert_same_up_to_rounding(tmp_path / "two", tmp_path / "run")


def test_tokenizers_of_two_formats_are_the_same_if_their_ids_are(tmp_path):
    for kind in ("bytes", "chars", "gpt2"):
        write_tokenizer(tokenizer_of(kind), tmp_path, CONTEXT)
        assert same_tokenizer(tokenizer_of(kind), load_tokenizer(tmp_path))
    write_tokenizer(CharTokenizer("abc"), tmp_path, CONTEXT)
    for other in ("abd", "abcd"):
        assert not same_tokenizer(CharTokenizer(other), load_tokenizer(tmp_path))


def test_what_contradicts_the_model_is_refused_by_name(hf, argv):
    refused(argv(hf, "--model.num-layers 4"), r"--model\.num-layers is 4: expected 2, as .*-gpt2")
    refused(argv(hf, "--model.no-tied"), r"--model\.tied is False: expected True, as in --init-")
    refused(argv(hf, "--model.context 80"), r"--model\.context is 80: expected at most 40, as .*2")
    refused(argv(hf, "--data.tokenizer chars"), r"the chars tokenizer .* its own, bytes \(256")
    other = replace(configure(argv(hf)), model=ModelConfig(num_layers=2, context=16))
    with pytest.raises(UserError, match=r"--model\.\S+ is .*: expected .*, as in --init-from"):
        build(resolve(other))


def test_data_of_another_tokenizer_is_refused(hf, argv, tmp_path):
    other, same = (prepared(tmp_path / kind, texts(50), kind) for kind in ("bpe", "bytes"))
    said = r"bpe was prepared with tokenizer 'bpe', not .*tiny-gpt2-\w+\.json'"
    refused(argv(hf, f"--data.source {other}"), said)
    build(resolve(configure(argv(hf, f"--data.source {same}")))).loader.close()
    run = saved_run(tmp_path / "no-tokenizer")
    refused(argv(run, "--data.tokenizer bytes"), rf"\(256 tokens\): .*step_0+ needs at most {V}")


def test_names_that_are_nothing_are_errors_of_one_line(argv, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name, said in {
        "baby-20261120": "baby-20261120 does not exist: expected a run such as runs/NAME",
        "runs/mistyped": "runs/mistyped does not exist",
        "out/ckpt.pt": "out/ckpt.pt does not exist",
        str(tmp_path): "is not a model: expected a run or checkpoint, a folder with config.json",
    }.items():
        monkeypatch.setattr("sys.argv", ["train.py", *argv(name)])
        assert said in runs.one_line_error(capfd, main)


def test_settings_in_a_file_are_held_to_the_architecture(hf, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"recipe: baby\ninit_from: {hf}\nmodel: {{dropout: 0.25}}")
    config = configure(["--config", str(file)])
    assert (config.model.dropout, config.init_from) == (0.25, str(hf))
    file.write_text(to_yaml(config))
    assert configure(["--config", str(file)]) == config
    file.write_text(f"recipe: baby\ninit_from: {hf}\nmodel: {{num_layers: 9}}")
    with pytest.raises(UserError, match=r"--model.num-layers is 9: expected \d+, as in"):
        resolve(configure(["--config", str(file)]))


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"cut")])
def test_weights_that_vanish_after_they_were_opened_are_one_line(damage, hf, argv, tmp_path):
    plan = resolve(configure(argv(hf)))
    for path in hf.glob("*.safetensors"):
        damage(path)
    with pytest.raises(UserError, match=r"\.safetensors cannot be read: [^\n]+$"):
        build(plan)


def test_a_converted_run_says_how_to_train_on(hf, argv, tmp_path):
    run = converted(hf, tmp_path / "converted", "run")
    refused(["--resume", str(run)], r"no optimizer state: start a new run .*--init-from .*ed$")
    saved = (run / "config.json").read_text()
    older = json.loads(saved) | {"take_over": False}  # of an earlier version
    older["train"]["verify_every"] = 5
    assert from_json(json.dumps(older)) == from_json(saved)
    build(resolve(configure(argv(run)))).loader.close()
