"""Recipes: named settings of a run, as in `python train.py shakespeare-cpu`."""

from dataclasses import replace

from fastgpt.config.config import Config, DataConfig, OptimConfig, TrainConfig
from fastgpt.config.model import ModelConfig


def _gpt2(layers: int, heads: int, dim: int) -> Config:
    """Settings of GPT-2 at one of its published sizes (Radford et al. 2019, table 2)."""
    return Config(
        steps=19_073,  # of 2^19 tokens: 10^10 in all
        model=ModelConfig(num_layers=layers, num_heads=heads, dim=dim, vocab_size=50_257),
        data=DataConfig(source="prepared", eval_tokens=2**20, final_eval_tokens=10 * 2**20),
        optim=OptimConfig(warmup_steps=715),
        train=TrainConfig(micro_batch=64 if dim == 768 else 16, sample_tokens=64),
    )


def _modern(gpt2: Config) -> Config:
    """Settings of GPT-2 with Qwen3's network, for the same data; not tuned."""
    return replace(
        gpt2,
        model=replace(
            gpt2.model, norm="rmsnorm", bias=False, position="rotary", activation="swiglu",
            qk_norm=True, qk_norm_weight=True,
        ),
        optim=replace(gpt2.optim, kind="muon", schedule="wsd", min_lr_ratio=0.0, weight_decay=0.01),
    )  # fmt: skip


_SHAKESPEARE = DataConfig(source="shakespeare", eval_tokens=0)

_NANOGPT = ModelConfig(bias=False, activation="gelu_erf")
"""nanoGPT's network: unlike GPT-2's, its GELU is the exact one, which is faster on a CPU, too."""
_CHAR = replace(_NANOGPT, num_layers=6, num_heads=6, dim=384, context=256, dropout=0.2)
_SMALL = replace(_NANOGPT, num_layers=4, num_heads=4, dim=128, context=64)

_PYTORCHS_ADAMW = OptimConfig(
    beta2=0.999, weight_decay=0.01, grad_clip=0.0, schedule="constant"
)  # fmt: skip
"""PyTorch's default settings of AdamW, except that vectors have no weight decay."""


def _lecture(*, steps: int, batch: int, eval_every: int, model: ModelConfig) -> Config:
    """Settings of a step of the lecture, with the lecture's sampling, evaluation and optimizer."""
    small = model.init == "torch"
    return Config(
        steps=steps,
        log_every=100,
        eval_every=eval_every,
        model=model,
        data=DataConfig(source="shakespeare", sampling="random-windows", eval_batches=200),
        optim=replace(_PYTORCHS_ADAMW, lr=1e-3 if small else 3e-4),
        train=TrainConfig(
            batch_tokens=batch * model.context, precision="fp32" if small else "auto"
        ),
    )


_HEAD = ModelConfig(
    architecture="heads", num_layers=1, num_heads=1, dim=32, context=8, vocab_multiple=1,
    activation="relu", qkv_bias=False, score_scale="width", tied=False, head_bias=True,
    init="torch",
)  # fmt: skip
_RESIDUAL = replace(_HEAD, architecture="residual", num_layers=3, num_heads=4)
_LAYERNORM = replace(_RESIDUAL, architecture="gpt")
_LECTURE_GPT = ModelConfig(
    num_layers=6, num_heads=6, dim=192, context=128, activation="relu", qkv_bias=False,
    tied=False, head_bias=True, init="normal", dropout=0.2, embedding_dropout=0.0,
)  # fmt: skip


_STORIES = ModelConfig(
    num_layers=6, num_heads=4, dim=128, context=256, norm="rmsnorm", bias=False, activation="relu",
    tied=False, init="torch", dropout=0.2, embedding_dropout=0.0,
)  # fmt: skip
_ABSTRACTS = ModelConfig(
    num_layers=6, num_heads=4, dim=128, context=512, norm_position="post", activation="gelu_erf",
    qkv_bias=False, projection_bias=False, tied=False, head_bias=True, init="torch",
    attention_dropout=0.2, feed_forward_dropout=0.2,
)  # fmt: skip


def _ladder(model: ModelConfig) -> Config:
    return _lecture(steps=5000, batch=32, eval_every=500, model=model)


_MUON = OptimConfig(
    kind="muon",
    lr=1e-2,
    muon_lr=0.06,
    muon_momentum=0.9,
    beta1=0.8,
    schedule="linear",
    min_lr_ratio=0.0,
    warmup_steps=20,
)
"""Optimizer settings for runs of a few hundred steps."""

