"""A checkout of nanoGPT as a peer: its model.py as it is, a step as its train.py takes it, and data
laid out for that train.py."""

import importlib.util
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgpt import device
from fastgpt.config import Config
from fastgpt.data.corpus import Corpus
from fastgpt.data.loader import IGNORED, eval_batches
from fastgpt.errors import UserError


def load_model_module(checkout: Path) -> Any:
    """Its model.py, imported under a name of its own."""
    path = checkout / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    if not path.exists() or spec is None or spec.loader is None:
        raise UserError(f"--nanogpt {checkout}: expected a checkout of nanoGPT, found no model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def training_step(
    config: Config,
    checkout: Path,
    on: str,
    precision: str,
    batches: Callable[[], tuple[Tensor, Tensor]],
) -> Callable[[], None]:
    """A step of its model with `config`'s sizes, optimizer settings and dropout; on CUDA compiled.

    Forward, backward, clipping and AdamW, as its train.py does between two log lines.
    """
    module = load_model_module(checkout)
    sizes, optim = config.model, config.optim
    model = module.GPT(
        module.GPTConfig(
            block_size=sizes.context,
            # its own default for GPT-2 is padded, its other settings are not
            vocab_size=50_304 if sizes.vocab_size == 50_257 else sizes.vocab_size,
            n_layer=sizes.num_layers,
            n_head=sizes.num_heads,
            n_embd=sizes.dim,
            dropout=sizes.dropout,
            bias=sizes.bias,
        )
    ).to(on)
    betas = (optim.beta1, optim.beta2)
    adamw = model.configure_optimizers(optim.weight_decay, optim.lr, betas, on)
    forward = torch.compile(model) if on == "cuda" else model

    def step() -> None:
        x, y = batches()
        with device.autocast(on, precision):
            _, loss = forward(x, y)
        loss.backward()
        if optim.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    return step


def copy_with_data(checkout: Path, folder: Path, corpus: Corpus) -> Path:
    """A copy of the checkout with tiny shakespeare laid out as its train.py reads it."""
    if not (checkout / "train.py").exists():
        raise UserError(f"--nanogpt {checkout}: expected a checkout of nanoGPT, found no train.py")
    copy = folder / "nanogpt"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
    data = copy / "data" / "shakespeare_char"
    corpus.train[:].tofile(data / "train.bin")
    corpus.val[:].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": corpus.tokenizer.vocab_size}))
    return copy


@torch.no_grad()
def validation_loss(checkout: Path, corpus: Corpus) -> float:
    """Mean loss in nats of its last checkpoint over all held-out windows, as fastgpt's is taken."""
    module = load_model_module(checkout)
    saved = torch.load(checkout / "out-shakespeare-char" / "ckpt.pt", weights_only=False)
    model = module.GPT(module.GPTConfig(**saved["model_args"])).eval()
    model.load_state_dict(saved["model"])
    total = count = 0.0
    batches = eval_batches(
        corpus.val,
        context=model.config.block_size,
        micro_batch=64,
        rank=0,
        world_size=1,
        max_tokens=0,
    )
    for x, y in batches:
        scored = int((y != IGNORED).sum())
        _, loss = model(x, torch.where(y == IGNORED, -1, y))  # its own ignore_index
        total, count = total + loss.item() * scored, count + scored
    return total / count
