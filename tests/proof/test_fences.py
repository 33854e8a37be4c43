"""The fences that Triton leaves out: where it does, and that our kernels are compiled with them."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastgpt.kernels import fences, runtime
from tests.processes import python

COPIED = "cp.async.wait_group \t1;\nbar.sync \t0;\n"
OURS = "fastgpt.kernels.attention.forward"


def test_triton_leaves_them_out_where_the_table_says_and_nowhere_else():
    """A Triton that leaves none out any more fails here: shrink `fences.needs_fence` then."""
    done = python("-m", "tests.proof.execute.missing_fence", TRITON_INTERPRET=None)
    assert done.returncode == 0, done.stderr
    said = dict(re.findall(r"sm_(\d+, [\w ]+): (.*)", done.stdout))
    for arch in (80, 90, 100, 110):
        assert said[f"{arch}, with fences"] == "True", said
        fault = "reads what threads wrote, without a fence.proxy.async between"
        expected = fault if fences.needs_fence(arch) else "True"
        assert expected in said[f"{arch}, as compiled"], said


class Kernel:
    """A kernel whose launch asks Triton's hook as its compiler does, and keeps what it compiled."""

    __name__ = "kernel"

    def __init__(self, module, ptx):
        self.module, self.ptx = module, ptx

    def __getitem__(self, grid):
        return self.launched

    def launched(self, *args, **options):
        from triton import knobs

        stages = {"ptx": lambda source, metadata: self.ptx}
        hook: Any = knobs.runtime.add_stages_inspection_hook
        self.key = hook() if hook else ("", "")
        if hook:
            hook(None, stages, None, None, None)
        self.compiled = stages["ptx"](None, {})


@pytest.mark.parametrize(
    ("arch", "module", "instruction", "added"),
    [
        (103, OURS, "tcgen05.mma", True),
        (100, OURS, "add.f32", False),
        (100, "yours", "tcgen05.mma", False),
        (80, OURS, "mma.sync", False),
    ],
)
def test_a_launch_compiles_our_kernels_with_them(monkeypatch, arch, module, instruction, added):
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", None)
    monkeypatch.setattr(fences, "needs_fence", lambda arch: arch // 10 == 10)  # as Triton 3.7.1
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    monkeypatch.setattr(runtime, "_cuda", lambda index: (arch, 148))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel = Kernel(module, f"{COPIED}{instruction};")
    runtime.launch(kernel, (1,), SimpleNamespace(device=torch.device("cuda", 0)))
    fence = "cp.async.wait_group \t1;\n\tfence.proxy.async.shared::cta;\nbar.sync"
    assert (fence in kernel.compiled) == added
    assert (kernel.key == (fences.KEY, fences.KEY)) == (arch in (100, 103) and module == OURS)
    kernel.launched()  # by somebody else: the hook stays, and does nothing
    assert (kernel.compiled, kernel.key) == (kernel.ptx, ("", ""))
