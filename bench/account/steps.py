"""Parts of a training step of fastgpt, nanoGPT and llm.c.

Each part has FLOPs, bytes of memory and launches, counted by hand from the trainers' sources for
one micro-batch, forward, backward and one update.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fastgpt.config.model import ModelConfig
from fastgpt.kernels.cross_entropy.chunks import chunk_on_gpu


@dataclass(frozen=True, slots=True)
class Part:
    """Work of a step that is done in one way, `count` times."""

    name: str
    group: str
    """The part of `bench.parts` that it belongs to."""
    flops: float = 0
    bytes: float = 0
    count: int = 1
    """Number of times that it is done."""
    launches: int = 1
    """Kernels of one of these times."""
    product: tuple[int, int] = (0, 0)
    """Rows and columns of a product's result."""
    kernels: tuple[str, ...] = ()
    """Keys of the forms of ours that do it (`Row.key`)."""
    library: str = ""
    """Name of an ASSUMED share of the peak FLOPs."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model and of its step, M tokens in sequences of T, and of the GPU."""

    M: int
    T: int
    C: int
    F: int
    H: int
    V: int
    valid: int
    """Tokens of the vocabulary; V has padding, too."""
    L: int
    processors: int

    @property
    def D(self) -> int:  # noqa: N802 - as the other sizes
        return self.C // self.H

    @property
    def block(self) -> int:
        """Weights of a layer."""
        return 4 * self.C * self.C + 2 * self.F * self.C

    @property
    def weights(self) -> int:
        """All weights, without biases and norms."""
        return self.L * self.block + (self.V + self.T) * self.C


def sizes_of(config: ModelConfig, tokens: int, processors: int) -> Sizes:
    c = config
    assert c.vocab_size is not None
    vocabulary = (c.padded_vocab, c.vocab_size)
    network = (c.context, c.dim, c.ffn_width, c.num_heads, *vocabulary, c.num_layers)
    return Sizes(tokens, *network, processors)


def products(s: Sizes) -> Iterator[Part]:
    """The products of all layers, forward and for both gradients: the same for every trainer."""
    shapes = {"qkv": (3 * s.C, s.C), "attention's projection": (s.C, s.C),
              "up": (s.F, s.C), "down": (s.C, s.F)}  # fmt: skip
    for name, (n, k) in shapes.items():
        for which, (rows, columns, depth) in {
            "": (s.M, n, k), ", input's gradient": (s.M, k, n), ", weight's gradient": (n, k, s.M)
        }.items():  # fmt: skip
            moved = 2 * (rows * columns + (rows + columns) * depth)
            yield Part(f"{name}{which}", "GEMM", 2 * rows * columns * depth, moved, s.L,
                       product=(rows, columns))  # fmt: skip


def head(s: Sizes, chunks: int) -> Iterator[Part]:
    """The head's three products, in chunks of tokens whose sums are kept in fp32."""
    flops, m = 2 * s.M * s.V * s.C, s.M // chunks
    move = 2 * (s.M * s.V + s.M * s.C + chunks * s.V * s.C)
    yield Part("head", "GEMM", flops / chunks, move / chunks, chunks, product=(m, s.V))
    yield Part("head, input's gradient", "GEMM", flops / chunks, move / chunks, chunks,
               product=(m, s.C))  # fmt: skip
    sums = 8 * s.V * s.C if chunks > 1 else 0
    yield Part("head, weight's gradient", "GEMM", flops / chunks, move / chunks + sums, chunks,
               product=(s.V, s.C))  # fmt: skip


