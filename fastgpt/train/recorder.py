"""Recorder of a run: its display, logs, evaluations, samples and checkpoints."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastgpt.checkpoint import checkpoint
from fastgpt.checkpoint.checkpoint import Saver
from fastgpt.config.config import to_json
from fastgpt.device import device
from fastgpt.errors import counted
from fastgpt.evaluate.validation import perplexity
from fastgpt.faults import watchdog
from fastgpt.guards.nonfinite import check_weights
from fastgpt.logs.metrics import MetricsLog, comparable
from fastgpt.model.flops import MFU_CONVENTION, flops_per_token
from fastgpt.run import directory, manifest
from fastgpt.run.directory import RunLock
from fastgpt.sampling.text import encode_prompt, sample_text
from fastgpt.terminal import Display, short
from fastgpt.train import init_from
from fastgpt.train.build import Run
from fastgpt.train.data import sample_prompt


class Recorder:
    """Shows and writes what happens in a run; all ranks have one, and the main rank's writes.

    Args:
        lock: returns the lock of the run's directory; a new run's is created.

    Raises:
        UserError: the directory holds another run, or cannot be written.
    """

    def __init__(self, run: Run, display: Display, lock: Callable[[Path], RunLock]) -> None:
        self.run, self.plan, self.display = run, run.plan, display
        self.lock = lock
        self.config, self.world = run.plan.config, run.plan.world
        self.metrics: MetricsLog | None = None
        self.best: tuple[float, float] = (math.inf, 0)
        """Lowest validation loss of a checkpoint on disk, and its step."""
        prompt = sample_prompt(self.config, self.plan.data.corpora[0])
        self.prompt = encode_prompt(prompt, self.plan.data.tokenizer, "the prompt of the samples")
        self.world.barrier()  # all ranks have read their checkpoint: later ones may be renamed
        self.run_dir, self.peak = self.world.on_rank0(self._open_files)
        source, found = self.plan.source, self.plan.resumed.checkpoint
        kept = init_from.kept_files(source, found and found.path, self.plan.data.template)
        self.saver = Saver(
            self.run_dir / "checkpoints",
            config_json=to_json(self.config),
            save_tokenizer=self.plan.data.tokenizer.save,
            keep=self.config.train.keep_checkpoints,
            huggingface_json=json.dumps(kept) if kept else None,
        )

    def _open_files(self) -> tuple[Path, float]:
        """Creates or reopens the run directory and its logs, and prints the header.

        Returns the directory, and the FLOP/s of all ranks that MFU is relative to.
        """
        plan, config, warn = self.plan, self.config, self.display.warn
        path = config.run_dir or directory.new_run_dir(config.recipe)
        self.lock(path)
        if note := directory.open_run_dir(path, config, self.run.step, self.world.size):
            warn(note)
        peak = device.measured_peak(plan.device, device.DTYPES[plan.precision])
        peak *= device.shares(plan.device, self.world.size)
        saved = self._manifest(peak)
        title = f"{path.name}: {config.recipe}, {short(saved['parameters'])} parameters"
        self.metrics = MetricsLog(path, self.run.step, title, warn, config.track)
        # the best is chosen among the checkpoints on disk, as in a run without interruption
        kept = checkpoint.saved_steps(path / "checkpoints")
        losses = {r["step"]: r["val_loss"] for r in comparable(self.metrics.records)}
        self.best = min(((losses[s], s) for s in kept if s in losses), default=self.best)
        manifest.write(path / "manifest.json", saved)
        self.display.header(self._header(saved, path))
        for line in plan.resumed.changes(config):
            self.display.line(f"changed: {line}")
        return path, peak

    def _manifest(self, peak: float) -> dict[str, Any]:
        """Returns what manifest.json keeps of the plan, beside its settings.

        MFU is relative to `peak`, the FLOP/s of all ranks.
        """
        plan, data = self.plan, self.plan.data
        return {
            "device": device.device_name(plan.device),
            "on": plan.device,
            "ranks": self.world.size,
            "precision": plan.precision,
            "compile": plan.compiled,
            "micro_batch": self.run.micro_batch,
            "ops": plan.ops.names,
            "trials": plan.trials,
            "parameters": self.run.model.num_params(),
            "peak_flops": peak,
            "mfu": MFU_CONVENTION,
            "resumed_from_step": self.run.step or None,
            "started_from": None if plan.source is None else str(plan.source.path),
            "data": {
                "name": data.name,
                "sha256": data.sha256,
                "python": data.corpora[0].python,
                "tokenizer": data.tokenizer.kind,
                "train_tokens": sum(len(corpus.train) for corpus in data.corpora),
                "val_tokens": sum(len(corpus.val) for corpus in data.corpora),
                "align": self.config.data.align,
                "weights": data.weights,
                "samples_per_epoch": plan.epoch_sizes,
            },
        }

    def _header(self, saved: dict[str, Any], run_dir: Path) -> dict[str, str]:
        """Returns the lines that a run prints before it begins, by their first word."""
        run, plan, config, data = self.run, self.plan, self.config, saved["data"]
        compiled = "on" if plan.compiled else "off"
        python = f" of Python {data['python']}" if data["python"] else ""
        parts = {"sequence": run.micro_batch, "micro-step": run.loader.accumulation,
                 "rank": self.world.size}  # fmt: skip
        batch = " x ".join(counted(number, noun) for noun, number in parts.items())
        left = counted(config.steps - run.step, "more step" if run.step else "step")
        begun = {} if plan.source is None else {"weights": f"from {plan.source.path}"}
        if plan.resumed.checkpoint is not None:
            begun["resumed"] = f"from {plan.resumed.checkpoint.path}, step {run.step}"
        return {
            "recipe": config.recipe,
            **begun,
            "device": f"{saved['device']}, {plan.precision}, compile {compiled}",
            "model": f"{saved['parameters']:,} parameters, context {config.model.context}",
            "data": f"{data['name']}{python}: {short(data['train_tokens'])} training + "
            f"{short(data['val_tokens'])} validation tokens"
            f" ({data['tokenizer'].removesuffix('s')} tokenizer), sha256 {data['sha256'][:16]}",
            "training": f"{left} of {config.train.batch_tokens:,} tokens each ({batch}),"
            " " + {"adamw": "AdamW", "muon": "Muon"}[config.optim.kind],
            "ops": ", ".join(f"{op} {name}" for op, name in saved["ops"].items()),
            "MFU": f"relative to {saved['peak_flops'] / 1e12:.2f} TFLOP/s, the fastest matrix"
            " product measured here",
            "run": str(run_dir),
        }

    # --- the loop ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Shows the bar and starts the clock; evaluates before the first step.

        A resumed run that lost the evaluation of its step is evaluated there, too.
        """
        step, steps = self.run.step, self.config.steps
        if step == steps:
            self.display.line(f"this run is finished: it has taken its {steps} steps")
        self.display.start(step, steps)
        records = [] if self.metrics is None else self.metrics.records
        seen = any(r["step"] == step and "val_loss" in r for r in records)
        if self.world.broadcast_object((step == 0 or self.due(self.plan.eval_every)) and not seen):
            self.evaluate()
            self.sample()
            self.status()
        self.clock, self.logged, self.skipped = time.perf_counter(), step, 0
        self.waited_s = self.run.loader.waited_s

    def due(self, every: int) -> bool:
        """Returns True after each `every`-th step and after the last; 0: after the last alone."""
        step = self.run.step
        return step == self.config.steps or (every > 0 and step % every == 0)

    def status(self, what: str = "") -> None:
        """Shows what this rank does, and tells the watchdog; without `what` it trains again."""
        self.display.doing(what)
        watchdog.progress()

    def after_step(self) -> None:
        """Writes the settings once a step has been taken with them; stops if a save has failed."""
        if self.saver.failed and self.run.stop is not None:
            self.run.stop.ask()  # all ranks leave together, and raise its error there
        if self.run.step == self.plan.resumed.step + 1:
            self._on_rank0(lambda: directory.write_config(self.run_dir, self.config))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context whose time does not count in the speed of training."""
        self.run.finite_loss()  # a sync: work in the queue belongs to training, not the pause
        began = time.perf_counter()
        yield
        self.status()
        self.clock += time.perf_counter() - began

    def log(self) -> None:
        """Writes and shows the loss of this step, and the speed since the last log."""
        run = self.run
        loss, grad_norm = run.finite_loss()
        now, waited_s = time.perf_counter(), run.loader.waited_s
        seconds, waited = now - self.clock, waited_s - self.waited_s
        steps = run.step - self.logged
        first = self.logged == self.plan.resumed.step  # with what is compiled or allocated once
        self.clock, self.waited_s, self.logged = now, waited_s, run.step
        per_second = steps * self.config.train.batch_tokens / seconds
        achieved = per_second * flops_per_token(self.config.model)
        self.peak = max(achieved, self.peak)  # which may have been measured on a busy machine
        rates = [optimizer.param_groups[0]["lr"] for optimizer in run.optimizers.all]
        record = {
            "step": run.step,
            "train_loss": loss if math.isfinite(loss) else None,  # that step was skipped
            "tokens": run.tokens,
            "tok_per_s": round(per_second, 1),
            "epoch": round(max(run.epochs()), 4),
            "data_wait": round(waited / seconds, 4),
            "mfu": round(achieved / self.peak, 4),
            **dict(zip(("lr", "muon_lr"), rates)),
            "grad_norm": grad_norm if math.isfinite(grad_norm) else None,  # fp16 skipped the step
            **device.peak_memory(self.plan.device),
        }
        if run.spikes is not None:
            record["rollbacks"] = run.spikes.total
        if run.finite.most:
            record["skipped_steps"] = number = int(run.finite.skipped - self.skipped)
            if number:
                said = "skipped: the loss or a gradient was not finite"
                self.display.warn(f"{counted(number, 'step')} {said}")
            self.skipped = run.finite.skipped
        if self.metrics is not None:
            self.metrics.write(record)
        left = None if first else (self.config.steps - run.step) * seconds / steps
        self.display.step(record, self.config.steps, left)

    def save(self) -> None:
        """Starts a checkpoint; raises if loss or weights are not finite."""
        run = self.run
        self.status("saving")
        run.finite_loss()
        check_weights(run.optimizers.named.items(), run.step)
        if run.spikes is not None:  # a run that resumes here has the same
            run.spikes.keep(run.step)
        weights, state = run.snapshot()
        copied = self.plan.sharded
        self._on_rank0(lambda: self.saver.save(run.step, weights, state, copied=copied))

    def publish(self) -> None:
        """Waits until all checkpoints are on the disk; raises on all ranks if one is not."""
        self.status("saving")
        self._on_rank0(self.saver.wait)
        self.status()

    def _on_rank0(self, work: Callable[[], None]) -> None:
        """Calls `work` where checkpoints are written; its error is raised on all ranks."""
        self.world.on_rank0(lambda: self.lock(self.run_dir).check())
        self.world.on_rank0(work)

    def evaluate(self) -> None:
        """Logs the validation loss, and marks the checkpoint if it is the best."""
        run, data, step = self.run, self.config.data, self.run.step
        tokens = data.final_eval_tokens if step >= self.config.steps else data.eval_tokens
        results = run.evaluate("val", tokens, self.status)
        loss = self.display.val_loss = self._weighted(results)
        record: dict[str, Any] = {"step": step, "val_loss": loss}
        record["val_tokens"] = sum(count for _, count in results)
        if data.sampling == "lecture":
            losses = run.evaluate("train", 0, self.status)
            record["eval_train_loss"] = self._weighted(losses)
        if len(results) > 1:
            record["val_losses"] = [loss for loss, _ in results]
        bits = ""
        if self.plan.data.val_bytes_per_token is not None:
            bits_per_byte = loss / math.log(2) / self.plan.data.val_bytes_per_token
            record["val_bits_per_byte"] = bits_per_byte
            bits = f"  {bits_per_byte:.4f} bits per byte"
        record["tokens"], also = run.tokens, ""
        # of another length than earlier evaluations, unless the text ends before
        most = max(count for _, count in results)
        other = 0 < tokens < data.eval_tokens or (tokens != data.eval_tokens < most)
        if other and data.sampling != "lecture":
            same = run.evaluate("val", data.eval_tokens, self.status)
            record["val_loss_compared"] = self._weighted(same)
            also = f"; {record['val_loss_compared']:.4f} on the text of the earlier ones"
        self.display.line(
            f"step {step:>6}  epoch {max(run.epochs()):.2f}  val loss {loss:.4f}  "
            f"perplexity {perplexity(loss):.2f}{bits}  ({record['val_tokens']:,} tokens{also})"
        )
        loss = record.get("val_loss_compared", loss)
        if self.metrics is not None:
            self.metrics.write(record)
            if loss < self.best[0] and self.saver.has(step):
                self.saver.mark_best(step)
                self.best = loss, step

    def _weighted(self, results: list[tuple[float, int]]) -> float:
        """Returns the weighted mean of the corpora's losses."""
        weights = self.plan.data.weights
        return math.fsum(loss * weight for (loss, _), weight in zip(results, weights))

    def sample(self) -> None:
        """Samples on the main rank, or with sharded weights the same on all, and shows it."""
        run, plan, length = self.run, self.plan, self.config.train.sample_tokens
        if not run.step or not length:
            return
        self.status("sampling")
        # ranks that share weights agree on whether one was asked to stop
        stop = run.stop
        stops = stop and (stop.agreed(self.world) if plan.sharded else stop.received is not None)
        if not stops and (plan.sharded or self.world.is_main):
            run.model.eval()
            with run.autocast(), device.eager(plan.compiled):
                [text] = sample_text(
                    run.model, plan.data.tokenizer, [self.prompt], temperature=0.8,
                    max_new_tokens=length, seed=self.config.seed, device=plan.device,
                )  # fmt: skip
            run.model.train()
            if self.metrics is not None:
                self.display.sample(text)
                self.metrics.write_sample(run.step, text)
        self.world.barrier()  # a rank that waited in its next micro-step would seem to stall
