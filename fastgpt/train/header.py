"""A run's description of itself: the header that it prints, and the facts in its manifest."""

from pathlib import Path
from typing import Any

from fastgpt.device import device
from fastgpt.display import short
from fastgpt.errors import counted
from fastgpt.model.flops import MFU_CONVENTION
from fastgpt.train.engine import Engine


def facts(engine: Engine, peak: float) -> dict[str, Any]:
    """Returns what the manifest records of a run, beside its settings.

    Args:
        peak: FLOP/s of all ranks that MFU is relative to.
    """
    data = engine.data
    return {
        "device": device.device_name(engine.device),
        "on": engine.device,
        "ranks": engine.world.size,
        "precision": engine.precision,
        "compile": engine.compiled,
        "micro_batch": engine.micro_batch,
        "ops": engine.model.ops.names,
        "trials": engine.trials,
        "parameters": engine.model.num_params(),
        "peak_flops": peak,
        "mfu": MFU_CONVENTION,
        "resumed_from_step": engine.step or None,
        "started_from": None if engine.source is None else str(engine.source.path),
        "data": {
            "name": data.name,
            "sha256": data.sha256,
            "python": data.corpora[0].python,
            "tokenizer": data.tokenizer.kind,
            "train_tokens": sum(len(corpus.train) for corpus in data.corpora),
            "val_tokens": sum(len(corpus.val) for corpus in data.corpora),
            "align": engine.config.data.align,
            "weights": data.weights,
            "samples_per_epoch": engine.epoch_sizes,
        },
    }


def header(engine: Engine, known: dict[str, Any], run_dir: Path) -> dict[str, str]:
    """Returns the lines that a run prints before it begins, by their first word.

    Args:
        known: from `facts`.
    """
    config, data = engine.config, known["data"]
    compiled = "on" if engine.compiled else "off"
    python = f" of Python {data['python']}" if data["python"] else ""
    parts = {"sequence": engine.micro_batch, "micro-step": engine.loader.accumulation,
             "rank": engine.world.size}  # fmt: skip
    batch = " x ".join(counted(number, noun) for noun, number in parts.items())
    left = counted(config.steps - engine.step, "more step" if engine.step else "step")
    begun = {} if engine.source is None else {"weights": f"from {engine.source.path}"}
    if engine.restored.path is not None:
        begun["resumed"] = f"from {engine.restored.path}, step {engine.step}"
    return {
        "recipe": config.recipe,
        **begun,
        "device": f"{known['device']}, {engine.precision}, compile {compiled}",
        "model": f"{known['parameters']:,} parameters, context {config.model.context}",
        "data": f"{data['name']}{python}: {short(data['train_tokens'])} training + "
        f"{short(data['val_tokens'])} validation tokens"
        f" ({data['tokenizer'].removesuffix('s')} tokenizer), sha256 {data['sha256'][:16]}",
        "training": f"{left} of {config.train.batch_tokens:,} tokens each ({batch}),"
        " " + {"adamw": "AdamW", "muon": "Muon"}[config.optim.kind],
        "ops": ", ".join(f"{op} {name}" for op, name in known["ops"].items()),
        "MFU": f"relative to {known['peak_flops'] / 1e12:.2f} TFLOP/s, the fastest matrix product"
        " measured here",
        "run": str(run_dir),
    }
