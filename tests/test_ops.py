"""The model on our kernels gives what it gives on PyTorch's ops; here they are interpreted."""

import pytest
import torch

from fastgpt import ops
from fastgpt.config import ModelConfig, OpsConfig
from fastgpt.errors import UserError
from fastgpt.model import GPT
from kernels import runtime
from tests.proof import launches

TINY = ModelConfig(num_layers=2, num_heads=4, dim=32, context=16, vocab_size=50)
NORM_KERNELS = ("_norm_fwd_kernel", "_norm_bwd_kernel")


def loss_and_gradients(model: GPT, autocast: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (3, 17), generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("options", [
    {}, {"norm": "rmsnorm", "bias": False}, {"norm_position": "post"},
    {"norm": "rmsnorm", "norm_position": "post"},
])  # fmt: skip
@pytest.mark.parametrize("autocast", [False, True])
def test_model_on_triton_norms_is_the_model_on_torchs(options, autocast):
    config = ModelConfig(**{**{n: getattr(TINY, n) for n in TINY.__slots__}, **options})
    models = []
    for norm in ("torch", "triton"):
        torch.manual_seed(0)
        model = GPT(config, ops.select(OpsConfig(norm=norm), "cpu", compiled=False))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.add_(torch.randn_like(weight) * (0.3 if "ln" in name else 0.1))
        models.append(model)
    with launches():
        expected = loss_and_gradients(models[0], autocast)
    with launches(*NORM_KERNELS):
        got = loss_and_gradients(models[1], autocast)
    # in bf16 the two round at different places
    tolerance = 5e-2 if autocast else 1e-4
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_cuda_runs_our_norms_and_cpus_torchs():
    assert ops.select(OpsConfig(), "cuda", compiled=True).names["norm"] == "triton"
    assert ops.select(OpsConfig(), "cpu", compiled=True).names["norm"] == "torch"


def test_kernels_where_they_cannot_run_are_refused(monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    with pytest.raises(UserError, match=r"^ops\.norm is triton: it runs on CUDA, not on cpu$"):
        ops.select(OpsConfig(norm="triton"), "cpu", compiled=False)
