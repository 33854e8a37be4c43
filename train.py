"""Trains a GPT: `python train.py [recipe] [--section.field value ...]`, alone or under torchrun."""

from fastgpt.interpreter import require_torch

require_torch()

from fastgpt.cli import main  # noqa: E402 - it imports torch

if __name__ == "__main__":
    main()
