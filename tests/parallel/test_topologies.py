"""Random small configurations: 50 steps on several ranks, or 10, have the losses of one rank."""

import random

import pytest

from tests.data.sets import prepared, texts
from tests.processes import Ranks
from tests.runs import series

TRAIN = (
    ("--optim.kind adamw", "--optim.kind muon"), ("--model.num-layers 2", "--model.num-layers 1"),
    ("--train.micro-batch 3", "--train.micro-batch 8"), ("--model.no-tied", "--model.tied"),
    ("--data.align document", "--data.align none"), ("--optim.grad-clip 0.1", ""),
    ("--model.document-mask", "--model.no-document-mask"),
    ("--train.recompute full", "--train.recompute selective", "--train.recompute none"),
)  # fmt: skip
MODELS = (
    "", "--model.norm rmsnorm", "--model.bias False", "--model.ffn-dim 40", "--model.softcap 3",
    "--model.num-kv-heads 2", "--model.window 3", "--model.position none",
    "--model.norm post-layernorm --model.activation relu --model.position sinusoidal",
    "--model.norm rmsnorm --model.bias False --model.activation swiglu --model.position rotary"
    " --model.window 5 --model.num-kv-heads 2 --model.qk-norm True --model.softcap 15",
)  # fmt: skip
FSDP, HSDP = "--parallel.kind fsdp", "--parallel.kind hsdp --parallel.shards 2"
CP, TP = "--parallel.cp 2", f"{FSDP} --parallel.tp 2"
KINDS = {
    2: (TP, "", CP, FSDP, TP), 3: (FSDP,),
    4: (HSDP, f"{FSDP} {CP}", TP, f"{TP} {CP}"),
}  # fmt: skip


def examples(size: int, count: int) -> list[tuple[str, str]]:
    """Draws settings for each kind of parallelism: (flags, flags of the kind)."""
    draw, kinds = random.Random(size), KINDS[size]
    return [
        (" ".join(map(draw.choice, (MODELS, *TRAIN))), kinds[number % len(kinds)])
        for number in range(count)
    ]


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
