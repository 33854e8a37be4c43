"""The model on our interpreted kernels gives the same results as on PyTorch's ops."""

import importlib.util
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from fastgpt.config.config import Config, OpsConfig
from fastgpt.errors import UserError
from fastgpt.kernels import attention_ref, runtime
from fastgpt.model.gpt import GPT
from fastgpt.ops import tables
from tests.models import TINY, initial, sharp
from tests.parity import launches

ATTENTION_KERNELS = [f"_attention_{part}_kernel" for part in ("fwd", "bwd_dq", "bwd_dkv")]
OTHERS = ("_norm_fwd_kernel", "_norm_bwd_kernel", "_cross_entropy_fwd_kernel",
          "_bias_act_fwd_kernel", "_bias_act_bwd_kernel")  # fmt: skip
OURS = OpsConfig(attention="triton", loss="chunked", kernels="triton")
PLAIN = OpsConfig(attention="torch", loss="torch", kernels="torch")


def loss_and_gradients(model: GPT, autocast: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (2, 17), generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize(("options", "autocast"), [
    ({}, False), ({}, True),
    ({"activation": "swiglu", "bias": False, "position": "rotary", "num_kv_heads": 2}, True),
    ({"norm": "rmsnorm", "bias": False, "position": "rotary", "num_kv_heads": 2}, False),
    ({"norm": "post-layernorm", "activation": "swiglu", "window": 5}, False),
    ({"norm": "post-rmsnorm", "qk_norm": True, "position": "rotary"}, False),
    ({"activation": "swiglu", "bias": False}, False),
    ({"document_mask": True, "eot_id": 7, "tied": False, "softcap": 3.0}, False),
])  # fmt: skip
def test_model_on_our_kernels_is_the_model_on_torchs_ops(options, autocast):
    config = replace(TINY, **options)
    # the interpreter multiplies the raw bits of bf16
    ours = tables.select(replace(OURS, attention="torch") if autocast else OURS, "cpu")
    plain = sharp(0.1, config=config, chosen=tables.select(PLAIN, "cpu"))
    model = initial(config, chosen=ours)
    model.load_state_dict(plain.state_dict())
    with launches():
        expected = loss_and_gradients(plain, autocast)
    ran = [*OTHERS]
    ran += [] if autocast else ATTENTION_KERNELS
    ran += ["_rotary_kernel"] * (config.position == "rotary")
    with launches(*ran):
        got = loss_and_gradients(model, autocast)
    # in bf16 the two round at different places
    tolerance = 5e-2 if autocast else 1e-4
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("asked", "device", "changed"), [
    (OpsConfig(), "cpu", {"attention": "blocked", "dropout": "packed_rng"}),
    (OpsConfig(), "cuda", {"attention": "sdpa", "loss": "torch"}),
    (OURS, "cuda", dict.fromkeys(("attention", *tables.BY_KERNELS), "triton")),
])  # fmt: skip
def test_what_runs_where(monkeypatch, asked, device, changed):
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    names = dict.fromkeys(tables.OPS, "torch") | {"loss": "chunked"} | changed
    assert tables.select(asked, device).names == names


@pytest.mark.parametrize(("asked", "device", "said"), [
    ({"attention": "triton"}, "cpu", "attention is triton: it runs on CUDA, not on cpu"),
    ({"attention": "blocked"}, "cuda", "attention is blocked: it runs on CPUs, not"),
    ({"attention": "flash_attn"}, "cuda", "attention is flash_attn: .*not installed"),
])  # fmt: skip
def test_what_cannot_run_somewhere_is_refused(monkeypatch, asked, device, said):
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"^--ops\.{said}"):
        tables.select(OpsConfig(**asked), device)


@pytest.mark.parametrize("window", [None, 5])
def test_the_model_on_flash_attn_is_the_model_on_torchs_attention(monkeypatch, window):
    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)
    ):
        before, after = window_size
        assert (dropout_p, causal) == (0.0, True)
        assert after == (-1 if before < 0 else 0)
        seen = None if before < 0 else before + 1
        return attention_ref(q, k, v, scale=softmax_scale, window=seen)

    module = ModuleType("flash_attn")
    module.__dict__.update(flash_attn_func=flash_attn_func, __spec__=ModuleSpec("flash_attn", None))
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    asked = OpsConfig(attention="flash_attn")
    model = GPT(replace(TINY, window=window, num_kv_heads=2), tables.select(PLAIN, "cpu"))
    want = loss_and_gradients(model, False)
    for block in model.h:
        block.attn.ops = tables.select(asked, "cuda")
    assert all(map(torch.equal, loss_and_gradients(model, False), want))
    with pytest.raises(UserError, match=r"does not support --model\.document-mask"):
        Config(model=replace(TINY, document_mask=True), ops=asked)
