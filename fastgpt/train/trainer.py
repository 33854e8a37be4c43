"""A training run from Python or the command line: resolved, built, and trained to its end."""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from fastgpt.checkpoint import checkpoint
from fastgpt.commands import resume_command, sample_command
from fastgpt.config.config import Config
from fastgpt.data.items import Data
from fastgpt.device import device
from fastgpt.display import Display, duration
from fastgpt.errors import UserError
from fastgpt.faults import watchdog
from fastgpt.logs.metrics import check_trackers
from fastgpt.parallel import distributed
from fastgpt.parallel.signals import Stopped, StopSignal
from fastgpt.run import directory
from fastgpt.train.build import build
from fastgpt.train.loop import train
from fastgpt.train.plan import resolve
from fastgpt.train.recorder import Recorder
from fastgpt.train.resume import check_same_command


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
            self.recorder = Recorder(self.run, self.display, self.lock)
            cleanup.pop_all()
        self.config, self.world = self.plan.config, self.plan.world
        self.run_dir, self.metrics = self.recorder.run_dir, self.recorder.metrics

    def _prepare(self, config: Config) -> None:
        """Checks what the run's files need, and locks an existing run's directory."""
        check_trackers(config.track)
        if config.run_dir is not None and directory.is_run(config.run_dir):
            instead = "stop it" if config.resume else "pass another --run-dir"
            self.lock = directory.RunLock(config.run_dir, instead)

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
            if recorder.lock is not None:
                recorder.lock.release()
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
        lock = self.recorder.lock
        return directory.resume_hint(lock.place if lock else self.run_dir, self.world.size)

    def _done(self, seconds: float) -> list[str]:
        """Returns the lines to print at the end of a run that took so many seconds."""
        steps, run_dir = self.config.steps, self.run_dir
        resume = resume_command(run_dir, self.world.size)
        chat = " --chat" if self.plan.data.template else ""
        (loss, step), best = self.recorder.best, run_dir.absolute() / "checkpoints" / "best"
        marked = f"; best val loss {loss:.4f} at step {step}: {best}" if loss < math.inf else ""
        return [
            f"done after step {steps}: {run_dir.absolute()}",
            f"it took {duration(seconds)}{marked}",
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
