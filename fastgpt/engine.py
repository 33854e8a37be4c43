"""What computes: device, data, model, optimizers, and one training step over all ranks.

The step is forward only: batches come from the loader, losses and norms stay on the device, and
nothing waits for it but `Engine.finite_loss`, once a log interval.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastgpt import checkpoint, device, distributed, ops, run
from fastgpt.config import Config
from fastgpt.corpus import Corpus, open_corpus
from fastgpt.errors import UserError
from fastgpt.evaluate import validation_loss
from fastgpt.loader import Loader
from fastgpt.metrics import flops_per_token
from fastgpt.model import GPT
from fastgpt.optim import Optimizers
from fastgpt.schedule import lr_ratio


class Engine:
    """Everything a step needs, as this rank sees it; where `config.resume` says, from a checkpoint.

    Args:
        config: from `fastgpt.cli.parse`.
        warn: is told, in a line each, what a person should know.

    Raises:
        UserError: for whatever in the config, the data or the checkpoint cannot work.
    """

    def __init__(self, config: Config, warn: Callable[[str], None] = print) -> None:
        self.device = device.pick_device(config.train.device)
        self.world = distributed.start(self.device)
        self.precision = device.pick_precision(config.train.precision, self.device)
        self.compiled, note = device.pick_compile(config.train.compile, self.device)
        self.warn = warn if self.world.is_main else _say_nothing
        if note:
            self.warn(note)
        if config.train.tf32:
            torch.set_float32_matmul_precision("high")
        self.corpus = self._open_corpus(config)
        self.config = run.with_vocabulary(config, self.corpus.tokenizer)
        self.flops_per_token = flops_per_token(self.config.model)
        self._build_model()
        self.step, self.lr = 0, 0.0
        self.train_loss = self.grad_norm = torch.zeros((), device=self.device)
        self._open_loader(self._restore())

    def _open_corpus(self, config: Config) -> Corpus:
        source = run.resolve_source(config.data.source, self.warn)
        arguments = {"tokenizer": config.data.tokenizer, "val_fraction": config.data.val_fraction}
        if self.world.is_main:
            open_corpus(source, **arguments)  # downloaded and prepared by one, read by all
        self.world.barrier()
        return open_corpus(source, **arguments)

    def _build_model(self) -> None:
        config = self.config
        self.ops = ops.select(config.ops, self.device, compiled=self.compiled)
        torch.manual_seed(config.seed)
        self.model = GPT(config.model, self.ops).to(self.device)
        scaler = torch.amp.GradScaler(self.device, enabled=self.precision == "fp16")
        self.optimizers = Optimizers(self.model, config.optim, scaler)
        self.loss: Callable[..., Tensor] = self.model
        if self.compiled:
            # training and evaluation batches have one shape, so one graph each is all there ever is
            self.loss = torch.compile(self.model, fullgraph=True, dynamic=False)
        self.replica = None
        if self.world.size > 1:
            module = cast(nn.Module, self.loss)
            self.replica = DistributedDataParallel(module, gradient_as_bucket_view=True)

    def _restore(self) -> dict[str, int]:
        """Loads what `config.resume` names; the loader's state."""
        if self.config.resume is None:
            return {"epoch": 0, "index": 0}
        found, complaints = checkpoint.find(self.config.resume)
        for complaint in complaints:
            self.warn(f"{complaint}; the one before it is used")
        run.check_same(found, self.config, self.corpus.tokenizer)
        self.model.load_state_dict(found.weights)
        self.optimizers.load_state_dict(found.state["optimizers"])
        self.step = found.step
        if found.state["corpus"] != self.corpus.sha256:
            self.warn(
                f"{found.path} was trained on other text ({found.state['corpus'][:12]}): "
                f"this one ({self.corpus.sha256[:12]}) is read from its start"
            )
            return {"epoch": 0, "index": 0}
        return found.state["loader"]

    def _open_loader(self, state: dict[str, int]) -> None:
        config, ranks = self.config, self.world.size
        if config.global_batch % ranks:
            raise UserError(
                f"train.batch_tokens is {config.train.batch_tokens}: {config.global_batch} "
                f"sequences of {config.model.context}, expected a multiple of the {ranks} ranks"
            )
        share = config.global_batch // ranks
        most = min(share, config.train.micro_batch)
        self.micro_batch = next(size for size in range(most, 0, -1) if share % size == 0)
        self.loader = Loader(
            self.corpus.train,
            context=config.model.context,
            global_batch=config.global_batch,
            micro_batch=self.micro_batch,
            rank=self.world.rank,
            world_size=ranks,
            seed=config.seed,
            sampling=config.data.sampling,
            device=self.device,
            **state,
        )

    # --- the step ---------------------------------------------------------------------------------

    def train_step(self) -> None:
        """One optimizer step on the next global batch; sets `train_loss`, `grad_norm` and `lr`."""
        torch.manual_seed(_dropout_seed(self.config.seed, self.step, self.world.rank))
        self.optimizers.zero_grad()
        micro_steps = self.loader.accumulation
        total = torch.zeros((), device=self.device)
        for micro_step in range(micro_steps):
            x, y = self.loader.next()
            # Not synced before the last micro-step. DDP decides in its forward, so the forward is
            # inside: around the backward alone, gradients would silently go unsynced.
            last = micro_step == micro_steps - 1
            quiet = nullcontext() if self.replica is None or last else self.replica.no_sync()
            with quiet:
                with self.autocast():
                    loss = (self.replica or self.loss)(x, y) / micro_steps
                self.optimizers.scaler.scale(loss).backward()
            total += loss.detach()
        ratio = lr_ratio(self.step, self.config.steps, self.config.optim)
        self.grad_norm = self.optimizers.step(ratio)
        self.train_loss = self.world.average(total)
        self.lr = self.config.optim.lr * ratio
        self.step += 1

    def autocast(self) -> AbstractContextManager:
        """Around every forward."""
        return device.autocast(self.device, self.precision)

    def validation(self, max_tokens: int) -> tuple[float, int]:
        """(mean loss in nats, targets scored); see `validation_loss`."""
        self.model.eval()
        result = validation_loss(
            self.loss,
            self.corpus.val,
            context=self.config.model.context,
            micro_batch=self.micro_batch,
            max_tokens=max_tokens,
            world=self.world,
            device=self.device,
            autocast=self.autocast(),
        )
        self.model.train()
        return result

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the weights."""
        return {
            "optimizers": self.optimizers.state_dict(),
            "loader": self.loader.state(),
            "corpus": self.corpus.sha256,
            # each step's random numbers are a function of these and of the rank
            "rng": {"seed": self.config.seed, "step": self.step},
        }

    # --- is everything finite? --------------------------------------------------------------------

    def finite_loss(self) -> tuple[float, float]:
        """Loss and gradient norm of the last step; the only place that waits for the device.

        Raises:
            UserError: one of them is not finite; the first such tensor is named.
        """
        loss, norm = torch.stack((self.train_loss, self.grad_norm)).tolist()
        # fp16's scaler meets infinite gradients by design: it skips the step, lowers its scale
        finite_norm = math.isfinite(norm) or self.optimizers.scaler.is_enabled()
        if math.isfinite(loss) and finite_norm:
            return loss, norm
        raise UserError(
            f"step {self.step}: the training loss is {loss}, the gradient norm {norm}; "
            f"first tensor that is not finite: {self._first_not_finite()}"
        )

    def _first_not_finite(self) -> str:
        for name, weight in self.model.named_parameters():
            for kind, tensor in (("", weight), (" (gradient)", weight.grad)):
                if tensor is not None and not tensor.isfinite().all():
                    return name + kind
        return "none among weights and gradients"

    def check_weights(self) -> None:
        """Raises `UserError` with the first weight that is not finite, if there is one."""
        if not nn.utils.get_total_norm(self.optimizers.parameters).isfinite():
            raise UserError(f"step {self.step}: {self._first_not_finite()} is not finite")


def _say_nothing(_: str) -> None:
    """What every rank but the main one tells a person."""


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """Of one step's random numbers: a resumed run draws what an unbroken one does, stateless."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0])
