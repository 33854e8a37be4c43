"""Loading a trained model for use: `fastgpt.load("runs/x")`."""

from pathlib import Path

from fastgpt.config.config import OpsConfig
from fastgpt.convert.source import OpenedModel, read
from fastgpt.data.tokenizers import Tokenizer
from fastgpt.model.gpt import GPT
from fastgpt.terminal import print_line


def load(
    source: str | Path, device: str = "cpu", asked: OpsConfig | None = None
) -> tuple[GPT, Tokenizer | None]:
    """Loads a model, in evaluation mode and fp32, and its tokenizer.

    Args:
        source: folder of a run, whose newest valid checkpoint is used, of a checkpoint, or of a
            Hugging Face model (GPT-2, Llama, Qwen3), the name of one on the hub, nanoGPT's ckpt.pt
            or a .bin file of llm.c.
        device: `cpu`, `cuda`, `xpu` or `mps`.
        asked: implementations of the model's ops; by default those that suit the device.

    Returns:
        tuple[GPT, Tokenizer | None]: the tokenizer is None if the folder has none.

    Raises:
        UserError: there is no such model, a file is damaged, or our model cannot express it.

    >>> model, tokenizer = fastgpt.load("runs/mine")
    >>> model.generate(torch.tensor([[1, 2]]), max_new_tokens=3).shape
    torch.Size([1, 5])
    """
    found = open_model(source)
    return found.build_gpt(device, asked), found.tokenizer


def open_model(source: str | Path) -> OpenedModel:
    """Reads a model as `load` does, without building it, and prints its warnings."""
    found = read(str(source))
    for warning in found.warnings:
        print_line(f"warning: {warning}")
    if found.tokenizer is None:
        print_line(f"warning: {found.path} has no tokenizer: the model works on token ids only")
    return found
