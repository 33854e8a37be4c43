"""Times a step of our Muon beside PyTorch's: `python -m bench.muon [recipe]`.

Both step in turn on matrices of the recipe's shapes, with random weights and gradients in fp32, on
a CPU.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
import tyro
from torch import nn

from bench import records
from bench.timing import Timed, Timer, quantiles
from fastgpt import flags
from fastgpt.config.config import OpsConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.errors import UserError, run_command, unknown_name
from fastgpt.model.build import build_model
from fastgpt.ops.tables import select
from fastgpt.parallel.distributed import World
from fastgpt.train.muon import Muon

VOCABULARY = 256
"""Size of the vocabulary: Muon has no part in the embeddings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonBench:
    """Times a step of our Muon beside PyTorch's, on a CPU."""

    recipe: Annotated[str, tyro.conf.Positional] = "shakespeare-cpu"
    """Recipe of the network, whose layers' matrices are updated."""
    rounds: int = 20
    """Number of timed rounds; each of the two has a turn in each."""

    def __post_init__(self) -> None:
        if self.rounds < 2:
            raise UserError(f"--rounds is {self.rounds}: expected 2 or more")


def matrices(recipe: str) -> list[nn.Parameter]:
    """Makes the matrices of a recipe's layers, random, each with a random gradient."""
    config = replace(RECIPES[recipe][1].model, vocab_size=VOCABULARY)
    ops = select(OpsConfig(), "cpu")
    found = [x for x in build_model(config, ops).h.parameters() if x.dim() == 2]
    for matrix in found:
        matrix.grad = torch.randn_like(matrix)
    return found


def time_steps(recipe: str, rounds: int) -> list[dict]:
    """Returns a row for each of the two, with the seconds of a step."""
    ours, peers = Muon(matrices(recipe), World()), torch.optim.Muon(matrices(recipe))
    rivals = {name: Timed(lambda _, step=x.step: step()) for name, x in
              (("ours", ours), ("pytorch", peers))}  # fmt: skip
    samples = Timer("cpu").interleave(rivals, seconds=0, rounds=rounds)
    about = {"case": f"muon/{recipe}", "rounds": rounds}
    return [
        {**about, "implementation": name, "seconds": quantiles(found.device)}
        for name, found in samples.items()
    ]


def main(argv: list[str]) -> None:
    asked = flags.parse(MuonBench, argv, prog="python -m bench.muon")
    if asked.recipe not in RECIPES:
        raise unknown_name("recipe", asked.recipe, RECIPES)
    rows = time_steps(asked.recipe, asked.rounds)
    lines = []
    for row in rows:
        figures = " ".join(f"{1e3 * row['seconds'][p]:.2f}" for p in ("p20", "p50", "p80"))
        lines.append((row["case"], row["implementation"], figures))
    records.show("case|implementation|ms a step (p20, p50, p80)", lines)
    print(records.Writer("cpu").write("muon", *rows))


if __name__ == "__main__":
    run_command(main)
