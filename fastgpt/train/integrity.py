"""Loss of a checkpoint's weights on a fixed batch: a run that is resumed must have the same."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastgpt.commands import installed
from fastgpt.device import device
from fastgpt.errors import UserError, brief
from fastgpt.evaluate.validation import mean_loss
from fastgpt.files import code_hash
from fastgpt.kernels import parity
from fastgpt.train.engine import Engine

PACKAGE = Path(__file__).parents[1]
MOST_COST = 0.01
"""Largest share of a run's computing that the losses of checkpoints take by default."""


def records_loss(engine: Engine) -> bool:
    """Returns True if checkpoints record the loss of their weights.

    They do if asked to, or for `auto` if that costs little: it is a forward; the steps between two
    checkpoints have as many, and backwards of twice the time.
    """
    config, asked = engine.config, engine.config.train.resume_check
    interval = min(every or config.steps for every in (config.eval_every, config.save_every))
    cheap = 1 / (3 * interval * engine.loader.accumulation) <= MOST_COST
    return asked == "on" or (asked == "auto" and cheap)


def own_loss(engine: Engine) -> dict[str, Any]:
    """Computes the loss of a model's weights on a fixed batch; a collective operation.

    The batch is one random sequence, equal in all rows. It depends on the vocabulary and the
    context alone, so that its mean loss is the same with any micro-batch and any data.

    Returns:
        dict[str, Any]: the `loss`, the `precision` it was computed in, and the `setup`, a hash of
        all that its bits depend on besides the weights.
    """
    config = engine.config
    drawn = np.random.RandomState(0).randint(0, config.model.vocab_size, config.model.context + 1)
    rows = torch.from_numpy(drawn.astype(np.int64)).repeat(engine.micro_batch, 1)
    engine.model.eval()
    loss, _ = mean_loss(
        engine.loss, [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())], world=engine.world,
        device=engine.device, autocast=engine.autocast(),
    )  # fmt: skip
    engine.model.train()
    facts = [
        torch.__version__, torch.backends.cpu.get_cpu_capability(),
        device.device_name(engine.device), engine.world.size, asdict(config.parallel),
        engine.micro_batch, engine.precision, config.train.tf32, engine.narrow_residual,
        engine.compiled, engine.model.ops.names, installed("triton"), code_hash(PACKAGE),
    ]  # fmt: skip
    setup = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    # TF32 rounds to as many bits as fp16
    in_tf32 = config.train.tf32 and engine.precision == "fp32"
    return {"loss": loss, "precision": "fp16" if in_tf32 else engine.precision, "setup": setup}


def check_recorded_loss(engine: Engine) -> None:
    """Compares the loss that a checkpoint recorded with that of the weights as they were loaded.

    Raises:
        UserError: with the same setup their bits differ; with another one more than
            `fastgpt.kernels.parity` allows in the coarser of both precisions.
    """
    code_hash(PACKAGE)  # now: it may be edited while the run goes on
    recorded, path = (engine.restored.state or {}).get("own_loss"), engine.restored.path
    if recorded is None or engine.config.train.resume_check == "off":
        return
    now = own_loss(engine)
    try:
        before, after = ({"loss": torch.tensor([x["loss"]]).double()} for x in (recorded, now))
        dtypes = [device.DTYPES[x["precision"]] for x in (recorded, now)]
        same = recorded["setup"] == now["setup"]
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} has a damaged own_loss: {brief(error)}") from error
    if same:
        wrong = recorded["loss"] != now["loss"]
        expected = "the same bits, with the same software, device and settings"
    else:
        model = engine.config.model
        longest = max(model.padded_vocab, engine.micro_batch * model.context)
        coarser = max(dtypes, key=lambda x: torch.finfo(x).eps)
        wrong = parity.complaints(after, before, before, coarser, longest)
        expected = f"less ({'; '.join(wrong)})"
    if wrong:
        raise UserError(
            f"{path}: its weights had a loss of {recorded['loss']!r} on a fixed batch when it was"
            f" written, and have {now['loss']!r} now; expected {expected}. This machine or version"
            " computes something else: resume an earlier checkpoint to compare, or go on with"
            " --train.resume-check off"
        )
