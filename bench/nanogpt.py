"""A checkout of nanoGPT as a peer: its model.py as it is, and data laid out for its train.py."""

import importlib.util
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

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
