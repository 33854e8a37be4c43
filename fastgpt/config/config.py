"""Settings of a run, as frozen dataclasses that are checked when they are built.

Each field is a flag: `--model.num-layers 4` sets `Config.model.num_layers`. The text below a field
is the flag's help; its first sentence must stand alone, because --help shows only that.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fastgpt.config.checks import (
    FRACTION,
    INT64,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Range,
    check_fields,
    flag,
)
from fastgpt.config.model import ModelConfig
from fastgpt.errors import UserError, reason
from fastgpt.files import parse_json

CONVERTED = "converted"
"""Recipe of a run that was converted from another program's model."""
MOST_TOKENS = 2**28
"""Largest number of tokens in one batch of samples; their ids alone take 2 GiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Data: text, tokenizer, sampling and evaluation."""

    source: str = "builtin"
    """Text to train on: a name, file or folder. The names are builtin (the source code of this
    Python's standard library), shakespeare, and those of fastgpt.prepare. A folder may also hold
    token shards, ours or llm.c's; prepared:NAME is the folder $FASTGPT_DATA/NAME; prepared is
    $FASTGPT_DATA/gpt2, or builtin if that is missing. A=0.7,B=0.3 mixes sources by weight."""
    tokenizer: str = "auto"
    """Tokenizer: auto, bytes, chars, gpt2, or the path of a tokenizer.json. `auto` uses the one
    saved with the data, else chars for shakespeare and bytes for the rest; gpt2 for documents, if
    the recipe has GPT-2's vocabulary or needs to tell documents apart."""
    encoding: str = "utf-8"
    """Encoding of text files: utf-8, utf-16, cp1252 or another name that Python knows."""
    val_fraction: Annotated[float, Range(words="a fraction in (0, 1)", gt=0, lt=1)] = 0.1
    """Fraction of the data held out for validation, between 0 and 1: the end of a text, or this
    share of a dataset's documents."""
    sampling: Literal["epoch", "random-windows"] = "epoch"
    """Sampling of the training data. epoch: each sample once per epoch, shuffled; random-windows:
    windows drawn at random with replacement."""
    align: Literal["none", "bos", "document", "conversation"] = "none"
    """Alignment of samples to documents. none: windows that begin anywhere; bos: windows that begin
    with a document; document: single documents, cut or padded to the context (padding does not
    count in the loss); conversation: a JSONL file of conversations, of which only the answers count
    in the loss, each padded to the context; with model.document-mask several share a row."""
    chat_template: str | None = None
    """File with a chat template in Jinja, for data.align conversation. By default it is that of the
    model to start from, else ChatML."""
    eval_tokens: Annotated[int, NOT_NEGATIVE] = 131_072
    """Number of validation tokens in an evaluation, the same ones each time; 0: all of them."""
    final_eval_tokens: Annotated[int, NOT_NEGATIVE] = 0
    """Number of validation tokens in the evaluation after the last step; 0: all of them."""
    eval_batches: Annotated[int, NOT_NEGATIVE] = 0
    """Number of random batches from each split to evaluate on, new ones each time; 0: use
    data.eval-tokens instead."""

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        if self.eval_batches and self.align == "document":
            raise UserError(
                f"--data.eval-batches is {self.eval_batches}: random windows ignore documents"
                " (--data.align document): expected 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Optimizer and learning rate."""

    kind: Literal["adamw", "muon"] = "adamw"
    """Optimizer: AdamW for all weights, or Muon for the blocks' matrices and AdamW for the
    others."""
    lr: Annotated[float, POSITIVE] = 6e-4
    """Peak learning rate of AdamW. With Muon it applies to the weights that AdamW still trains."""
    muon_lr: Annotated[float, POSITIVE] = 0.02
    """Peak learning rate of Muon. For each matrix it is scaled by sqrt(max(1, rows / columns))."""
    muon_momentum: Annotated[float, FRACTION] = 0.95
    """Nesterov momentum of Muon."""
    beta1: Annotated[float, FRACTION] = 0.9
    """Decay of AdamW's running mean of the gradient, between 0 and 1."""
    beta2: Annotated[float, FRACTION] = 0.95
    """Decay of AdamW's running mean of the squared gradient, between 0 and 1."""
    eps: Annotated[float, POSITIVE] = 1e-8
    """Epsilon of AdamW, added to the denominator."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    """Decoupled weight decay, of matrices and embeddings only."""
    grad_clip: Annotated[float, NOT_NEGATIVE] = 1.0
    """Gradient norm above which the gradient is clipped; 0: no clipping."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Learning rate schedule after the warmup. `wsd` keeps the peak and decays linearly at the
    end."""
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Number of steps in which the learning rate rises linearly to its peak."""
    min_lr_ratio: Annotated[float, SHARE] = 0.1
    """Final learning rate, as a fraction of the peak from 0 to 1 (not for `constant`)."""
    decay_fraction: Annotated[float, POSITIVE, SHARE] = 0.2
    """Fraction of all steps in which `wsd` decays, above 0 and at most 1."""

    def __post_init__(self) -> None:
        check_fields(self, "optim.")


Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Training: batch, device, precision, loss, checkpoints and samples."""

    batch_tokens: Annotated[int, POSITIVE] = 524_288
    """Batch size of one optimizer step, in tokens. It counts all ranks and micro-batches, and is a
    multiple of model.context."""
    micro_batch: Annotated[int, POSITIVE] = 64
    """Sequences computed at once (per process); fewer need less memory. Larger batches use gradient
    accumulation."""
    device: Literal["auto", "cuda", "xpu", "mps", "cpu"] = "auto"
    """Device to train on: cuda (NVIDIA, AMD), xpu (Intel), mps (Apple), cpu or auto. `auto` uses
    the first of them that torch sees; AMD's GPUs need a build of torch for ROCm."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of autocast. `auto` uses bf16 if the hardware supports it, else fp32; a run that
    is resumed on a CPU keeps its own."""
    residual: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the residual stream, the sum that runs through all layers. bf16 halves what
    the norms read and write, and needs precision bf16; auto: on CUDA, where that is, else fp32."""
    recompute: Recompute = "none"
    """Activations that the backward computes again, to save memory. full: all of a block but its
    input; selective: all but its attention, which is the slowest part of long texts; none: it keeps
    them all. The results do not change."""
    tf32: bool = False
    """TF32 in fp32 matrix products on CUDA."""
    compile: Literal["auto", "on", "off", "graphs"] = "auto"
    """Use of torch.compile. auto: on CUDA only; graphs: with CUDA graphs as well, on one GPU."""
    ddp_dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format in which ranks exchange gradients. bf16 halves the traffic and rounds each
    rank's gradients and their sum."""
    ddp_bucket_mb: Annotated[int, POSITIVE] = 25
    """Size of the pieces in which ranks exchange gradients, in MiB. The exchange of a piece begins
    when its gradients are computed, while the backward goes on with the blocks before."""
    label_smoothing: Annotated[float, FRACTION] = 0.0
    """Label smoothing: the share of each target's probability that is spread evenly over the
    vocabulary, between 0 and 1. It applies to the training loss only."""
    z_loss: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the z-loss, the mean of log(sum(exp(logits)))^2, which is added to the training
    loss only."""
    keep_checkpoints: Annotated[int, POSITIVE] = 3
    """Number of newest checkpoints to keep; the best one is kept as well."""
    keep_every: Annotated[int, NOT_NEGATIVE] = 0
    """Number of steps of whose multiples the checkpoints are never removed, if there are any (see
    --save-every). 0: only the newest and the best are kept."""
    skip_nonfinite: Annotated[int, NOT_NEGATIVE] = 0
    """Number of optimizer steps in a row, skipped because their loss or a gradient is not finite,
    after which the run stops. A skipped step changes no weight. 0: the first one stops it."""
    spike_z: Annotated[float, NOT_NEGATIVE] = 0.0
    """Number of standard deviations above the mean of the last 100 steps at which the loss or the
    gradient norm is a spike: the run then goes back to the weights and optimizer of at most 25
    steps before, and does not use the batches since then again; 0: never. Each step waits for the
    device."""
    stall_s: Annotated[float, NOT_NEGATIVE] = 1800
    """Seconds without a micro-step after which a run ends, with the Python stacks of the rank that
    stalled on stderr; 0: never. Compiling, evaluating, saving and sampling always get half an
    hour. The default is the time for which PyTorch's ranks wait for each other on CPUs."""
    sample_tokens: Annotated[int, Range(words=f"0 to {MOST_TOKENS:,}", ge=0, le=MOST_TOKENS)] = 200
    """Length of the sample shown with each evaluation, in tokens; 0: no sample."""
    sample_prompt: str | None = None
    """Prompt of the samples. By default it is the recipe's own on the recipe's data (`def ` for
    baby, else a newline), and on other data the first words of the validation text."""
    report: Literal["on", "off"] = "off"
    """Page about the run, report.html in its folder, written after its last step (docs/report.md);
    it needs the extra `report`."""

    def __post_init__(self) -> None:
        check_fields(self, "train.")
        for name in ("skip_nonfinite", "spike_z"):
            if getattr(self, name) and self.precision == "fp16":
                raise UserError(
                    f"{flag(f'train.{name}')} is {getattr(self, name)}: expected 0 with"
                    " --train.precision fp16, whose loss scale skips steps already"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Parallel training: how the ranks that torchrun starts share the work."""

    kind: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """Part of the model that each rank keeps. ddp: all of it; fsdp: a part of each weight, of its
    gradient and of its optimizer state; hsdp: the same within groups of ranks, each of which has
    the model."""
    shards: Annotated[int | None, POSITIVE] = None
    """Number of ranks in a group of hsdp; by default those of a machine."""
    reshard: bool = True
    """Freeing of a block's weights between its forward and its backward, so that they are gathered
    twice: less memory, more traffic (fsdp and hsdp)."""
    cp: Annotated[int, POSITIVE] = 1
    """Number of ranks that share each sequence (context parallelism), for long contexts whose
    activations do not fit on one. The results do not change."""
    tp: Annotated[int, POSITIVE] = 1
    """Number of ranks that share the work of each layer (tensor parallelism; fsdp and hsdp), for
    layers that are too large or too slow for one. The results do not change."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format in which weights are gathered (fsdp and hsdp). bf16 halves the traffic; it
    rounds the weights of the normalisation layers and the residual stream, too, and needs precision
    bf16."""

    def __post_init__(self) -> None:
        check_fields(self, "parallel.")
        if self.tp > 1 and self.kind == "ddp":
            raise UserError(f"--parallel.tp is {self.tp}: expected --parallel.kind fsdp or hsdp")
        if self.shards is not None and self.kind != "hsdp":
            raise UserError(
                f"--parallel.shards is {self.shards}: expected None, because --parallel.kind"
                f" {self.kind} has no groups"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OpsConfig:
    """Implementation of each op. `auto` uses the fastest one that is correct on the device."""

    attention: Literal["auto", "torch", "sdpa", "blocked", "triton", "flash_attn"] = "auto"
    """Implementation of attention. torch: the plain reference; sdpa: PyTorch's fused attention;
    blocked: ours, for CPUs; triton: our kernels, on CUDA; flash_attn: the package flash-attn, on
    CUDA in bf16 or fp16."""
    norm: Literal["auto", "torch", "triton"] = "auto"
    """Implementation of LayerNorm and RMSNorm with the residual sum before them. triton: our
    kernels, on CUDA."""
    loss: Literal["auto", "torch", "chunked"] = "auto"
    """Implementation of the output head and its cross-entropy. chunked: computes the logits of a
    part of the tokens at a time, which saves memory; on CUDA with our kernels."""
    rotary: Literal["auto", "torch", "triton"] = "auto"
    """Implementation of rotary positions. triton: our kernel, on CUDA."""
    activation: Literal["auto", "torch", "triton"] = "auto"
    """Implementation of the feed-forward layers' bias and activation. triton: our kernels, on
    CUDA."""
    decode: Literal["auto", "torch", "triton"] = "auto"
    """Implementation of attention over the key/value cache in generation. `auto` uses PyTorch's;
    triton: our kernels, on CUDA."""
    dropout: Literal["auto", "torch", "lanes"] = "auto"
    """Implementation of dropout. torch: PyTorch's own; lanes: faster on CPUs, because each 64-bit
    random number decides on four elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Run: length, folder, and intervals of logs, evaluations and checkpoints."""

    recipe: tyro.conf.Suppress[str] = "gpt2-124m"
    """Recipe that gives the defaults of the flags."""
    steps: Annotated[int, POSITIVE, INT64] = 19_073
    """Number of optimizer steps."""
    epochs: Annotated[float | None, POSITIVE] = None
    """Number of passes over the training data; it replaces --steps."""
    eval_epochs: Annotated[float | None, POSITIVE] = None
    """Number of passes between two evaluations; it replaces --eval-every."""
    seed: Annotated[int, INT64] = 1337
    """Random seed for weights, data order and dropout."""
    run_dir: Path | None = None
    """Folder of the run; by default runs/<recipe>-<date>."""
    log_every: Annotated[int, POSITIVE] = 10
    """Number of steps between two log lines; the first step has one, too. Each syncs with the
    device."""
    track: Literal["none"] | tuple[Literal["tensorboard", "wandb", "trackio"], ...] = (
        "tensorboard",
    )
    """Trackers that show the run, one or more: tensorboard (files in its folder), wandb (a server;
    needs the extra wandb), trackio (on this machine; needs the extra trackio); or none."""
    eval_every: Annotated[int, INT64] = 250
    """Number of steps between two evaluations; 0: only before the first and after the last step."""
    save_every: Annotated[int, INT64] = 0
    """Number of steps between two checkpoints, in addition to the one before each evaluation; 0:
    only those."""
    resume: str | None = None
    """Run to resume: its folder, a checkpoint, or auto. `auto` uses --run-dir or the newest run of
    the recipe, and starts a new run if there is none."""
    init_from: str | None = None
    """Model that a new run starts from: a run, a checkpoint, a folder of Hugging Face, a name on
    the hub such as gpt2, nanoGPT's ckpt.pt or a .bin file of llm.c. It decides the architecture,
    and its tokenizer is the default; the optimizer starts afresh."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    ops: OpsConfig = field(default_factory=OpsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.run_dir is not None and self.run_dir == Path():
            raise UserError("--run-dir is the current directory: expected a folder of its own")
        if self.train.batch_tokens % self.model.context:
            raise UserError(
                f"--train.batch-tokens is {self.train.batch_tokens}: expected a multiple of"
                f" --model.context, {self.model.context}"
            )
        if self.ops.attention == "flash_attn" and self.model.document_mask:
            raise UserError(
                "--ops.attention is flash_attn, which does not support --model.document-mask:"
                " expected sdpa or triton"
            )

    @property
    def global_batch(self) -> int:
        """Number of sequences in one optimizer step."""
        return self.train.batch_tokens // self.model.context


def to_json(config: Config) -> str:
    """Writes settings as JSON, without `resume` and `run_dir` (of one command only)."""
    values = dataclasses.asdict(config)
    del values["resume"], values["run_dir"]
    return json.dumps(values, indent=1)


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Returns nested values by dotted names, such as `model.num_layers` of a run's settings."""
    found = {}
    for name, x in values.items():
        inner = flat(x) if isinstance(x, dict) else {"": x}
        found |= {f"{name}.{key}".strip("."): value for key, value in inner.items()}
    return found


def from_json(text: str) -> Config:
    """Reads settings that `to_json` wrote.

    A wrong value is a `UserError`. A field unknown to this version, or what is no JSON, is another
    error: see `saved_config`.
    """
    values = parse_json(text)
    values.pop("take_over", None)  # earlier versions wrote it, and the next one
    values.get("train", {}).pop("verify_every", None)
    return overlay(Config(), values)


def saved_config(run: Path) -> Config:
    """Reads the settings of a run or a checkpoint from its config.json."""
    path = run / "config.json"
    try:
        return from_json(path.read_text())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, UserError) as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error


def overlay(config: Any, values: dict[str, Any]) -> Any:
    """Replaces the settings that `values` names, of a section as in `{"model": {"dim": 64}}`.

    An unknown field is a TypeError.
    """
    values = {key: tuple(x) if isinstance(x, list) else x for key, x in values.items()}
    for name in values:
        old = getattr(config, name, None)
        if dataclasses.is_dataclass(old) and not isinstance(old, type):
            values[name] = overlay(old, values[name])
    return dataclasses.replace(config, **values)