def attention(s: Sizes) -> tuple[float, float, float, float]:
    """FLOPs and bytes of attention's two products, and of the five that its gradient needs."""
    one = 2 * (s.M // s.T) * s.H * s.D * s.T * (s.T + 1) / 2
    wide = 2 * s.M * s.C
    return 2 * one, 4 * wide, 5 * one, 10 * wide


def passes(s: Sizes, stream: int, of_weights: float) -> Iterator[Part]:
    """Yields the parts that touch each parameter once, the optimizer above all, and the embeddings.

    Args:
        stream: bytes of an element of the residual stream.
        of_weights: bytes of each parameter's gradient that are read for their norm, then scaled.
    """
    yield Part("norm of the gradients, clipping", "optimizer", 0, of_weights * s.weights, 1, 4)
    yield Part("AdamW", "optimizer", 0, 28 * s.weights, 1, 2)
    moved = s.M * s.C * (8 + stream) + s.M * s.C * stream + 4 * s.V * s.C
    yield Part("embeddings", "other", 0, moved, 1, 4)


def fastgpt(s: Sizes) -> Iterator[Part]:
    """Our step as it is now: fp32 residual stream, bf16 products."""
    n, wide = s.M * s.C, s.M * s.F
    fwd, read, bwd, moved = attention(s)
    causal = f"D={s.D} bfloat16 causal"
    norm = f"layer N={s.C} bf16 weight=fp32 bias input_bias residual=fp32"
    gelu = f"gelu_tanh F={s.F} bf16 bias=fp32"
    chunks = math.ceil(s.M / chunk_on_gpu(s.M, s.V, s.C, 2, s.processors))
    yield from products(s)
    yield from head(s, chunks)
    forward = (f"_attention_fwd_kernel {causal}",)
    yield Part("attention", "attention", fwd, read, s.L, kernels=forward)
    both = tuple(f"_attention_bwd_{x}_kernel {causal} input_bias" for x in ("dq", "dkv"))
    moved += 2 * 4 * 3 * s.C * s.M // 64  # sums of the columns of tiles, which have 64 rows or more
    yield Part("attention's gradient", "attention", bwd, moved, s.L, 4, kernels=both)
    yield Part("residual + LayerNorm", "norm", 0, 12 * n, 2 * s.L + 1,
               kernels=(f"_norm_fwd_kernel {norm}",))  # fmt: skip
    yield Part("LayerNorm's gradient", "norm", 0, 16 * n, 2 * s.L + 1, 2,
               kernels=(f"_norm_bwd_kernel {norm}",))  # fmt: skip
    yield Part("bias + GELU", "other", 0, 4 * wide, s.L, kernels=(f"_bias_act_fwd_kernel {gelu}",))
    yield Part("GELU's gradient", "other", 0, 6 * wide, s.L, 2,
               kernels=(f"_bias_act_bwd_kernel {gelu}",))  # fmt: skip
    loss = (f"_cross_entropy_fwd_kernel V={s.V} bf16 valid={s.valid} in place",)
    yield Part(
        "loss, gradient in place", "loss", 0, 4 * s.M * s.V / chunks, chunks, 2, kernels=loss
    )
    yield Part("weights to bf16, gradients to fp32", "other", 0, 12 * s.weights, 1, 4 * s.L)
    yield from passes(s, 4, 12)


def by_libraries(s: Sizes, attends: str, forward: int, backward: int) -> Iterator[Part]:
    """Yields what nanoGPT's and llm.c's steps have in common.

    Args:
        attends: library of the attention, the first word of its ASSUMED shares.
        forward: bytes of an element that a norm reads and writes.
        backward: the same of its gradient.
    """
    n, wide = s.M * s.C, s.M * s.F
    fwd, read, bwd, moved = attention(s)
    yield from products(s)
    yield from head(s, 1)
    yield Part("attention", "attention", fwd, read, s.L, library=f"{attends} forward")
    gradient = f"{attends} backward"
    yield Part("attention's gradient", "attention", bwd, moved, s.L, 3, library=gradient)
    yield Part("residual + LayerNorm", "norm", 0, forward * n, 2 * s.L + 1)
    yield Part("LayerNorm's gradient", "norm", 0, backward * n, 2 * s.L + 1, 2)
    yield Part("GELU", "other", 0, 4 * wide, s.L)
    yield Part("GELU's gradient", "other", 0, 6 * wide, s.L)


def nanogpt(s: Sizes) -> Iterator[Part]:
    """nanoGPT's train.py with its defaults: torch.compile, flash attention, no biases."""
    yield from by_libraries(s, "flash", 12, 22)
    yield Part("loss and its gradient", "loss", 0, 6 * s.M * s.V, 1, 3)
    yield Part("weights to bf16, gradients to fp32", "other", 0, 12 * s.weights, 1, 4 * s.L)
    yield from passes(s, 4, 12)


def llmc(s: Sizes) -> Iterator[Part]:
    """llm.c's train_gpt2.cu: bf16 throughout, fp32 master weights, cuDNN's attention."""
    yield from by_libraries(s, "cudnn", 8, 8)
    biases = s.M * (10 * s.C + 2 * s.F)
    yield Part("gradients of the biases", "other", 0, biases, s.L, 8)
    yield Part("loss, gradient in place", "loss", 0, 4 * s.M * s.V, 1)
    yield from passes(s, 2, 2)


TRAINERS = {"fastgpt": fastgpt, "nanoGPT": nanogpt, "llm.c": llmc}
