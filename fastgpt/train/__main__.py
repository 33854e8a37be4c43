"""Trains, as `python train.py` does."""

from fastgpt.cli import main

if __name__ == "__main__":
    main()
