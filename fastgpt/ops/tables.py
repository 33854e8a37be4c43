"""Implementations of a model's ops, and the choice between them.

The tables map the names of `OpsConfig` to functions: `torch` is the plain form, `sdpa` PyTorch's
fused attention, `flash_attn` that of the package flash-attn, `triton` our kernels, on CUDA (and for
tests on CPUs, in Triton's interpreter); `blocked` and `packed_rng` are for CPUs; `chunked` is for
both, with our kernels on CUDA. A name that cannot run on the device is an error, never a silent
fallback. A run's plan resolves `auto` once, and its manifest has the choice.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by

from fastgpt import kernels
from fastgpt.config.config import OpsConfig
from fastgpt.device.device import kind_of
from fastgpt.errors import UserError
from fastgpt.kernels.rotary.cpu import rotary_plain
from fastgpt.kernels.runtime import runs_kernels
from fastgpt.ops import torch_ops
from fastgpt.ops.protocols import Norms, Op, Ops, PairOp

ATTENTION: dict[str, Op] = {
    "torch": kernels.attention_ref,
    "sdpa": torch_ops.sdpa,
    "blocked": kernels.attention_blocked,
    "triton": kernels.attention,
    "flash_attn": torch_ops.flash_attn,
}
PACKED_ATTENTION: dict[str, Op] = {"triton": kernels.attention_packed}
DECODE: dict[str, Op] = {"torch": torch_ops.decode_sdpa, "triton": torch_ops.decode_by_kernels}
ROTARY: dict[str, PairOp] = {"torch": rotary_plain, "triton": kernels.rotary}
NORMS = {
    "torch": Norms(
        torch_ops.layer_norm,
        torch_ops.after_sum(torch_ops.layer_norm),
        torch_ops.rms_norm,
        torch_ops.after_sum(torch_ops.rms_norm),
    ),
    "triton": Norms(
        kernels.layer_norm,
        kernels.add_layer_norm,
        kernels.rms_norm,
        kernels.add_rms_norm,
    ),
}
ACTIVATION: dict[str, Op] = {"triton": kernels.bias_act}
LOSS: dict[str, Op] = {
    "torch": torch_ops.linear_cross_entropy,
    "chunked": kernels.linear_cross_entropy,
}
DROPOUT: dict[str, Op] = {"torch": F.dropout, "packed_rng": kernels.dropout}
BY_KERNELS = ("norm", "rotary", "activation", "decode")
"""Ops that `OpsConfig.kernels` decides."""
OPS = ("attention", "norm", "loss", "rotary", "activation", "decode", "dropout")


def select(
    config: OpsConfig, device: torch.device | str, chosen: Mapping[str, str] | None = None
) -> Ops:
    """Resolves `auto`, and checks that the implementations asked for run on `device`.

    On a CPU `blocked` attention and `packed_rng` dropout are faster (docs/performance.md). `auto`
    never resolves to our Triton kernels by itself: the user, or `fastgpt.autotune.choose` for a run
    on CUDA, asks for them.

    Args:
        chosen: implementations by the names of ops, in place of the settings.
    """
    device = torch.device(device)
    on_cpu = device.type == "cpu"
    automatic = {
        "attention": "blocked" if on_cpu else "sdpa",
        "loss": "chunked" if on_cpu and not runs_kernels(device) else "torch",
        "dropout": "packed_rng" if on_cpu else "torch",
    }
    asked: dict[str, str] = asdict(config)
    for op, name in asked.items():
        where, there = ("CUDA", runs_kernels(device)) if name == "triton" else ("CPUs", on_cpu)
        if name in ("blocked", "packed_rng", "triton") and not there:
            here = kind_of(device).name if name == "triton" and not on_cpu else device.type
            raise UserError(f"--ops.{op} is {name}: it runs on {where}, not on {here}")
        if name == "chunked" and device.type not in ("cpu", "cuda"):
            raise UserError(f"--ops.{op} is chunked: expected torch on {kind_of(device).name}")
        if name == "flash_attn" and (on_cpu or importlib.util.find_spec(name) is None):
            raise UserError(
                "--ops.attention is flash_attn: it runs on CUDA, with the package flash-attn, "
                + ("not on cpu" if on_cpu else "which is not installed")
            )
    others = dict.fromkeys(BY_KERNELS, asked.pop("kernels"))
    names = {op: name for op, name in (asked | others).items() if name != "auto"}
    names = dict.fromkeys(OPS, "torch") | automatic | names | dict(chosen or {})
    return Ops(
        attention=ATTENTION[names["attention"]],
        attention_packed=PACKED_ATTENTION.get(names["attention"]),
        decode=DECODE[names["decode"]],
        rotary=ROTARY[names["rotary"]],
        norms=NORMS[names["norm"]],
        activation=ACTIVATION.get(names["activation"]),
        loss=LOSS[names["loss"]],
        dropout=DROPOUT[names["dropout"]],
        names=names,
    )
