"""Random small configurations: 50 steps on several ranks, or 10, have the losses of one rank."""

import random

import pytest

from fastgpt.config.checks import flag
from tests.data.sets import prepared, texts
from tests.models import OPTIONS
from tests.processes import Ranks
from tests.runs import series

TRAIN = {
    "optim.kind": ("adamw", "muon"), "model.num_layers": (2, 1), "train.micro_batch": (3, 8),
    "data.align": ("document", "none"), "model.document_mask": (True, False),
    "model.tied": (False, True), "optim.grad_clip": (0.1, 1.0),
    "train.recompute": ("full", "selective", "none"),
}  # fmt: skip
FSDP, HSDP = "--parallel.kind fsdp", "--parallel.kind hsdp --parallel.shards 2"
CP, TP = "--parallel.cp 2", f"{FSDP} --parallel.tp 2"
KINDS = {
    2: (TP, "", CP, FSDP, TP), 3: (FSDP,),
    4: (HSDP, f"{FSDP} {CP}", TP, f"{TP} {CP}"),
}  # fmt: skip


def as_flags(given) -> str:
    """Writes settings as on the command line."""
    found = []
    for name, value in given.items():
        if isinstance(value, bool) and name not in ("model.qk_norm", "model.bias"):
            group, _, last = name.partition(".")
            name, value = (name if value else f"{group}.no_{last}"), ""
        found.append(f"{flag(name)} {value}".strip())
    return " ".join(found)


def examples(size: int, count: int) -> list[tuple[str, str]]:
    """Draws settings for each kind of parallelism: (flags, flags of the kind)."""
    draw, found = random.Random(size), []
    for number in range(count):
        kind = KINDS[size][number % len(KINDS[size])]
        refused = ("untied", "one-kv-head" if "tp 2" in kind else "")
        options = draw.choice([x for name, x in OPTIONS.items() if name not in refused])
        drawn = {name: draw.choice(values) for name, values in TRAIN.items()}
        drawn |= {f"model.{name}": value for name, value in options.items()}
        found.append((as_flags(drawn), kind))
    return found


QUICK, LONG = ((2, 3, 10), (4, 1, 10)), ((2, 6, 50), (3, 2, 50), (4, 4, 50))


@pytest.mark.parametrize(
    ("size", "count", "steps"),
    [*QUICK, *(pytest.param(*x, marks=pytest.mark.slow) for x in LONG)],
)
def test_losses_do_not_depend_on_the_ranks(size, count, steps, fit, tiny, tmp_path):
    """Relative: 1e-5 after 50 steps; with Muon, whose bf16 products enlarge roundings, 1e-3."""
    always = f"--data.source {prepared(tmp_path / 'data', texts(60))} --steps {steps}"
    always += f" --eval-every {steps // 2} --optim.lr 1e-3 --train.batch-tokens 192"
    always += " --train.sample-tokens 20 --model.num-heads 4"
    drawn = examples(size, count)
    runs = [tmp_path / f"{number}" for number in range(len(drawn))]
    with Ranks(size) as several:
        argvs = [tiny(always, *both, f"--run-dir {run}") for both, run in zip(drawn, runs)]
        several.train(*argvs, timeout=400)
    for (more, _), run in zip(drawn, runs):
        one = fit(always, more, f"--run-dir {run}-one")
        for key in ("train_loss", "val_loss"):
            found, expected = (series(x, key) for x in (run, one))
            assert len(found) >= 3
            assert found == pytest.approx(expected, rel=1e-5 if "adamw" in more else 1e-3), more
        if "adamw" in more:  # samples longer than the context of 16, by one rank or by all
            found, expected = ((x / "samples.txt").read_text() for x in (run, one))
            assert found == expected
