"""Trains a GPT: `python train.py [RECIPE] [--FLAG VALUE ...]`, alone or under torchrun."""

from fastgpt.require_torch import require_torch

require_torch()

from fastgpt.cli import main  # noqa: E402 - it imports torch

if __name__ == "__main__":
    main()
