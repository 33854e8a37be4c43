"""Trains on a dataset of your own: sums such as 27+48=075; only the answer is learned.

    python examples/own_dataset.py
    python examples/own_dataset.py --steps 2000

Any map-style dataset of torch.utils.data can be used. An item is a pair (tokens, targets); a
target is the next token, or -100 where the loss does not count.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, random_split

import fastgpt
from fastgpt import flags
from fastgpt.config import OptimConfig, TrainConfig

ALPHABET = "0123456789+="
QUESTION, ANSWER = len("27+48="), len("075")


class Sums(Dataset[tuple[Tensor, Tensor]]):
    """All sums of two numbers below 100."""

    def __len__(self) -> int:
        return 100 * 100

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        a, b = divmod(index, 100)
        ids = torch.tensor([ALPHABET.index(x) for x in f"{a:02}+{b:02}={a + b:03}"])
        tokens, targets = ids[:-1], ids[1:].clone()
        targets[: QUESTION - 1] = -100
        return tokens, targets


def main(steps: int = 200, out: Path | None = None) -> None:
    """Trains on nine tenths of the sums, and counts right answers to the others."""
    train, val = random_split(Sums(), [0.9, 0.1], torch.Generator().manual_seed(0))
    config = fastgpt.Config(
        steps=steps,
        run_dir=out,
        model=fastgpt.ModelConfig(num_layers=2, num_heads=4, dim=64, context=QUESTION + ANSWER - 1),
        optim=OptimConfig(lr=3e-3, warmup_steps=10),
        train=TrainConfig(batch_tokens=256 * (QUESTION + ANSWER - 1), sample_tokens=0),
    )
    data = fastgpt.Data(train=train, val=val, vocab_size=len(ALPHABET), name="sums")
    trainer = fastgpt.Trainer(config, data)
    trainer.fit()
    assert trainer.run_dir is not None
    model, _ = fastgpt.load(trainer.run_dir)
    tokens, targets = (torch.stack(x) for x in zip(*val, strict=True))
    answers = model.generate(tokens[:, :QUESTION], max_new_tokens=ANSWER, temperature=0)
    right = (answers[:, QUESTION:] == targets[:, QUESTION - 1 :]).all(dim=1).sum()
    print(f"{right} of {len(val)} answers are right")


if __name__ == "__main__":
    flags.run(main)
