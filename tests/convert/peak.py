"""Measures how much memory conversions take: `python -m tests.convert.peak --layers 48`.

A model with random weights is converted to Hugging Face and back and loaded. Each line has how far
the peak of the resident memory, which includes mapped files, rose above that before.
"""

import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastgpt import flags
from fastgpt.config import ModelConfig
from fastgpt.convert.source import Source, shapes
from fastgpt.convert.target import write_run
from fastgpt.loading import load
from fastgpt.tensors import Weights
from tests.convert.models import converted


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakConfig:
    """Measures the memory of conversions of a GPT-2 with random weights in bf16."""

    layers: int = 48
    """Number of layers."""
    dim: int = 1600
    """Width of the model; with the defaults it has 1.5 billion parameters."""
    vocab: int = 50_257
    """Size of the vocabulary."""
    verify: bool = False
    """Also measures the proof, which computes with the model on the CPU."""


def random_weights(config: ModelConfig) -> Weights:
    """Returns weights that are drawn when they are read, so that a model is never in memory."""
    plan = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for name, shape in shapes(config).items()
    }

    def drawn(name: str) -> Tensor:
        return torch.empty_like(plan[name], device="cpu").normal_(std=0.02)

    return Weights(plan, drawn)


def peak() -> float:
    """Returns the process's largest resident memory so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main(argv: list[str]) -> None:
    asked = flags.parse(PeakConfig, argv, prog="python -m tests.convert.peak", first=("layers",))
    config = ModelConfig(
        num_layers=asked.layers, num_heads=asked.dim // 64, dim=asked.dim, vocab_size=asked.vocab
    )
    weights = random_weights(config)
    sizes = [x.nbytes / 1e6 for x in weights.plan.values()]
    print(f"weights {sum(sizes):.0f} MB, of which the largest has {max(sizes):.0f} MB")
    with tempfile.TemporaryDirectory() as folder:
        run, hf, again = (Path(folder) / name for name in ("run", "hf", "again"))
        before = peak()
        steps = {
            "written as a run": lambda: write_run(Source(run, "run", config, weights, None), run),
            "run to hf": lambda: converted(run, hf, "hf", verify=False),
            "hf to run": lambda: converted(hf, again, "run", verify=False),
            "loaded": lambda: load(str(hf)),
            "proved": lambda: converted(run, Path(folder) / "proved", "hf"),
        }
        for name, step in steps.items():
            if name != "proved" or asked.verify:
                step()
                print(f"{name}: {peak() - before:.0f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
