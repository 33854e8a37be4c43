"""Training steps of other trainers, which are timed beside ours.

They are plain PyTorch in the usual form (GPT-2, SDPA, fused AdamW, torch.compile), the model of a
nanoGPT checkout, and llm.c's binary. None uses a kernel of ours.
"""

import importlib
import importlib.util
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor, nn

from bench.timing import quantiles
from fastgpt.config.config import Config
from fastgpt.config.model import ModelConfig
from fastgpt.device import device
from fastgpt.errors import UserError

Batches = Callable[[], tuple[Tensor, Tensor]]
"""Function that returns x and y, (B, T) each, on the device."""


def _step(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    config: Config,
    on: str,
    precision: str,
    batches: Batches,
) -> Callable[[], None]:
    """Makes a training step: batch, forward, backward, clipping, optimizer."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def step() -> None:
        x, y = batches()
        with device.autocast(on, precision):
            loss = loss_of(x, y)
        loss.backward()
        if config.optim.grad_clip:
            nn.utils.clip_grad_norm_(parameters, config.optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# --- plain PyTorch --------------------------------------------------------------------------------


GELUS = {"gelu_tanh": "tanh", "gelu_erf": "none"}
"""PyTorch's argument for each GELU: GPT-2's, and the exact one of nanoGPT."""


class Block(nn.Module):
    """A GPT-2 block: pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        C, bias = config.dim, config.bias_at("mlp")
        self.heads, self.dropout = config.num_heads, config.dropout
        self.gelu = GELUS[config.activation]
        self.norm_1, self.norm_2 = nn.LayerNorm(C, bias=bias), nn.LayerNorm(C, bias=bias)
        self.qkv = nn.Linear(C, 3 * C, bias=bias)
        self.out = nn.Linear(C, C, bias=bias)
        self.up = nn.Linear(C, 4 * C, bias=bias)
        self.down = nn.Linear(4 * C, C, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.heads, C // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(C, dim=2)
        )
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(B, T, C))
        x = x + F.dropout(y, p)
        y = self.down(F.gelu(self.up(self.norm_2(x)), approximate=self.gelu))
        return x + F.dropout(y, p)


