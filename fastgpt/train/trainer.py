"""A training run: steps, logs, checkpoints and evaluations, until it is done or stopped."""

import json
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fastgpt.checkpoint import checkpoint
from fastgpt.checkpoint.async_saver import Saver
from fastgpt.commands import resume_command, sample_command
from fastgpt.config.config import Config, to_json
from fastgpt.convert.source import OpenedModel
from fastgpt.data.items import Data
from fastgpt.device import device
from fastgpt.display import Display, duration, short
from fastgpt.errors import UserError, brief, counted
from fastgpt.evaluate.validation import perplexity
from fastgpt.faults import watchdog
from fastgpt.logs.metrics import MetricsLog, check_trackers, comparable
from fastgpt.model.flops import flops_per_token
from fastgpt.parallel import distributed
from fastgpt.parallel.signals import Stopped, StopSignal
from fastgpt.run import directory, manifest
from fastgpt.sampling.text import encode_prompt, sample_text, warn_if_cut
from fastgpt.train import init_from
from fastgpt.train.data import sample_prompt
from fastgpt.train.engine import Engine
from fastgpt.train.header import facts, header
from fastgpt.train.resume import check_same_command


class Trainer:
    """Trains on one rank, and writes logs, samples and checkpoints into the run's directory.

    Args:
        config: settings of the run.
        data: own datasets, in place of what `config.data` names.
        source: the model that `config.init_from` names, if it is open already.

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

    def __init__(
        self, config: Config, data: Data | None = None, source: OpenedModel | None = None
    ) -> None:
        config = directory.without_auto(config)
        self.world = distributed.start(device.pick_device(config.train.device))
        check_same_command(config, self.world)
        self.display = Display(quiet=not self.world.is_main)
        self.best: tuple[float, float] = (math.inf, 0)
        """Lowest validation loss of a checkpoint on disk, and its step."""
        self.log, self.lock = None, None
        self.requeue = False
        """True after `fit` if SIGUSR1 stopped the run on any rank: its job should go on later."""
        with ExitStack() as cleanup:
            cleanup.callback(lambda: self.lock and self.lock.release())
            if config.train.report == "on":
                from fastgpt.report.page import require_bokeh

                self.world.on_rank0(require_bokeh)
            # before its checkpoints are read, because the lock's holder writes and removes them
            self.world.on_rank0(lambda: self._lock(config))
            self.world.on_rank0(lambda: check_trackers(config.track))
            self.engine = Engine(config, self.display.warn, data, source)
            cleanup.callback(self.engine.loader.close)
            self.config, self.world = self.engine.config, self.engine.world
            self.prompt = self._encoded_prompt()
            self._open_run()
            cleanup.pop_all()

    def _lock(self, config: Config) -> None:
        """Locks the directory of an existing run; that of a new one is created and locked later."""
        if config.run_dir is not None and directory.is_run(config.run_dir):
            instead = "stop it" if config.resume else "pass another --run-dir"
            self.lock = directory.RunLock(config.run_dir, instead)

    def _encoded_prompt(self) -> torch.Tensor:
        prompt = sample_prompt(self.config, self.engine.data.corpora[0])
        ids = encode_prompt(prompt, self.engine.data.tokenizer, "--train.sample-prompt")
        if self.config.train.sample_prompt is not None:
            context = self.config.model.context
            warn_if_cut(ids, context, "--train.sample-prompt", self.display.warn)
        return ids

    def _open_run(self) -> None:
        engine, config = self.engine, self.config
        self.world.barrier()  # all ranks have read their checkpoint: later ones may be renamed
        self.run_dir, self.peak = self.world.on_rank0(self._open_files)
        kept = init_from.kept_files(engine.source, engine.restored.path, engine.data.template)
        self.saver = Saver(
            self.run_dir / "checkpoints",
            config_json=to_json(config),
            save_tokenizer=engine.data.tokenizer.save,
            keep=config.train.keep_checkpoints,
            keep_every=config.train.keep_every,
            huggingface_json=json.dumps(kept) if kept else None,
        )

    def _open_files(self) -> tuple[Path, float]:
        """Creates or reopens the run directory and its logs, and prints the header.

        Returns the directory, and the FLOP/s of all ranks that MFU is relative to.
        """
        engine, config, warn = self.engine, self.config, self.display.warn
        path = config.run_dir or directory.new_run_dir(config.recipe)
        self.lock = self.lock or directory.RunLock(path)
        if note := directory.open_run_dir(path, config, engine.step, self.world.size):
            warn(note)
        on, dtype = engine.device, device.DTYPES[engine.precision]
        peak = device.measured_peak(on, dtype) * device.shares(on, self.world.size)
        known = facts(engine, peak)
        title = f"{path.name}: {config.recipe}, {short(known['parameters'])} parameters"
        self.log = MetricsLog(path, engine.step, title, warn, config.track)
        # the best is chosen among the checkpoints on disk, as in a run without interruption
        kept = checkpoint.saved_steps(path / "checkpoints")
        losses = {r["step"]: r["val_loss"] for r in comparable(self.log.records)}
        self.best = min(((losses[s], s) for s in kept if s in losses), default=self.best)
        manifest.write(path / "manifest.json", known)
        self.display.header(header(engine, known, path))
        for line in engine.restored.changes(config):
            self.display.line(f"changed: {line}")
        return path, peak

    def fit(self) -> None:
        """Trains until `config.steps`, a signal or Ctrl-C, and completes the run directory.

        Raises:
            UserError: the loss or a gradient is not finite, or the disk is full; earlier
                checkpoints stay valid.
        """
        self.stop = StopSignal(self.display.line)
        watchdog.start(self.config.train.stall_s)
        self.begun = time.monotonic()
        try:
            ending = self._fit()
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"step {self.engine.step}: no GPU memory left with micro-batches of "
                f"{self.engine.micro_batch}: pass a smaller --train.micro-batch (same batch size); "
                f"{self._resume_hint()}"
            ) from error
        except UserError as error:
            raise type(error)(f"{error}; {self._resume_hint()}") from error
        except KeyboardInterrupt as error:
            said = f"at step {self.engine.step}, without saving it; {self._resume_hint()}"
            raise KeyboardInterrupt(said) from error
        finally:
            # after a failure, torchrun sends SIGTERM to the other ranks: no line about that
            self.stop.say = lambda _: None
            self._settle(self.saver.close)
            self.display.stop()
            self.engine.loader.close()
            if self.log is not None:
                self._settle(self.log.close)
            if self.lock is not None:
                self.lock.release()
            watchdog.close()
            self.stop.restore()
        for line in [*self._report(), *ending]:
            self.display.line(line)

    def _report(self) -> list[str]:
        """Writes the page of a run that has taken its last step, and returns a line about it."""
        complete = self.engine.step >= self.config.steps
        if self.config.train.report == "off" or self.log is None or not complete:
            return []
        from fastgpt.report.page import write_report

        path = self.run_dir.absolute() / "report.html"
        try:
            write_report([self.run_dir], path)
        except Exception as error:  # the run is complete, and a command can write its page again
            self.display.warn(f"{path} was not written: {brief(error)}")
            return []
        return [f"its page: {path}"]

    def _settle(self, end: Callable[[], None]) -> None:
        """Calls `end`; an error there is only a warning, so as not to hide an earlier one."""
        watchdog.progress(slow=True)
        try:
            end()
        except UserError as error:
            self.display.warn(str(error))

    def _doing(self, what: str = "") -> None:
        """Shows what this rank does, and tells the watchdog; without `what` it trains again."""
        self.display.doing(what)
        watchdog.progress(slow=True)

    def _fit(self) -> list[str]:
        """Trains, and returns the lines to print at the end."""
        try:
            self._train()
        except Stopped:
            return self._leave()
        steps = self.config.steps
        resume = resume_command(self.run_dir, self.world.size)
        chat = " --chat" if self.engine.data.template else ""
        (loss, step), best = self.best, self.run_dir.absolute() / "checkpoints" / "best"
        marked = f"; best val loss {loss:.4f} at step {step}: {best}" if loss < math.inf else ""
        return [
            f"done after step {steps}: {self.run_dir.absolute()}",
            f"it took {duration(time.monotonic() - self.begun)}{marked}",
            f"to sample from it: {sample_command(self.run_dir)}{chat}",
            f"to train longer: {resume} --steps {2 * steps}",
        ]

    def _train(self) -> None:
        engine, config = self.engine, self.config
        if engine.step == config.steps:
            self.display.line(f"this run is finished: it has taken its {config.steps} steps")
        self.display.start(engine.step, config.steps)
        if self._lacks_evaluation():
            self._evaluate()
            self._doing()
        self.clock, self.logged, self.skipped = time.perf_counter(), engine.step, 0
        self.waited_s, self.pace = engine.loader.waited_s, (0, 0.0)
        while engine.step < config.steps:
            if self.saver.failed:  # all ranks leave together, and raise its error there
                self.stop.ask()
            engine.train_step(self.stop)
            if engine.step == engine.restored.step + 1:
                self._on_rank0(lambda: directory.write_config(self.run_dir, config))
            last = engine.step == config.steps
            if last or engine.step == 1 or engine.step % config.log_every == 0:
                self._log()
            evaluate = last or _due(engine.step, config.eval_every)
            if evaluate or _due(engine.step, config.save_every):
                engine.finite_loss()  # a sync: work in the queue belongs to training, not the pause
                pause = time.perf_counter()
                self._save()
                if evaluate:
                    self._evaluate()
                self._doing()
                self.clock += time.perf_counter() - pause
        self._publish()

    def _lacks_evaluation(self) -> bool:
        """Returns True before the first step, and if a resumed run lost its step's evaluation."""
        step = self.engine.step
        due = step in (0, self.config.steps) or _due(step, self.config.eval_every)
        records = [] if self.log is None else self.log.records
        seen = any(r["step"] == step and "val_loss" in r for r in records)
        return self.world.broadcast_object(due and not seen)

    def _resume_hint(self) -> str:
        """Returns a clause for error messages: the last checkpoint, and the command to resume."""
        self._settle(self.saver.wait)
        return directory.resume_hint(
            self.lock.place if self.lock else self.run_dir, self.world.size
        )

    def _log(self) -> None:
        engine, optim = self.engine, self.config.optim
        loss, grad_norm = engine.finite_loss()
        now, waited_s = time.perf_counter(), engine.loader.waited_s
        seconds, waited = now - self.clock, waited_s - self.waited_s
        steps = engine.step - self.logged
        self._estimate(steps, seconds)
        self.clock, self.waited_s, self.logged = now, waited_s, engine.step
        per_second = steps * self.config.train.batch_tokens / seconds
        achieved = per_second * flops_per_token(self.config.model)
        self.peak = max(achieved, self.peak)  # which may have been measured on a busy machine
        record = {
            "step": engine.step,
            "train_loss": loss if math.isfinite(loss) else None,  # that step was skipped
            "tokens": engine.tokens,
            "tok_per_s": round(per_second, 1),
            "epoch": round(max(engine.epochs()), 4),
            "data_wait": round(waited / seconds, 4),
            "mfu": round(achieved / self.peak, 4),
            "lr": engine.lr,
            **({"muon_lr": optim.muon_lr * (engine.lr / optim.lr)} if optim.kind == "muon" else {}),
            "grad_norm": grad_norm if math.isfinite(grad_norm) else None,  # fp16 skipped the step
            **device.peak_memory(engine.device),
        }
        if engine.spikes is not None:
            record["rollbacks"] = engine.spikes.total
        if engine.finite.most:
            record["skipped_steps"] = number = int(engine.finite.skipped - self.skipped)
            if number:
                said = "skipped: the loss or a gradient was not finite"
                self.display.warn(f"{counted(number, 'step')} {said}")
            self.skipped = engine.finite.skipped
        if self.log is not None:
            self.log.write(record)
        self.display.step(record, self.config.steps)

    def _estimate(self, steps: int, seconds: float) -> None:
        """Shows once, after ten steps, how long the others will take; the first one may compile."""
        before, spent = self.pace
        if self.logged == self.engine.restored.step or before >= 10:
            return
        self.pace = before + steps, spent + seconds
        left = self.config.steps - self.engine.step
        if before + steps >= 10 and left:
            needed = left * (spent + seconds) / (before + steps)
            self.display.header(
                {"estimate": f"{duration(needed)} for {counted(left, 'more step')}"}
            )

    def _save(self) -> None:
        """Starts a checkpoint; raises if loss or weights are not finite."""
        engine = self.engine
        self._doing("saving")
        engine.finite_loss()
        engine.check_weights()
        if engine.spikes is not None:  # a run that resumes here has the same
            engine.spikes.keep(engine.step)
        weights, state = engine.snapshot()
        copied = engine.sharded
        self._on_rank0(lambda: self.saver.save(engine.step, weights, state, copied=copied))

    def _publish(self) -> None:
        """Waits until all checkpoints are on the disk; raises on all ranks if one is not."""
        self._doing("saving")
        self._on_rank0(self.saver.wait)
        self._doing()

    def _on_rank0(self, work: Callable[[], None]) -> None:
        """Calls `work` where checkpoints are written; its error is raised on all ranks."""
        self.world.on_rank0(lambda: self.lock and self.lock.check())
        self.world.on_rank0(work)

    def _evaluate(self) -> None:
        """Logs the validation loss and a sample, and marks the checkpoint if it is the best."""
        engine, data, step = self.engine, self.config.data, self.engine.step
        tokens = data.final_eval_tokens if step >= self.config.steps else data.eval_tokens
        results = engine.evaluate("val", tokens, self.stop, self._doing)
        loss = self.display.val_loss = self._weighted(results)
        record: dict[str, Any] = {"step": step, "val_loss": loss}
        record["val_tokens"] = sum(count for _, count in results)
        if data.eval_batches:
            losses = engine.evaluate("train", 0, self.stop, self._doing)
            record["eval_train_loss"] = self._weighted(losses)
        if len(results) > 1:
            record["val_losses"] = [loss for loss, _ in results]
        bits = ""
        if engine.data.val_bytes_per_token is not None:
            bits_per_byte = loss / math.log(2) / engine.data.val_bytes_per_token
            record["val_bits_per_byte"] = bits_per_byte
            bits = f"  {bits_per_byte:.4f} bits per byte"
        record["tokens"], also = engine.tokens, ""
        if self._scores_other_text(tokens, results):
            same = engine.evaluate("val", data.eval_tokens, self.stop, self._doing)
            record["val_loss_compared"] = self._weighted(same)
            also = f"; {record['val_loss_compared']:.4f} on the text of the earlier ones"
        self.display.line(
            f"step {step:>6}  epoch {max(engine.epochs()):.2f}  val loss {loss:.4f}  "
            f"perplexity {perplexity(loss):.2f}{bits}  ({record['val_tokens']:,} tokens{also})"
        )
        if self.log is not None:
            self.log.write(record)
        if step and self.config.train.sample_tokens:
            self._sample()
        loss = record.get("val_loss_compared", loss)
        if self.log is not None and loss < self.best[0] and self.saver.has(step):
            self.saver.mark_best(step)
            self.best = loss, step

    def _scores_other_text(self, tokens: int, results: list[tuple[float, int]]) -> bool:
        """Returns True if an evaluation of `tokens` had other text than those before the last."""
        data = self.config.data
        if data.eval_batches or tokens == data.eval_tokens:
            return False
        return tokens > 0 or max(count for _, count in results) > data.eval_tokens

    def _weighted(self, results: list[tuple[float, int]]) -> float:
        """Returns the weighted mean of the corpora's losses."""
        weights = self.engine.data.weights
        return math.fsum(loss * weight for (loss, _), weight in zip(results, weights))

    def _sample(self) -> None:
        """Samples on the main rank, or with sharded weights the same on all, and shows it."""
        engine = self.engine
        self._doing("sampling")
        # ranks that share weights agree on whether one was asked to stop
        shares = engine.sharded
        stops = self.stop.agreed(self.world) if shares else self.stop.received is not None
        if not stops and (shares or self.world.is_main):
            engine.model.eval()
            with engine.autocast(), device.eager(engine.compiled):
                [text] = sample_text(
                    engine.model, engine.data.tokenizer, [self.prompt], temperature=0.8,
                    max_new_tokens=self.config.train.sample_tokens, seed=self.config.seed,
                    device=engine.device,
                )  # fmt: skip
            engine.model.train()
            if self.log is not None:
                self.display.sample(text)
                self.log.write_sample(engine.step, text)
        self.world.barrier()  # a rank that waited in its next micro-step would seem to stall

    def _leave(self) -> list[str]:
        """Saves the last complete step if necessary, and returns the lines to print at the end."""
        step = self.engine.step
        saved = checkpoint.step_path(self.run_dir.absolute() / "checkpoints", step)
        self.engine.optimizers.zero_grad()
        if not self.world.broadcast_object(self.saver.has(step)):
            self._save()
        self._publish()
        self.requeue = bool(self.world.sum(torch.tensor(int(self.stop.requeue))))
        resume = resume_command(self.run_dir, self.world.size)
        return [f"stopped after step {step}, saved in {saved}", f"to resume: {resume}"]


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
