"""A training run: `Trainer` resolves and builds it, and `train` is the loop that takes steps."""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

from fastgpt.checkpoint import checkpoint
from fastgpt.commands import resume_command, sample_command
from fastgpt.config.checks import flag
from fastgpt.config.config import Config, by_name
from fastgpt.data.items import Data
from fastgpt.device import device
from fastgpt.errors import UserError
from fastgpt.faults import watchdog
from fastgpt.logs.metrics import check_trackers
from fastgpt.parallel import distributed
from fastgpt.parallel.distributed import World
from fastgpt.parallel.signals import Stopped, StopSignal
from fastgpt.run import directory
from fastgpt.terminal import Display
from fastgpt.train.build import Run, build
from fastgpt.train.optim import lr_ratio
from fastgpt.train.plan import resolve
from fastgpt.train.recorder import Recorder


class Trainer:
    """Trains on one rank, and writes logs, samples and checkpoints into the run's directory.

    Args:
        config: settings of the run.
        data: own datasets, in place of what `config.data` names.

    Raises:
        UserError: the config or the data cannot work; raised before any training.

    >>> from fastgpt.config import DataConfig, TrainConfig
    >>> model = fastgpt.ModelConfig(num_layers=1, num_heads=2, dim=16, context=16)
    >>> data = DataConfig(source="mine.txt", tokenizer="bytes")
    >>> train = TrainConfig(batch_tokens=32, device="cpu", sample_tokens=0)
    >>> config = fastgpt.Config(steps=2, model=model, data=data, train=train)
    >>> trainer = fastgpt.Trainer(config)
    recipe ...
    >>> trainer.fit()
    step ...
    >>> model, tokenizer = fastgpt.load(trainer.run_dir)
    """

    def __init__(self, config: Config, data: Data | None = None) -> None:
        config = directory.without_auto(config)
        world = distributed.start(device.pick_device(config.train.device))
        check_same_command(config, world)
        self.display, self.lock = Display(quiet=not world.is_main), None
        self.requeue = False
        """True after `fit` if SIGUSR1 stopped the run on any rank: its job should go on later."""
        with ExitStack() as cleanup:
            cleanup.callback(lambda: self.lock and self.lock.release())
            # before its checkpoints are read, because the lock's holder writes and removes them
            world.on_rank0(lambda: self._prepare(config))
            self.plan = resolve(config, self.display.warn, data, world)
            self.run = build(self.plan, self.display.warn)
            cleanup.callback(self.run.loader.close)
            self.recorder = Recorder(self.run, self.display, self._lock_run)
            cleanup.pop_all()
        self.config, self.world = self.plan.config, self.plan.world
        self.run_dir, self.metrics = self.recorder.run_dir, self.recorder.metrics

    def _prepare(self, config: Config) -> None:
        """Checks what the run's files need, and locks an existing run's directory."""
        check_trackers(config.track)
        if config.run_dir is not None and directory.is_run(config.run_dir):
            instead = "stop it" if config.resume else "pass another --run-dir"
            self.lock = directory.RunLock(config.run_dir, instead)

    def _lock_run(self, path: Path) -> directory.RunLock:
        """Returns the lock of the run's directory, which a new run creates."""
        self.lock = self.lock or directory.RunLock(path)
        return self.lock

    def fit(self) -> None:
        """Trains until `config.steps`, a signal or Ctrl-C, and completes the run directory.

        Raises:
            UserError: the loss or a gradient is not finite, or the disk is full; earlier
                checkpoints stay valid.
        """
        run, recorder = self.run, self.recorder
        stop = run.stop = StopSignal(self.display.line)
        watchdog.start()
        begun = time.monotonic()
        try:
            try:
                train(run, recorder=recorder)
                recorder.publish()
                ending = self._done(time.monotonic() - begun)
            except Stopped:
                ending = self._stopped()
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"step {run.step}: no GPU memory left with micro-batches of {run.micro_batch}: pass"
                f" a smaller --train.micro-batch (same batch size); {self._last_checkpoint()}"
            ) from error
        except UserError as error:
            raise type(error)(f"{error}; {self._last_checkpoint()}") from error
        except KeyboardInterrupt as error:
            said = f"at step {run.step}, without saving it; {self._last_checkpoint()}"
            raise KeyboardInterrupt(said) from error
        finally:
            # after a failure, torchrun sends SIGTERM to the other ranks: no line about that
            stop.say = lambda _: None
            self._finish(recorder.saver.close)
            self.display.stop()
            run.loader.close()
            if self.metrics is not None:
                self._finish(self.metrics.close)
            if self.lock is not None:
                self.lock.release()
            watchdog.close()
            stop.restore()
        for line in ending:
            self.display.line(line)

    def _finish(self, end: Callable[[], None]) -> None:
        """Calls `end`; an error there is only a warning, so as not to hide an earlier one."""
        watchdog.progress()
        try:
            end()
        except UserError as error:
            self.display.warn(str(error))

    def _last_checkpoint(self) -> str:
        """Returns a clause for error messages: the last checkpoint, and the command to resume."""
        self._finish(self.recorder.saver.wait)
        place = self.lock.place if self.lock else self.run_dir
        return directory.resume_hint(place, self.world.size)

    def _done(self, seconds: float) -> list[str]:
        """Returns the lines to print at the end of a run that took so many seconds."""
        steps, run_dir = self.config.steps, self.run_dir
        resume = resume_command(run_dir, self.world.size)
        chat = " --chat" if self.plan.data.template else ""
        (loss, step), best = self.recorder.best, run_dir.absolute() / "checkpoints" / "best"
        marked = f"; best val loss {loss:.4f} at step {step}: {best}" if loss < math.inf else ""
        return [
            f"done after step {steps}: {run_dir.absolute()}",
            f"it took {timedelta(seconds=round(seconds))}{marked}",
            f"to sample from it: {sample_command(run_dir)}{chat}",
            f"to train longer: {resume} --steps {2 * steps}",
        ]

    def _stopped(self) -> list[str]:
        """Saves the last complete step if necessary, and returns the lines to print at the end."""
        step, recorder = self.run.step, self.recorder
        saved = checkpoint.step_path(self.run_dir.absolute() / "checkpoints", step)
        self.run.optimizers.zero_grad()
        if not self.world.broadcast_object(recorder.saver.has(step)):
            recorder.save()
        recorder.publish()
        asked = torch.tensor(int(self.run.stop is not None and self.run.stop.requeue))
        self.requeue = bool(self.world.sum(asked))
        resume = resume_command(self.run_dir, self.world.size)
        return [f"stopped after step {step}, saved in {saved}", f"to resume: {resume}"]


