"""Trains a small GPT on a text file of yours, then prints a text that it makes up.

    python examples/train_your_text.py mybook.txt
    python examples/train_your_text.py mybook.txt --steps 3000 --out runs/mybook

`python train.py baby --data.source mybook.txt` does the same with all options as flags.
"""

from pathlib import Path

import tyro

import fastgpt
from fastgpt import flags
from fastgpt.config import DataConfig, OptimConfig, TrainConfig


def main(text: tyro.conf.Positional[Path], steps: int = 100, out: Path | None = None) -> None:
    """Trains on a text.

    Args:
        text: text file, or folder of text files.
        steps: number of optimizer steps.
        out: folder of the run; by default a new one in runs/.
    """
    config = fastgpt.Config(
        recipe="baby",
        steps=steps,
        run_dir=out,
        model=fastgpt.ModelConfig(num_layers=2, num_heads=4, dim=64, context=128),
        data=DataConfig(source=str(text), tokenizer="bytes"),
        optim=OptimConfig(lr=3e-3, warmup_steps=10),
        train=TrainConfig(batch_tokens=16 * 128, device="auto", sample_tokens=0),
    )
    trainer = fastgpt.Trainer(config)
    trainer.fit()
    assert trainer.run_dir is not None
    model, tokenizer = fastgpt.load(trainer.run_dir)
    assert tokenizer is not None
    prompt = fastgpt.encode_prompt("The ", tokenizer)
    texts = fastgpt.sample_text(
        model, tokenizer, [prompt], max_new_tokens=100, temperature=0.8, seed=0
    )
    print(texts[0])


if __name__ == "__main__":
    flags.run(main)
