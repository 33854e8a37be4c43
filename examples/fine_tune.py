"""Fine-tunes a model on conversations, so that it answers.

    python examples/fine_tune.py gpt2 chats.jsonl
    python examples/fine_tune.py runs/mybook chats.jsonl --steps 200

A line of the file is {"prompt": "...", "completion": "..."} or has a list of `messages`. The model
is a run of fastgpt, a folder of Hugging Face or a name on its hub. At its end the run prints the
command that talks with it. docs/finetuning.md says more.
"""

from pathlib import Path

import tyro

import fastgpt
from fastgpt import flags
from fastgpt.config import DataConfig, OptimConfig, TrainConfig
from fastgpt.train.init_from import with_architecture


def main(
    model: tyro.conf.Positional[str],
    chats: tyro.conf.Positional[Path],
    steps: int = 20,
    out: Path | None = None,
) -> None:
    """Fine-tunes a model.

    Args:
        model: model to start from.
        chats: file of conversations.
        steps: number of optimizer steps.
        out: folder of the run; by default a new one in runs/.
    """
    config = fastgpt.Config(
        steps=steps,
        run_dir=out,
        data=DataConfig(source=str(chats), align="conversation"),
        optim=OptimConfig(lr=1e-4, warmup_steps=2),
        train=TrainConfig(batch_tokens=8 * 1024, sample_tokens=0),
    )
    fastgpt.Trainer(with_architecture(config, model)).fit()


if __name__ == "__main__":
    flags.run(main)
