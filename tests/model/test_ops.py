"""The model on our interpreted kernels gives the same results as on PyTorch's ops."""

import importlib.util
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastgpt.config.config import Config, OpsConfig
from fastgpt.errors import UserError
from fastgpt.kernels import attention_ref, runtime
from fastgpt.model.gpt import GPT
from fastgpt.ops import tables
from tests.models import TINY, initial, on_cpu, sharp
from tests.parity import launches

ATTENTION_KERNELS = [f"_attention_{part}_kernel" for part in ("fwd", "bwd_dq", "bwd_dkv")]
NORM_KERNELS = ("_norm_fwd_kernel", "_norm_bwd_kernel")
LOSS_KERNELS = ("_cross_entropy_fwd_kernel",)
ACTIVATION_KERNELS = ("_bias_act_fwd_kernel", "_bias_act_bwd_kernel")
OURS = OpsConfig(attention="triton", loss="chunked", kernels="triton")
PLAIN = OpsConfig(attention="torch", loss="torch", kernels="torch")


def loss_and_gradients(model: GPT, autocast: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (2, 17), generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("options", [
    {}, {"norm": "rmsnorm", "bias": False, "position": "rotary", "num_kv_heads": 2},
    {"norm": "post-layernorm", "window": 5},
    {"norm": "post-rmsnorm", "qk_norm": True, "position": "rotary"},
    {"activation": "swiglu", "bias": False}, {"activation": "swiglu"},
    {"document_mask": True, "eot_id": 7, "tied": False, "softcap": 3.0},
])  # fmt: skip
@pytest.mark.parametrize("autocast", [False, True])
def test_model_on_our_kernels_is_the_model_on_torchs_ops(options, autocast):
    if autocast and options:
        options = {**options, "num_layers": 1}
    config = replace(TINY, **options)
    # the interpreter multiplies the raw bits of bf16
    ours = tables.select(replace(OURS, attention="torch") if autocast else OURS, "cpu")
    plain = sharp(0.1, config=config, chosen=tables.select(PLAIN, "cpu"))
    model = initial(config, chosen=ours)
    model.load_state_dict(plain.state_dict())
    with launches():
        expected = loss_and_gradients(plain, autocast)
    ran = [*NORM_KERNELS, *LOSS_KERNELS, *ACTIVATION_KERNELS]
    ran += [] if autocast else ATTENTION_KERNELS
    ran += ["_rotary_kernel"] * (config.position == "rotary")
    with launches(*ran):
        got = loss_and_gradients(model, autocast)
    # in bf16 the two round at different places
    tolerance = 5e-2 if autocast else 1e-4
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


class ColumnSums(TorchDispatchMode):
    """Counts sums over all rows, in which autograd gets the gradient of a bias."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        sums = func is torch.ops.aten.sum.dim_IntList
        self.count += sums and len(args[1]) == args[0].dim() - 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("options", "left"), [({}, 2), ({"norm": "post-layernorm"}, 2), ({"dropout": 0.1}, 6)]
)
def test_biases_get_their_gradients_where_those_of_the_activations_are_computed(options, left):
    def count(asked, **chosen):
        ops = tables.select(asked, "cpu", chosen)
        model = initial(replace(TINY, **options), chosen=ops)
        with ColumnSums() as sums:
            loss_and_gradients(model, autocast=False)
        return sums.count

    # two layers with three biases each: that of q, k and v, and two that dropout keeps from a norm
    assert (count(OURS), count(PLAIN, activation="triton")) == (left, 6)


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "device", "changed"),
    [
        (OpsConfig(), "cpu", {"attention": "blocked", "dropout": "packed_rng"}),
        (OpsConfig(), "cuda", {"attention": "sdpa", "loss": "torch"}),
        (OURS, "cuda", dict.fromkeys(("attention", *tables.BY_KERNELS), "triton")),
    ],
)
def test_what_runs_where(monkeypatch, asked, device, changed):
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    names = dict.fromkeys(tables.OPS, "torch") | {"loss": "chunked"} | changed
    assert tables.select(asked, device).names == names


@pytest.mark.parametrize("op", ["attention", "kernels"])
def test_kernels_where_they_cannot_run_are_refused(monkeypatch, op):
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    with pytest.raises(UserError, match=rf"^--ops\.{op} is triton: it runs on CUDA, not on cpu$"):
        on_cpu(**{op: "triton"})


def test_what_is_for_cpus_is_refused_elsewhere():
    with pytest.raises(UserError, match=r"--ops.attention is blocked: it runs on CPUs, not"):
        tables.select(OpsConfig(attention="blocked"), "cuda")


# --- the package flash-attn -----------------------------------------------------------------------


@pytest.fixture
def flash_attn(monkeypatch):
    """Stands in for the flash-attn package: its arguments, computed by our reference attention."""

    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)
    ):
        before, after = window_size
        assert (dropout_p, causal) == (0.0, True)
        assert after == (-1 if before < 0 else 0)
        window = None if before < 0 else before + 1
        return attention_ref(q, k, v, scale=softmax_scale, window=window)

    module = ModuleType("flash_attn")
    module.__dict__.update(flash_attn_func=flash_attn_func, __spec__=ModuleSpec("flash_attn", None))
    monkeypatch.setitem(sys.modules, "flash_attn", module)


@pytest.mark.parametrize("window", [None, 5])
def test_the_model_on_flash_attn_is_the_model_on_torchs_attention(flash_attn, window):
    chosen = tables.select(OpsConfig(attention="flash_attn"), "cuda")
    config = replace(TINY, window=window, num_kv_heads=2)
    model = GPT(config, tables.select(PLAIN, "cpu"))
    want = loss_and_gradients(model, False)
    for block in model.h:
        block.attn.ops = chosen
    got = loss_and_gradients(model, False)
    assert all(map(torch.equal, got, want))


def test_flash_attn_is_refused_where_it_cannot_run(monkeypatch):
    asked = OpsConfig(attention="flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for device, reason in (("cpu", "not on cpu"), ("cuda", "which is not installed")):
        with pytest.raises(UserError, match=rf"^--ops\.attention is flash_attn: .*{reason}$"):
            tables.select(asked, device)
    with pytest.raises(UserError, match=r"does not support --model\.document-mask"):
        Config(model=replace(TINY, document_mask=True), ops=asked)