class GPT2(nn.Module):
    """GPT-2 in plain PyTorch: tokens and targets (B, T) -> mean loss (); tied head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.padded_vocab, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim, bias=config.bias_at("mlp"))
        self.dropout = config.dropout
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / (math.sqrt(2 * config.num_layers) if last else 1)
                nn.init.normal_(weight, std=std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_step(
    config: Config, on: str, precision: str, batches: Batches, *, compiled: bool
) -> Callable[[], None]:
    """Returns a function that runs a training step of `GPT2`, under torch.compile if `compiled`."""
    model = GPT2(config.model).to(on)
    optim = config.optim
    groups = [
        {
            "params": [p for p in model.parameters() if (p.dim() >= 2) == decays],
            "weight_decay": decay,
        }
        for decays, decay in ((True, optim.weight_decay), (False, 0.0))
    ]
    betas = (optim.beta1, optim.beta2)
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, fused=True)
    return _step(torch.compile(model) if compiled else model, adamw, config, on, precision, batches)


# --- nanoGPT --------------------------------------------------------------------------------------


def nanogpt_module(checkout: Path) -> Any:
    """Imports the model.py of a checkout under a name of its own."""
    path = checkout / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    if not path.exists() or spec is None or spec.loader is None:
        raise UserError(f"--nanogpt {checkout}: expected a checkout of nanoGPT, found no model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def nanogpt_step(
    config: Config, checkout: Path, on: str, precision: str, batches: Batches
) -> Callable[[], None]:
    """Makes a step as nanoGPT's train.py takes it between two log lines; on CUDA compiled."""
    module = nanogpt_module(checkout)
    sizes, optim = config.model, config.optim
    model = module.GPT(
        module.GPTConfig(
            block_size=sizes.context,
            # nanoGPT pads only GPT-2's vocabulary by default
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
    return _step(lambda x, y: forward(x, y)[1], adamw, config, on, precision, batches)


def nanochat_step(config: Config, checkout: Path, on: str, batches: Batches) -> Callable[[], None]:
    """Makes a compiled step of nanochat's GPT, another network than GPT-2, with fused AdamW.

    Its own optimizer is left out: what counts beside ours is its network, of the same sizes. It
    casts by itself, without autocast.
    """
    if not (checkout / "nanochat" / "gpt.py").exists():
        raise UserError(
            f"--nanochat {checkout}: expected a checkout of nanochat, found no nanochat/gpt.py"
        )
    sys.path.insert(0, str(checkout))
    module = importlib.import_module("nanochat.gpt")
    sizes, optim = config.model, config.optim
    with torch.device(on):
        model = module.GPT(
            module.GPTConfig(
                sequence_len=sizes.context, vocab_size=sizes.vocab_size, n_layer=sizes.num_layers,
                n_head=sizes.num_heads, n_kv_head=sizes.num_heads, n_embd=sizes.dim,
                window_pattern="L",
            )
        )  # fmt: skip
    model.init_weights()
    adamw = torch.optim.AdamW(model.parameters(), lr=optim.lr, fused=True)
    forward = torch.compile(model, dynamic=False)
    return _step(forward, adamw, config, on, "fp32", batches)


# --- llm.c ----------------------------------------------------------------------------------------

LLMC_STEP = re.compile(r"step +\d+.*?([\d.]+) ms")
"""Pattern of the line that both of its programs print for a step (commit f1e2ace)."""
LLMC_MEMORY = re.compile(r"allocat(?:ed|ing) (\d+) MiB")
LLMC_ON_CPU = {"batch": 4, "context": 64}
"""Sequences in a step and tokens of each, which llm.c's program for CPUs has built in."""
PATIENCE_S = 600


def run_llmc(
    binary: Path, shards: Path, *, layers: int, batch: int, context: int, steps: int
) -> dict[str, Any]:
    """Runs llm.c's training of a GPT-2 of that depth on a GPU, with random weights, in bf16.

    Args:
        binary: `train_gpt2cu`, or a checkout that has it.
        shards: a folder with `train_*.bin` and `val_*.bin` in its format.
        layers: depth of the network.
        batch: sequences in a step.
        context: tokens of each.
        steps: number of steps; the first one, which warms up, is not counted.

    Returns:
        dict[str, Any]: quantiles of a step's seconds, and the bytes that it reports as allocated.
    """
    shards = shards.absolute()
    printed, seconds = _run_llmc(
        binary, "train_gpt2cu", steps, shards, "-i", shards / "train_*.bin", "-j",
        shards / "val_*.bin", "-e", f"d{layers}", "-b", batch, "-t", context, "-d", batch * context,
        "-x", steps, "-v", 1_000_000, "-m", 1, "-s", 0, "-r", 0,
    )  # fmt: skip
    mib = sum(map(int, LLMC_MEMORY.findall(printed)))
    return {"seconds": seconds, "peak_bytes": mib * 2**20 or None}


def run_llmc_on_cpu(binary: Path, model: ModelConfig, steps: int) -> dict[str, Any]:
    """Runs llm.c's training of a GPT-2 on a CPU, with random weights and tokens, in fp32.

    Args:
        binary: `train_gpt2`, or a checkout that has it.
        model: sizes of the network; the context must hold that of `LLMC_ON_CPU`.
        steps: number of steps, 3 to 20, after which it samples text; the first one, which warms up,
            is not counted.
    """
    with tempfile.TemporaryDirectory() as name:
        _write_llmc_files(Path(name), model)
        _, seconds = _run_llmc(binary, "train_gpt2", steps, Path(name))
    return {"seconds": seconds}


def _run_llmc(
    binary: Path, name: str, steps: int, folder: Path, *arguments: object
) -> tuple[str, dict[str, float]]:
    """Runs a program of llm.c until it has taken its steps, in a folder.

    Returns:
        tuple[str, dict[str, float]]: what it printed, and quantiles of a step's seconds.

    Raises:
        UserError: the binary is missing, fails, takes too long, or prints too few steps.
    """
    binary = binary / name if binary.is_dir() else binary
    if not binary.exists():
        raise UserError(f"--llmc {binary}: expected llm.c's {name}, found nothing")
    printed: list[str] = []
    seconds: list[float] = []
    screen, its_end = os.openpty()  # into a pipe it would write its lines late
    with open(screen, errors="replace") as lines:
        command = [str(binary.absolute()), *map(str, arguments)]
        try:
            process = subprocess.Popen(command, cwd=folder, stdout=its_end, stderr=its_end)
        except OSError as error:
            raise UserError(f"--llmc {binary} cannot be run: {error.strerror}") from error
        finally:
            os.close(its_end)
        end = threading.Timer(PATIENCE_S, process.kill)
        end.start()
        try:
            while len(seconds) < steps and (line := lines.readline()):
                printed.append(line)
                seconds += [float(ms) / 1e3 for ms in LLMC_STEP.findall(line)]
        except OSError:
            pass  # it has ended
        finally:
            end.cancel()
            process.kill()
            process.wait()
    if len(seconds) < steps:
        said = next((line.strip() for line in reversed(printed) if line.strip()), "nothing")
        found = f"{len(seconds)} of {steps} steps in {PATIENCE_S} s, last line: {said}"
        raise UserError(f"--llmc {binary}: {found}")
    return "".join(printed), quantiles(seconds[1:])


def _write_llmc_files(folder: Path, model: ModelConfig) -> None:
    """Writes the files that llm.c's program for CPUs reads: random weights and random tokens."""
    rng, vocab, L, C = np.random.default_rng(0), model.vocab_size, model.num_layers, model.dim
    assert vocab is not None
    header = np.zeros(256, np.int32)
    sizes = (model.context, vocab, L, model.num_heads, C, model.padded_vocab)
    header[:8] = 20240326, 3, *sizes
    parameters = (model.padded_vocab + model.context) * C + L * (12 * C + 13) * C + 2 * C
    weights = 0.02 * rng.standard_normal(parameters, np.float32)
    (folder / "gpt2_124M.bin").write_bytes(header.tobytes() + weights.tobytes())
    texts = folder / "dev" / "data" / "tinyshakespeare"
    texts.mkdir(parents=True)
    tokens = rng.integers(vocab, size=2**16, dtype=np.uint16)
    header[:8] = 20240520, 1, len(tokens), 0, 0, 0, 0, 0
    for split in ("train", "val"):
        path = texts / f"tiny_shakespeare_{split}.bin"
        path.write_bytes(header.tobytes() + tokens.tobytes())
