"""The named runs: `python train.py NAME`."""

from fastgpt.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig

GPT2_SIZES = {
    "gpt2-124m": (12, 12, 768),
    "gpt2-355m": (24, 16, 1024),
    "gpt2-774m": (36, 20, 1280),
    "gpt2-1558m": (48, 25, 1600),
}
"""Layers, heads and width as published (Radford et al. 2019, table 2)."""


def _gpt2(name: str) -> Config:
    layers, heads, dim = GPT2_SIZES[name]
    return Config(
        recipe=name,
        steps=19_073,  # of 2^19 tokens: 10^10 in all
        model=ModelConfig(num_layers=layers, num_heads=heads, dim=dim, vocab_size=50_257),
        data=DataConfig(source="prepared", eval_tokens=2**20, final_eval_tokens=10 * 2**20),
        optim=OptimConfig(warmup_steps=715),
        train=TrainConfig(micro_batch=64 if dim == 768 else 16),
    )


_SHAKESPEARE = DataConfig(source="shakespeare", eval_tokens=0)

_SMALL = ModelConfig(num_layers=4, num_heads=4, dim=128, context=64, bias=False)

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
"""For runs of a few hundred steps."""

RECIPES: dict[str, tuple[str, Config]] = {
    "baby": (
        "a small GPT on the source of this Python's library: minutes on a laptop CPU",
        Config(
            recipe="baby",
            steps=900,
            eval_every=300,
            model=ModelConfig(num_layers=4, num_heads=4, dim=128, context=256),
            data=DataConfig(val_fraction=0.05, eval_tokens=2**16),
            optim=_MUON,
            train=TrainConfig(batch_tokens=16 * 256, sample_prompt="def "),
        ),
    ),
    "shakespeare-cpu": (
        "tiny shakespeare, 4 layers of 128, with Muon: seconds on a CPU",
        Config(
            recipe="shakespeare-cpu",
            steps=300,
            eval_every=0,
            model=_SMALL,
            data=_SHAKESPEARE,
            optim=_MUON,
            train=TrainConfig(batch_tokens=24 * 64),
        ),
    ),
    "shakespeare-cpu-adamw": (
        "the same network trained as nanoGPT trains it on small computers",
        Config(
            recipe="shakespeare-cpu-adamw",
            steps=2000,
            eval_every=1000,
            model=_SMALL,
            data=_SHAKESPEARE,
            optim=OptimConfig(lr=1e-3, beta2=0.99, warmup_steps=100),
            train=TrainConfig(batch_tokens=12 * 64),
        ),
    ),
    "shakespeare-char": (
        "tiny shakespeare, 6 layers of 384: minutes on a GPU",
        Config(
            recipe="shakespeare-char",
            steps=5000,
            model=ModelConfig(
                num_layers=6, num_heads=6, dim=384, context=256, bias=False, dropout=0.2
            ),
            data=_SHAKESPEARE,
            optim=OptimConfig(lr=1e-3, beta2=0.99, warmup_steps=100),
            train=TrainConfig(batch_tokens=64 * 256),
        ),
    ),
    "gpt2-124m": ("GPT-2 small, 10 billion tokens", _gpt2("gpt2-124m")),
    "gpt2-355m": ("GPT-2 medium", _gpt2("gpt2-355m")),
    "gpt2-774m": ("GPT-2 large", _gpt2("gpt2-774m")),
    "gpt2-1558m": ("GPT-2 XL", _gpt2("gpt2-1558m")),
}  # fmt: skip
"""Name: (what it is, the settings)."""
