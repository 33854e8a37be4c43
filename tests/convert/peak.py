"""Measures how much memory conversions take: `python -m tests.convert.peak 48 1600 50257`.

The numbers are layers, width and vocabulary of a GPT-2 with random weights in bf16, 1.5 billion
here. Each line has how far the peak of the resident memory rose above that before.
"""

import resource
import sys
import tempfile
from pathlib import Path

import torch

from fastgpt.checkpoint.tensors import Weights
from fastgpt.config.model import ModelConfig
from fastgpt.convert.__main__ import ConvertConfig, convert
from fastgpt.convert.families import tensors_of
from fastgpt.convert.source import OpenedModel, load
from fastgpt.convert.target import write_run


def peak() -> float:
    """Returns the process's largest resident memory so far, in MB; it includes mapped files."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main(layers: int, dim: int, vocab: int) -> None:
    config = ModelConfig(num_layers=layers, num_heads=dim // 64, dim=dim, vocab_size=vocab)
    plan = {name: x.to(torch.bfloat16) for name, x in tensors_of(config).items()}
    # drawn when they are read, so that the model is never in memory
    weights = Weights(plan, lambda name: torch.empty_like(plan[name], device="cpu").normal_())
    sizes = [x.nbytes / 1e6 for x in plan.values()]
    print(f"weights {sum(sizes):.0f} MB, of which the largest has {max(sizes):.0f} MB")
    with tempfile.TemporaryDirectory() as folder:
        run, hf, again = (Path(folder) / name for name in ("run", "hf", "again"))
        before = peak()
        for name, step in {
            "drawn to run": lambda: write_run(OpenedModel(run, config, weights), run),
            "run to hf": lambda: convert(ConvertConfig(source=str(run), target=hf, to="hf")),
            "hf to run": lambda: convert(ConvertConfig(source=str(hf), target=again, to="run")),
            "loaded": lambda: load(str(hf)),
        }.items():
            step()
            print(f"{name}: {peak() - before:.0f} MB")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
