"""Silent corruption is noticed: by replicas of each other, and by the loss that a checkpoint has.

That sound runs pass both checks is shown in test_topologies and test_sharding.
"""

import json
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from fastgpt.checkpoint import checkpoint
from fastgpt.cli import parse
from fastgpt.errors import UserError
from fastgpt.files import sha256_of
from fastgpt.train.integrity import odd_ones, records_loss
from fastgpt.train.trainer import Trainer
from tests.runs import torchrun

FLIP = """
import os, torch, train
from fastgpt.train.engine import Engine
from fastgpt.parallel.fsdp import local_shard

step = Engine.train_step

def flipped(engine, stop=None):
    step(engine, stop)
    if engine.step == 3 and os.environ["RANK"] == os.environ["FAULTY"]:
        [weight] = [x for n, x in engine.model.named_parameters() if n == "h.0.mlp.c_fc.weight"]
        local_shard(weight.detach()).view(torch.int32)[0, 5] ^= 1

Engine.train_step = flipped
train.main()
"""


@pytest.mark.parametrize(
    ("kind", "ranks", "faulty", "said"),
    [
        ("ddp", 2, 1, "rank 1 against rank 0"),
        pytest.param("hsdp --parallel.shards 2", 4, 3, "rank 3 against r", marks=pytest.mark.slow),
    ],
)
def test_flipped_bit_is_named_by_rank_and_tensor(kind, ranks, faulty, said, tiny, tmp_path):
    (tmp_path / "flip.py").write_text(FLIP)
    flags = f"--parallel.kind {kind} --optim.kind adamw --train.verify-every 5 --steps 6"
    process = torchrun(
        ranks, str(tmp_path / "flip.py"), *tiny(flags), forks=True, FAULTY=str(faulty)
    )
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert f"error: step 4: the replicas of h.0.mlp.c_fc.weight differ, {said}" in err
    saved = checkpoint.steps_on_disk(tmp_path / "run" / "checkpoints")
    assert [path.name for path in saved] == [], "that of step 4 is checked before it is written"


UNREADABLE = """
import os, train
from fastgpt.checkpoint import tensors
from fastgpt.errors import UserError

def unpickle(path, **_):
    if os.environ["RANK"] == "1":
        raise UserError(f"{path} cannot be read: seeded fault")
    return read(path)

read, tensors.unpickle = tensors.unpickle, unpickle
train.main()
"""


def test_checkpoint_that_one_rank_alone_cannot_read_ends_all(fit, tiny, tmp_path):
    saved = fit("--steps 4") / "checkpoints" / "step_00000004"
    (tmp_path / "unreadable.py").write_text(UNREADABLE)
    process = torchrun(2, str(tmp_path / "unreadable.py"), *tiny(f"--resume {saved}"), forks=True)
    _, err = process.communicate(timeout=60)  # gloo would wait for half an hour
    assert "state.pt cannot be read: seeded fault; there is no valid one before it" in err


def test_most_ranks_are_right():
    for checksums, said in (
        ({0: 7, 1: 7}, ""), ({0: 7, 2: 8}, "rank 2 against rank 0, of which either may be wrong"),
        ({0: 8, 1: 7, 2: 7}, "rank 0 against rank 1, 2"), ({3: 1, 4: 2, 5: 1, 6: 9},
        "rank 4, 6 against rank 3, 5"),
    ):  # fmt: skip
        assert odd_ones(checksums) == said


@pytest.mark.parametrize(
    ("factor", "flags", "said"),
    [
        (1, "", None),
        (1, "--train.micro-batch 4", None),
        (1.001, "", "expected the same bits, with the same software"),
        (1.001, "--train.micro-batch 4", r"expected less \(loss .* > "),
        (1.001, "--train.resume-check off", None),
    ],
)
def test_resumed_weights_have_the_loss_that_was_recorded(factor, flags, said, fit, tiny):
    """A weight is changed with its checksum, as by a fault before the checkpoint was written."""
    run = fit("--steps 4 --train.resume-check on --optim.schedule constant")
    saved = run / "checkpoints" / "step_00000004"
    weights = load_file(saved / "model.safetensors")
    weights["wte.weight"] *= factor
    save_file(weights, saved / "model.safetensors")
    record = json.loads((saved / "checkpoint.json").read_text())
    record["sha256"]["model.safetensors"] = sha256_of(saved / "model.safetensors")
    (saved / "checkpoint.json").write_text(json.dumps(record))
    again = parse(tiny("--optim.schedule constant", flags, f"--resume {run}"))
    if said is None:
        Trainer(again).fit()
    else:
        with pytest.raises(UserError, match=rf"^{saved}: its weights had a loss of .*{said}"):
            Trainer(again)


@pytest.mark.parametrize(
    ("flags", "micro_steps", "recorded"),
    [
        ("--eval-every 34", 1, True),
        ("--eval-every 33", 1, False),
        ("--eval-every 0 --steps 100", 1, True),
        ("--eval-every 1000 --save-every 5", 1, False),
        ("--eval-every 1000 --save-every 5", 7, True),
        ("--eval-every 1 --train.resume-check on", 1, True),
        ("--eval-every 1000 --train.resume-check off", 1, False),
    ],
)
def test_loss_is_recorded_where_it_costs_under_a_hundredth(flags, micro_steps, recorded, tiny):
    loader = SimpleNamespace(accumulation=micro_steps)
    engine = SimpleNamespace(config=parse(tiny("--steps 1000", flags)), loader=loader)
    assert records_loss(engine) is recorded  # pyright: ignore[reportArgumentType]
