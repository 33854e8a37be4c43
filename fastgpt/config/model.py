"""Settings of the model: its size and architecture; see `fastgpt.config.config`."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import tyro

from fastgpt.config.checks import FRACTION, POSITIVE, SIZE, Range, check_fields
from fastgpt.errors import UserError

BiasPlace = Literal["qkv", "projection", "mlp", "head"]
BIAS_PLACES = get_args(BiasPlace)
DropoutPlace = Literal["embedding", "attention", "residual", "feed_forward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Model: its size and architecture."""

    architecture: Literal["gpt", "bigram", "heads", "feedforward", "residual", "layernorm"] = "gpt"
    """Model to build: a GPT, or a step of the lecture before it (see fastgpt/model/build.py). A GPT
    divides attention scores by the root of the head's width, the others of the model's width."""
    num_layers: Annotated[int, Range("1 to 256", lambda x: 0 <= x <= 256)] = 12
    """Number of transformer blocks."""
    num_heads: Annotated[int, SIZE] = 12
    """Number of attention heads; it must divide model.dim."""
    num_kv_heads: Annotated[int | None, SIZE] = None
    """Number of key/value heads; it must divide model.num-heads, which is the default."""
    head_size: Annotated[int | None, SIZE] = None
    """Width of each attention head; by default model.dim / model.num-heads."""
    dim: Annotated[int, SIZE] = 768
    """Width of the model, a multiple of model.num-heads. With model.head-size it may be any."""
    ffn_dim: Annotated[int | None, SIZE] = None
    """Width of the feed-forward layers. By default 4 x model.dim, or with SwiGLU 8/3 x model.dim,
    rounded up to a multiple of 64."""
    context: Annotated[int, SIZE] = 1024
    """Longest sequence, in tokens."""
    vocab_size: Annotated[int | None, SIZE] = None
    """Number of tokens in the vocabulary; by default the tokenizer's."""
    vocab_multiple: Annotated[int, SIZE] = 64
    """Multiple to which the vocabulary is padded, for speed; padding tokens are never predicted."""
    norm: Literal["layernorm", "rmsnorm", "post-layernorm", "post-rmsnorm"] = "layernorm"
    """Normalisation layer. It comes before each sub-layer, as in GPT-2; with `post-` after each
    residual sum, as in the transformer of 2017."""
    norm_eps: Annotated[float | None, POSITIVE] = None
    """Epsilon of the normalisation layers and of model.qk-norm; by default 1e-5 for LayerNorm and
    1e-6 for the others."""
    bias: bool | tuple[BiasPlace, ...] = True
    """Layers with a bias. True: all but the output head; False: none; or a list: qkv (queries, keys
    and values), projection (after attention), mlp (with LayerNorm), head (with model.no-tied)."""
    activation: Literal["gelu_tanh", "gelu_erf", "relu", "relu_squared", "swiglu"] = "gelu_tanh"
    """Activation function of the feed-forward layers; SwiGLU adds a gate."""
    position: Literal["learned", "sinusoidal", "rotary", "none"] = "learned"
    """Position encoding: learned or sinusoidal embeddings, rotary, or none."""
    rotary_base: Annotated[float, POSITIVE] = 10_000.0
    """Base of the rotary frequencies; larger ones suit longer contexts."""
    rotary_scaling: tuple[float, float, float, int] | None = None
    """Llama 3's scaling of the rotary frequencies for longer contexts: factor, low and high
    frequency factor, and the context trained on, for example 8 1 4 8192; by default none."""
    qk_norm: bool | Literal["weighted"] = False
    """RMS normalisation of queries and keys in each head; weighted: with weights for each layer."""
    tied: bool = True
    """Shared weight matrix for the token embedding and the output head."""
    softcap: Annotated[float | None, POSITIVE] = None
    """Bound of the logits, which tanh squashes into (-softcap, softcap); by default none."""
    window: Annotated[int | None, POSITIVE] = None
    """Number of tokens that each token attends to: itself and those before it; by default all."""
    document_mask: bool = False
    """Mask that keeps attention within a document; the tokenizer needs an end-of-text token."""
    eot_id: tyro.conf.Suppress[int | None] = None
    """Id of the token that begins a document; the data's tokenizer sets it."""
    init: Literal["gpt2", "normal", "torch"] = "gpt2"
    """Initialisation of the weights. normal: a standard deviation of 0.02; gpt2: the same, and
    residual projections scaled by 1 / sqrt(2 x layers); torch: PyTorch's default."""
    dropout: Annotated[float, FRACTION] = 0.0
    """Dropout probability in training."""
    dropout_places: tuple[DropoutPlace, ...] = get_args(DropoutPlace)
    """Places with dropout: the sum of embeddings, the attention weights, and the outputs of
    attention (residual) and of the feed-forward layers; by default all four."""

    def __post_init__(self) -> None:
        check_fields(self, "model.")
        rotary, scaling = self.position == "rotary", self.rotary_scaling
        factor, low, high, before = scaling or (1, 1, 2, 1)
        own_size = self.head_size is not None
        head = "--model.head-size" if own_size else "--model.dim / --model.num-heads"
        for wrong, said in (
            (self.num_layers == 0 and self.architecture != "bigram",
             "--model.num-layers is 0: expected 1 to 256"),
            (not own_size and self.dim % self.num_heads,
             f"--model.dim is {self.dim}: expected a multiple of --model.num-heads,"
             f" {self.num_heads}"),
            (self.num_heads % self.kv_heads,
             f"--model.num-heads is {self.num_heads}: expected a multiple of"
             f" --model.num-kv-heads, {self.kv_heads}"),
            (own_size and not self.is_gpt,
             "--model.head-size: only --model.architecture gpt has it"),
            (rotary and self.head_dim % 2,
             f"{head} is {self.head_dim}: rotary needs an even number"),
            (not rotary and scaling, "--model.rotary-scaling: --model.position is not rotary"),
            (not (factor >= 1 and 0 < low < high and before >= 1),
             f"--model.rotary-scaling is {scaling}: expected a factor of 1 or more, a low factor"
             " above 0, a higher one, and a context of 1 or more"),
            (self.position == "sinusoidal" and self.dim % 2,
             f"--model.dim is {self.dim}: sinusoidal needs an even number"),
            (self.bias_at("head") and self.tied,
             "--model.bias has head: a head tied to the embedding has none: pass --model.no-tied"),
        ):  # fmt: skip
            if wrong:
                raise UserError(said)

    @property
    def is_gpt(self) -> bool:
        """True if blocks and normalisation layers are a GPT's."""
        return self.architecture in ("gpt", "layernorm")

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads if self.head_size is None else self.head_size

    @property
    def epsilon(self) -> float:
        """Epsilon of the normalisation layers."""
        own = 1e-5 if self.norm_kind == "layernorm" else 1e-6
        return own if self.norm_eps is None else self.norm_eps

    @property
    def norm_kind(self) -> str:
        """`layernorm` or `rmsnorm`, wherever it is placed."""
        return self.norm.removeprefix("post-")

    @property
    def pre_norm(self) -> bool:
        return self.norm == self.norm_kind

    @property
    def attention_scale(self) -> float:
        """Factor of the attention scores."""
        return (self.head_dim if self.architecture == "gpt" else self.dim) ** -0.5

    @property
    def ffn_width(self) -> int:
        own = -(-8 * self.dim // 3 // 64) * 64 if self.activation == "swiglu" else 4 * self.dim
        return own if self.ffn_dim is None else self.ffn_dim

    @property
    def padded_vocab(self) -> int:
        assert self.vocab_size is not None
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def bias_at(self, place: str) -> bool:
        """Returns True if `place`, which is `qkv`, `projection`, `mlp` or `head`, has a bias."""
        return place in self.bias if isinstance(self.bias, tuple) else self.bias and place != "head"

    def dropout_at(self, place: str) -> float:
        """Returns the dropout probability of embedding, attention, residual or feed_forward."""
        return self.dropout if place in self.dropout_places else 0.0


def bias_of(*, qkv: bool, projection: bool, mlp: bool, head: bool = False) -> Any:
    """Returns the setting `bias` of a model, in one form for each set of places."""
    if qkv == projection == mlp and not head:
        return mlp
    return tuple(place for place, has in zip(BIAS_PLACES, (qkv, projection, mlp, head)) if has)
