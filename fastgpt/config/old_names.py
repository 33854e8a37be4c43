"""Settings that config.json had in version 0.2: what became of them."""

from collections.abc import Callable
from typing import Any, get_args

from fastgpt.config.checks import flag
from fastgpt.config.model import DropoutPlace, bias_of
from fastgpt.errors import UserError

Values = dict[str, Any]
"""Settings by names such as `model.dim`."""

NO_MATTER = (
    "take_over", "train.verify_every", "train.report", "train.stall_s", "train.keep_every",
    "train.ddp_bucket_mb", "train.sample_prompt", "parallel.reshard", "ops.decode", "ops.dropout",
    "eval_epochs",  # eval_every has its number of steps
)  # fmt: skip
"""Names that are gone, and did not change what a run learns."""
CONSTANT: Values = {
    "data.encoding": "utf-8", "optim.eps": 1e-8, "optim.decay_fraction": 0.2, "train.tf32": False,
    "train.label_smoothing": 0.0,
}  # fmt: skip
"""Names that are gone -> the value that is left."""
PLACES = get_args(DropoutPlace)


def _expect(old: Values, name: str, value: Any) -> None:
    if old.get(name, value) != value:
        said = f"{flag(name)} is {old[name]}: expected {value}, since this version has no other"
        raise UserError(said)


def _momentum(old: Values) -> Values:
    if old.get("optim.kind") == "muon":
        _expect(old, "optim.muon_momentum", (1 + old.get("optim.beta1", 0.9)) / 2)
    return {}


def _dtype(old: Values) -> Values:
    if old.get("parallel.kind", "ddp") == "ddp":
        return {"parallel.dtype": old["train.ddp_dtype"]}
    _expect(old, "train.ddp_dtype", "fp32")
    return {}


def _evaluation(old: Values) -> Values:
    if old.get("data.sampling") != "random-windows":
        _expect(old, "data.eval_batches", 0)
    if not old["data.eval_batches"]:
        return {}
    tokens = old["data.eval_batches"] * old["train.batch_tokens"]
    return {"data.sampling": "lecture", "data.eval_tokens": tokens}


def _kernels(old: Values) -> Values:
    kinds = {old.get(f"ops.{name}", "auto") for name in ("norm", "rotary", "activation")}
    return {"ops.kernels": kinds.pop() if len(kinds) == 1 else "auto"}


def _bias(old: Values) -> Values:
    mlp = old.get("model.bias", True)
    own = {place: old.get(f"model.{place}_bias") for place in ("qkv", "projection")}
    own = {place: mlp if bias is None else bias for place, bias in own.items()}
    return {"model.bias": bias_of(**own, mlp=mlp, head=old.get("model.head_bias", False))}


def _dropout(old: Values) -> Values:
    rates = {place: old.get(f"model.{place}_dropout") for place in PLACES}
    rate = old.get("model.dropout", 0.0)
    rates = {place: rate if own is None else own for place, own in rates.items()}
    used = {place: rate for place, rate in rates.items() if rate}
    if len({*used.values()}) > 1:
        raise UserError(f"the dropout probabilities are {rates}: expected one, or 0")
    rate = max(used.values(), default=0.0)
    return {"model.dropout": rate, "model.dropout_places": tuple(used) or PLACES}


def _norm(old: Values) -> Values:
    post = "post-" if old["model.norm_position"] == "post" else ""
    return {"model.norm": post + old.get("model.norm", "layernorm")}


def _architecture(old: Values) -> Values:
    kind, by_width = old.get("model.architecture", "gpt"), old["model.score_scale"] == "width"
    if kind not in ("gpt", "bigram") and old.get("model.num_heads") != 1:
        _expect(old, "model.score_scale", "width")
    return {"model.architecture": "layernorm" if by_width and kind == "gpt" else kind}


MERGED: dict[tuple[str, ...], Callable[[Values], Values]] = {
    ("optim.muon_momentum",): _momentum,
    ("train.ddp_dtype",): _dtype,
    ("data.eval_batches",): _evaluation,
    ("ops.norm", "ops.rotary", "ops.activation"): _kernels,
    ("model.qkv_bias", "model.projection_bias", "model.head_bias"): _bias,
    tuple(f"model.{place}_dropout" for place in PLACES): _dropout,
    ("model.norm_position",): _norm,
    ("model.qk_norm_weight",): lambda old: (
        {"model.qk_norm": "weighted"} if old["model.qk_norm_weight"] else {}
    ),
    ("model.score_scale",): _architecture,
}
"""Names that are gone -> settings of today that stand for them, from all old ones."""


def renamed(values: Values) -> Values:
    """Returns the settings of a config.json by today's names.

    Raises:
        UserError: a setting has a value that this version cannot give it.
    """
    sections = {name: x for name, x in values.items() if isinstance(x, dict)}
    old = {f"{name}.{key}": x for name, inner in sections.items() for key, x in inner.items()}
    old |= {name: x for name, x in values.items() if name not in sections}
    for name, value in CONSTANT.items():
        _expect(old, name, value)
    new, gone = dict(old), {*NO_MATTER, *CONSTANT}.union(*MERGED)
    for names, merge in MERGED.items():
        if old.keys() & {*names}:
            new |= merge(old)
    found: Values = {name: {} for name in sections}
    for name in new.keys() - gone:
        section, _, key = name.rpartition(".")
        (found.setdefault(section, {}) if section else found)[key] = new[name]
    return found
