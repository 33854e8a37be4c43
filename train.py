"""Trains a GPT: `python train.py [recipe] [--section.field value ...]`, alone or under torchrun."""

from fastgpt.cli import main

if __name__ == "__main__":
    main()
