"""Wrong input gets one line that says what was given and expected."""

import json
import shlex
import sys
from unittest import mock

import numpy as np
import pytest
import torch

import train
from fastgpt import flags, prepare
from fastgpt.cli import configure
from fastgpt.train.optim import Optimizers
from tests.data.sets import write_shard
from tests.runs import before_each, one_line_error
from tests.warm import warm


@pytest.fixture
def error(monkeypatch, capfd):
    """Runs train.py's `main`, which must fail with one line on stderr; returns that line."""

    def run(argv):
        monkeypatch.setattr(sys, "argv", ["train.py", *argv])
        return one_line_error(capfd, train.main)

    return run


def test_process_fails_with_one_line_and_no_traceback(tiny, tmp_path):
    missing = tmp_path / "nowhere.txt"
    done = warm().run("train.py", *tiny(f"--data.source {missing}"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert str(missing) in done.stderr
    assert not (tmp_path / "run").exists()


def test_torchrun_is_given_the_line_to_end_its_own_report_with(error, tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    line = error(["babby"]).rstrip()
    message = json.loads(path.read_text())["message"]
    assert (message["message"], message["extraInfo"]["py_callstack"]) == (line, line)


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "empty"), ("0123456789abcde", "one window"), ("x", "nothing to train on")],
)
def test_corpus_that_cannot_be_trained_on(error, tiny, text, content, said):
    text.write_text(content)
    assert said in error(tiny())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("babby", ("unknown recipe 'babby'; did you mean 'baby'?",)),
        ("qqqq", ("unknown recipe 'qqqq' (expected one of 'baby', ", ", --config FILE)")),
        ("baby --model.num-layer 4", ("unknown flag '--model.num-layer'; did", "num-layers'?")),
        ("baby --lr 4", ("unknown flag '--lr'; did you mean '--optim.lr'?",)),
        ("baby --zzz 4", ("unknown flag '--zzz' (--help lists them)",)),
        ("gpt2", ("did you mean 'gpt2-124m'?",)),
        ("baby shakespeare-cpu", ("unexpected 'shakespeare-cpu': expected one recipe, then",)),
        ("--steps 3 baby", ("unexpected 'baby': expected one recipe, then flags",)),
        (
            "--batch_size 3 --n_head=4",
            ("--batch-size is --train.micro-batch, --n-head is --model",),
        ),
        ("baby --config", ("--config has no value: expected a file",)),
        ("baby --max-iters 3", ("--max-iters is --steps\n",)),
        ("baby --model.num-heads 3", ("--model.dim is 128", "multiple", "3")),
        ("baby --model.num-heads 4 --model.num-kv-heads 3", ("--model.num-heads is 4", "3")),
        ("baby --model.dim 0", ("--model.dim is 0",)),
        ("lecture-head --model.num-layers 0", ("--model.num-layers is 0",)),
        ("lecture-gpt --model.tied", ("embedding has none: pass --model.no-tied",)),
        ("baby --train.batch-tokens 1000", ("--train.batch-tokens is 1000", "context, 256")),
        ("baby --train.sample-tokens 268435457", ("--train.sample-tokens is 268435457: expected",)),
        ("baby --train.z-loss=-1e-4", ("--train.z-loss is -0.0001: expected 0 or more",)),
        ("baby --train.z-loss nan", ("--train.z-loss is nan: expected 0 or more",)),
        ("baby --steps 9223372036854775808", ("--steps is 9223372036854775808: expected 0",)),
        (f"baby --seed {2**70}", ("--seed is 1180591620717411303424: expected 0 to",)),
        ("baby --epochs 0", ("--epochs is 0",)),
        ("lecture-gpt --data.align document", ("--data.sampling is lecture, whose",)),
        ("baby --data.source builtin --model.vocab-size 100", ("100", "256")),
        ("baby --data.tokenizer byts", ("'byts'", "'bytes'")),
        ("baby --data.source ''", ("the source is empty",)),
        (f"baby --data.source {'x' * 5000}", ("File name too long",)),
        ("baby --data.source .", ("source '.' is empty",)),
        ("baby --data.source no.txt", ("'no.txt': no such file or folder (train.py: --data.so",)),
        ("baby --run-dir ''", ("--run-dir is the current directory",)),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_wrong_recipe_field_or_value(error, argv, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = error(shlex.split(argv))
    assert [part for part in said if part not in line] == [], line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--steps many", "--steps is 'many': expected an integer"),
        ("--optim.lr=1%", "--optim.lr is '1%': expected a number"),
        ("--epochs some", "--epochs is ['some']: expected a number or None"),
        ("--optim.kind sgd", "--optim.kind is 'sgd': expected adamw or muon"),
        (
            "--train.compile false",
            "--train.compile is 'false': expected auto or on or off or graphs",
        ),
        ("--seed 1 --steps", "--steps has no value: expected an integer"),
        ("--resume", "--resume has no value: expected text or None"),
        ("--steps 3 4", "unexpected '4': expected one recipe, then flags"),
        ("--model.no-tied x", "unexpected 'x' after --model.no-tied, which takes no value"),
        ("--model.tied=3", "unexpected '3' after --model.tied, which takes no value"),
        ("--steps \"it's: from '7'.\"", "--steps is \"it's: from '7'.\": expected an integer"),
    ],
)
def test_a_wrong_or_missing_value_is_named_with_what_was_expected(error, argv, said):
    assert error(["baby", *shlex.split(argv)]).startswith(f"error: {said}")


