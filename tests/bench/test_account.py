"""The account of a step counts what a step of this machine really does."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.account import time
from bench.account.__main__ import PAGE, beside, show_beside
from bench.account.steps import TRAINERS, sizes_of
from bench.account.time import GPUS, account, floor, rate_of_tiles
from bench.parts import PARTS
from fastgpt.config.config import OpsConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.errors import UserError
from fastgpt.model.build import build_model
from fastgpt.ops.tables import select
from tests.processes import printed_by

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


def test_products_are_those_that_pytorch_counts():
    model = build_model(SMALL, select(OpsConfig(attention="torch"), "cpu", compiled=False))
    tokens = torch.randint(SMALL.vocab_size or 0, (B, SMALL.context))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counted.items() if str(op) in ("aten.mm", "aten.addmm"))
    ours = (part for part in TRAINERS["fastgpt"](SIZES) if part.group == "GEMM")
    assert products == sum(part.count * part.flops for part in ours)


ONE_LAYER = """
import torch
from collections import Counter
from dataclasses import replace
from bench.account.steps import fastgpt, sizes_of
from fastgpt.config.config import OpsConfig
from fastgpt.kernels import runtime
from fastgpt.kernels.proof.compile import collect, specialised
from fastgpt.kernels.specs import SPECS
from fastgpt.model.build import build_model
from fastgpt.ops.tables import select
from fastgpt.config.recipes import RECIPES
from tests.processes import printed_by

config = replace(RECIPES["gpt2-124m"][1].model, num_layers=1)
asked = OpsConfig(attention="triton", norm="triton", loss="chunked", activation="triton")
launched = []
with runtime.executing(90, launched.append), torch.autocast("cpu", torch.bfloat16):
    model = build_model(config, select(asked, "cpu", compiled=False))
    tokens = torch.zeros(1, config.context, dtype=torch.int64)
    model(tokens, tokens).backward()
forms = {c.key: c.launch for c in collect([spec.forms for spec in SPECS.values()], [90])}
compiled = Counter((x.kernel.__name__, repr(specialised(x))) for x in launched)
for part in fastgpt(sizes_of(config, tokens.numel(), processors=132)):
    for key in part.kernels:
        form = forms[key]
        count = compiled[form.kernel.__name__, repr(specialised(form))]
        print(key, count, part.count, sep="|")
"""


OTHER_FORMS = {"_norm_fwd_kernel": 1, "_norm_bwd_kernel": 2}
"""Norms of a step in other forms: the first adds no residual, and nothing reads the last sum."""


def test_our_kernels_are_the_forms_that_a_step_launches():
    rows = [line.split("|") for line in printed_by(ONE_LAYER).splitlines()]
    assert len(rows) == 8
    for key, launched, counted in rows:
        kernel = key.split()[0]
        if kernel == "_cross_entropy_fwd_kernel":  # chunks on a CPU are others
            assert int(launched) > 0
        else:
            assert int(launched) == int(counted) - OTHER_FORMS.get(kernel, 0), key


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
        ("NVIDIA T4", {"parts": {}}, "no account of baby on NVIDIA T4: there is one of gpt2-124m"),
        ("NVIDIA H100", {}, "has no step of fastgpt that bench.step measured part by part"),
    ],
)
def test_steps_without_an_account_are_said(tmp_path, capsys, device, parts, says):
    row = {"kind": "step", "implementation": "fastgpt", "device": device, "recipe": "baby"} | parts
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
    changes = ({"device": "NVIDIA T4"}, {"implementation": "nanogpt"}, {"recipe": "baby"})
    others = [row | change for change in changes]
    found = {x["part"]: x for x in beside([row, *others], GPUS)}
    assert set(found) == {*PARTS, "step"}
    assert found["norm"]["error"] == pytest.approx(-0.5)
    assert found["step"]["measured_ms"] == 1000
    assert found["data wait"]["error"] is None  # nothing was measured


@pytest.mark.slow
def test_the_page_is_what_the_kernels_give():
    script = "from bench.account.__main__ import GPUS, page; print(page(GPUS), end='')"
    page = PAGE.read_text(encoding="utf-8")
    assert printed_by(script) == page, "run python -m bench.account --publish"
