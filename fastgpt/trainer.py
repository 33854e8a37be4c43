"""The run: built from a config, then train, log, save and evaluate until done or told to stop."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastgpt import checkpoint, device, distributed, ops, run
from fastgpt.config import Config, to_json
from fastgpt.corpus import Corpus, cache_dir, open_corpus
from fastgpt.display import Display
from fastgpt.errors import UserError
from fastgpt.evaluate import encode_prompt, sample_text, validation_loss
from fastgpt.loader import Loader
from fastgpt.metrics import MFU_CONVENTION, MetricsLog, flops_per_token
from fastgpt.model import GPT
from fastgpt.optim import Optimizers
from fastgpt.schedule import lr_ratio


class Trainer:
    """One training run, as this rank sees it.

    Args:
        config: from `fastgpt.cli.parse`.

    Raises:
        UserError: before any training, for whatever in the config or the data cannot work.
    """

    def __init__(self, config: Config) -> None:
        self.device = device.pick_device(config.train.device)
        self.world = distributed.start(self.device)
        self.stop = distributed.StopSignal()
        self.display = Display(quiet=not self.world.is_main)
        self.precision = device.pick_precision(config.train.precision, self.device)
        self.compiled, note = device.pick_compile(config.train.compile, self.device)
        if note:
            self.display.warn(note)
        if config.train.tf32:
            torch.set_float32_matmul_precision("high")
        self.corpus = self._open_corpus(config)
        self.config = run.with_vocabulary(config, self.corpus.tokenizer)
        self._build_model()
        self.step, self.best = 0, math.inf
        self._open_loader(self._restore())
        self.prompt = encode_prompt(self.config.train.sample_prompt, self.corpus.tokenizer)
        self._open_run()

    def _open_corpus(self, config: Config) -> Corpus:
        source = run.resolve_source(config.data.source, self.display)
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
            self.display.warn(f"{complaint}; the one before it is used")
        run.check_same(found, self.config, self.corpus.tokenizer)
        self.model.load_state_dict(found.weights)
        self.optimizers.load_state_dict(found.state["optimizers"])
        self.step = found.step
        if found.state["corpus"] != self.corpus.sha256:
            self.display.warn(
                f"{found.path} was trained on other text ({found.state['corpus'][:12]}): "
                f"this one ({self.corpus.sha256[:12]}) is read from its start"
            )
            return {"epoch": 0, "index": 0}
        return found.state["loader"]

    def _open_loader(self, state: dict[str, int]) -> None:
        config, ranks = self.config, self.world.size
        if config.global_batch % ranks:
            raise UserError(
                f"train.batch_tokens is {config.train.batch_tokens}, {config.global_batch} sequences "
                f"of {config.model.context}: expected a number of them that {ranks} ranks can share"
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

    def _open_run(self) -> None:
        """Makes or reopens the run directory, and says what is about to happen."""
        precision = self.precision
        peak = device.peak_flops(self.device, precision, cache_dir()) if self.world.is_main else 0.0
        self.peak = self.world.from_main(peak) * device.shares(self.device, self.world.size)
        self.flops = flops_per_token(self.config.model)
        self.run_dir = self.world.from_main(
            run.open_run_dir(self.config, self.step) if self.world.is_main else None
        )
        self.log = MetricsLog(self.run_dir, self.step) if self.world.is_main else None
        if self.log is not None:
            seen = [r["val_loss"] for r in self.log.records if "val_loss" in r]
            self.best = min(seen, default=math.inf)
            manifest = run.manifest(self._facts())
            (self.run_dir / "manifest.json").write_text(manifest)
        self.display.header(self._header())

    def _facts(self) -> dict[str, Any]:
        corpus = self.corpus
        return {
            "device": device.device_name(self.device),
            "ranks": self.world.size,
            "precision": self.precision,
            "compile": self.compiled,
            "ops": self.ops.names,
            "parameters": self.model.num_params(),
            "peak_flops": self.peak,
            "mfu": MFU_CONVENTION,
            "resumed_from_step": self.step or None,
            "data": {
                "name": corpus.name,
                "sha256": corpus.sha256,
                "python": corpus.python,
                "tokenizer": corpus.tokenizer.kind,
                "train_tokens": len(corpus.train),
                "val_tokens": len(corpus.val),
            },
        }

    def _header(self) -> dict[str, str]:
        config, corpus = self.config, self.corpus
        python = f" of Python {corpus.python}" if corpus.python else ""
        batch = f"{self.micro_batch} x {self.loader.accumulation} x {self.world.size}"
        compiled = "on" if self.compiled else "off"
        return {
            "recipe": config.recipe,
            "device": f"{device.device_name(self.device)}, {self.precision}, compile {compiled}",
            "model": f"{self.model.num_params():,} parameters, context {config.model.context}",
            "data": f"{corpus.name}{python}: {len(corpus.train):,} + {len(corpus.val):,} "
            f"{corpus.tokenizer.kind} tokens, sha256 {corpus.sha256[:16]}",
            "training": f"steps {self.step} to {config.steps} of {config.train.batch_tokens:,} "
            f"tokens (sequences x micro-steps x ranks: {batch}), {config.optim.kind}",
            "ops": ", ".join(f"{op} {name}" for op, name in self.ops.names.items()),
            "MFU": f"{MFU_CONVENTION}, {self.peak / 1e12:.2f} TFLOP/s",
            "run": str(self.run_dir),
        }

    # --- training ---------------------------------------------------------------------------------

    def fit(self) -> None:
        """Trains to `config.steps`, or to SIGTERM or Ctrl-C; the run directory is complete then.

        Raises:
            UserError: the loss or a gradient is not finite, or the disk is full; what was saved
                before is good.
        """
        try:
            self._fit()
        finally:
            self.display.stop()
            self.loader.close()
            self.stop.restore()
            if self.log is not None:
                self.log.close()

    def _fit(self) -> None:
        if self._lacks_evaluation():
            self._evaluate()
        self.display.start(self.step, self.config.steps)
        self.clock = time.perf_counter()
        self.logged_step = self.step
        while self.step < self.config.steps:
            if self.stop.agreed(self.world):
                self._leave()
                return
            self._train_step()
            last = self.step == self.config.steps
            if last or self.step % self.config.log_every == 0:
                self._log()
            pause = time.perf_counter()
            if last or _due(self.step, self._save_every()):
                self._save()
            if last or _due(self.step, self.config.eval_every):
                self._evaluate()
            self.clock += time.perf_counter() - pause
        self.display.stop()
        self.display.line(f"done: {self.run_dir}")

    def _lacks_evaluation(self) -> bool:
        """Before the first step, or where a resumed run lost the evaluation of its step."""
        if self.step == 0:
            return True
        due = self.step >= self.config.steps or _due(self.step, self.config.eval_every)
        records = self.log.records if self.log is not None else []
        seen = any(r["step"] == self.step and "val_loss" in r for r in records)
        return self.world.from_main(due and not seen)

    def _train_step(self) -> None:
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
                with self._autocast():
                    loss = (self.replica or self.loss)(x, y) / micro_steps
                self.optimizers.scaler.scale(loss).backward()
            total += loss.detach()
        ratio = lr_ratio(self.step, self.config.steps, self.config.optim)
        self.grad_norm = self.optimizers.step(ratio)
        self.train_loss = self.world.average(total)
        self.lr = self.config.optim.lr * ratio
        self.step += 1

    def _autocast(self) -> AbstractContextManager:
        return device.autocast(self.device, self.precision)

    def _log(self) -> None:
        loss, grad_norm = self._finite_loss()
        now = time.perf_counter()
        tokens_per_second = (
            (self.step - self.logged_step) * self.config.train.batch_tokens / (now - self.clock)
        )
        self.clock, self.logged_step = now, self.step
        record = {
            "step": self.step,
            "train_loss": loss,
            "tokens": self.step * self.config.train.batch_tokens,
            "tok_per_s": round(tokens_per_second, 1),
            "mfu": round(tokens_per_second * self.flops / self.peak, 4),
            "lr": self.lr,
            "grad_norm": grad_norm,
        }
        if self.log is not None:
            self.log.write(record)
        self.display.step(record, self.config.steps)

    def _finite_loss(self) -> tuple[float, float]:
        """Loss and gradient norm of the last step; the only place that waits for the device."""
        loss, norm = torch.stack((self.train_loss, self.grad_norm)).tolist()
        # fp16's scaler meets infinite gradients by design: it skips the step, lowers its scale
        finite_norm = math.isfinite(norm) or self.optimizers.scaler.is_enabled()
        if math.isfinite(loss) and finite_norm:
            return loss, norm
        raise UserError(
            f"step {self.step}: the training loss is {loss}, the gradient norm {norm}; "
            f"first tensor that is not finite: {self._first_not_finite()}; "
            f"{checkpoint.last_good(self.run_dir)}"
        )

    def _first_not_finite(self) -> str:
        for name, weight in self.model.named_parameters():
            for kind, tensor in (("", weight), (" (gradient)", weight.grad)):
                if tensor is not None and not tensor.isfinite().all():
                    return name + kind
        return "none among weights and gradients"

    # --- saving, evaluating, leaving --------------------------------------------------------------

    def _save_every(self) -> int:
        every = self.config.save_every
        return self.config.eval_every if every is None else every

    def _save(self) -> None:
        """Saves on the main rank, unless something is not finite."""
        self._finite_loss()
        if not nn.utils.get_total_norm(self.optimizers.parameters).isfinite():
            raise UserError(
                f"step {self.step}: not saved, {self._first_not_finite()} is not finite; "
                f"{checkpoint.last_good(self.run_dir)}"
            )
        if not self.world.is_main:
            return
        state = {
            "optimizers": self.optimizers.state_dict(),
            "loader": self.loader.state(),
            "corpus": self.corpus.sha256,
            # each step's random numbers are a function of these and of the rank
            "rng": {"seed": self.config.seed, "step": self.step},
        }
        checkpoint.save(
            self.run_dir / "checkpoints",
            self.step,
            weights=self.model.state_dict(),
            state=state,
            config_json=to_json(self.config),
            save_tokenizer=self.corpus.tokenizer.save,
            keep=self.config.train.keep_checkpoints,
        )

    def _evaluate(self) -> None:
        """Validation loss (all of the held-out tokens at the end), and a sample."""
        data, last = self.config.data, self.step >= self.config.steps
        self.model.eval()
        loss, tokens = validation_loss(
            self.loss,
            self.corpus.val,
            context=self.config.model.context,
            micro_batch=self.micro_batch,
            max_tokens=data.final_eval_tokens if last else data.eval_tokens,
            world=self.world,
            device=self.device,
            autocast=self._autocast(),
        )
        record: dict[str, Any] = {"step": self.step, "val_loss": loss, "val_tokens": tokens}
        bits = ""
        if self.corpus.val_bytes_per_token is not None:
            record["val_bits_per_byte"] = loss / math.log(2) / self.corpus.val_bytes_per_token
            bits = f"  {record['val_bits_per_byte']:.4f} bits per byte"
        record["tokens"] = self.step * self.config.train.batch_tokens
        self.display.line(f"step {self.step:>6}  val loss {loss:.4f}{bits}  ({tokens:,} tokens)")
        if self.log is not None:
            self.log.write(record)
            if self.step and self.config.train.sample_tokens:
                self._sample()
            saved = checkpoint.step_path(self.run_dir / "checkpoints", self.step)
            if loss < self.best and saved.exists():
                checkpoint.mark_best(saved)
                self.best = loss
        self.model.train()

    def _sample(self) -> None:
        with self._autocast():
            [text] = sample_text(
                self.model,
                self.corpus.tokenizer,
                self.prompt,
                max_new_tokens=self.config.train.sample_tokens,
                temperature=0.8,
                seed=self.config.seed,
                device=self.device,
            )
        self.display.sample(text)
        with (self.run_dir / "samples.txt").open("a") as file:
            file.write(f"=== step {self.step} ===\n{text}\n\n")

    def _leave(self) -> None:
        """Told to stop: saves what is not saved yet, and says how to go on."""
        if self.step and not checkpoint.step_path(self.run_dir / "checkpoints", self.step).exists():
            self._save()
        self.display.stop()
        command = run.resume_command(self.run_dir, self.world.size)
        self.display.line(f"stopped after step {self.step}; to go on: {command}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """Of one step's random numbers: a resumed run draws what an unbroken one does, stateless."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0])