def test_a_wrong_flag_of_a_function_such_as_an_example_is_one_line(capsys, monkeypatch):
    def main(steps: int = 3) -> None:
        print(steps)

    monkeypatch.setattr(sys, "argv", ["example.py", "--steps", "x"])
    said = "error: --steps is 'x': expected an integer\n"
    assert one_line_error(capsys, flags.run, main) == said


def test_missing_arguments_are_named(capsys):
    line = one_line_error(capsys, prepare.main, [])
    assert line == "error: missing: SOURCE, --out (see python -m fastgpt.prepare --help)\n"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--train.device cuda", ("sees no CUDA device", "--train.device cpu")),
        ("--train.precision fp16", ("fp16",)),
        ("--train.residual bf16", ("expected --train.precision bf16, which is fp32 here",)),
        (
            "--train.compile graphs",
            ("--train.compile is graphs: expected one rank on CUDA, got 1 on",),
        ),
    ],
)
def test_what_cannot_run_here_or_on_this_text(error, tiny, tmp_path, monkeypatch, flags, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = error([*tiny(), *shlex.split(flags)])
    assert [part for part in said if part not in line] == [], line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# --- checkpoints and run directories --------------------------------------------------------------


def test_run_directory_that_holds_a_run(error, fit, tiny):
    run = fit("--steps 1")
    before = (run / "metrics.jsonl").read_bytes()
    line = error(tiny())
    assert f"{run} holds a run already" in line
    assert line.endswith(f"train.py --resume {run}\n")
    assert (run / "metrics.jsonl").read_bytes() == before


def test_fork_into_a_directory_that_holds_another_run(error, fit, tiny, tmp_path):
    run, other = fit(), fit(f"--run-dir {tmp_path / 'other'}")
    before = sorted(path.name for path in (other / "checkpoints").iterdir())
    source = run / "checkpoints" / "step_00000004"
    assert str(other) in error(tiny(f"--resume {source} --run-dir {other}"))
    assert sorted(path.name for path in (other / "checkpoints").iterdir()) == before


@pytest.mark.parametrize("place", ["run", "run/inner"])
def test_run_directory_that_cannot_be_made(error, tiny, tmp_path, place):
    """A run directory that cannot be created gets an error that names it.

    Root may write anywhere, so a file stands where the folder would be.
    """
    (tmp_path / "run").write_text("")
    assert str(tmp_path / place) in error(tiny(f"--run-dir {tmp_path / place}"))


@pytest.mark.parametrize("where", ["nowhere", "run", "run/checkpoints"])
def test_resume_from_what_is_no_run(error, tiny, tmp_path, where):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert str(tmp_path / where) in error(tiny(f"--resume {tmp_path / where}"))


def test_resume_from_a_run_of_another_recipe(error, fit, tiny):
    run = fit("--steps 1")
    line = error(["shakespeare-cpu", *tiny(f"--resume {run}")[1:]])
    assert "'baby'" in line
    assert "'shakespeare-cpu'" in line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--data.tokenizer chars", "different vocabularies"),
        ("--model.context 32", "--model.context is 32: expected 16"),
        ("--model.activation relu", "--model.activation is relu: expected gelu_tanh"),
        ("--optim.kind adamw", "--optim.kind is adamw: expected muon"),
        ("--data.val-fraction 0.2", "--data.val-fraction is 0.2: expected 0.1"),
        ("--data.sampling random-windows", "--data.sampling is random-windows: expected epoch"),
        ("--seed 2", "--seed is 2: expected 1337"),
        ("--steps 2", "--steps is 2: "),
        ("--epochs 0.25", "--epochs 0.25 in steps is 2: "),
    ],
)
def test_what_a_resume_cannot_change(error, fit, flags, said):
    run = fit("--steps 4")
    line = error(["--resume", str(run), *flags.split()])
    assert said in line
    assert str(run / "checkpoints" / "step_00000004") in line


def test_other_characters_under_the_same_number(error, fit, tiny, text):
    """Resuming on a text with other characters is refused, even if their number is the same."""
    flags = "--data.tokenizer chars --steps 1"
    fit(flags)
    text.write_text(text.read_text().replace("m", "x"))
    assert "different vocabularies" in error(tiny(flags, "--resume auto"))


def test_damaged_config_of_a_run(error, fit, tiny):
    run = fit("--steps 1")
    (run / "config.json").write_text("{")
    assert str(run / "config.json") in error(tiny("--resume auto"))


# --- while it trains ------------------------------------------------------------------------------