def check_same_command(config: Config, world: World) -> None:
    """Raises `UserError` on all ranks if their settings differ, or what they resume."""
    own = {"resume": directory.resumed_name(config.resume)} | by_name(config)
    main = world.broadcast_object(own)
    differing = [(name, str(x), str(main[name])) for name, x in own.items() if x != main[name]]
    found = world.all_gather_object(differing[:1])
    if others := [rank for rank, differs in enumerate(found) if differs]:
        name, theirs, ours = found[others[0]][0]
        raise UserError(
            f"{flag(name)} is {theirs} on rank {', '.join(map(str, others))}, and {ours} on rank 0:"
            " expected the same on all ranks"
        )


def train(run: Run, until: int | None = None, recorder: Recorder | None = None) -> None:
    """Takes optimizer steps until step `until`, by default the last one.

    A step does not wait for the device: losses and norms stay there, and only a log line reads them
    (with fp16 and `train.spike_z` each step does).

    Args:
        recorder: logs, evaluates, samples and saves; None: none of these.

    Raises:
        Stopped: on all ranks, after `run.stop` was received, which is checked between micro-steps:
            the step that was begun is not taken.
    """
    plan, config, world = run.plan, run.plan.config, run.plan.world
    optimizers, loader, scaler = run.optimizers, run.loader, run.optimizers.scaler
    if recorder is not None:
        recorder.begin()
    while run.step < (config.steps if until is None else until):
        seed_dropout(run)
        optimizers.zero_grad()
        loss = torch.zeros((), device=plan.device)
        for micro_step in range(loader.accumulation):
            last = micro_step == loader.accumulation - 1
            watchdog.progress()
            # A step's first forward may have a collective of DDP's own: no rank stops before that.
            if run.stop is not None and (last or micro_step or world.size == 1):
                run.stop.check(world, all_reduce=last or plan.has_forward_collectives)
            x, y = loader.next()
            # Gradients sync in the last micro-step only. DDP decides in its forward, so the forward
            # is inside no_sync: around the backward alone, gradients would silently go unsynced.
            with nullcontext() if last else run.no_sync():
                with run.autocast():
                    # Weights each micro-batch by its targets (padded samples have fewer), so that
                    # the sum is the mean over the global batch's targets.
                    weight = loader.target_ratio / loader.accumulation
                    micro_loss = (run.ddp or run.forward)(x, y) * weight
                scaler.scale(micro_loss).backward()
            loss += micro_loss.detach()
        run.loss = loss if world.size == 1 else world.sum(loss / world.size)
        optimizers.set_lr(lr_ratio(run.step, config.steps, config.optim))
        run.grad_norm = optimizers.clip()
        optimizers.step(run.finite.skips(run.loss, run.grad_norm))
        run.step += 1
        run.finite.watch(run.step, optimizers.norms)
        if run.spikes is not None:
            run.spikes.after_step(run.step, run.loss, run.grad_norm)
        if recorder is None:
            continue
        recorder.after_step()
        if run.step == 1 or recorder.due(config.log_every):
            recorder.log()
        evaluates = recorder.due(plan.eval_every)
        if evaluates or recorder.due(config.save_every):
            with recorder.pause():
                recorder.save()
                if evaluates:
                    recorder.evaluate()
                    recorder.sample()


def seed_dropout(run: Run) -> None:
    """Seeds dropout's masks by the step, so that no generator state has to be saved."""
    config, world = run.plan.config, run.plan.world
    # tensor-parallel ranks need the same masks
    numbers = (config.seed, run.step, world.rank // config.parallel.tp)
    seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
    # torch.manual_seed formats a stack trace for each missing GPU backend, which takes a good part
    # of the smallest steps
    (torch.default_generator if run.plan.device == "cpu" else torch).manual_seed(seed)
