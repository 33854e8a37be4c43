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
)
from fastgpt.config.model import ModelConfig
from fastgpt.errors import UserError, shown, unknown_name

CONVERTED = "converted"
"""Recipe of a run that was converted from another program's model."""
OF_COMMAND = ("resume", "run_dir")
"""Settings of one command only, which neither config.json nor a YAML file has."""
MOST_TOKENS = 2**28
"""Largest number of tokens in one batch of samples; their ids alone take 2 GiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Data: text, tokenizer, sampling and evaluation."""

    source: str = "builtin"
    """Text to train on: a name, file or folder. Names are builtin (the source code of this Python's
    library), shakespeare, and the names of fastgpt.prepare. A folder may hold token shards, ours or
    llm.c's; prepared:NAME is the folder $FASTGPT_DATA/NAME; prepared is $FASTGPT_DATA/gpt2, or
    builtin if that is missing. A=0.7,B=0.3 mixes sources by weight."""
    tokenizer: str = "auto"
    """Tokenizer: auto, bytes, chars, gpt2, or the path of a tokenizer.json. `auto` uses the one
    saved with the data, else chars for shakespeare and bytes for the rest; gpt2 for documents, if
    the recipe has GPT-2's vocabulary or needs to tell documents apart."""
    val_fraction: Annotated[float, Range("a fraction in (0, 1)", lambda x: 0 < x < 1)] = 0.1
    """Fraction of the data held out for validation: the end of a text, or some documents."""
    sampling: Literal["epoch", "random-windows", "lecture"] = "epoch"
    """Sampling of the training data. epoch: each sample once per epoch, shuffled; random-windows:
    windows drawn at random with replacement; lecture: the same, and each evaluation draws
    data.eval-tokens at random, from both the training and the validation data."""
    align: Literal["none", "bos", "document", "conversation"] = "none"
    """Alignment of samples to documents. none: windows that begin anywhere; bos: windows that begin
    with a document; document: single documents, cut or padded to the context; conversation: a JSONL
    file of conversations, each padded to the context, or with model.document-mask several in a row.
    Padding does not count in the loss; in a conversation only the answers count."""
    chat_template: str | None = None
    """File with a chat template in Jinja, for data.align conversation. By default the model to
    start from decides, else it is ChatML."""
    eval_tokens: Annotated[int, NOT_NEGATIVE] = 131_072
    """Number of validation tokens in an evaluation, the same ones each time; 0: all of them."""
    final_eval_tokens: Annotated[int, NOT_NEGATIVE] = 0
    """Number of validation tokens in the evaluation after the last step; 0: all of them."""

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        if self.sampling == "lecture" and (self.align == "document" or not self.eval_tokens):
            raise UserError(
                "--data.sampling is lecture, whose evaluations draw --data.eval-tokens at random:"
                " expected more than 0 of them, and another --data.align than document"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Optimizer and learning rate."""

    kind: Literal["adamw", "muon"] = "adamw"
    """Optimizer: AdamW for all weights, or Muon for the blocks' matrices and AdamW for the rest."""
    lr: Annotated[float, POSITIVE] = 6e-4
    """Peak learning rate of AdamW. With Muon it applies to the weights that AdamW still trains."""
    muon_lr: Annotated[float, POSITIVE] = 0.02
    """Peak learning rate of Muon. For each matrix it is scaled by sqrt(max(1, rows / columns))."""
    beta1: Annotated[float, FRACTION] = 0.9
    """Decay of AdamW's running mean of the gradient. Muon's momentum is (1 + beta1) / 2."""
    beta2: Annotated[float, FRACTION] = 0.95
    """Decay of AdamW's running mean of the squared gradient."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    """Decoupled weight decay, of matrices and embeddings only."""
    grad_clip: Annotated[float, NOT_NEGATIVE] = 1.0
    """Gradient norm above which the gradient is clipped; 0: no clipping."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Learning rate schedule after the warmup. `wsd` keeps the peak, and decays linearly over the
    last fifth of the steps."""
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Number of steps over which the learning rate rises linearly to its peak."""
    min_lr_ratio: Annotated[float, SHARE] = 0.1
    """Final learning rate, as a fraction of the peak (not for `constant`)."""

    def __post_init__(self) -> None:
        check_fields(self, "optim.")


Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Training: batch, device, precision, loss, checkpoints and samples."""

    batch_tokens: Annotated[int, POSITIVE] = 524_288
    """Number of tokens in one optimizer step, of all ranks; a multiple of model.context."""
    micro_batch: Annotated[int, POSITIVE] = 64
    """Number of sequences that a rank computes at once; fewer need less memory. A larger batch
    accumulates gradients."""
    device: Literal["auto", "cuda", "xpu", "mps", "cpu"] = "auto"
    """Device to train on: cuda (NVIDIA, AMD), xpu (Intel), mps (Apple), cpu or auto. `auto` uses
    the first of them that torch sees; AMD's GPUs need a build of torch for ROCm."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of autocast. `auto` uses bf16 if the hardware supports it, else fp32; a run that is
    resumed on a CPU keeps its own."""
    residual: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the residual stream. bf16 halves what the norms read and write, and needs
    precision bf16; `auto` uses it on CUDA."""
    recompute: Recompute = "none"
    """Activations that the backward computes again, to save memory. full: all within a block;
    selective: all but attention, which is the slowest part of long texts. The results do not
    change."""
    compile: Literal["auto", "on", "off", "graphs"] = "auto"
    """Use of torch.compile. auto: on CUDA only; graphs: with CUDA graphs as well, on one GPU."""
    z_loss: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the z-loss, the mean of log(sum(exp(logits)))^2, in the training loss."""
    keep_checkpoints: Annotated[int, POSITIVE] = 3
    """Number of newest checkpoints to keep; the best one is kept as well."""
    skip_nonfinite: Annotated[int, NOT_NEGATIVE] = 0
    """Number of steps in a row with a loss or gradient that is not finite, after which the run
    stops. Such a step changes no weight. 0: the first one stops the run."""
    spike_z: Annotated[float, NOT_NEGATIVE] = 0.0
    """Number of standard deviations above the mean of the last 100 steps that make a loss or a
    gradient norm a spike. The run then goes back at most 25 steps, and skips the batches since
    then; 0: never. Each step waits for the device."""
    sample_tokens: Annotated[
        int, Range(f"0 to {MOST_TOKENS:,}", lambda x: 0 <= x <= MOST_TOKENS)
    ] = 200
    """Length of the sample shown with each evaluation, in tokens; 0: no sample."""

    def __post_init__(self) -> None:
        check_fields(self, "train.")
        for name, value in (("skip-nonfinite", self.skip_nonfinite), ("spike-z", self.spike_z)):
            if value and self.precision == "fp16":
                fp16 = "--train.precision fp16, whose loss scale skips steps already"
                raise UserError(f"--train.{name} is {value}: expected 0 with {fp16}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Parallel training: how the ranks that torchrun starts share the work."""

    kind: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """Part of the model that each rank keeps. ddp: all of it; fsdp: a part of each weight, with its
    gradient and optimizer state; hsdp: the same within a group of ranks."""
    shards: Annotated[int | None, POSITIVE] = None
    """Number of ranks in a group of hsdp; by default the ranks of a machine."""
    cp: Annotated[int, POSITIVE] = 1
    """Number of ranks that share each sequence (context parallelism), for long contexts. The
    results do not change."""
    tp: Annotated[int, POSITIVE] = 1
    """Number of ranks that share each layer (tensor parallelism; fsdp and hsdp), for large layers.
    The results do not change."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format in which ranks exchange gradients (ddp) or weights (fsdp and hsdp). bf16 halves
    that traffic and rounds what it carries. With fsdp it rounds the weights of the normalisation
    layers and the residual stream, too, and needs precision bf16."""

    def __post_init__(self) -> None:
        check_fields(self, "parallel.")
        if self.tp > 1 and self.kind == "ddp":
            raise UserError(f"--parallel.tp is {self.tp}: expected --parallel.kind fsdp or hsdp")
        if self.shards is not None and self.kind != "hsdp":
            expected = f"expected None, because --parallel.kind {self.kind} has no groups"
            raise UserError(f"--parallel.shards is {self.shards}: {expected}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpsConfig:
    """Implementation of each op. `auto` uses the fastest one that is correct on the device."""

    attention: Literal["auto", "torch", "sdpa", "blocked", "triton", "flash_attn"] = "auto"
    """Implementation of attention. torch: the plain reference; sdpa: PyTorch's; blocked: ours, for
    CPUs; triton: our kernels, on CUDA; flash_attn: the package, on CUDA in bf16 or fp16."""
    loss: Literal["auto", "torch", "chunked"] = "auto"
    """Implementation of the output head and its cross-entropy. chunked: ours, which computes the
    logits of some tokens at a time, to save memory."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Implementation of the other ops: normalisation with the residual sum before it, rotary
    positions, activation, and attention over the key/value cache. triton: our kernels, on CUDA."""

    def __post_init__(self) -> None:
        check_fields(self, "ops.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Run: length, folder, and intervals of logs, evaluations and checkpoints."""

    recipe: tyro.conf.Suppress[str] = "gpt2-124m"
    """Recipe that gives the defaults of the flags."""
    steps: Annotated[int, POSITIVE, INT64] = 19_073
    """Number of optimizer steps."""
    epochs: Annotated[float | None, POSITIVE] = None
    """Number of passes over the training data; it replaces --steps."""
    seed: Annotated[int, INT64] = 1337
    """Random seed for weights, data order and dropout."""
    run_dir: Path | None = None
    """Folder of the run; by default runs/<recipe>-<date>."""
    log_every: Annotated[int, POSITIVE] = 10
    """Number of steps between two log lines. Each line waits for the device."""
    track: Literal["none"] | tuple[Literal["tensorboard", "wandb", "trackio"], ...] = (
        "tensorboard",
    )
    """Trackers that show the run: tensorboard (files in its folder), wandb (a server), trackio (on
    this machine), several of them, or none. wandb and trackio are extras."""
    eval_every: Annotated[int | Literal["epoch"], INT64] = 250
    """Number of steps between two evaluations; 0: only before the first and after the last step;
    epoch: after each pass over the training data."""
    save_every: Annotated[int, INT64] = 0
    """Number of steps between two checkpoints; 0: one before each evaluation only."""
    resume: str | None = None
    """Run to resume: its folder, a checkpoint, or auto. `auto` uses --run-dir or the newest run of
    the recipe, and starts a new run if there is none."""
    init_from: str | None = None
    """Model that a new run starts from: a run, a checkpoint, a folder of Hugging Face, a name on
    the hub such as gpt2, nanoGPT's ckpt.pt or a .bin file of llm.c. It decides the architecture;
    its tokenizer is the default."""
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
            expected = f"expected a multiple of --model.context, {self.model.context}"
            raise UserError(f"--train.batch-tokens is {self.train.batch_tokens}: {expected}")
        if self.ops.attention == "flash_attn" and self.model.document_mask:
            lacks = "which does not support --model.document-mask: expected sdpa or triton"
            raise UserError(f"--ops.attention is flash_attn, {lacks}")

    @property
    def global_batch(self) -> int:
        """Number of sequences in one optimizer step."""
        return self.train.batch_tokens // self.model.context


COMMON = (
    "steps", "epochs", "seed", "run_dir", "resume", "init_from", "eval_every", "track",
    "model.num_layers", "model.num_heads", "model.dim", "model.context", "model.dropout",
    "data.source", "data.tokenizer", "optim.kind", "optim.lr", "train.batch_tokens",
    "train.micro_batch", "train.device",
)  # fmt: skip
"""Settings that `train.py --help` shows."""


def to_json(config: Config) -> str:
    """Writes settings as JSON; `resume` and `run_dir` belong to one command only."""
    values = {name: x for name, x in dataclasses.asdict(config).items() if name not in OF_COMMAND}
    return json.dumps(values, indent=1)


def by_name(config: Config) -> dict[str, Any]:
    """Returns the settings that `to_json` writes, by dotted names such as `model.num_layers`."""
    return flat(json.loads(to_json(config)))


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Returns nested values by dotted names."""
    found = {}
    for name, x in values.items():
        inner = flat(x) if isinstance(x, dict) else {"": x}
        found |= {f"{name}.{key}".strip("."): value for key, value in inner.items()}
    return found


def overlay(config: Any, values: dict[str, Any], where: str = "the settings") -> Any:
    """Replaces the settings that `values` names, of a section as in `{"model": {"dim": 64}}`.

    Raises:
        UserError: a setting of `where` is unknown, or has a wrong value.
    """
    known = [x.name for x in dataclasses.fields(config) if x.name not in OF_COMMAND]
    new: dict[str, Any] = {}
    for name, x in values.items():
        if name not in known:
            raise unknown_name(f"setting of {where}", str(name), known)
        if dataclasses.is_dataclass(old := getattr(config, name)):
            if not isinstance(x, dict):
                raise UserError(f"{name} of {where} is {shown(x)}: expected settings by name")
            x = overlay(old, x, f"{name} in {where}")
        new[name] = tuple(x) if isinstance(x, list) else x
    return dataclasses.replace(config, **new)