_RECIPES = {
    "baby": (
        "Small GPT on Python's own library; minutes on a CPU",
        Config(
            steps=900,
            eval_every=300,
            model=ModelConfig(num_layers=4, num_heads=4, dim=128, context=256),
            data=DataConfig(val_fraction=0.05, eval_tokens=2**16),
            optim=_MUON,
            train=TrainConfig(batch_tokens=16 * 256),
        ),
    ),
    "shakespeare-cpu": (
        "Tiny Shakespeare, 4 layers of 128, Muon; 20 s on a CPU",
        Config(
            steps=300,
            eval_every=0,
            model=_SMALL,
            data=replace(_SHAKESPEARE, eval_tokens=2**14),  # at the end all are scored
            optim=_MUON,
            train=TrainConfig(batch_tokens=24 * 64),
        ),
    ),
    "shakespeare-cpu-adamw": (
        "Tiny Shakespeare, 4 layers of 128, AdamW as in nanoGPT",
        Config(
            steps=2000,
            eval_every=1000,
            model=_SMALL,
            data=_SHAKESPEARE,
            optim=OptimConfig(lr=1e-3, beta2=0.99, warmup_steps=100),
            train=TrainConfig(batch_tokens=12 * 64),
        ),
    ),
    "shakespeare-char": (
        "Tiny Shakespeare, 6 layers of 384; minutes on a GPU",
        Config(
            steps=5000,
            model=_CHAR,
            data=_SHAKESPEARE,
            optim=OptimConfig(lr=1e-3, beta2=0.99, warmup_steps=100),
            train=TrainConfig(batch_tokens=64 * 256),
        ),
    ),
    "shakespeare-char-muon": (
        "The same network, Muon and smaller batches; 40 min on a CPU",
        Config(
            steps=2000,
            eval_every=200,
            model=replace(_CHAR, dropout=0.25),
            data=_SHAKESPEARE,
            optim=replace(
                _MUON, lr=5e-3, muon_lr=0.03, muon_momentum=0.95, beta1=0.9, beta2=0.99,
                warmup_steps=50,
            ),
            train=TrainConfig(batch_tokens=32 * 256),
        ),
    ),
    "lecture-bigram": (
        "Lecture, step A: a bigram table",
        _lecture(
            steps=10_100, batch=32, eval_every=2000,
            model=replace(_HEAD, architecture="bigram"),
        ),
    ),
    "lecture-head": ("Lecture, step B: one attention head", _ladder(_HEAD)),
    "lecture-multihead": (
        "Lecture, step C: four attention heads of 8",
        _ladder(replace(_HEAD, num_heads=4)),
    ),
    "lecture-feedforward": (
        "Lecture, step D: four heads and a feed-forward layer",
        _ladder(replace(_HEAD, architecture="feedforward", num_heads=4)),
    ),
    "lecture-residual": ("Lecture, step E: three residual blocks", _ladder(_RESIDUAL)),
    "lecture-layernorm": (
        "Lecture, step F: three residual blocks with LayerNorm",
        _ladder(_LAYERNORM),
    ),
    "lecture-gpt": (
        "Lecture, step G: the GPT of the notes, 2.7M parameters",
        _lecture(steps=5000, batch=64, eval_every=1000, model=_LECTURE_GPT),
    ),
    "lecture-gpt-full": (
        "Lecture, step G': the full-size GPT, 10.8M; for a GPU",
        _lecture(
            steps=5000, batch=64, eval_every=1000,
            model=replace(_LECTURE_GPT, dim=384, context=256),
        ),
    ),
    "lecture-gpt-small": (
        "Lecture, step H: a GPT of 0.2M parameters",
        _lecture(
            steps=5000, batch=16, eval_every=100,
            model=replace(_LAYERNORM, num_layers=4, dim=64, context=32),
        ),
    ),
    "tinystories-char": (
        "TinyStories by characters, 6 layers of 128, RMSNorm",
        Config(
            steps=10_000,
            log_every=50,
            eval_every=500,
            model=_STORIES,
            data=DataConfig(source="prepared:tinystories-char"),
            optim=replace(_PYTORCHS_ADAMW, lr=1e-4),
            train=TrainConfig(batch_tokens=16 * 256),
        ),
    ),
    "pubmed": (
        "Abstracts, one per sample, WordPiece, 8.7M; for a GPU",
        Config(
            epochs=20,
            eval_epochs=1,
            model=_ABSTRACTS,
            data=DataConfig(source="prepared:pubmed", align="document", eval_tokens=0),
            optim=replace(_PYTORCHS_ADAMW, lr=2e-3),
            train=TrainConfig(batch_tokens=64 * 512),
        ),
    ),
    "gpt2-124m": ("GPT-2 small, 10 billion tokens; for GPUs", _gpt2(12, 12, 768)),
    "gpt2-124m-modern": (
        "GPT of 124M with Qwen3's network and Muon; for GPUs",
        _modern(_gpt2(12, 12, 768)),
    ),
    "gpt2-355m": ("GPT-2 medium, 10 billion tokens; for GPUs", _gpt2(24, 16, 1024)),
    "gpt2-774m": ("GPT-2 large, 10 billion tokens; for GPUs", _gpt2(36, 20, 1280)),
    "gpt2-1558m": ("GPT-2 XL, 10 billion tokens; for GPUs", _gpt2(48, 25, 1600)),
    "finetune-gpt2": (
        "Published GPT-2 on tiny Shakespeare, as in nanoGPT",
        Config(
            init_from="gpt2",
            steps=20,
            log_every=1,
            eval_every=5,
            model=ModelConfig(vocab_size=50_257),
            data=replace(_SHAKESPEARE, sampling="random-windows"),
            optim=OptimConfig(lr=3e-5, schedule="constant"),
            train=TrainConfig(batch_tokens=32 * 1024, micro_batch=1),
        ),
    ),
}  # fmt: skip
RECIPES: dict[str, tuple[str, Config]] = {
    name: (about, replace(config, recipe=name)) for name, (about, config) in _RECIPES.items()
}
"""One-line description and settings of each recipe, by name."""
