"""Trains a GPT: `python train.py [recipe] [--section.field value ...]`, alone or under torchrun."""

import sys

from fastgpt import cli, distributed
from fastgpt.errors import shown_in_one_line


def main() -> None:
    try:
        with shown_in_one_line():
            config = cli.parse(sys.argv[1:])
            from fastgpt.trainer import Trainer  # after --help and wrong flags had their answer

            Trainer(config).fit()
    finally:
        distributed.stop()


if __name__ == "__main__":
    main()
