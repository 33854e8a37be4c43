"""`python -m kernels.aot --changed`, the form that CI runs."""

import json

import pytest

from tests.proof.test_aot import compiling

SOURCE = '''
import torch, triton
import triton.language as tl
from fastgpt.kernels.proof.compile import Variant
from fastgpt.kernels.runtime import launch

BIAS: tl.constexpr = 1

@triton.jit
def _add(x):
    return x + BIAS

@triton.jit
def _a_kernel(x_ptr, N: tl.constexpr):
    """Adds."""
    offs = tl.arange(0, N)
    tl.store(x_ptr + offs, _add(tl.load(x_ptr + offs)))

@triton.jit
def _b_kernel(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), 0.0)

def variants(arch):
    x = torch.empty(512, device="meta")
    for kernel in (_a_kernel, _b_kernel):
        for n in (64, 128, 256):
            run = lambda kernel=kernel, n=n: launch(kernel, (1,), x, N=n, num_warps=1)
            yield Variant(f"N={n}", run)
'''
CHANGES = {
    "nothing": SOURCE,
    "comments": SOURCE.replace("Adds.", "Sums up.").replace("return x +", "# !\n    return x  +"),
    "a_helper": SOURCE.replace("x + BIAS", "x - BIAS"),
    "a_global": SOURCE.replace("constexpr = 1", "constexpr = 2"),
    "a_setting": SOURCE.replace("num_warps=1", "num_warps=1 + n // 256"),
    "a_new_variant": SOURCE.replace("128, 256)", "128, 256, 512)"),
}
SELECT = """
import importlib, json, sys
from pathlib import Path
from fastgpt.kernels import aot
from fastgpt.kernels.proof.compile import CompileResult, collect, fingerprint

names, folder = sys.argv[2:], sys.argv[1]
sys.path.insert(0, folder)
budget = str(Path(folder, "budget.json"))

def selected(name):
    args = ["--changed", "--arch", "90", "--modules", name, "--budget", budget]
    return [config.key for config in aot.select(aot.parse_args(args))]

found = {"before": selected(names[0])}
configs = collect([importlib.import_module(names[0]).variants], [90])
rows = [CompileResult(c.kernel, 90, c.label, fingerprint=fingerprint(c)) for c in configs]
aot.record(rows, Path(budget))
print(json.dumps(found | {name: selected(name) for name in names}))
"""


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    """Returns the configurations that `--changed` selects after each change of a source file."""
    folder = tmp_path_factory.mktemp("changed")
    for change, source in CHANGES.items():
        assert (source == SOURCE) == (change == "nothing")
        (folder / f"{change}.py").write_text(source)
    done = compiling("-c", SELECT, str(folder), *CHANGES)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ("before", []),  # an arch without a record
        ("nothing", []),
        ("comments", []),
        ("a_helper", ["_a_kernel N=128", "_a_kernel N=256"]),
        ("a_global", ["_a_kernel N=128", "_a_kernel N=256"]),
        ("a_setting", ["_a_kernel N=256", "_b_kernel N=256"]),
        ("a_new_variant", ["_a_kernel N=512", "_b_kernel N=512"]),
    ],
)
def test_one_of_each_kernel_and_what_changed_is_chosen(chosen, change, more):
    assert sorted(chosen[change]) == sorted(["_a_kernel N=64", "_b_kernel N=64", *more])
