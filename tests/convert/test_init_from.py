"""Runs that start from a model: its loss, its tokenizer, its architecture, and what is refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by
from transformers import AutoModelForCausalLM

import fastgpt
from fastgpt.cli import configure, main
from fastgpt.config.files import to_yaml
from fastgpt.config.model import ModelConfig
from fastgpt.convert.source import read
from fastgpt.convert.target import write_tokenizer
from fastgpt.data.tokenizers import ByteTokenizer, load_tokenizer
from fastgpt.errors import UserError
from fastgpt.train import plan as planning
from fastgpt.train.build import build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import Trainer, train
from tests import runs
from tests.convert import models
from tests.convert.models import converted, refused, saved, saved_run, started, theirs
from tests.data.sets import prepared, texts

BYTES = 300  # vocabulary of models for the 256 bytes; 64 does not divide it
SMALL = (
    "--train.device cpu --train.precision fp32 --train.batch-tokens 80 --train.sample-tokens 0"
    " --log-every 1 --eval-every 0 --optim.kind adamw --optim.lr 2e-3 --optim.schedule constant"
    " --optim.warmup-steps 0 --optim.beta1 0.9"
)


@pytest.fixture
def argv(tiny, text, tmp_path):
    """Returns the command line of a run that starts from a model; flags given later win."""

    def flags(source, more="", recipe="baby"):
        place = ["--data.source", str(text), "--run-dir", str(tmp_path / "run")]
        return [recipe, *SMALL.split(), *place, "--init-from", str(source), *more.split()]

    return flags


@pytest.fixture
def hf(tmp_path):
    """Folder of a GPT-2 with dropout, which has the tokenizer of bytes in Hugging Face's format."""
    folder = saved(theirs("gpt2", vocab_size=BYTES, resid_pdrop=0.1), tmp_path / "tiny-gpt2")
    write_tokenizer(ByteTokenizer(), folder, models.CONTEXT)
    return folder


def begins_with_the_loss_of(run, logits):
    x, y = run.loader.next()
    assert x.shape[1] == run.plan.config.model.context
    with torch.no_grad():
        expected = F.cross_entropy(logits(x).flatten(0, 1), y.flatten())
        torch.testing.assert_close(run.model(x, y), expected, rtol=1e-5, atol=0)


def test_the_loss_begins_at_the_models_own_and_falls(hf, argv, tmp_path):
    shorter = configure(["finetune-gpt2", "--init-from", str(hf)])
    assert shorter.train.batch_tokens == 32 * 1024 // 40 * 40
    model = AutoModelForCausalLM.from_pretrained(hf)
    run = saved_run(tmp_path / "llama", ByteTokenizer(), vocab_size=BYTES, **models.LLAMA)
    for source, context, logits in (
        (hf, 16, lambda x: model(x).logits), (run, 40, fastgpt.load(run)[0])
    ):  # fmt: skip
        live = started(argv(source, f"--model.context {context}", "finetune-gpt2"))
        assert live.plan.config.model.dropout_at("residual") == 0
        begins_with_the_loss_of(live, logits)
        [(before, _)] = live.evaluate("val")
        for _ in range(5):
            train(live, live.step + 1)
        [(after, _)] = live.evaluate("val")
        assert after < before - 0.1


def test_a_run_says_where_it_came_from_and_resumes_without_its_source(
    hf, argv, tmp_path, monkeypatch
):
    (hf / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    times = []
    runs.before_each(monkeypatch, planning, "read", times.append)
    monkeypatch.setattr("sys.argv", ["train.py", *argv(hf, "--steps 2")])
    main()
    assert times == [str(hf)]
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
    refused(argv(hf, f"--resume {run}"), f"--init-from is {hf}: .*run is resumed")


def test_two_ranks_start_from_the_same_weights(hf, argv, ranks, tmp_path):
    flags = argv(hf, "--steps 2")
    Trainer(configure(flags)).fit()
    ranks.train([*flags, "--run-dir", str(tmp_path / "two")])
    runs.assert_same_up_to_rounding(tmp_path / "two", tmp_path / "run")


def test_what_contradicts_the_model_is_refused_by_name(hf, argv):
    for flags, said in (
        ("--model.num-layers 4", r"num-layers is 4: expected 2, as .*-gpt2"),
        ("--model.context 80", r"context is 80: expected at most 40"),
        ("--data.tokenizer chars", r"the chars tokenizer .* its own, bytes \(256"),
    ):
        refused(argv(hf, flags), said)
    other = replace(configure(argv(hf)), model=ModelConfig(num_layers=2, context=16))
    with pytest.raises(UserError, match=r"--model\.\S+ is .*: expected .*, as in --init-from"):
        build(resolve(other))


def test_data_of_another_tokenizer_is_refused(hf, argv, tmp_path):
    other, same = (prepared(tmp_path / kind, texts(50), kind) for kind in ("bpe", "bytes"))
    refused(argv(hf, f"--data.source {other}"), r"prepared with tokenizer 'bpe', not .*tiny-gpt2")
    started(argv(hf, f"--data.source {same}")).loader.close()
    run = saved_run(tmp_path / "no-tokenizer")
    source = models.foreign(run, "nanogpt", tmp_path / "ckpt.pt")
    assert configure(argv(source)).model.activation == "gelu_erf"
    refused(argv(source), "has no tokenizer")
    refused(argv("runs/mistyped"), "runs/mistyped does not exist")
    with pytest.raises(UserError, match="has no tokenizer"):
        read(str(source)).known_tokenizer()
    refused(argv(run, "--data.tokenizer bytes"), rf"256 tokens.*step_0+ needs at most {models.V}")


def test_settings_in_a_file_go_with_the_model(hf, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"recipe: baby\ninit_from: {hf}\nmodel: {{dropout: 0.25}}")
    config = configure(["--config", str(file)])
    assert (config.model.dropout, config.init_from) == (0.25, str(hf))
    file.write_text(to_yaml(config))
    assert configure(["--config", str(file)]) == config


def test_weights_that_are_damaged_after_they_were_opened_are_named(hf, argv, tmp_path):
    plan = resolve(configure(argv(hf)))
    for path in hf.glob("*.safetensors"):
        path.write_bytes(b"cut")
    with pytest.raises(UserError, match=r"\.safetensors cannot be read: [^\n]+$"):
        build(plan)


def test_a_converted_run_says_how_to_train_on(hf, argv, tmp_path):
    run = converted(hf, tmp_path / "converted", "run")
    refused(["--resume", str(run)], "no optimizer state: .*--init-from")
    started(argv(run)).loader.close()
