"""A run's description of itself: the header that it prints, and the facts in its manifest."""

from pathlib import Path
from typing import Any

from fastgpt.config.recipes import expected
from fastgpt.device import device
from fastgpt.display import duration, short
from fastgpt.errors import counted
from fastgpt.model.flops import MFU_CONVENTION
from fastgpt.train.engine import Engine


def facts(engine: Engine, peak: float) -> dict[str, Any]:
    """Returns what the manifest records of a run, beside its settings.

    Args:
        peak: FLOP/s of all ranks that MFU is relative to.
    """
    return {
        "device": device.device_name(engine.device),
        "on": engine.device,
        "ranks": engine.world.size,
        "precision": engine.plan.precision,
        "compile": engine.plan.compiled,
        "micro_batch": engine.micro_batch,
        "ops": engine.model.ops.names,
        "trials": engine.plan.trials,
        "parameters": engine.model.num_params(),
        "peak_flops": peak,
        "mfu": MFU_CONVENTION,
        "resumed_from_step": engine.step or None,
        "started_from": None if engine.plan.source is None else str(engine.plan.source.path),
        "data": {
            "name": engine.data.name,
            "sha256": engine.data.sha256,
            "python": engine.data.corpora[0].python,
            "tokenizer": engine.data.tokenizer.kind,
            "train_tokens": sum(len(corpus.train) for corpus in engine.data.corpora),
            "val_tokens": sum(len(corpus.val) for corpus in engine.data.corpora),
            "align": engine.config.data.align,
            "weights": engine.data.weights,
            "samples_per_epoch": engine.plan.epoch_sizes,
        },
    }


def header(engine: Engine, peak: float, run_dir: Path) -> dict[str, str]:
    """Returns the lines that a run prints before it begins, by their first word."""
    config, known = engine.config, facts(engine, peak)
    data, compiled = known["data"], "on" if engine.plan.compiled else "off"
    python = f" of Python {data['python']}" if data["python"] else ""
    parts = {"sequence": engine.micro_batch, "micro-step": engine.loader.accumulation,
             "rank": engine.world.size}  # fmt: skip
    batch = " x ".join(counted(number, noun) for noun, number in parts.items())
    left = counted(config.steps - engine.step, "more step" if engine.step else "step")
    resumed = {} if engine.plan.source is None else {"weights": f"from {engine.plan.source.path}"}
    if engine.restored.path is not None:
        resumed["resumed"] = f"from {engine.restored.path}, step {engine.step}"
        resumed["changed"] = ", ".join(engine.restored.changes) or "no settings"
    return {
        "recipe": config.recipe,
        **resumed,
        "device": f"{known['device']}, {engine.plan.precision}, compile {compiled}",
        "model": f"{known['parameters']:,} parameters, context {config.model.context}",
        "data": f"{data['name']}{python}: {short(data['train_tokens'])} training + "
        f"{short(data['val_tokens'])} validation tokens"
        f" ({data['tokenizer'].removesuffix('s')} tokenizer), "
        f"sha256 {data['sha256'][:16]}",
        "training": f"{left} of {config.train.batch_tokens:,} tokens each ({batch}),"
        " " + {"adamw": "AdamW", "muon": "Muon"}[config.optim.kind],
        "epochs": _epochs_planned(engine),
        "estimate": _estimate(engine, peak),
        "ops": ", ".join(f"{op} {name}" for op, name in known["ops"].items()),
        "MFU": f"relative to {peak / 1e12:.2f} TFLOP/s, the fastest matrix product measured here",
        "run": str(run_dir),
    }


def _epochs_planned(engine: Engine) -> str:
    """Describes how many epochs of each corpus the whole run reads."""
    config = engine.config
    samples = config.steps * config.global_batch
    data = engine.data
    counts = zip(data.corpora, data.weights, engine.plan.epoch_sizes, engine.plan.coverage)
    return ", ".join(
        f"{samples * weight / size:.3g} passes over {corpus.name} ({size:,} samples, which"
        f" cover {f'{covered:.0%}'.replace('100%', 'all')} of its tokens)"
        for corpus, weight, size, covered in counts
    )


def _estimate(engine: Engine, peak: float) -> str:
    """Describes the tokens left to train and evaluate on, the time, and the expected loss."""
    tokens = (engine.config.steps - engine.step) * engine.config.train.batch_tokens
    scored = _tokens_to_score(engine)
    # a step costs three times the FLOPs of its forward, which is all that an evaluation needs
    flops = (tokens + scored / 3) * engine.flops_per_token
    short_s, long_s = (flops / peak / mfu for mfu in (0.5, 0.2))
    time_left = f"{duration(short_s)} to {duration(long_s)} (at an MFU of 50% to 20%)"
    return (
        f"{tokens:,} training + {scored:,} evaluation tokens, {flops:.2g} FLOPs, "
        f"{time_left if long_s >= 60 else 'less than a minute of computing'}; "
        f"{expected(engine.config.recipe)}"
    )


def _tokens_to_score(engine: Engine) -> int:
    """Counts the tokens of all evaluations to come (with documents or few tokens, roughly)."""
    config, step = engine.config, engine.step
    corpora = engine.data.corpora

    def scored(most: int) -> int:
        if config.data.eval_batches:  # of both splits
            return 2 * len(corpora) * config.data.eval_batches * config.train.batch_tokens
        return sum(min(most or len(corpus.val), len(corpus.val)) for corpus in corpora)

    if step == config.steps:
        return 0
    every = config.eval_every or config.steps
    before_last = (config.steps - 1) // every - step // every + (step == 0)
    return before_last * scored(config.data.eval_tokens) + scored(config.data.final_eval_tokens)
