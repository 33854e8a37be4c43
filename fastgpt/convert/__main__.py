"""Converts a model to or from Hugging Face: `python -m fastgpt.convert SOURCE TARGET --to hf`."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from safetensors import SafetensorError

from fastgpt import flags
from fastgpt.config.checks import POSITIVE, check_fields
from fastgpt.convert.gguf import write_gguf
from fastgpt.convert.source import open_model
from fastgpt.convert.target import write_folder, write_run
from fastgpt.device.device import DTYPES
from fastgpt.errors import UserError, is_disk_full, reason, run_command
from fastgpt.files import temporary_name
from fastgpt.terminal import print_text


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertConfig:
    """Converts a model to a folder of Hugging Face, a GGUF file, or a run of fastgpt."""

    source: Annotated[str, tyro.conf.Positional]
    """Model to convert: a run, a checkpoint, a folder of Hugging Face (GPT-2, Llama, Qwen3), a name
    on the hub, nanoGPT's ckpt.pt, a .bin file of llm.c or a .gguf file of llama.cpp."""
    target: Annotated[Path, tyro.conf.Positional]
    """Folder to write, or file for gguf; it must not exist yet."""
    to: Literal["hf", "gguf", "run"]
    """Format to write. hf: Hugging Face's GPT-2, Llama or Qwen3, whichever fits; gguf: a file of
    llama.cpp; run: a run of fastgpt."""
    dtype: Literal["fp32", "bf16", "fp16", "q8_0"] | None = None
    """Number format of the weights; by default the source's, or fp16 for gguf. Only gguf has
    q8_0: 8 bits, and a scale for each 32 weights."""
    shard_gb: Annotated[float, POSITIVE] = 5.0
    """Size from which a new safetensors file is begun, in gigabytes."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dtype == "q8_0" and self.to != "gguf":
            raise UserError("--dtype is q8_0: expected fp32, bf16 or fp16, or --to gguf")


def convert(config: ConvertConfig) -> None:
    """Converts a model.

    Raises:
        UserError: the source cannot be read, or the target exists or cannot be written or express
            the model; nothing is left at the target then.
    """
    target = config.target
    if target.exists():
        raise UserError(f"{target} exists: expected a new name")
    source = open_model(config.source)
    if config.dtype is not None and config.to != "gguf":
        source = replace(source, weights=source.weights.to(DTYPES[config.dtype]))
    temporary = temporary_name(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if config.to == "hf":
            write_folder(source, temporary, int(config.shard_gb * 1e9))
        elif config.to == "gguf":
            write_gguf(source, temporary, config.dtype or "fp16")
        else:
            write_run(source, temporary)
        temporary.rename(target)
    except (OSError, RuntimeError, SafetensorError, UnicodeError) as error:
        why = "no space left on the disk" if is_disk_full(error) else reason(error)
        raise UserError(f"cannot write {target}: {why}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if temporary.is_file():
            temporary.unlink()


def main(argv: list[str]) -> None:
    """Runs the command line `argv`."""
    config = flags.command(ConvertConfig, argv, prog="python -m fastgpt.convert")
    convert(config)
    print_text(f"wrote {config.target}")


if __name__ == "__main__":
    run_command(main)
