"""Silent corruption is noticed by the loss that a checkpoint has, and damage by all ranks."""

import json
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from fastgpt.cli import parse
from fastgpt.errors import UserError
from fastgpt.files import sha256_of
from fastgpt.train.integrity import records_loss
from fastgpt.train.trainer import Trainer
from tests.runs import torchrun

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
