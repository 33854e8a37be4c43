"""The model on our kernels gives what it gives on PyTorch's ops; here they are interpreted."""

from dataclasses import replace

import pytest
import torch

from fastgpt import ops
from fastgpt.config import ModelConfig, OpsConfig
from fastgpt.errors import UserError
from fastgpt.model import GPT
from kernels import runtime
from tests.proof import launches

TINY = ModelConfig(num_layers=2, num_heads=4, dim=32, context=16, vocab_size=50)
ATTENTION_KERNELS = (
    "_attention_fwd_kernel",
    "_attention_bwd_dq_kernel",
    "_attention_bwd_dkv_kernel",
)
NORM_KERNELS = ("_norm_fwd_kernel", "_norm_bwd_kernel")


def loss_and_gradients(model: GPT, autocast: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (3, 17), generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("options", [
    {}, {"norm": "rmsnorm", "bias": False, "position": "rotary", "num_kv_heads": 2},
    {"norm_position": "post", "window": 5},
    {"norm": "rmsnorm", "norm_position": "post", "qk_norm": True},
    {"document_mask": True, "eot_id": 7},
])  # fmt: skip
@pytest.mark.parametrize("autocast", [False, True])
def test_model_on_our_kernels_is_the_model_on_torchs_ops(options, autocast):
    if autocast and options:
        options = {**options, "num_layers": 1}
    config = replace(TINY, **options)
    models = []
    for name in ("torch", "triton"):
        torch.manual_seed(0)
        # the interpreter multiplies the raw bits of bf16
        attention = "torch" if autocast else name
        asked = OpsConfig(norm=name, attention=attention)
        model = GPT(config, ops.select(asked, "cpu", compiled=False))
        with torch.no_grad():
            for parameter, weight in model.named_parameters():
                weight.add_(torch.randn_like(weight) * (0.3 if "ln" in parameter else 0.1))
        models.append(model)
    with launches():
        expected = loss_and_gradients(models[0], autocast)
    with launches(*NORM_KERNELS, *(() if autocast else ATTENTION_KERNELS)):
        got = loss_and_gradients(models[1], autocast)
    # in bf16 the two round at different places
    tolerance = 5e-2 if autocast else 1e-4
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_our_kernels_run_where_they_are_asked_for():
    asked = OpsConfig(attention="triton", norm="triton")
    names = ops.select(asked, "cuda", compiled=True).names
    assert (names["attention"], names["norm"]) == ("triton", "triton")
    for device in ("cpu", "cuda"):
        assert "triton" not in ops.select(OpsConfig(), device, compiled=True).names.values()


@pytest.mark.parametrize("op", ["norm", "attention"])
def test_kernels_where_they_cannot_run_are_refused(monkeypatch, op):
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    with pytest.raises(UserError, match=rf"^ops\.{op} is triton: it runs on CUDA, not on cpu$"):
        ops.select(OpsConfig(**{op: "triton"}), "cpu", compiled=False)
