"""The training loop: it takes the steps of a run that `fastgpt.train.build` has built."""

from contextlib import nullcontext

import numpy as np
import torch

from fastgpt.faults import watchdog
from fastgpt.train.build import Run
from fastgpt.train.optim import lr_ratio
from fastgpt.train.recorder import Recorder


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
                    # weights the micro-batches by their targets, of which padded samples have
                    # fewer: the sum is the mean over the global batch's targets
                    weight = loader.target_ratio / loader.accumulation
                    micro_loss = (run.ddp or run.forward)(x, y) * weight
                scaler.scale(micro_loss).backward()
            loss += micro_loss.detach()
        run.loss = loss if world.size == 1 else world.sum(loss / world.size)
        optimizers.set_lr(lr_ratio(run.step, config.steps, config.optim))
        run.grad_norm = optimizers.clip()
        optimizers.step(run.finite.skips(run.loss, run.grad_norm))
        run.step += 1
        run.finite.watch(run.step, optimizers.norms, scaled=scaler.is_enabled())
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
