"""Bugs planted in the compiled code of kernels, each of another kind: all must be noticed."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fastgpt.kernels import runtime
from fastgpt.kernels.proof.fenced import compile_launch, run_launch
from fastgpt.kernels.spec import Problem
from fastgpt.kernels.specs import SPECS
from simgpu.executor import FaultError, Launch
from tests import parity
from tests.kernels import conformance
from tests.parity import awkward
from tests.processes import printed_by

FULL = {"B": 1, "T": 64, "H": 1, "D": 16, "causal": False}
OPPOSITES = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}


@dataclass(frozen=True, slots=True)
class Bug:
    """A change of one place in a kernel's PTX, and the parity check that launches the kernel.

    `aligned` rows begin at multiples of 16 elements, so that copies are wide; others begin at odd
    addresses.
    """

    arch: int
    kernel: str
    pattern: str
    new: Callable[[re.Match[str]], str]
    place: int
    """Number of the place, of those that the pattern finds."""
    op: str
    problem: str | Problem
    dtype: torch.dtype = torch.bfloat16
    aligned: bool = True


def deleted(m: re.Match[str]) -> str:
    return ""


def one_more(m: re.Match[str]) -> str:
    return f"{m[1]}{int(m[2]) + 1};"


PLANTED = {
    "tcgen05.wait::st deleted": Bug(
        100, "_attention_bwd_dq_kernel", r"tcgen05\.wait::st\.sync\.aligned;", deleted, 1,
        "attention", {**FULL, "T": 256},
    ),
    "tcgen05.wait::ld deleted": Bug(
        100, "_attention_bwd_dq_kernel", r"tcgen05\.wait::ld\.sync\.aligned;", deleted, 1,
        "attention", {**FULL, "T": 256},
    ),
    "wgmma waited for one group late": Bug(
        90, "_attention_bwd_dq_kernel", r"(wgmma\.wait_group\.sync\.aligned\s+)(\d+);", one_more, 1,
        "attention", FULL,
    ),
    "ldmatrix transposed": Bug(
        80, "_attention_bwd_dkv_kernel", r"(ldmatrix\.sync\.aligned\.m8n8\.x\d)(\.trans)?",
        lambda m: m[1] + ("" if m[2] else ".trans"), 0, "attention", FULL,
    ),
    "shuffle's distance changed": Bug(
        90, "_norm_fwd_kernel", r"(shfl\.sync\.\w+\.b32\s+[^,]+,[^,]+, )(\d+)",
        lambda m: m[1] + str(int(m[2]) // 2 or 2 - int(m[2]) % 2), 0, "layer_norm", "masked-tail",
    ),
    "cp.async waited for one group late": Bug(
        80, "_norm_bwd_kernel", r"(cp\.async\.wait_group\s+)(\d+);", one_more, 0,
        "rms_norm", "masked-tail",
    ),
    "comparison changed": Bug(
        80, "_cross_entropy_fwd_kernel", r"(?<=setp\.)(lt|le|gt|ge|eq|ne)(?=\.)",
        lambda m: OPPOSITES[m[1]], 2, "cross_entropy", "mean", torch.float32, aligned=False,
    ),
    "conversion's operands swapped": Bug(
        90, "_rotary_kernel", r"(cvt\.rn\.\w+x2\.f32\s+%r\d+), (%r\d+), (%r\d+);",
        lambda m: f"{m[1]}, {m[3]}, {m[2]};", 0, "rotary", "tokens-in-parts",
    ),
    "predicate dropped": Bug(
        80, "_bias_act_fwd_kernel", r"@!?%p\d+ (?=(?:ld|st)\.global)", deleted, 0,
        "bias_act", "gelu_tanh masked-tail",
    ),
    "store deleted": Bug(
        90, "_bias_act_bwd_kernel",
        r"(?:@!?%p\d+ )?(?:st\.global|st\.shared|stmatrix|tcgen05\.st)[^;]*;", deleted, 0,
        "bias_act_swiglu", "swiglu no bias", torch.float32,
    ),
    "barrier deleted": Bug(
        80, "_decode_attention_kernel", r"bar\.sync\s+0;", deleted, 1,
        "decode_attention", "head-of-64",
    ),
}  # fmt: skip


def in_wide_rows(*shape: int, **options: Any) -> Tensor:
    """Makes `awkward` inputs whose rows begin at multiples of 16 elements; NaN follows each."""
    x = awkward(*shape, **options)
    if x.dim() < 2:
        return x.contiguous()
    wide = x.new_full((*x.shape[:-1], x.shape[-1] // 16 * 16 + 16), torch.nan)
    return wide[..., : x.shape[-1]].copy_(x)


def check(bug: Bug) -> None:
    spec = conformance.careful(SPECS[bug.op])
    problem = spec.problems[bug.problem] if isinstance(bug.problem, str) else bug.problem
    make = in_wide_rows if bug.aligned else awkward
    with (
        mock.patch.object(conformance, "awkward", make),
        mock.patch.object(parity, "awkward", make),
    ):
        conformance.parity(spec, problem, "cpu", bug.dtype)


@contextmanager
def executing(bug: Bug, text: str = "", instead: str = "") -> Iterator[list[str]]:
    """Runs what is launched inside, `text` replaced; yields the texts of the bug's kernel."""
    found: list[str] = []

    def run(launch: Launch) -> None:
        kernel = compile_launch(launch, bug.arch)
        found.extend([kernel.ptx] * (launch.kernel.__name__ == bug.kernel))
        run_launch(replace(kernel, ptx=instead) if kernel.ptx == text else kernel, launch)

    with runtime.executing(bug.arch, run):
        yield found


def noticed(bug: Bug) -> str:
    """Returns what is said of the bug, or nothing; the unchanged kernel must pass."""
    with executing(bug) as found:
        check(bug)
    ptx = found[0]
    m = list(re.compile(bug.pattern).finditer(ptx, ptx.index(".entry")))[bug.place]
    try:
        with executing(bug, ptx, ptx[: m.start()] + bug.new(m) + ptx[m.end() :]):
            check(bug)
    except (FaultError, AssertionError) as error:
        return str(error)
    return ""


def main() -> None:
    print(json.dumps({kind: noticed(bug) for kind, bug in PLANTED.items()}))


def test_each_planted_bug_is_noticed():
    """In a process without the interpreter."""
    said = json.loads(printed_by(f"from {__name__} import main; main()"))
    assert said.keys() == PLANTED.keys()
    assert [kind for kind, text in said.items() if not text] == []
