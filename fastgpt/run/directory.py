"""Run directories: finding, creating, opening and resuming them."""

import itertools
import math
import time
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path

from fastgpt.checkpoint import checkpoint
from fastgpt.checkpoint.checkpoint import Checkpoint
from fastgpt.commands import resume_command
from fastgpt.config.checks import flag
from fastgpt.config.config import Config, to_json
from fastgpt.config.saved import saved_config
from fastgpt.data.tokenizers import Tokenizer, load_tokenizer, same_tokenizer
from fastgpt.errors import UserError, writing
from fastgpt.files import write_atomically

ROOT = Path("runs")


def find_run(resume: str, run_dir: Path | None, recipe: str) -> tuple[Path, Path] | None:
    """Finds the run to resume, and the path to load it from: a checkpoint's, or the run's.

    Args:
        resume: `auto`, or the path of a run or of a checkpoint.
        run_dir: directory where `auto` looks; None: the newest run of `recipe`.

    Returns:
        tuple[Path, Path] | None: None if `auto` finds no run, so that a new one starts.

    Raises:
        UserError: the path given is neither a run nor a checkpoint.
    """
    if resume == "auto":
        runs = [run_dir] if run_dir else sorted(ROOT.glob(f"{recipe}-2*"), reverse=True)
        found = next((path for path in runs if is_run(path)), None)
        return None if found is None else (found, found)
    path = Path(resume)
    if checkpoint.is_checkpoint(path):
        return path.absolute().parent.parent, path
    if is_run(path):
        return path, path
    what = "is neither a run nor a checkpoint" if path.exists() else "does not exist"
    raise UserError(f"--resume {resume} {what}: expected auto, or the path of a run or checkpoint")


def begins_again(path: Path) -> bool:
    """Returns True if `path` is a run without a checkpoint, which starts from its first step."""
    return is_run(path) and not checkpoint.steps_on_disk(path / "checkpoints")


def resumes(resume: str) -> bool:
    """Returns True if `resume` stands for a checkpoint; False for a run that has none yet."""
    return resume != "auto" and not begins_again(Path(resume))  # `auto` that found no run


def is_run(path: Path) -> bool:
    """Returns True if `path` is a run's directory, even of a run without a checkpoint."""
    return (path / "config.json").exists() and (path / "checkpoints").is_dir()


def new_run_dir(recipe: str) -> Path:
    """Returns a new path for a run of `recipe`, where nothing exists yet."""
    stem = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if i == 1 else f"{stem}-{i}" for i in itertools.count(1))
    return next(ROOT / name for name in names if not (ROOT / name).exists())


def open_run_dir(path: Path, config: Config, step: int, ranks: int = 1) -> str | None:
    """Creates the directory of a new run, or reopens that of a run resumed at `step`.

    Returns:
        str | None: a warning if the run has to start again from its first step.

    Raises:
        UserError: the directory holds another run, or cannot be written.
    """
    if (path / "config.json").exists() and not _goes_on(config.resume, path):
        raise UserError(
            f"{path} holds a run already: pass another --run-dir; to resume that run:"
            f" {resume_command(path, ranks)}"
        )
    again = begins_again(path)
    with writing(path):
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        checkpoint.set_aside_after(path / "checkpoints", step)
        kept = _set_log_aside(path) if again else ""
        write_atomically(path / "config.json", to_json(config).encode())
    return f"{path} has no checkpoint yet: starting from its first step{kept}" if again else None


def _set_log_aside(path: Path) -> str:
    """Moves the logs of a run to `abandoned_N`, and returns a clause that says so."""
    logs = ("metrics.jsonl", "samples.txt", "loss.png", "events.out.tfevents.*")
    files = [file for pattern in logs for file in path.glob(pattern)]
    if not files:
        return ""
    names = (path / f"abandoned_{i}" for i in itertools.count(1))
    aside = next(folder for folder in names if not folder.exists())
    aside.mkdir()
    for file in files:
        file.rename(aside / file.name)
    return f"; its earlier logs are kept in {aside}"


def _goes_on(resume: str | None, run_dir: Path) -> bool:
    """Returns True if `resume` is a path in this run, or still `auto`, which found no run."""
    if resume == "auto":
        return True
    return resume is not None and Path(resume).resolve().is_relative_to(run_dir.resolve())


def way_back(path: Path, ranks: int) -> str:
    """Returns a clause for error messages: a run's newest checkpoint and the command to resume."""
    if not is_run(path):
        return "nothing is left there to resume"
    saved = checkpoint.steps_on_disk(path / "checkpoints")
    found = f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
    return f"{found}; to resume: {resume_command(path, ranks)}"


def with_vocabulary(config: Config, tokenizer: Tokenizer) -> Config:
    """Fills in the size of the vocabulary, and the end-of-text token for a document mask.

    The vocabulary has as many tokens as the tokenizer, unless `config` asks for more.

    Raises:
        UserError: `config` asks for fewer, or the mask needs an end-of-text token that is missing.
    """
    asked, needed = config.model.vocab_size, tokenizer.vocab_size
    if asked is not None and asked < needed:
        raise UserError(
            f"--model.vocab-size is {asked}: the {tokenizer.kind} tokenizer needs at least {needed}"
        )
    eot_id = tokenizer.eot_id if config.model.document_mask else None
    if config.model.document_mask and eot_id is None:
        raise UserError(
            f"--model.document-mask: the {tokenizer.kind} tokenizer has no end-of-text token to"
            " tell documents apart: use another tokenizer, for example gpt2"
        )
    model = replace(config.model, vocab_size=asked or needed, eot_id=eot_id)
    return replace(config, model=model)


def with_epochs(config: Config, samples: int) -> Config:
    """Converts lengths given in epochs of `samples` samples into steps, rounded up."""
    per_step = config.global_batch

    def steps(epochs: float | None, given: int) -> int:
        return given if epochs is None else math.ceil(epochs * samples / per_step)

    return replace(
        config,
        steps=steps(config.epochs, config.steps),
        eval_every=steps(config.eval_epochs, config.eval_every),
    )


def check_same(saved: Checkpoint, config: Config, tokenizer: Tokenizer) -> None:
    """Raises `UserError` if tokenizer, model, optimizer, data order or seed differ from `saved`."""
    kept = load_tokenizer(saved.path / "tokenizer.json")
    if not same_tokenizer(kept, tokenizer):
        raise UserError(
            f"checkpoint {saved.path} and the data have different vocabularies: {kept.kind} with "
            f"{kept.vocab_size} tokens in the checkpoint, {tokenizer.kind} with "
            f"{tokenizer.vocab_size} in the data; with equal numbers, some tokens differ"
        )
    before = saved_config(saved.path)
    kept = ("optim.kind", "data.val_fraction", "data.sampling", "data.align", "seed")
    for name in (*(f"model.{field}" for field in asdict(config.model)), *kept):
        old, new = (attrgetter(name)(settings) for settings in (before, config))
        if old != new:
            raise UserError(f"{flag(name)} is {new}: expected {old}, as in checkpoint {saved.path}")


def check_step(config: Config, step: int, path: Path) -> None:
    """Raises `UserError` if the checkpoint `path`, of `step`, is beyond the run's last step."""
    if step > config.steps:
        asked = "--steps" if config.epochs is None else f"--epochs {config.epochs} in steps"
        raise UserError(f"{asked} is {config.steps}: {path} is already at step {step}")
