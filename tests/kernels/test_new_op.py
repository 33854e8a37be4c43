"""A new op from nothing: the suite tests it from a description in this file alone.

CONTRIBUTING.md walks through it.
"""

import math
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from bench import measure, ops
from fastgpt.kernels.checks import DTYPES
from fastgpt.kernels.proof.compile import Variant
from fastgpt.kernels.rows import as_rows
from fastgpt.kernels.runtime import Op, autocast_dtype, launch, recording, runs_kernels
from fastgpt.kernels.spec import Make, Problem, Spec, Work, meta, rows, work
from tests.kernels import conformance


@triton.jit(do_not_specialize=["M"])
def _double_kernel(x_ptr, y_ptr, stride_xm, M, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_xm + offs, mask=offs < N, other=0.0)
    tl.store(y_ptr + row * N + offs, 2 * x, mask=offs < N)


def double_fwd(x: Tensor, dtype: torch.dtype) -> Tensor:
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    flat = as_rows(x)
    M, N = flat.shape
    if M:
        block = triton.next_power_of_2(N)
        launch(_double_kernel, (M,), flat, y, flat.stride(0), M, N, BLOCK=block)
    return y


def double_fake(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def setup_context(ctx, inputs, output) -> None:
    ctx.dtype = inputs[0].dtype


def backward(ctx, dy):
    return (2 * dy.contiguous()).to(ctx.dtype), None


_double_fwd = Op(
    "test_double_fwd(Tensor x, ScalarType dtype) -> Tensor",
    double_fwd,
    double_fake,
    setup_context=setup_context,
    backward=backward,
)


def double_ref(x: Tensor) -> Tensor:
    return (2 * x).to(autocast_dtype(x))


def double(x: Tensor) -> Tensor:
    if x.dtype not in DTYPES or x.dim() == 0:
        raise ValueError(f"x: expected (..., N) of fp32, fp16 or bf16, got {x.dtype}")
    if not runs_kernels(x.device):
        return double_ref(x)
    return _double_fwd(x, autocast_dtype(x))


def inputs(s: Problem, make: Make) -> dict[str, Tensor]:
    return {"x": make(*rows(s), s["N"])}


def bytes_moved(s: Problem, itemsize: int) -> Work:
    n = math.prod(rows(s)) * s["N"] * itemsize
    return work((0, 2 * n), (0, 2 * n))


def variants(arch: int) -> Iterator[Variant]:
    x = meta(64, 768)
    yield Variant("N=768", lambda: double_fwd(x, x.dtype))


DOUBLE = Spec(
    name="double",
    op=double,
    ref=double_ref,
    eager=double_ref,
    inputs=inputs,
    launches=lambda s: ("_double_kernel",),
    variants=variants,
    work=bytes_moved,
    problems={"typical": {"M": (3, 5), "N": 24}, "masked": {"M": 7, "N": 123}},
    sizes={"cuda": {"gpt2": {"M": 16384, "N": 768}}, "cpu": {"gpt2": {"M": 1024, "N": 768}}},
)


@pytest.mark.parametrize("check", [conformance.parity, *conformance.checks(DOUBLE)])
def test_the_suite_proves_it(check, device):
    check(DOUBLE, DOUBLE.problems["typical"], device)


def test_errors_keep_the_rule_at_an_awkward_problem(device):
    conformance.parity(DOUBLE, DOUBLE.problems["masked"], device)


def test_the_bench_judges_it_and_counts_its_bytes(device):
    case = ops.Case(DOUBLE, "typical", DOUBLE.problems["typical"], "fp32", {})
    assert case.work()["both"] == (0, 4 * 15 * 24 * 4)
    checker = measure.Checker(case, device)
    assert checker.complaints(case.implementations()["ours"](device))[0] == []


def test_its_forms_are_recorded_as_they_would_be_launched():
    with recording(90) as recorded:
        for case in DOUBLE.variants(90):
            case.run()
    assert [launch.kernel.__name__ for launch in recorded] == ["_double_kernel"]
