"""Wrong input ends in one line that names what was given, before any work is lost."""

import re
import shlex
import shutil
import sys
from io import BytesIO, TextIOWrapper
from unittest import mock

import numpy as np
import pytest
import torch

import train
from bench import records
from fastgpt.cli import configure
from fastgpt.errors import run_command
from fastgpt.train.optim import Optimizers
from tests.cli.conftest import main_of
from tests.data.sets import write_shard
from tests.runs import before_each, one_line_error


@pytest.fixture
def error(monkeypatch, capfd):
    """Runs train.py's `main`, which must fail with one line on stderr; returns that line."""

    def run(argv):
        monkeypatch.setattr(sys, "argv", ["train.py", *argv])
        return one_line_error(capfd, train.main)

    return run


WRONG = [
    # TINY is a run's command line, RUN a trained run
    ("train babby", 2, "did you mean 'baby'"),
    ("train baby --model.num-layer 4", 2, "did you mean '--model.num-layers'"),
    ("train baby shakespeare-cpu", 2, "unexpected 'shakespeare-cpu': expected one recipe"),
    ("train --batch_size 3 --n_head=4", 2, "--train.micro-batch, --n-head is --model.num-heads"),
    ("train baby --steps many", 2, "--steps is 'many': expected an integer"),
    ("train baby --optim.kind sgd", 2, "is 'sgd': expected adamw or muon"),
    ("train baby --seed 1 --steps", 2, "--steps has no value"),
    ("train baby --model.tied=3", 2, "'3' after --model.tied"),
    ("train baby --model.num-heads 3", 2, "--model.dim is 128"),
    ("train baby --model.num-heads 4 --model.num-kv-heads 3", 2, "--model.num-kv-heads, 3"),
    ("train baby --model.dim 0", 2, "--model.dim is 0"),
    ("train lecture-gpt --model.tied", 2, "--model.no-tied"),
    ("train baby --train.batch-tokens 1000", 2, "--train.batch-tokens is 1000"),
    ("train baby --train.sample-tokens 268435457", 2, "--train.sample-tokens is 268435457"),
    ("train baby --train.z-loss nan", 2, "--train.z-loss is nan"),
    ("train baby --steps 9223372036854775808", 2, "--steps is 9223372036854775808"),
    ("train baby --epochs 0", 2, "--epochs is 0"),
    ("train pubmed --steps 7 --epochs 1", 2, "--steps and --epochs"),
    ("train lecture-gpt --data.align document", 2, "--data.sampling is lecture"),
    ("train baby --run-dir ''", 2, "--run-dir is the current directory"),
    ("train TINY --train.device cuda", 1, "--train.device cpu"),
    ("train TINY --train.precision fp16", 1, "--train.precision is fp16"),
    ("train TINY --train.compile graphs", 1, "--train.compile is graphs"),
    ("train TINY --model.vocab-size 100", 1, "256"),
    ("train TINY --data.tokenizer byts", 1, "'bytes'"),
    (f"train TINY --data.source {'x' * 5000}", 1, "File name too long"),
    ("train TINY --data.source no.txt", 1, "'no.txt'"),
    ("train TINY --data.sampling lecture --data.val-fraction 0.02", 1, "expected at least 17"),
    ("train TINY --run-dir RUN", 1, "holds a run already"),
    ("train TINY --run-dir text.txt/inner", 1, "text.txt/inner"),
    ("train TINY --resume nowhere", 2, "nowhere"),
    ("train shakespeare-cpu --resume RUN", 2, "'baby': expected that, not 'shakespeare-cpu'"),
    ("train --resume RUN --model.context 32", 1, "--model.context is 32: expected 16"),
    ("train --resume RUN --data.val-fraction 0.2", 1, "--data.val-fraction is 0.2: expected 0.1"),
    ("train --resume RUN --seed 2", 1, "--seed is 2: expected 1337"),
    ("train --resume RUN --steps 6", 1, "--steps is 6: "),
    ("train --resume RUN --epochs 0.25", 1, "--epochs 0.25 in steps is "),
    ("fastgpt.prepare", 2, "missing: SOURCE, --out"),
    ("fastgpt.sample RUN --top-k 0", 2, "--top-k is 0"),
    ("fastgpt.sample RUN --tokens 100000000000", 2, "--tokens is 100000000000"),
    ("fastgpt.sample RUN --device cpu --prompt the --prompt the€", 1, "'the€'"),
    ("fastgpt.sample RUN --device cpu --prompt the --prompt ''", 1, "--prompt is empty"),
    ("fastgpt.sample RUN --device cpu --kernels triton", 1, "--kernels is triton"),
    ("fastgpt.sample RUN --device cuda", 1, "--device is cuda"),
    ("fastgpt.sample no --device cpu", 1, "no does not exist"),
    ("fastgpt.compare RUN .", 1, ". is neither a run nor a checkpoint"),
    ("fastgpt.report .", 1, ". is not a run"),
    ("fastgpt.report", 2, "no RUN was given"),
    ("fastgpt.report RUN -o no/page.html", 1, "--out is no/page.html"),
    ("fastgpt.serve x --port 0", 2, "--port is 0"),
    ("fastgpt.serve x --host ::", 2, "FASTGPT_TOKEN"),
    ("fastgpt.doctor baby --gpu h10", 1, "did you mean 'h100'"),
    ("fastgpt.doctor --gpus 8", 1, "expected a recipe"),
    ("fastgpt.doctor baby --gpu h100 --tok-per-s nan", 1, "--tok-per-s is nan"),
    ("fastgpt.doctor baby --parallel.cp 3 --gpu l4 --gpus 4", 1, "divisor"),
    ("bench relu3", 1, "'relu3'"),
    ("bench --rounds 1", 2, "--rounds is 1"),
    ("bench.step --implementations nanogpt", 1, "--nanogpt is missing"),
    ("bench.generate gpt2-124m-modern", 1, "norm, activation, position"),
    ("bench.count", 1, "simgpu"),
]


