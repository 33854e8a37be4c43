"""Settings of saved runs, by the names of version 0.2, too."""

from pathlib import Path
from typing import Any, get_args

from fastgpt.config.checks import flag
from fastgpt.config.config import Config, overlay
from fastgpt.config.model import DropoutPlace, bias_of
from fastgpt.errors import UserError, reason
from fastgpt.files import parse_json

Values = dict[str, Any]

GONE: Values = {
    "data.encoding": "utf-8", "optim.eps": 1e-8, "optim.decay_fraction": 0.2, "train.tf32": False,
    "train.label_smoothing": 0.0,
    **dict.fromkeys((
        "take_over", "train.verify_every", "train.report", "train.stall_s", "train.keep_every",
        "train.ddp_bucket_mb", "train.sample_prompt", "parallel.reshard", "ops.decode",
        "ops.dropout", "eval_epochs",  # eval_every has its number of steps
    )),
}  # fmt: skip
"""Names that are gone -> the value that is left; None: it did not change what a run learns."""


def saved_config(run: Path) -> Config:
    """Reads the settings of a run or a checkpoint from its config.json."""
    path = run / "config.json"
    try:
        return from_json(path.read_text())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, UserError) as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error


def from_json(text: str) -> Config:
    """Reads settings that `to_json` wrote.

    A wrong setting is a `UserError`; what is no JSON is another error: see `saved_config`.
    """
    return overlay(Config(), renamed(parse_json(text)), "config.json")


def renamed(values: Values) -> Values:
    """Replaces the settings of a config.json by today's, and returns them.

    Raises:
        UserError: a setting has a value that this version cannot give it.
    """
    sections = ("model", "data", "optim", "train", "ops", "parallel")
    model, data, optim, train, ops, parallel = (values.setdefault(name, {}) for name in sections)
    for name, left in GONE.items():
        section, _, key = name.rpartition(".")
        found = (values[section] if section else values).pop(key, left)
        _expect(name, found, found if left is None else left)
    if "score_scale" not in model:  # newer than version 0.2
        return values
    _merge_model(model)
    momentum, of_beta1 = optim.pop("muon_momentum"), (1 + optim["beta1"]) / 2
    if optim["kind"] == "muon":
        _expect("optim.muon_momentum", momentum, of_beta1)
    dtype = train.pop("ddp_dtype", "fp32")
    if parallel.get("kind", "ddp") == "ddp":
        parallel["dtype"] = dtype
    else:
        _expect("train.ddp_dtype", dtype, "fp32")
    batches = data.pop("eval_batches")
    if data["sampling"] != "random-windows":
        _expect("data.eval_batches", batches, 0)
    elif batches:
        data |= {"sampling": "lecture", "eval_tokens": batches * train["batch_tokens"]}
    kernels = {ops.pop(name) for name in ("norm", "rotary", "activation")}
    ops["kernels"] = kernels.pop() if len(kernels) == 1 else "auto"
    return values


def _merge_model(model: Values) -> None:
    kind, heads, scale = model["architecture"], model["num_heads"], model.pop("score_scale")
    if kind not in ("gpt", "bigram") and heads != 1:
        _expect("model.score_scale", scale, "width")
    if kind == "gpt" and scale == "width":
        model["architecture"] = "layernorm"
    if model.pop("norm_position") == "post":
        model["norm"] = f"post-{model['norm']}"
    if model.pop("qk_norm_weight", False):
        model["qk_norm"] = "weighted"
    mlp, own = model["bias"], [model.pop(f"{x}_bias") for x in ("qkv", "projection")]
    qkv, projection = (mlp if x is None else x for x in own)
    model["bias"] = bias_of(qkv=qkv, projection=projection, mlp=mlp, head=model.pop("head_bias"))
    rates = {place: model.pop(f"{place}_dropout") for place in get_args(DropoutPlace)}
    rates = {place: model["dropout"] if own is None else own for place, own in rates.items()}
    used = {place: rate for place, rate in rates.items() if rate}
    if len({*used.values()}) > 1:
        raise UserError(f"the dropout probabilities are {rates}: expected one, or 0")
    model["dropout"] = max(used.values(), default=0.0)
    model["dropout_places"] = tuple(used or rates)


def _expect(name: str, found: Any, value: Any) -> None:
    if found != value:
        said = f"{flag(name)} is {found}: expected {value}, since this version has no other"
        raise UserError(said)
