"""How long the parts of a step take on a GPU: the fewest seconds, and the expected ones.

The fewest follow from the data sheet's rates, the expected ones from the ASSUMED shares of them.
Kernels of ours take what their machine code says: attention by `bench.tune.predict`, the others by
the ceiling of their loops where that is lower than the memory's.
"""

import math
import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from bench.account.steps import TRAINERS, Part, Sizes, fastgpt, sizes_of
from bench.parts import PARTS
from bench.tune.predict import milliseconds
from fastgpt.config.model import ModelConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.errors import UserError
from fastgpt.kernels.attention.spec import SHAPES
from fastgpt.kernels.proof.compile import Row, collect, compile_config
from fastgpt.kernels.proof.sass import DEVICES, Device, ceiling
from fastgpt.kernels.specs import SPECS

RECIPE = "gpt2-124m"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU and its data sheet."""

    name: str
    arch: int
    device: Device

    @property
    def flops(self) -> float:
        """Peak bf16 FLOPs per second."""
        return self.device.multiprocessors * self.device.ghz * 1e9 * self.device.flops

    @property
    def bandwidth(self) -> float:
        """Peak bytes per second of its memory."""
        return self.device.bandwidth * 1e9


GPUS = (
    Gpu("A100", 80, DEVICES[80]),
    Gpu("RTX 4090", 89, DEVICES[89]),
    Gpu("H100", 90, DEVICES[90]),
    Gpu("H200", 90, replace(DEVICES[90], bandwidth=4800)),
    Gpu("B200", 100, DEVICES[100]),
)
ASSUMED = {
    "matmul": (0.80, "Share of the peak FLOPs that large products reach."),
    "copy": (0.90, "Share of the memory's bandwidth that streaming kernels reach."),
    "static": (0.75, "Share of its machine code's static ceiling that a kernel of ours reaches."),
    "launch": (2e-6, "Seconds from one kernel's end to full work in the next."),
    "flash forward": (0.19, "Share of the peak FLOPs of PyTorch's flash attention, D = 64."),
    "flash backward": (0.15, "The same of its backward."),
    "cudnn forward": (0.24, "Share of the peak FLOPs of cuDNN's attention, D = 64."),
    "cudnn backward": (0.20, "The same of its backward."),
}
"""Name -> (value, meaning). The library kernels' shares are those published for an H100 at
T = 1024; smaller tensor cores are easier to keep busy, so they are low for the other GPUs."""
TILES = ((128, 256), (128, 128))
"""Output tiles that a product may be cut into; with fewer tiles than multiprocessors, its sum is
cut too."""


def rate_of_tiles(product: tuple[int, int], multiprocessors: int) -> float:
    """Returns the share of a product's time in which all multiprocessors have a tile."""
    best = 0.0
    for height, width in TILES:
        tiles = math.ceil(product[0] / height) * math.ceil(product[1] / width)
        for cuts in (1, 2, 4, 8) if tiles < multiprocessors else (1,):
            waves = math.ceil(tiles * cuts / multiprocessors)
            best = max(best, tiles * cuts / (waves * multiprocessors))
    return best


@cache
def compiled(arch: int) -> dict[str, tuple[Row, dict[str, Any]]]:
    """Compiles the forms of ours that a step runs; returns (machine code, constexprs) by key."""
    sizes = sizes_of(*recipe(RECIPE), processors=1)
    wanted = {key for part in fastgpt(sizes) for key in part.kernels}
    with warnings.catch_warnings(action="ignore"):  # of GPUs without a table of their own
        configs = list(collect([spec.forms for spec in SPECS.values()], [arch]))
    found = {c.key: (compile_config(c), c.launch.meta) for c in configs if c.key in wanted}
    if missing := wanted - found.keys():
        raise UserError(f"no form ships for sm_{arch} that is called {min(missing)}")
    return found


def static_seconds(part: Part, gpu: Gpu, s: Sizes) -> float:
    """Returns the time of a part in our kernels as their machine code has it, without launches."""
    total = 0.0
    for key in part.kernels:
        row, meta = compiled(gpu.arch)[key]
        if row.kernel.startswith("_attention"):
            B, T, H = SHAPES[s.D]
            ms = milliseconds(row, meta, 16)
            assert T == s.T
            assert ms is not None
            total += ms / 1e3 * (s.M // T) * s.H / (B * H)
            continue
        loop = max(row.loops, key=lambda x: x.bytes)
        top = ceiling(loop, row.arch, row.warps, row.registers, row.shared, row.columns)
        assert top is not None
        total += part.bytes / (top.gbytes * 1e9)
    return total / ASSUMED["static"][0]


def floor(part: Part, gpu: Gpu) -> float:
    """Returns the fewest seconds that a part may take, all times together."""
    return part.count * max(part.flops / gpu.flops, part.bytes / gpu.bandwidth)


def predicted(part: Part, gpu: Gpu, s: Sizes) -> float:
    """Returns the seconds that a part is expected to take, all times together."""
    share = ASSUMED[part.library or "matmul"][0]
    if any(part.product):
        share *= rate_of_tiles(part.product, gpu.device.multiprocessors)
    by_memory = part.bytes / gpu.bandwidth / ASSUMED["copy"][0]
    busy = static_seconds(part, gpu, s) if part.kernels else part.flops / gpu.flops / share
    return part.count * (max(by_memory, busy) + part.launches * ASSUMED["launch"][0])


@dataclass(frozen=True, slots=True)
class Account:
    """A trainer's step on a GPU: (part, seconds at least, seconds predicted)."""

    trainer: str
    gpu: Gpu
    tokens: int
    lines: tuple[tuple[Part, float, float], ...]

    @property
    def floor(self) -> float:
        return sum(least for _, least, _ in self.lines)

    @property
    def seconds(self) -> float:
        return sum(seconds for _, _, seconds in self.lines)

    @property
    def rate(self) -> float:
        """Predicted tokens per second."""
        return self.tokens / self.seconds

    def by_group(self) -> dict[str, float]:
        """Returns the predicted milliseconds of each of `bench.parts`."""
        found = dict.fromkeys(PARTS, 0.0)
        for part, _, seconds in self.lines:
            found[part.group] += 1e3 * seconds
        return found


def account(trainer: str, gpu: Gpu, config: ModelConfig, tokens: int) -> Account:
    """Accounts for one step of a trainer, of so many tokens."""
    sizes = sizes_of(config, tokens, gpu.device.multiprocessors)
    parts = tuple(TRAINERS[trainer](sizes))
    lines = tuple((part, floor(part, gpu), predicted(part, gpu, sizes)) for part in parts)
    return Account(trainer, gpu, sizes.M, lines)


def recipe(name: str) -> tuple[ModelConfig, int]:
    """Returns a recipe's model and the tokens of one micro-batch of it."""
    config = RECIPES[name][1]
    assert config.train.micro_batch
    return config.model, config.train.micro_batch * config.model.context
