"""`patch` puts our kernels into a GPT-2, Llama or Qwen3 of transformers, `unpatch` takes them out.

Only what passes its trial on the model's device is put in: the trials are those of
`fastgpt.autotune.choose`, in the forms in which transformers calls the ops. A forward of ours is an
attribute of the module that hides its class's; `unpatch` deletes it.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch

from fastgpt.autotune import choose
from fastgpt.autotune.trials import Sizes
from fastgpt.config.model import ModelConfig
from fastgpt.convert.families import ACTIVATIONS, GPT2_NAMES, LLAMA_NAMES
from fastgpt.device.device import DTYPES, kind_of, missing_for_triton
from fastgpt.errors import UserError
from fastgpt.hf import forwards
from fastgpt.kernels.runtime import INTERPRETING, autocast_dtype, runs_kernels
from fastgpt.terminal import print_line

CLASSES = (
    "GPT2LMHeadModel", "GPT2Model", "LlamaForCausalLM", "LlamaModel", "Qwen3ForCausalLM",
    "Qwen3Model",
)  # fmt: skip
"""Classes of transformers that can be patched."""
OPS = ("attention", "norm", "activation", "loss")
NORMS = {
    "LayerNorm": forwards.layer_norm,
    "LlamaRMSNorm": forwards.rms_norm,
    "Qwen3RMSNorm": forwards.rms_norm,
}
NAME = "fastgpt"
"""Name of our attention in transformers' AttentionInterface."""
STATE = "_fastgpt_patched"


@dataclass(frozen=True, slots=True)
class Patched:
    """Report of `patch`: which ops of a model our kernels compute, and why not the others."""

    model: str
    device: str
    patched: dict[str, str] = field(default_factory=dict)
    """Results of the trials, by op: attention, norm, activation, loss."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Reasons why ops are not patched, by op."""
    methods: list[Any] = field(default_factory=list, repr=False)
    """Forwards that the modules have now, bound to them."""

    def __str__(self) -> str:
        lines = [f"{self.model} on {self.device}: {len(self.patched)} of {len(OPS)} ops patched"]
        lines += [f"  {op}: patched ({why})" for op, why in self.patched.items()]
        lines += [f"  {op}: not patched: {why}" for op, why in self.skipped.items()]
        return "\n".join(lines)


def patch(model: Any, *, force: bool = False, batch: int = 4, length: int | None = None) -> Patched:
    """Makes a model of transformers compute attention, norms, activations and loss by our kernels.

    Each op is tried on the model's device first, and stays as it is if ours is wrong or slower. In
    training with `labels` the loss is computed without the logits of all tokens, and the output's
    `logits` are None; in evaluation they are there as before.

    Args:
        model: a GPT2LMHeadModel, LlamaForCausalLM or Qwen3ForCausalLM, or its base model.
        force: patches what is correct, however fast it is.
        batch: sequences in a batch of the trial.
        length: tokens in each; by default the model's context, at most 1024.

    Returns:
        Patched: what is patched and what is not, with reasons; print it.

    Raises:
        UserError: the model is of another class or patched already, or transformers is too old.
    """
    _require(model)
    if hasattr(model, STATE) and getattr(model, STATE).patched:
        raise UserError(
            "the model is patched already: expected one that is not; call unpatch first"
        )
    for name, number in (("batch", batch), ("length", length)):
        if number is not None and number < 1:
            raise UserError(f"{name} is {number}: expected 1 or more")
    on = next(model.parameters()).device.type
    skipped = _obstacles(model, force)
    asked = [op for op in OPS if op not in skipped]
    tried = _trials(asked, _sizes(model, batch, length), on, force) if asked else {}
    report = Patched(type(model).__name__, on)
    for op in OPS:
        passed, why = tried.get(op) or (False, skipped[op])
        (report.patched if passed else report.skipped)[op] = why
    setattr(model, STATE, report)
    if "attention" in report.patched:
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(NAME, forwards.attend)
        AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])  # its masks
        model.set_attn_implementation(NAME)
    for op in report.patched:
        for module, forward in _changes(model, op):
            module.forward = MethodType(forward, module)
            report.methods.append(module.forward)
    return report


def unpatch(model: Any) -> None:
    """Gives a model back as it was before `patch`.

    Raises:
        UserError: it is not patched, or something replaced a patched forward since.
    """
    report: Patched | None = getattr(model, STATE, None)
    if report is None:
        raise UserError(
            f"the {type(model).__name__} is not patched: expected the model that was given to patch"
        )
    for method in report.methods:
        if vars(method.__self__).get("forward") != method:
            raise UserError(
                f"the forward of a {type(method.__self__).__name__} was replaced after patch:"
                " expected that to be undone before unpatch"
            )
    for method in report.methods:
        del method.__self__.forward
    if model.config._attn_implementation == NAME:
        model.set_attn_implementation("sdpa")
    delattr(model, STATE)