@pytest.mark.parametrize(("line", "status", "word"), WRONG, ids=[row[0][:60] for row in WRONG])
def test_a_wrong_command_is_one_line_and_changes_nothing(
    line, status, word, trained, tiny, tmp_path, monkeypatch, capfd
):
    if line.startswith("fastgpt.report"):
        pytest.importorskip("bokeh", reason="needs the extra report")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("fastgpt.kernels.runtime.INTERPRETING", False)
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    for name in ("SIMGPU", "FASTGPT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    line = line.replace("RUN", str(trained)).replace("TINY", shlex.join(tiny()))
    name, *argv = shlex.split(line)
    monkeypatch.setattr(sys, "argv", [name, *argv])
    folders = (tmp_path, trained)
    before = [{path: path.stat().st_mtime_ns for path in x.rglob("*")} for x in folders]
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        train.main() if name == "train" else run_command(main_of(name))
    said = capfd.readouterr().err
    assert re.fullmatch(r"error: .*\n", said), said
    assert word in said
    assert stopped.value.code == status
    assert [{path: path.stat().st_mtime_ns for path in x.rglob("*")} for x in folders] == before


def test_corpora_that_cannot_be_trained_on(error, tiny, text, tmp_path):
    for content, said in (("0123456789abcde", "one window"), ("x", "nothing to train on")):
        text.write_text(content)
        assert said in error(tiny())
    (tmp_path / "train_000000.bin").write_bytes(b"x" * 2000)
    assert "no *val*.bin" in error(tiny("--data.source", str(tmp_path)))
    (tmp_path / "val_000000.bin").write_bytes(b"x" * 2000)
    assert "not a token shard" in error(tiny("--data.source", str(tmp_path)))
    for split, count in (("train", 20), ("val", 1)):
        write_shard(tmp_path / f"{split}_000000.bin", np.arange(count))
    line = error(tiny("--data.source", str(tmp_path), "--data.tokenizer bytes"))
    assert "1 token held out" in line
    assert not (tmp_path / "run").exists()


def test_fork_into_a_directory_that_holds_another_run(error, trained, run):
    shutil.rmtree(run / "checkpoints" / "step_00000008")
    source = trained / "checkpoints" / "step_00000004"
    assert str(run) in error(["--resume", str(source), "--run-dir", str(run)])
    assert not (run / "checkpoints" / "step_00000008").exists()


def test_other_characters_and_a_damaged_config(error, run, tiny, text):
    text.write_text(text.read_text().replace("m", "x"))
    assert "different vocabularies" in error(tiny("--data.tokenizer chars --resume auto"))
    (run / "config.json").write_text("{")
    assert str(run / "config.json") in error(tiny("--resume auto"))


def test_flags_of_a_resume_are_checked_against_the_run(trained):
    """96 tokens are 6 windows of the run's context, but no multiple of the recipe's."""
    config = configure(["--resume", str(trained), "--train.batch-tokens", "96"])
    assert config.global_batch == 6


def test_files_of_others_are_left_alone_and_a_damaged_best_stops_no_resume(fit, run):
    own = [run / "checkpoints" / name for name in (".DS_Store", "step_00000004_backup", "step_9")]
    own[0].touch()
    for path in own[1:]:
        path.mkdir()
    record = run / "checkpoints" / "best" / "checkpoint.json"
    record.unlink()  # a hard link: what is written into it would show in the other folder, too
    record.write_text("[]")
    fit("--resume auto --steps 12 --train.keep-checkpoints 1")
    assert (run / "abandoned_1" / "checkpoints" / "best").exists()
    assert all(path.exists() for path in own)


def test_loss_that_is_not_finite_names_the_step_and_the_checkpoint_to_resume_from(
    error, tiny, tmp_path, monkeypatch
):
    """It does in step 6, after the checkpoint of step 4, and before a log line."""
    calls = []

    def spoil(optimizers):
        calls.append(optimizers)
        if len(calls) == 6:
            optimizers.parameters[0].grad.fill_(float("nan"))

    before_each(monkeypatch, Optimizers, "clip", spoil)
    line = error(tiny("--log-every 4"))
    assert line.startswith("error: step 6: not finite; at step 8 ")
    assert str(tmp_path / "run" / "checkpoints" / "step_00000004;") in line
    assert line.endswith(f" --resume {tmp_path / 'run'}\n")


def test_full_disk_while_writing_the_manifest(error, tiny, monkeypatch):
    no_space = OSError(28, "No space left on device")
    monkeypatch.setattr("fastgpt.run.manifest.write_atomically", mock.Mock(side_effect=no_space))
    assert "manifest.json" in (line := error(tiny()))
    assert line.startswith("error: no space left on the disk of ")


def test_a_full_disk_of_the_logs_ends_no_run(fit, monkeypatch, capsys):
    names = {"loss.png": 1, "samples.txt": 2, "metrics.jsonl": 11}

    def fails(*args, **options):
        if {getattr(path, "name", None) for path in args} & names.keys():
            raise OSError(28, "No space left on device")
        return open(*args, **options)

    for function in ("plot_losses", "open"):
        monkeypatch.setattr(f"fastgpt.logs.metrics.{function}", fails, raising=False)
    path = fit() / "metrics.jsonl"
    out = capsys.readouterr().out
    assert "done after step 8: " in out
    assert out.count(f"no space left on the disk of {path}") == out.count("no space left") == 1
    assert f"complete: {sum(names.values())} write" in out


def test_a_sample_that_the_terminal_cannot_show_ends_no_run(fit, text, monkeypatch):
    text.write_text(200 * "\u00e9t\u00e9 ", encoding="utf-8")
    screen = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    fit()
    screen.flush()
    assert b"--- sample ---\n?" in screen.buffer.getvalue()
