"""A run of version 0.2 still has its settings, whatever they are called now."""

import json
from pathlib import Path

import pytest

from fastgpt.config.config import by_name
from fastgpt.config.recipes import RECIPES
from fastgpt.convert.saved import from_json
from fastgpt.errors import UserError

WRITTEN = (Path(__file__).parent / "version_0_2.json").read_text()  # of `lecture-layernorm`


def read(changes):
    values = json.loads(WRITTEN)
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        (values[section] if section else values)[key] = value
    return by_name(from_json(json.dumps(values)))


def test_every_setting_is_read():
    assert from_json(WRITTEN) == RECIPES["lecture-layernorm"][1]


PLAIN = {
    "model.qkv_bias": None, "model.head_bias": False, "model.score_scale": "head",
    "data.eval_batches": 0,
}  # fmt: skip


@pytest.mark.parametrize(("old", "now"), [
    (PLAIN, {"model.bias": True, "model.architecture": "gpt", "data.sampling": "random-windows",
             "data.eval_tokens": 131_072}),
    ({"model.bias": False, "model.qkv_bias": True}, {"model.bias": ["qkv", "head"]}),
    ({"model.projection_bias": False}, {"model.bias": ["mlp", "head"]}),
    ({"model.norm_position": "post"}, {"model.norm": "post-layernorm"}),
    ({"model.qk_norm": True, "model.qk_norm_weight": True}, {"model.qk_norm": "weighted"}),
    ({"model.dropout": 0.2, "model.embedding_dropout": 0.0},
     {"model.dropout": 0.2, "model.dropout_places": ["attention", "residual", "feed_forward"]}),
    ({"model.attention_dropout": 0.3},
     {"model.dropout": 0.3, "model.dropout_places": ["attention"]}),
    ({"train.ddp_dtype": "bf16"}, {"parallel.dtype": "bf16"}),
    ({"parallel.kind": "fsdp", "parallel.dtype": "bf16"}, {"parallel.dtype": "bf16"}),
    ({"ops.norm": "torch"}, {"ops.kernels": "auto"}),
    ({"optim.kind": "muon", "optim.beta1": 0.8, "optim.muon_momentum": 0.9}, {}),
    ({"train.stall_s": 4, "train.keep_every": 9, "train.report": "on", "eval_epochs": 0.5,
      "train.sample_prompt": "x", "take_over": True, "parallel.reshard": False}, {}),
])  # fmt: skip
def test_a_setting_that_was_merged_has_its_meaning(old, now):
    found = read(old)
    assert {name: found[name] for name in now} == now


@pytest.mark.parametrize(("old", "said"), [
    ({"optim.eps": 1e-6}, "optim.eps is 1e-06"),
    ({"optim.kind": "muon", "optim.muon_momentum": 0.9}, "momentum is 0.9: expected 0.95"),
    ({"data.sampling": "epoch"}, "eval-batches is 200"),
    ({"parallel.kind": "fsdp", "train.ddp_dtype": "bf16"}, "ddp-dtype is bf16"),
    ({"model.architecture": "heads", "model.score_scale": "head"}, "scale is head"),
    ({"model.dropout": 0.2, "model.attention_dropout": 0.1}, "'attention': 0.1, 'residual': 0"),
])  # fmt: skip
def test_a_value_that_is_gone_is_named(old, said):
    with pytest.raises(UserError, match=said):
        read(old)
