"""The account of a step counts what a step of this machine really does."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.account import time
from bench.account.__main__ import beside, show_beside
from bench.account.steps import TRAINERS, sizes_of
from bench.account.time import GPUS, account, floor, rate_of_tiles
from bench.parts import PARTS
from fastgpt.config import OpsConfig
from fastgpt.errors import UserError
from fastgpt.kernels import runtime
from fastgpt.lecture import build_model
from fastgpt.ops import select
from fastgpt.recipes import RECIPES

SMALL = replace(
    RECIPES["gpt2-124m"][1].model, vocab_size=256, num_layers=3, dim=64, num_heads=2, context=32
)
B = 2
TOKENS = B * SMALL.context
SIZES = sizes_of(SMALL, TOKENS, processors=2)


@pytest.fixture
def static(monkeypatch):
    """Our kernels take no time in their machine code, which is not compiled here."""
    monkeypatch.setattr(time, "static_seconds", lambda *_: 0.0)


def step(kernels: OpsConfig) -> None:
    model = build_model(SMALL, select(kernels, "cpu", compiled=False))
    tokens = torch.randint(SMALL.vocab_size or 0, (B, SMALL.context))
    model(tokens, tokens).backward()


def test_products_are_those_that_pytorch_counts():
    with FlopCounterMode(display=False) as counter:
        step(OpsConfig(attention="torch"))
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counted.items() if str(op) in ("aten.mm", "aten.addmm"))
    ours = (part for part in TRAINERS["fastgpt"](SIZES) if part.group == "GEMM")
    assert products == sum(part.count * part.flops for part in ours)


def test_our_kernels_are_launched_as_often_as_a_step_launches_them():
    before = runtime.LAUNCHES.copy()
    step(OpsConfig(attention="triton", norm="triton", loss="chunked", activation="triton"))
    counted = runtime.LAUNCHES - before
    for part in TRAINERS["fastgpt"](SIZES):
        for key in part.kernels:
            kernel = key.split()[0]
            # the first norm has no residual yet, but is the same kernel
            assert counted[kernel] == part.count, kernel


@pytest.mark.parametrize(
    ("product", "processors", "share"),
    [
        ((128, 256), 1, 1.0),
        ((3 * 128, 256), 2, 1.0),  # six tiles of half the width
        ((64, 128), 3, 8 / 9),  # one tile, whose sum is cut into eight
        ((65_536, 768), 132, 3072 / (24 * 132)),
    ],
)
def test_a_wave_that_is_not_full_leaves_multiprocessors_idle(product, processors, share):
    assert rate_of_tiles(product, processors) == pytest.approx(share)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_no_part_is_predicted_below_its_floor(static, trainer):
    for gpu in GPUS:
        x = account(trainer, gpu, SMALL, TOKENS)
        assert all(seconds >= least > 0 for _, least, seconds in x.lines)
        assert sum(x.by_group().values()) == pytest.approx(1e3 * x.seconds)
        assert x.floor == pytest.approx(sum(floor(part, gpu) for part, *_ in x.lines))


@pytest.mark.parametrize(
    ("device", "parts", "says"),
    [
        ("NVIDIA T4", {"parts": {}}, "no account of NVIDIA T4: there is one of A100, "),
        ("NVIDIA H100", {}, "has no step of fastgpt that bench.step measured part by part"),
    ],
)
def test_steps_without_an_account_are_said(tmp_path, capsys, device, parts, says):
    row = {"kind": "step", "implementation": "fastgpt", "device": device, **parts}
    (tmp_path / "steps.jsonl").write_text(json.dumps(row))
    try:
        show_beside(tmp_path)
    except UserError as error:
        print(error)
    assert says in capsys.readouterr().out


def test_predicted_stands_beside_measured_with_its_error(static):
    gpu = next(gpu for gpu in GPUS if gpu.name == "H100")
    config = RECIPES["gpt2-124m"][1].model
    said = account("fastgpt", gpu, config, 4 * config.context).by_group()
    row = {
        "device": "NVIDIA H100 80GB HBM3", "implementation": "fastgpt", "recipe": "gpt2-124m",
        "case": "step/gpt2-124m/B=4", "shape": {"B": 4, "T": config.context},
        "parts": {part: 2 * said[part] for part in PARTS}, "seconds": {"p50": 1.0},
    }  # fmt: skip
    others = [{**row, "device": "NVIDIA T4"}, {**row, "implementation": "nanogpt"}]
    found = {x["part"]: x for x in beside([row, *others], GPUS)}
    assert set(found) == {*PARTS, "step"}
    assert found["norm"]["error"] == pytest.approx(-0.5)
    assert found["step"]["measured_ms"] == 1000
    assert found["data wait"]["error"] is None  # nothing was measured
