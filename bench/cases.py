"""What is measured: ops, their shapes, who implements them, what they cannot do without.

An op is one entry of OPS; each of its shapes, in each dtype, is a case: `attention/gpt2-124m/bf16`.
CONTRIBUTING.md says how to add one. The first shape of each op is what `--quick` takes; shapes
under `full` wait for `--full`. None is left out because somebody else is faster there.
"""

import fnmatch
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows it by
from torch import Tensor

from bench import peers, work
from bench.cases_other import OTHERS
from bench.op import Case, Inputs, Make, Op
from bench.peers import Maker, always, compiled, liger, packed
from bench.shapes import ATTENTION, HEADS, LOGITS, NORM, Shape
from fastgpt import kernels
from fastgpt.device import has_fast_bf16
from fastgpt.errors import UserError
from fastgpt.kernels.attention.op import attention_ref
from fastgpt.kernels.cross_entropy.linear import linear_cross_entropy_ref
from fastgpt.kernels.cross_entropy.op import cross_entropy_ref
from fastgpt.kernels.dropout.op import dropout
from fastgpt.kernels.norm.op import (
    add_layer_norm_ref,
    add_rms_norm_ref,
    layer_norm_ref,
    rms_norm_ref,
)
from fastgpt.kernels.runtime import INTERPRETING

P = 0.2
"""Probability of the dropout that is timed."""


def _one_head(name: str, x: Tensor) -> Tensor:
    """The last head of the last sequence, which no other one has a part in."""
    return x[-1:, :, -1:]


def _one_packed_head(name: str, x: Tensor) -> Tensor:
    if name.startswith("output"):
        return _one_head(name, x)
    H = x.shape[2] // 3
    return x[-1:, :, [H - 1, 2 * H - 1, 3 * H - 1]]


def _packed_ref(qkv: Tensor) -> Tensor:
    return attention_ref(*qkv.chunk(3, dim=2))


def _packed_ours(qkv: Tensor) -> Tensor:
    return kernels.attention_packed(qkv, qkv.shape[2] // 3)


def _ours(kernel: Callable[..., Any], cpu: Callable[..., Any]) -> Maker:
    """Our kernel where kernels run (in Triton's interpreter, too), else what the model runs."""
    return lambda on: kernel if on == "cuda" or INTERPRETING else cpu


OURS_ATTENTION = _ours(kernels.attention, kernels.attention_blocked)


def _attention_op(name: str, wrap: Callable[[Maker], Maker], **own: Any) -> Op:
    return Op(
        name=name,
        implementations={
            "ours": own.pop("ours"),
            "eager": wrap(always(peers.attention_eager)),
            "compiled": wrap(compiled(peers.attention_eager)),
            **{peer: wrap(maker) for peer, maker in peers.ATTENTION.items()},
        },
        work=work.attention,
        **own,
    )


def _norm_inputs(*names: str) -> Callable[[Shape, Make], Inputs]:
    def inputs(s: Shape, make: Make) -> Inputs:
        sizes = {"x": (s["M"], s["N"]), "residual": (s["M"], s["N"])}
        return {name: make(*sizes.get(name, (s["N"],))) for name in names}

    return inputs


def _eager_norm(op: Callable[..., Tensor], summed: bool, **options: float) -> Callable[..., Any]:
    def plain(x: Tensor, *vectors: Tensor) -> Tensor:
        return op(x, x.shape[-1:], *vectors, **options)

    def after_sum(x: Tensor, residual: Tensor, *vectors: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return plain(total, *vectors), total

    return after_sum if summed else plain


def _norm_op(name: str, ref: Callable[..., Any], liger_peer: Maker) -> Op:
    summed, rms = name.startswith("add"), "rms" in name
    eager = _eager_norm(F.rms_norm if rms else F.layer_norm, summed, eps=1e-6 if rms else 1e-5)
    names = ("x", *(("residual",) if summed else ()), "weight", *(() if rms else ("bias",)))
    return Op(
        name=name,
        inputs=_norm_inputs(*names),
        ref=ref,
        implementations={
            "ours": _ours(getattr(kernels, name), eager),
            "eager": always(eager),
            "compiled": compiled(ref),
            "liger": liger_peer,
        },
        work=work.add_norm if summed else work.norm,
        shapes=NORM,
    )


def _no_such_peer(on: str) -> Callable[..., Any]:
    raise peers.MissingError("liger-kernel has no such op")


def _eager_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)


def _eager_linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets)


