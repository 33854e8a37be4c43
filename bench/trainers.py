"""Trainers that the step benchmark compares: ours, plain PyTorch, nanoGPT, nanochat and llm.c.

A trainer is a function of a `Benchmark` that returns a training step (batch, forward, backward,
clipping, optimizer) and facts for the record. llm.c is a program, which `run_llmc` starts. All
train on random tokens of one vocabulary, so that no embedding row is warmer than in training.
"""

import importlib
import importlib.util
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor, nn

from bench.measure import quantiles
from fastgpt.config.config import Config, DataConfig, OpsConfig
from fastgpt.config.model import ModelConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.device import device
from fastgpt.errors import UserError, unknown_name
from fastgpt.train.build import build
from fastgpt.train.plan import resolve
from fastgpt.train.trainer import train

# Triton's interpreter takes seconds for a larger model's step
TINY: dict[str, Any] = {"num_layers": 1, "num_heads": 1, "dim": 16, "context": 8}
VOCABULARY, GPT2_VOCABULARY = 65, 50_257  # tiny shakespeare's, and GPT-2's
# settings that nanoGPT's and llm.c's GPT-2 also have
SIZES = {"num_layers", "num_heads", "dim", "context", "vocab_size", "vocab_multiple", "bias"}
SIZES |= {"dropout", "init"}
# PyTorch's argument for each GELU: GPT-2's, and the exact one of nanoGPT
GELUS = {"gelu_tanh": "tanh", "gelu_erf": "none"}
Step = Callable[[], None]
Built = tuple[Step, dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """Settings of the step that all trainers take; picklable, to be sent to processes."""

    config: Config
    on: str
    precision: str
    nanogpt: Path | None = None
    nanochat: Path | None = None
    traces: Path | None = None  # folder for Chrome traces of fastgpt's steps

    @property
    def tokens(self) -> int:
        return self.config.train.batch_tokens


def base_config(
    recipe: str, on: str, text: Path, *, context: int | None = None,
    compile: Literal["auto", "on", "off"] = "auto", tiny: bool = False,
) -> Config:  # fmt: skip
    """Returns a recipe's settings, on random text of its vocabulary; writes the text if need be."""
    if recipe == "auto":
        recipe = "gpt2-124m" if on == "cuda" else "shakespeare-char"
    if recipe not in RECIPES:
        raise unknown_name("recipe", recipe, RECIPES)
    config = RECIPES[recipe][1]
    vocab = (not tiny and config.model.vocab_size) or VOCABULARY
    sizes = (TINY if tiny else {}) | ({"context": context} if context else {})
    if not text.exists():
        # Chinese, because a character tokenizer must keep 50,257 of them apart; each occurs
        letters = [chr(i) for i in (*range(0x4E00, 0x9F00), *range(0x20000, 0x2A600))][:vocab]
        drawn = np.random.default_rng(0).integers(vocab, size=40 * max(vocab, 5000))
        text.write_text("".join([*letters, *(letters[i] for i in drawn)]), encoding="utf-8")
    model = replace(config.model, vocab_size=vocab, **sizes)
    data = DataConfig(source=str(text), tokenizer="chars")
    train = replace(config.train, compile=compile, device=on, batch_tokens=2**20)
    return replace(config, model=model, data=data, train=train)


def with_batch(benchmark: Benchmark, batch: int) -> Benchmark:
    """Returns the benchmark with that many sequences in a step."""
    config = benchmark.config
    train = replace(config.train, batch_tokens=batch * config.model.context, micro_batch=batch)
    return replace(benchmark, config=replace(config, train=train))


def expect_gpt2(model: ModelConfig) -> None:
    """Raises `UserError` for a network that differs from GPT-2's in more than sizes and GELU."""
    plain = ModelConfig(activation=model.activation if model.activation in GELUS else "gelu_tanh")
    names = [field.name for field in fields(model) if field.name not in SIZES]
    if others := [name for name in names if getattr(model, name) != getattr(plain, name)]:
        raise UserError(f"the network differs from GPT-2's in {', '.join(others)}")


TRITON_OPS = OpsConfig(attention="triton", loss="chunked", kernels="triton")


def _fastgpt(benchmark: Benchmark, ops: OpsConfig | None = None, **settings: Any) -> Built:
    """Makes a step of ours, with other `TrainConfig` settings if some are given."""
    settings = {"precision": benchmark.precision, **settings}
    config = benchmark.config
    config = replace(config, ops=ops or config.ops, train=replace(config.train, **settings))
    # not probed, which beside the first steps of others would halve the batch
    run = build(resolve(config, warn=lambda _: None), lambda _: None, probe=False)

    def step() -> None:
        train(run, run.step + 1)

    step.waited = lambda: run.loader.waited_s  # pyright: ignore
    facts = {"trials": run.plan.trials, "optimizer": config.optim.kind, "ops": run.model.ops.names}
    return step, {**facts, "compile": run.plan.compiled, "precision": config.train.precision}


def _step(
    benchmark: Benchmark, model: nn.Module, *, compiled: bool,
    optimizer: torch.optim.Optimizer | None = None, autocast: bool = True,
) -> Built:  # fmt: skip
    """Makes a step of a model that returns the loss, or the logits and the loss, with AdamW."""
    config, on, optim = benchmark.config, benchmark.on, benchmark.config.optim
    vocab, shape = config.model.vocab_size or 0, (2, config.global_batch, config.model.context)
    x, y = torch.randint(vocab, shape, device=on)
    parameters, betas = [*model.parameters()], (optim.beta1, optim.beta2)
    adamw = optimizer or torch.optim.AdamW(parameters, lr=optim.lr, betas=betas, fused=True)
    forward = torch.compile(model, dynamic=False) if compiled else model

    def step() -> None:
        with device.autocast(on, benchmark.precision if autocast else "fp32"):
            out = forward(x, y)
        (out if isinstance(out, Tensor) else out[1]).backward()
        if optim.grad_clip:
            nn.utils.clip_grad_norm_(parameters, optim.grad_clip)
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    return step, {"compile": compiled, "optimizer": "adamw", "precision": benchmark.precision}


class GPT2(nn.Module):
    """GPT-2 in plain PyTorch: tokens and targets (B, T) -> mean loss (); tied head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        C, bias, self.config = config.dim, config.bias_at("mlp"), config
        norm, linear = partial(nn.LayerNorm, C, bias=bias), partial(nn.Linear, bias=bias)
        self.tokens = nn.Embedding(config.padded_vocab, C)
        self.positions = nn.Embedding(config.context, C)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "norm_1": norm(), "qkv": linear(C, 3 * C), "out": linear(C, C),
                "norm_2": norm(), "up": linear(C, 4 * C), "down": linear(4 * C, C),
            })
            for _ in range(config.num_layers)
        )  # fmt: skip
        self.norm = norm()
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        config, drop = self.config, partial(F.dropout, p=self.config.dropout)
        x = drop(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        blocks: Any = self.blocks
        for block in blocks:
            packed = block.qkv(block.norm_1(x)).chunk(3, dim=2)
            q, k, v = (y.unflatten(2, (config.num_heads, -1)).transpose(1, 2) for y in packed)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=config.dropout, is_causal=True)
            x = x + drop(block.out(y.transpose(1, 2).flatten(2)))
            y = F.gelu(block.up(block.norm_2(x)), approximate=GELUS[config.activation])
            x = x + drop(block.down(y))
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _plain(benchmark: Benchmark, compiled: bool) -> Built:
    expect_gpt2(benchmark.config.model)
    return _step(benchmark, GPT2(benchmark.config.model).to(benchmark.on), compiled=compiled)


def imported(peer: str, checkout: Path | None) -> Path:
    """Returns the file of a peer's checkout that is imported; raises `UserError` without it."""
    name = {"nanogpt": "model.py", "nanochat": "nanochat/gpt.py"}[peer]
    if checkout is None or not (checkout / name).exists():
        raise UserError(f"--{peer} is {checkout or 'missing'}: expected a checkout with {name}")
    return checkout / name


def nanogpt_model(config: ModelConfig, checkout: Path | None) -> Any:
    """Builds nanoGPT's GPT of these sizes; its model.py is imported under a name of its own."""
    expect_gpt2(config)
    file = imported("nanogpt", checkout)
    spec: Any = importlib.util.spec_from_file_location("nanogpt_model", file)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # nanoGPT pads only GPT-2's vocabulary by default
    vocab = 50_304 if config.vocab_size == GPT2_VOCABULARY else config.vocab_size
    return module.GPT(module.GPTConfig(
        block_size=config.context, vocab_size=vocab, n_layer=config.num_layers,
        n_head=config.num_heads, n_embd=config.dim, dropout=config.dropout, bias=config.bias,
    ))  # fmt: skip


def _nanogpt(benchmark: Benchmark, precision: str = "") -> Built:
    """Makes a step as nanoGPT's train.py takes it between two log lines; on CUDA compiled."""
    benchmark = replace(benchmark, precision=precision or benchmark.precision)
    optim, on = benchmark.config.optim, benchmark.on
    model = nanogpt_model(benchmark.config.model, benchmark.nanogpt).to(on)
    betas = (optim.beta1, optim.beta2)
    adamw = model.configure_optimizers(optim.weight_decay, optim.lr, betas, on)
    return _step(benchmark, model, optimizer=adamw, compiled=on == "cuda")


def _nanochat(benchmark: Benchmark) -> Built:
    """Makes a step of nanochat's GPT, another network of the same sizes, which casts by itself."""
    sizes = benchmark.config.model
    sys.path.insert(0, str(benchmark.nanochat))
    module = importlib.import_module("nanochat.gpt")
    options = module.GPTConfig(
        sequence_len=sizes.context, vocab_size=sizes.vocab_size, n_layer=sizes.num_layers,
        n_head=sizes.num_heads, n_kv_head=sizes.num_heads, n_embd=sizes.dim, window_pattern="L",
    )  # fmt: skip
    with torch.device(benchmark.on):
        model = module.GPT(options)
    model.init_weights()
    return _step(benchmark, model, compiled=True, autocast=False)  # and AdamW, not its own


TRAINERS: dict[str, Callable[[Benchmark], Built]] = {
    "fastgpt": _fastgpt,
    "fastgpt fp32": partial(_fastgpt, precision="fp32"),
    "fastgpt triton": partial(_fastgpt, ops=TRITON_OPS),
    "fastgpt triton, fp32 residual": partial(_fastgpt, ops=TRITON_OPS, residual="fp32"),
    "eager": partial(_plain, compiled=False),
    "compiled": partial(_plain, compiled=True),
    "nanogpt": _nanogpt,
    "nanogpt fp32": partial(_nanogpt, precision="fp32"),
    "nanochat": _nanochat,
}

LLMC_STEPS = 20  # its program for CPUs samples text after the 20th
LLMC_STEP = re.compile(r"step +\d+.*?([\d.]+) ms")  # in both of its programs (commit f1e2ace)
LLMC_ON_CPU = {"batch": 4, "context": 64}  # its program for CPUs has them built in
PATIENCE_S = 600


def run_llmc(binary: Path, benchmark: Benchmark) -> dict[str, Any]:
    """Runs llm.c's training of the same network, with random weights: bf16 on a GPU, else fp32.

    Returns facts for the record, with quantiles of all steps but the first, which warms up.
    """
    config, on_gpu = benchmark.config.model, benchmark.on == "cuda"
    sizes = {"batch": benchmark.config.global_batch, "context": config.context}
    expect_gpt2(config)
    if config.vocab_size != GPT2_VOCABULARY:
        raise UserError(f"needs GPT-2's vocabulary, got {config.vocab_size} tokens")
    if not on_gpu and sizes != LLMC_ON_CPU:
        raise UserError(f"has {LLMC_ON_CPU} built in, got {sizes}")
    name, flags = "train_gpt2", ""
    if on_gpu:
        name, steps = "train_gpt2cu", f"-d {benchmark.tokens} -x {LLMC_STEPS} -v 1000000 -m 1 -s 0"
        flags = f"-e d{config.num_layers} -b {sizes['batch']} -t {config.context} {steps} -r 0"
    binary = (binary / name if binary.is_dir() else binary).absolute()
    if not binary.exists():
        raise UserError(f"--llmc {binary}: expected llm.c's {name}, found nothing")
    with tempfile.TemporaryDirectory() as folder:
        _write_llmc_files(Path(folder), benchmark)
        said = _run_until_trained([str(binary), *flags.split()], folder)
    mib = map(int, re.findall(r"allocat(?:ed|ing) (\d+) MiB", said)) if on_gpu else ()
    seconds = [float(ms) / 1e3 for ms in LLMC_STEP.findall(said)][1:]
    facts = {"precision": "bf16" if on_gpu else "fp32", "peak_bytes": 2**20 * sum(mib) or None}
    return {"figure": quantiles(seconds), "optimizer": "adamw", **facts}


def _write_llmc_files(folder: Path, benchmark: Benchmark) -> None:
    """Writes what both programs read by default: random tokens, and on a CPU random weights."""
    model, rng, header = benchmark.config.model, np.random.default_rng(0), np.zeros(256, np.int32)
    L, C, vocab = model.num_layers, model.dim, model.vocab_size or 0
    if benchmark.on == "cpu":
        header[:8] = 20240326, 3, model.context, vocab, L, model.num_heads, C, model.padded_vocab
        parameters = (model.padded_vocab + model.context) * C + L * (12 * C + 13) * C + 2 * C
        weights = 0.02 * rng.standard_normal(parameters, np.float32)
        (folder / "gpt2_124M.bin").write_bytes(header.tobytes() + weights.tobytes())
    tokens = rng.integers(vocab, size=LLMC_STEPS * benchmark.tokens + 1, dtype=np.uint16)
    header[:8] = 20240520, 1, len(tokens), 0, 0, 0, 0, 0
    texts = folder / "dev" / "data" / "tinyshakespeare"
    texts.mkdir(parents=True)
    for name in ("tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin"):
        (texts / name).write_bytes(header.tobytes() + tokens.tobytes())


def _run_until_trained(command: list[str], folder: str) -> str:
    """Runs a program of llm.c until it has taken its steps; returns what it printed."""
    said, pipe = "", subprocess.PIPE
    command = ["stdbuf", "-oL", *command]  # it would write its lines late
    with subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=subprocess.STDOUT) as process:
        end = threading.Timer(PATIENCE_S, process.kill)
        end.start()
        try:
            for line in process.stdout or ():
                said += line.decode(errors="replace")
                if len(LLMC_STEP.findall(said)) == LLMC_STEPS:
                    break
        finally:
            end.cancel()
            process.kill()
    if (steps := len(LLMC_STEP.findall(said))) < LLMC_STEPS:
        last = (said.strip().splitlines() or ["nothing"])[-1]
        found = f"{steps} of {LLMC_STEPS} steps in {PATIENCE_S} s, last line: {last}"
        raise UserError(f"--llmc {command[2]}: {found}")
    return said
