"""Writes a trained run as a folder of Hugging Face, and generates text from it with transformers.

    python examples/load_into_transformers.py runs/mybook mybook-hf

The folder is read like any model of the hub. It has a class of transformers (GPT-2, Llama or
Qwen3), so no code of fastgpt is needed where it is used.
"""

import subprocess
import sys
from pathlib import Path

import tyro
from transformers import pipeline

from fastgpt import flags


def main(
    run: tyro.conf.Positional[Path], folder: tyro.conf.Positional[Path], prompt: str = "The "
) -> None:
    """Converts a run.

    Args:
        run: folder of the run.
        folder: folder to write, which must not exist yet.
        prompt: text that the model continues.
    """
    convert = [sys.executable, "-m", "fastgpt.convert", str(run), str(folder), "--to", "hf"]
    subprocess.run(convert, check=True)
    generate = pipeline("text-generation", model=str(folder))
    print(generate(prompt, max_new_tokens=20, do_sample=False)[0]["generated_text"])


if __name__ == "__main__":
    flags.run(main)
