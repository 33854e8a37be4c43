"""A new op from nothing: the suite tests it from a description in this file alone.

CONTRIBUTING.md walks through it. Each fault below is one that a kernel has had; the checks named
beside it must notice it, so the suite itself is tested too.
"""

import math
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.testing._internal.optests.generate_tests import OpCheckError

from bench import measure, ops
from fastgpt.kernels.checks import DTYPES
from fastgpt.kernels.proof.compile import Variant
from fastgpt.kernels.rows import as_rows
from fastgpt.kernels.runtime import Op, autocast_dtype, launch, recording, runs_kernels
from fastgpt.kernels.spec import Make, Problem, Spec, Work, rows, work
from simgpu.executor import FaultError
from tests.kernels import conformance

FAULTS: set[str] = set()
"""Faults of the op that are turned on."""


@triton.jit(do_not_specialize=["M"])
def _double_kernel(x_ptr, y_ptr, stride_xm, M, N, EXTRA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_xm + offs, mask=offs < N, other=0.0)
    tl.store(y_ptr + row * N + offs, 2 * x, mask=offs < N + EXTRA)


def double_fwd(x: Tensor, dtype: torch.dtype) -> Tensor:
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    flat = x.reshape(-1, x.shape[-1]) if "strides" in FAULTS else as_rows(x)
    M, N = flat.shape
    if M or "empty" in FAULTS:
        extra = ("outside" in FAULTS) - ("unwritten" in FAULTS)
        launch(
            _double_kernel, (max(M, 1),), flat, y, flat.stride(0), M, N if M else 0,
            EXTRA=extra, BLOCK=triton.next_power_of_2(N + 1),
        )  # fmt: skip
    return y


def double_fake(x: Tensor, dtype: torch.dtype) -> Tensor:
    y = x.new_empty(x.shape, dtype=dtype)
    return y.mT.contiguous().mT if "fake" in FAULTS else y


def setup_context(ctx, inputs, output) -> None:
    ctx.dtype = inputs[0].dtype


def backward(ctx, dy):
    factor = 2.02 if "gradient" in FAULTS else 2
    return (factor * dy.contiguous()).to(ctx.dtype), None


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
    if "checks" not in FAULTS and (x.dtype not in DTYPES or x.dim() == 0):
        raise ValueError(f"x: expected (..., N) of fp32, fp16 or bf16, got {x.dtype}")
    if not runs_kernels(x.device) or "no kernel" in FAULTS:
        return double_ref(x)
    return _double_fwd(x, x.dtype if "autocast" in FAULTS else autocast_dtype(x))


def inputs(s: Problem, make: Make) -> dict[str, Tensor]:
    return {"x": make(*rows(s), s["N"])}


def bytes_moved(s: Problem, itemsize: int) -> Work:
    n = math.prod(rows(s)) * s["N"] * itemsize
    return work((0, 2 * n), (0, 2 * n))


def variants(arch: int) -> Iterator[Variant]:
    x = torch.empty(64, 768, device="meta")
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
CHECKS = {check.__name__: check for check in (conformance.parity, *conformance.checks(DOUBLE))}


@pytest.mark.parametrize("check", CHECKS)
def test_the_suite_proves_it(check, device):
    CHECKS[check](DOUBLE, DOUBLE.problems["typical"], device)


def test_errors_keep_the_rule_at_every_problem(device):
    for problem in DOUBLE.problems.values():
        conformance.parity(DOUBLE, problem, device)


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


SEEN = {
    "gradient": ["parity"],
    "outside": ["parity"],
    "unwritten": ["parity"],
    "no kernel": ["parity"],
    "strides": ["strides_do_not_matter"],
    "empty": ["no_rows"],
    "fake": ["opcheck_passes", "fake_tensors_need_no_kernel"],
    "autocast": ["autocast_sets_the_dtype_of_outputs_alone"],
    "checks": ["bad_arguments_are_named"],
}


@pytest.mark.parametrize(("fault", "check"), [(f, c) for f, seen in SEEN.items() for c in seen])
def test_a_fault_is_noticed(fault, check, device, monkeypatch):
    monkeypatch.setattr(f"{__name__}.FAULTS", {fault})
    with pytest.raises(
        (AssertionError, RuntimeError, OpCheckError, FaultError, pytest.fail.Exception)
    ) as said:
        CHECKS[check](DOUBLE, DOUBLE.problems["typical"], device)
    assert fault != "checks" or str(said.value).startswith("x of wrong dtype (")
