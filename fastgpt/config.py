"""What a run is made of: frozen dataclasses, checked when they are built, and the command line that
fills them.

Every field is a flag: `--model.num-layers 4` sets `Config.model.num_layers`; its docstring is its
help.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from fastgpt.errors import UserError

MOST_TOKENS = 2**28
"""In one batch of samples: their ids alone are 2 GiB."""


POSITIVE = ("a number greater than 0", lambda x: 0 < x < float("inf"))
NOT_NEGATIVE = ("0 or more", lambda x: 0 <= x < float("inf"))
INT64 = ("0 to 2^63 - 1", lambda x: 0 <= x < 2**63)
FRACTION = ("a fraction in [0, 1)", lambda x: 0 <= x < 1)
SHARE = ("a number from 0 to 1", lambda x: 0 <= x <= 1)


def check(config: object, expected: tuple[str, Callable[[Any], bool]], *names: str) -> None:
    """Raises `UserError` unless each field, `model.dim` or `--top-k`, is None or as expected."""
    words, fits = expected
    for name in names:
        value = getattr(config, name.split(".")[-1].removeprefix("--").replace("-", "_"))
        if value is not None and not fits(value):
            raise UserError(f"{name} is {value}: expected {words}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The network; the defaults are GPT-2 124M as published."""

    architecture: Literal["gpt", "bigram", "heads", "feedforward", "residual"] = "gpt"
    """A GPT, or one of the steps towards it in fastgpt.lecture, which have no normalisation."""
    num_layers: int = 12
    """Transformer blocks, L."""
    num_heads: int = 12
    """Query heads, H; must divide `dim`."""
    num_kv_heads: int | None = None
    """Key/value heads, K; must divide `num_heads`. None: as many as query heads."""
    dim: int = 768
    """Width of the residual stream, C."""
    ffn_dim: int | None = None
    """Feed-forward width, F. None: 4 C (SwiGLU: 8/3 C rounded up to a multiple of 64)."""
    context: int = 1024
    """Longest sequence in tokens, T."""
    vocab_size: int | None = None
    """Tokens, V. None: as many as the tokenizer has."""
    vocab_multiple: int = 64
    """The vocabulary is padded to a multiple of this for speed; only the model sees the padding."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation (eps 1e-5 and 1e-6)."""
    norm_position: Literal["pre", "post"] = "pre"
    """Before each sub-layer (GPT-2) or after each residual sum (the 2017 transformer)."""
    bias: bool = True
    """Biases in the blocks' linear layers and in LayerNorm."""
    qkv_bias: bool | None = None
    """Bias in the projection to queries, keys and values. None: as `bias`."""
    projection_bias: bool | None = None
    """Bias in attention's output projection. None: as `bias`."""
    head_bias: bool = False
    """Bias in the output head; it needs `tied` off."""
    activation: Literal["gelu_tanh", "gelu_erf", "relu", "relu_squared", "swiglu"] = "gelu_tanh"
    """Activation of the feed-forward layer; SwiGLU adds a gate."""
    position: Literal["learned", "sinusoidal", "rotary", "none"] = "learned"
    """How the model knows where a token stands."""
    rotary_base: float = 10_000.0
    """Longest wavelength of rotary positions, over 2 pi."""
    score_scale: Literal["head", "width"] = "head"
    """What attention scores are divided by: the root of the head dim, or (as in the lecture's first
    steps) of the width."""
    qk_norm: bool = False
    """RMS-normalise queries and keys in each head (no weights)."""
    tied: bool = True
    """Output head and token embedding share one matrix."""
    softcap: float | None = None
    """Squash logits to (-softcap, softcap) by tanh."""
    window: int | None = None
    """Attend only to this many last tokens. None: to all."""
    document_mask: bool = False
    """Attend only within one's own document."""
    eot_id: tyro.conf.Suppress[int | None] = None
    """The token that begins a document, for `document_mask`; the data's tokenizer sets it."""
    init: Literal["gpt2", "normal", "torch"] = "gpt2"
    """GPT-2's N(0, 0.02) with residual projections scaled by 1/sqrt(2 L), without that scaling, or
    PyTorch's default."""
    dropout: float = 0.0
    """Probability for all four places below that do not set their own."""
    embedding_dropout: float | None = None
    """After the sum of token and position embeddings."""
    attention_dropout: float | None = None
    """On the attention weights."""
    residual_dropout: float | None = None
    """After the attention's output projection."""
    feed_forward_dropout: float | None = None
    """After the feed-forward's output projection."""

    def __post_init__(self) -> None:
        layers = () if self.architecture == "bigram" else ("model.num_layers",)  # it has none
        check(self, POSITIVE, "model.num_heads", "model.num_kv_heads", "model.dim", *layers)
        check(self, POSITIVE, "model.ffn_dim", "model.context", "model.vocab_size", "model.window")
        check(self, POSITIVE, "model.vocab_multiple", "model.rotary_base", "model.softcap")
        dropouts = (name for name in self.__slots__ if name.endswith("dropout"))
        check(self, FRACTION, *(f"model.{name}" for name in dropouts))
        if self.dim % self.num_heads:
            raise UserError(
                f"model.dim is {self.dim}: expected a multiple of model.num_heads, {self.num_heads}"
            )
        if self.num_heads % self.kv_heads:
            raise UserError(
                f"model.num_heads is {self.num_heads}: expected a multiple of "
                f"model.num_kv_heads, {self.kv_heads}"
            )
        if self.position == "rotary" and self.head_dim % 2:
            raise UserError(
                f"model.dim / model.num_heads is {self.head_dim}: rotary positions need it even"
            )
        if self.position == "sinusoidal" and self.dim % 2:
            raise UserError(f"model.dim is {self.dim}: expected an even number for sinusoidal")
        if self.head_bias and self.tied:
            raise UserError(
                "model.head_bias: a head tied to the embedding has none: --model.no-tied"
            )

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def attention_scale(self) -> float:
        """The factor on attention scores."""
        return (self.head_dim if self.score_scale == "head" else self.dim) ** -0.5

    @property
    def ffn_width(self) -> int:
        if self.ffn_dim is not None:
            return self.ffn_dim
        if self.activation == "swiglu":
            return -(-8 * self.dim // 3 // 64) * 64
        return 4 * self.dim

    @property
    def padded_vocab(self) -> int:
        assert self.vocab_size is not None
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def bias_at(self, place: str) -> bool:
        """True if attention's projection at `place`, qkv or projection, has a bias."""
        own = getattr(self, f"{place}_bias")
        return self.bias if own is None else own

    def dropout_at(self, place: str) -> float:
        """The probability at `place`: embedding, attention, residual or feed_forward."""
        own = getattr(self, f"{place}_dropout")
        return self.dropout if own is None else own


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What is read, and in which order."""

    source: str = "builtin"
    """`builtin` (this Python's standard library), `shakespeare`, or whatever fastgpt.prepare takes;
    a prepared directory or llm.c's shards; `A=0.7,B=0.3` mixes; `prepared:NAME` is
    $FASTGPT_DATA/NAME, `prepared` is $FASTGPT_DATA/gpt2, else `builtin`."""
    tokenizer: str = "auto"
    """`bytes`, `chars`, `gpt2`, or the path of a tokenizer.json; `auto`: what suits the source."""
    encoding: str = "utf-8"
    """Encoding of text files, as Python names it: utf-8, utf-16, cp1252, ..."""
    val_fraction: float = 0.1
    """Held out: the end of a text, or so many of a set's documents."""
    sampling: Literal["epoch", "random-windows"] = "epoch"
    """Every sample once an epoch, shuffled; or samples drawn with replacement."""
    align: Literal["none", "bos", "document"] = "none"
    """What a sample is: a window anywhere; a window that begins with a document; or one document,
    cut or filled up, the filling not scored."""
    eval_tokens: int = 131_072
    """Held-out tokens that each evaluation scores, always the same ones; 0: all."""
    final_eval_tokens: int = 0
    """As `eval_tokens`, for the evaluation after the last step."""
    eval_batches: int = 0
    """Evaluate instead on so many batches of random windows of each split, others every time."""

    def __post_init__(self) -> None:
        check(self, ("a fraction in (0, 1)", lambda x: 0 < x < 1), "data.val_fraction")
        check(self, NOT_NEGATIVE, "data.eval_tokens", "data.final_eval_tokens", "data.eval_batches")
        if self.eval_batches and self.align == "document":
            raise UserError(
                f"data.eval_batches is {self.eval_batches}: random windows do not keep to documents"
                " (data.align document): expected 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """How the weights move."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the blocks' matrices, AdamW for everything else."""
    lr: float = 6e-4
    """AdamW's peak learning rate."""
    muon_lr: float = 0.02
    """Muon's peak learning rate, scaled by sqrt(max(1, rows / columns)) for each matrix."""
    muon_momentum: float = 0.95
    """Nesterov momentum of Muon."""
    beta1: float = 0.9
    """AdamW's first decay."""
    beta2: float = 0.95
    """AdamW's second decay."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled decay, on matrices and embeddings only."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Shape after the warmup; `wsd` holds the peak and falls linearly at the end."""
    warmup_steps: int = 0
    """Steps of linear rise to the peak."""
    min_lr_ratio: float = 0.1
    """Where the fall ends, after the last step, over the peak (not for `constant`)."""
    decay_fraction: float = 0.2
    """`wsd`: share of all steps that the fall takes."""

    def __post_init__(self) -> None:
        check(self, POSITIVE, "optim.lr", "optim.muon_lr", "optim.eps", "optim.decay_fraction")
        check(self, FRACTION, "optim.muon_momentum", "optim.beta1", "optim.beta2")
        check(self, NOT_NEGATIVE, "optim.weight_decay", "optim.grad_clip", "optim.warmup_steps")
        check(self, SHARE, "optim.min_lr_ratio", "optim.decay_fraction")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How a step runs."""

    batch_tokens: int = 524_288
    """Tokens of one optimizer step, over all ranks and micro-steps; a multiple of the context."""
    micro_batch: int = 64
    """Most sequences that one rank takes through the model at once; what is left is accumulated."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where it is visible."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Autocast dtype; `auto`: bf16 where the hardware has it, else fp32."""
    tf32: bool = False
    """Let CUDA round the fp32 matrix products to TF32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of model and loss; `auto`: on CUDA."""
    label_smoothing: float = 0.0
    """Spread this share of each target's probability evenly over the vocabulary; training only."""
    z_loss: float = 0.0
    """Add this times the mean of log(sum(exp(logits)))^2 to the loss; training only."""
    keep_checkpoints: int = 3
    """How many of the last checkpoints stay on disk (the best one stays too)."""
    sample_tokens: int = 200
    """Length of the sample shown with each evaluation; 0: none."""
    sample_prompt: str = "\n"
    """What the samples continue."""

    def __post_init__(self) -> None:
        check(self, POSITIVE, "train.batch_tokens", "train.micro_batch", "train.keep_checkpoints")
        check(self, FRACTION, "train.label_smoothing")
        check(self, NOT_NEGATIVE, "train.z_loss")
        most = (f"0 to {MOST_TOKENS:,}", lambda x: 0 <= x <= MOST_TOKENS)
        check(self, most, "train.sample_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpsConfig:
    """Which implementation runs each op."""

    attention: Literal["auto", "torch", "sdpa", "blocked", "triton", "flash_attn"] = "auto"
    """`torch`: the plain reference; `sdpa`: PyTorch's fused one; `blocked`: for CPUs; `triton`: our
    kernels, on CUDA; `flash_attn`: the package's, on CUDA in bf16 or fp16."""
    norm: Literal["auto", "torch", "triton"] = "auto"
    """LayerNorm and RMSNorm, with the residual sum before them. `triton`: our kernels, on CUDA."""
    loss: Literal["auto", "torch", "chunked"] = "auto"
    """The output head with its cross-entropy. `chunked`: the logits of some tokens at a time, never
    of all; on CUDA by our kernels."""
    rotary: Literal["auto", "torch", "triton"] = "auto"
    """Rotary positions, where the model has them. `triton`: our kernel, on CUDA."""
    activation: Literal["auto", "torch", "triton"] = "auto"
    """The feed-forward layers' bias and activation. `triton`: our kernels, on CUDA."""
    decode: Literal["auto", "torch", "triton"] = "auto"
    """Attention of new tokens over the cache, when text is generated. `auto`: PyTorch's; `triton`:
    our kernels, on CUDA."""
    dropout: Literal["auto", "torch", "lanes"] = "auto"
    """`lanes`: four 16-bit draws from each 64-bit random number, for CPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole run."""

    recipe: tyro.conf.Suppress[str] = "gpt2-124m"
    """Where the values came from before any flag."""
    steps: int = 19_073
    """Optimizer steps."""
    epochs: float | None = None
    """The length in passes over the training data, instead of `steps`."""
    eval_epochs: float | None = None
    """Passes between two evaluations, instead of `eval_every`."""
    seed: int = 1337
    """Random seed for the initial weights, the sample order and dropout."""
    run_dir: Path | None = None
    """Where everything about the run is kept. None: runs/<recipe>-<date>."""
    log_every: int = 10
    """Steps between two log lines, the only ones that wait for the device."""
    eval_every: int = 250
    """Steps between two evaluations; 0: only before the first and after the last step."""
    save_every: int = 0
    """Steps between two checkpoints, beside those before each evaluation; 0: only those."""
    resume: str | None = None
    """The path of a run or of a checkpoint to go on from; `auto`: `run_dir`, or the newest run of
    the recipe, or a fresh start where there is none."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    ops: OpsConfig = field(default_factory=OpsConfig)

    def __post_init__(self) -> None:
        check(self, POSITIVE, "steps", "log_every", "epochs", "eval_epochs")
        check(self, INT64, "steps", "seed", "eval_every", "save_every")
        if self.run_dir is not None and self.run_dir == Path():
            raise UserError("run_dir is the current directory: expected a folder of its own")
        if self.train.batch_tokens % self.model.context:
            raise UserError(
                f"train.batch_tokens is {self.train.batch_tokens}: expected a multiple of "
                f"model.context, {self.model.context}"
            )
        if self.ops.attention == "flash_attn" and self.model.document_mask:
            raise UserError(
                "ops.attention is flash_attn, which keeps no documents apart: expected sdpa or "
                "triton, or no model.document_mask"
            )

    @property
    def global_batch(self) -> int:
        """Sequences of one optimizer step."""
        return self.train.batch_tokens // self.model.context


def to_json(config: Config) -> str:
    """The settings as JSON; `resume` and `run_dir` belong to a call, not to a run: left out."""
    values = dataclasses.asdict(config)
    del values["resume"], values["run_dir"]
    return json.dumps(values, indent=1)


def from_json(text: str) -> Config:
    """The settings back from `to_json`.

    Raises:
        TypeError: a field is unknown to this version.
    """
    values = json.loads(text)
    for section in dataclasses.fields(Config):
        if isinstance(section.default_factory, type):
            values[section.name] = section.default_factory(**values[section.name])
    return Config(**values)
