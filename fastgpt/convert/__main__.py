"""Converts a model between programs: `python -m fastgpt.convert SOURCE TARGET --to hf`.

SOURCE is a run or checkpoint of fastgpt, a folder of Hugging Face with safetensors files (GPT-2,
Llama, Qwen3), the name of such a model on the hub, nanoGPT's ckpt.pt or a .bin file of llm.c.
Before success is reported the new files are read back, those of Hugging Face by transformers, and
logits and text are compared with the source's.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from safetensors import SafetensorError

from fastgpt.config import flags
from fastgpt.config.checks import POSITIVE, check_fields
from fastgpt.convert import elsewhere
from fastgpt.convert.llmc import write_llmc
from fastgpt.convert.nanogpt import write_nanogpt
from fastgpt.convert.proof import digests, prove
from fastgpt.convert.source import Source, read
from fastgpt.convert.target import DTYPES, write_folder, write_run
from fastgpt.display import command
from fastgpt.errors import UserError, is_disk_full, reason, run_command
from fastgpt.files import temporary_name
from fastgpt.terminal import print_line, print_text

FILES = {"nanogpt": ".pt", "llmc": ".bin"}
"""Formats that are a single file, and how its name ends."""
FIRST = ("source", "target", "to", "dtype", "verify")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertConfig:
    """Converts a model between fastgpt, Hugging Face, nanoGPT and llm.c."""

    source: Annotated[str, tyro.conf.Positional]
    """Model to convert: a run, a checkpoint, a folder of Hugging Face, a name on the hub, nanoGPT's
    ckpt.pt or a .bin file of llm.c."""
    target: Annotated[Path, tyro.conf.Positional]
    """Folder to write, or file for nanogpt and llmc; it must not exist yet."""
    to: Literal["hf", "run", "nanogpt", "llmc"]
    """Format to write. hf: Hugging Face's GPT-2, Llama or Qwen3, whichever fits; run: a run of
    fastgpt; nanogpt: a ckpt.pt without optimizer state; llmc: a .bin file."""
    dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Number format of the weights; by default that of the source."""
    shard_gb: Annotated[float, POSITIVE] = 5.0
    """Size from which a new safetensors file is begun, in gigabytes."""
    verify: bool = True
    """Proof that the written model is the same, by its logits and text. Without it the result is
    marked as unverified."""

    def __post_init__(self) -> None:
        check_fields(self)


def convert(config: ConvertConfig) -> str:
    """Converts a model; returns what was proved.

    Raises:
        UserError: the source cannot be read, the target exists or cannot be written or express the
            model, or the proof fails; nothing is left at the target then.
    """
    if config.target.exists():
        raise UserError(f"{config.target} exists: expected a new name")
    suffix = FILES.get(config.to, config.target.suffix)
    if config.target.suffix != suffix:
        raise UserError(f"{config.target} is for {config.to}: expected a name with {suffix}")
    source, dtype = read(config.source), DTYPES.get(config.dtype)
    others = elsewhere.warnings(source) if config.to == "hf" else ()
    for warning in (*source.complaints(), *others):
        print_line(f"warning: {warning}")
    if dtype is not None:
        source = replace(source, weights=source.weights.to(dtype))
    unique = temporary_name(config.target)
    temporary = unique.with_name(f"{unique.name}{suffix}" if config.to in FILES else unique.name)
    before = digests(source.weights)
    try:
        try:
            config.target.parent.mkdir(parents=True, exist_ok=True)
            _write(config, source, temporary)
        except (OSError, RuntimeError, SafetensorError, UnicodeError) as error:
            why = "no space left on the disk" if is_disk_full(error) else reason(error)
            raise UserError(f"cannot write {config.target}: {why}") from error
        said = "unverified: nothing was compared"
        if config.verify:
            said = prove(source, temporary, config.to, before, dtype)
        temporary.rename(config.target)
    finally:
        if temporary.is_file():
            temporary.unlink()
        shutil.rmtree(temporary, ignore_errors=True)
    return said


def _write(config: ConvertConfig, source: Source, folder: Path) -> None:
    if config.to == "hf":
        write_folder(source, folder, int(config.shard_gb * 1e9))
    elif config.to == "run":
        write_run(source, folder)
    else:
        write = {"nanogpt": write_nanogpt, "llmc": write_llmc}[config.to]
        write(source.config, source.weights, folder)


def main(argv: list[str]) -> None:
    """Runs the command line `argv`."""
    config = flags.parse(
        ConvertConfig, argv, prog=command("python -m fastgpt.convert"), first=FIRST
    )
    said = convert(config)
    print_text(f"{said}\nwrote {config.target}")


if __name__ == "__main__":
    run_command(main)