# --- what can be patched --------------------------------------------------------------------------


def _require(model: Any) -> None:
    """Raises UserError unless transformers has the hooks, and the model's class is known."""
    kind = type(model)
    if kind.__name__ not in CLASSES or not kind.__module__.startswith("transformers."):
        raise UserError(f"cannot patch a {kind.__name__}: expected one of {', '.join(CLASSES)}")
    if not hasattr(model, "set_attn_implementation"):
        from transformers import __version__

        said = f"transformers is {__version__}: expected 4.54 or newer"
        raise UserError(f"{said}, whose attention can be replaced")


def _obstacles(model: Any, force: bool) -> dict[str, str]:
    """Returns the reasons for which ops are not even tried."""
    weight = next(model.parameters())
    for_all = _unable(weight.device.type, force)
    if weight.dtype not in DTYPES.values():
        for_all = f"the weights are {weight.dtype}: our kernels take fp32, fp16 and bf16"
    if for_all:
        return dict.fromkeys(OPS, for_all)
    reasons: dict[str, str] = {}
    if (now := model.config._attn_implementation) != "sdpa":
        reasons["attention"] = f"the model's attention is {now}: only sdpa is replaced"
    name, kind = _activation(model)
    if kind is None:
        reasons["activation"] = f"our kernels have no {name}"
    if not hasattr(model, "lm_head"):
        reasons["loss"] = f"a {type(model).__name__} computes none"
    for op in OPS:
        if any("forward" in vars(module) for module, _ in _changes(model, op)):
            reasons.setdefault(op, "something else has replaced these modules' forwards")
    return reasons


def _unable(on: str, force: bool) -> str:
    """Returns the reason for which no kernel can run, or be timed, on a type of device."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not runs_kernels(torch.device(on)):
        return f"our kernels run on CUDA, not on {'cpu' if on == 'cpu' else kind_of(on).name}"
    if on == "cuda":
        return missing_for_triton()
    return "" if force or not INTERPRETING else "interpreted kernels are not timed: pass force=True"


def _activation(model: Any) -> tuple[str, str | None]:
    """Returns the name of the activation in transformers, and ours, None if there is none."""
    if model.config.model_type == "gpt2":
        name = model.config.activation_function
        return name, ACTIVATIONS.get(name)
    name = model.config.hidden_act
    return name, "swiglu" if name == "silu" else None


def _changes(model: Any, op: str) -> Iterator[tuple[Any, forwards.Forward]]:
    """Yields the modules that an op is patched in, with their new forwards."""
    if op == "loss" and hasattr(model, "lm_head"):
        yield model, forwards.with_loss(type(model).forward)
    _, kind = _activation(model)
    for module in model.modules():
        name = type(module).__name__
        if op == "norm" and name in NORMS:
            yield module, NORMS[name]
        if op == "activation" and kind and name == "GPT2MLP":
            yield module.act, forwards.activation(kind)
        if op == "activation" and kind and name in ("LlamaMLP", "Qwen3MLP"):
            yield module, forwards.swiglu


# --- trials ---------------------------------------------------------------------------------------


def _sizes(model: Any, batch: int, length: int | None) -> Sizes:
    """Describes the model to the trials, which depend on its widths and ops alone."""
    config, gpt2 = model.config, model.config.model_type == "gpt2"
    names = GPT2_NAMES if gpt2 else LLAMA_NAMES
    sizes: dict[str, Any] = {ours: getattr(config, theirs) for theirs, ours in names.items()}
    sizes |= {"num_layers": 1, "context": length or min(sizes["context"], 1024)}
    described = ModelConfig(
        **sizes,
        vocab_size=config.vocab_size,
        vocab_multiple=1,
        norm="layernorm" if gpt2 else "rmsnorm",
        bias=gpt2,
        activation=_activation(model)[1] or "gelu_tanh",  # pyright: ignore
    )
    dtype = autocast_dtype(next(model.parameters()))
    precision = next(name for name, known in DTYPES.items() if known == dtype)
    return Sizes(described, batch, precision, compiled=False, transformers=True)


def _trials(asked: list[str], sizes: Sizes, on: str, force: bool) -> dict[str, tuple[bool, str]]:
    """Tries ops: whether each passed, and what was found; with `force` they are not timed."""
    if force:
        wrong = {op: choose.faults(op, sizes, on) for op in asked}
        return {op: (not x, x[0] if x else "correct, not timed") for op, x in wrong.items()}
    results = choose.remembered_or_tried(asked, sizes, on, print_line)
    return {
        op: (result["chosen"] in ("triton", "chunked"), choose.why(result))
        for op, result in results.items()
    }
