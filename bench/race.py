"""Times whole training runs beside nanoGPT's: `python -m bench.race --nanogpt PATH`.

The time is a whole process's. nanoGPT runs its README's command for small computers on the same
text, and keeps its last checkpoint. Both losses are over all windows of the held-out text.
"""

import pickle
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from bench import records, report
from bench.measure import quantiles, time_process
from fastgpt import flags
from fastgpt.cli import configure
from fastgpt.convert import source
from fastgpt.data.preparation import open_corpus
from fastgpt.errors import UserError, run_command
from fastgpt.evaluate.text import score_text
from fastgpt.logs.metrics import read_records

NANOGPT = """train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20
    --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128
    --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0 --always_save_checkpoint=True"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """Runs recipes and nanoGPT's example for small computers in turn, as whole processes."""

    nanogpt: Path
    """Path of a nanoGPT checkout; a copy of it is run."""
    recipes: tuple[str, ...] = ("shakespeare-cpu", "shakespeare-cpu-adamw")
    """Recipes to run; flags may follow the name, as in "shakespeare-cpu --steps 200"."""
    rounds: int = 3
    """Number of runs of each."""

    def __post_init__(self) -> None:
        if not (self.nanogpt / "train.py").exists():
            raise UserError(f"--nanogpt {self.nanogpt}: expected nanoGPT, found no train.py")
        for recipe in self.recipes:
            configure(recipe.split())


def run(race: Race) -> Iterator[records.Record]:
    """Yields nanoGPT's and fastgpt's record for each recipe."""
    runs = {(name, who): [] for name in race.recipes for who in ("nanogpt", "fastgpt")}
    with tempfile.TemporaryDirectory() as folder:
        corpus = open_corpus("shakespeare", tokenizer="chars", val_fraction=0.1)
        copy = shutil.copytree(race.nanogpt, Path(folder, "nanogpt"))
        data = copy / "data" / "shakespeare_char"
        corpus.train[:].tofile(data / "train.bin")
        corpus.val[:].tofile(data / "val.bin")
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": corpus.tokenizer.vocab_size}))
        how = {"batch": 64, "device": "cpu", "autocast": nullcontext(), "report": str}
        for _ in range(race.rounds):
            seconds, _ = time_process("nanoGPT", *NANOGPT.split(), cwd=copy)
            model = source.read(str(copy / "out-shakespeare-char" / "ckpt.pt")).build_gpt()
            loss = score_text(model, corpus.val[:], None, **how)[0]["loss"]
            for name in race.recipes:
                runs[name, "nanogpt"].append((seconds, loss))
                run_dir = tempfile.mkdtemp(dir=folder)
                ours, _ = time_process(name, "train.py", *name.split(), "--run-dir", run_dir)
                log = read_records(Path(run_dir, "metrics.jsonl"))
                losses = [row["val_loss"] for row in log if "val_loss" in row]
                runs[name, "fastgpt"].append((ours, losses[-1]))
    for (name, who), found in runs.items():
        numbers = ([round(x, 4) for x in column] for column in zip(*found))
        more = dict(zip(("seconds", "val_loss"), numbers))
        yield records.record(f"race/{name}", who, quantiles(more["seconds"]), **more)


def main(argv: list[str]) -> None:
    rows = [*run(flags.command(Race, argv, prog="python -m bench.race"))]
    keys = ("case", "implementation", "seconds", "val_loss")
    report.show("|".join(keys), ([str(row[key]) for key in keys] for row in rows))
    print(records.Writer("cpu").write(*rows))


if __name__ == "__main__":
    run_command(main)