def test_loss_that_is_not_finite_names_step_tensor_and_checkpoint(
    error, tiny, tmp_path, monkeypatch
):
    """A loss that is not finite is reported with step, tensor and last good checkpoint.

    One gradient turns NaN in step 6, after the checkpoint of step 4.
    """
    calls = []

    def spoil(optimizers):
        calls.append(optimizers)
        if len(calls) == 6:
            [matrix] = [p for p in optimizers.parameters if p.shape == (128, 32)]
            matrix.grad[5, 7] = float("nan")

    before_each(monkeypatch, Optimizers, "clip", spoil)
    line = error(tiny("--log-every 4"))
    # found at the log of step 8, when all gradients and weights are NaN: where it began is said
    assert line.startswith("error: step 6: not finite; at step 8 the training loss is nan")
    assert "not finite: the gradient of h.0.mlp.c_fc.weight; " in line
    good = tmp_path / "run" / "checkpoints" / "step_00000004"
    assert f"; the last good checkpoint is {good}; to resume: {sys.executable} /" in line
    assert line.endswith(f" --resume {tmp_path / 'run'}\n")


def test_full_disk_while_writing_the_manifest(error, tiny, monkeypatch):
    no_space = OSError(28, "No space left on device")
    monkeypatch.setattr("fastgpt.run.manifest.write_atomically", mock.Mock(side_effect=no_space))
    assert "manifest.json" in (line := error(tiny()))
    assert line.startswith("error: no space left on the disk of ")


@pytest.mark.parametrize(
    ("function", "name", "lost"),
    [("plot_losses", "loss.png", 1), ("open", "samples.txt", 2), ("open", "metrics.jsonl", 11)],
)
def test_full_disk_while_drawing_the_curves_or_writing_a_log_ends_no_run(
    function, name, lost, fit, monkeypatch, capsys
):
    def fails(*args, **options):
        if name in [getattr(path, "name", None) for path in args]:
            raise OSError(28, "No space left on device")
        return open(*args, **options)

    monkeypatch.setattr(f"fastgpt.logs.metrics.{function}", fails, raising=False)
    path = fit() / name
    out = capsys.readouterr().out
    assert "done after step 8: " in out
    assert out.count(f"written (no space left on the disk of {path}): training") == 1
    assert f"complete: {lost} write" in out


# --- resuming, damaged or confused ----------------------------------------------------------------


def test_files_of_others_among_the_checkpoints_are_left_alone(fit, tmp_path):
    run = fit("--steps 4")
    own = [run / "checkpoints" / name for name in (".DS_Store", "step_00000004_backup", "step_9")]
    own[0].touch()
    for path in own[1:]:
        path.mkdir()
    fit("--resume auto --steps 12 --train.keep-checkpoints 1")
    assert all(path.exists() for path in own)


def test_damaged_best_does_not_stop_a_resume(fit):
    run = fit("--steps 4")
    record = run / "checkpoints" / "best" / "checkpoint.json"
    record.unlink()  # a hard link: what is written into it would show in the other folder, too
    record.write_text("[]")
    fit("--resume auto")
    assert (run / "abandoned_1" / "checkpoints" / "best").exists()


def test_flags_of_a_resume_are_checked_against_the_run(fit, tmp_path):
    """Flags given with --resume are checked against the run's settings, not the recipe's.

    96 tokens are 6 windows of the run's context, but no multiple of the recipe's.
    """
    run = fit("--steps 4")
    config = configure(["--resume", str(run), "--train.batch-tokens", "96"])
    assert config.global_batch == 6


def test_shards_without_their_manifest_are_not_taken_for_text(error, tiny, tmp_path):
    folder = tmp_path / "prepared"
    folder.mkdir()
    (folder / "train_000000.bin").write_bytes(b"x" * 2000)
    assert "no *val*.bin" in error(tiny("--data.source", str(folder)))
    (folder / "val_000000.bin").write_bytes(b"x" * 2000)
    line = error(tiny("--data.source", str(folder)))
    assert "train_000000.bin: not a token shard: magic" in line


def test_one_held_out_token_is_too_few_and_nothing_is_left_behind(error, tiny, tmp_path):
    (tmp_path / "short.txt").write_text("0123456789" * 2)
    line = error(tiny("--data.source", str(tmp_path / "short.txt"), "--data.val-fraction 0.05"))
    assert "leaves nothing to validate on" in line
    for split, count in (("train", 20), ("val", 1)):
        write_shard(tmp_path / f"{split}_000000.bin", np.arange(count))
    line = error(tiny("--data.source", str(tmp_path), "--data.tokenizer bytes"))
    assert "1 token held out" in line
    line = error(tiny("--data.sampling lecture --data.val-fraction 0.02"))
    assert "15 tokens held out, expected at least 17" in line
    assert not (tmp_path / "run").exists()


def test_a_sample_that_the_terminal_cannot_show_ends_no_run(tiny, text):
    text.write_text(200 * "\u00e9t\u00e9 ", encoding="utf-8")
    argv = ["train.py", *tiny()]
    out = warm().run(*argv, PYTHONIOENCODING="ascii")
    assert out.returncode == 0, out.stderr
    assert "?" in out.stdout