def _dropout_complaints(inputs: Inputs, out: Tensor) -> list[str]:
    """Whether elements are dropped with probability P, and the others scaled up."""
    x = inputs["x"].detach()
    kept = out != 0
    share, n = kept.float().mean().item(), x.numel()
    wrong = []
    if abs(share - (1 - P)) > 5 * (P * (1 - P) / n) ** 0.5 + 2**-16:
        wrong.append(f"output 0: {share:.5f} of it kept, expected {1 - P}")
    if not torch.allclose(out[kept].float(), x[kept].float() / (1 - P), rtol=1e-2):
        wrong.append(f"output 0: what is kept is not x / {1 - P}")
    return wrong


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        _attention_op(
            "attention",
            lambda maker: maker,
            ours=OURS_ATTENTION,
            inputs=lambda s, make: {x: make(s["B"], s["T"], s["H"], s["D"]) for x in "qkv"},
            ref=attention_ref,
            shapes=ATTENTION,
            probe=_one_head,
        ),
        _attention_op(
            "attention_packed",
            packed,
            ours=_ours(_packed_ours, packed(always(kernels.attention_blocked))("cpu")),
            inputs=lambda s, make: {"qkv": make(s["B"], s["T"], 3 * s["H"], s["D"])},
            ref=_packed_ref,
            shapes={
                "cuda": {k: v for k, v in ATTENTION["cuda"].items() if k.startswith("gpt2")},
                "cpu": {"shakespeare-char": ATTENTION["cpu"]["shakespeare-char"]},
                "tiny": ATTENTION["tiny"],
            },
            probe=_one_packed_head,
        ),
        _norm_op(
            "layer_norm", layer_norm_ref, liger("layer_norm", "LigerLayerNormFunction", None, 1e-5)
        ),
        _norm_op("add_layer_norm", add_layer_norm_ref, _no_such_peer),
        _norm_op(
            "rms_norm",
            rms_norm_ref,
            liger("rms_norm", "LigerRMSNormFunction", None, 1e-6, 0.0, "llama", False),
        ),
        _norm_op(
            "add_rms_norm",
            add_rms_norm_ref,
            # its default writes over the gradient from above, which the next call gets again
            liger(
                "fused_add_rms_norm", "LigerFusedAddRMSNormFunction",
                None, 1e-6, 0.0, "llama", False,
            ),
        ),
        Op(
            name="cross_entropy",
            inputs=lambda s, make: {
                "logits": make(s["M"], s["V"]),
                "targets": make(s["M"], below=s["V"]),
            },
            ref=cross_entropy_ref,
            implementations={
                "ours": always(partial(kernels.cross_entropy, inplace_grad=True)),
                "eager": always(_eager_cross_entropy),
                "compiled": compiled(_eager_cross_entropy),
                "liger": liger("cross_entropy", "LigerCrossEntropyFunction", 1, None),
            },
            work=work.cross_entropy,
            shapes=LOGITS,
            overwritten="logits",
        ),
        Op(
            name="linear_cross_entropy",
            inputs=lambda s, make: {
                "x": make(s["M"], s["C"]),
                "weight": make(s["V"], s["C"]),
                "targets": make(s["M"], below=s["V"]),
            },
            ref=linear_cross_entropy_ref,
            implementations={
                "ours": always(kernels.linear_cross_entropy),
                "eager": always(_eager_linear_cross_entropy),
                "compiled": compiled(_eager_linear_cross_entropy),
                "liger": liger(
                    "fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction", 1
                ),
            },
            work=work.linear_cross_entropy,
            shapes=HEADS,
            full={"cpu": {"gpt2-124m-4096": {"M": 4096, "C": 768, "V": 50304}}},
        ),
        Op(
            name="dropout",
            inputs=lambda s, make: {"x": make(s["M"], s["N"])},
            ref=partial(F.dropout, p=P),
            implementations={
                "ours": always(partial(dropout, p=P)),
                "eager": always(partial(F.dropout, p=P)),
            },
            work=work.elementwise,
            shapes={"cpu": {"shakespeare-char": {"M": 4096, "N": 1536}}, "tiny": {}, "cuda": {}},
            check=_dropout_complaints,
        ),
        *OTHERS,
    )
}  # fmt: skip


def cases(
    on: str,
    *,
    only: tuple[str, ...] = (),
    names: Container[str] | None = None,
    quick: bool = False,
    full: bool = False,
    sizes: str = "",
) -> Iterator[Case]:
    """The cases of a kind of device, all or those whose names match a pattern of `only`.

    Args:
        on: `cpu` or `cuda`.
        only: patterns as of a shell: `attention/*`, `*/gpt2-124m/bf16`.
        names: only these.
        quick: of each op the first shape in the first dtype.
        full: those too that take long.
        sizes: `tiny` for the shapes of a rehearsal; by default those of the device.

    Raises:
        UserError: nothing matches.
    """
    dtypes = ("bf16",) if on == "cuda" else ("bf16", "fp32") if has_fast_bf16(on) else ("fp32",)
    if sizes == "tiny":
        dtypes = ("fp32",)  # what Triton's interpreter is right in and a CPU is quick with
    found = [
        Case(op, label, shape, dtype)
        for op in OPS.values()
        for shapes in (op.shapes, op.full if full else {})
        for label, shape in shapes.get(sizes or on, {}).items()
        for dtype in dtypes
    ]
    if quick:
        found = list({case.op.name: case for case in reversed(found)}.values())[::-1]
    if names is not None:
        found = [case for case in found if case.name in names]
    chosen = [c for c in found if not only or any(fnmatch.fnmatch(c.name, p) for p in only)]
    if not chosen:
        raise UserError(f"--only {' '.join(only)}: no case has such a name; --list shows all")
    yield from chosen
