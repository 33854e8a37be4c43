"""Triton's kernels, by its own launcher and the executor."""

import pytest

ADD = """
import torch, triton, triton.language as tl

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)

x, y = (torch.randn(1000, device="cuda") for _ in range(2))
out = torch.empty_like(x)
"""


def test_a_kernel_runs_and_one_that_leaves_its_tensors_is_an_error(simulated):
    text = f"""{ADD}
from simgpu.launches import launched
add[(8,)](x, y, out, 1000, BLOCK=128)
assert torch.equal(out, x + y)
print(dict(launched), flush=True)
add[(9,)](x, y, out, 5000, BLOCK=128)
"""
    said = simulated(text, status=1)
    assert "{'add': 1}" in said
    assert "kernel add failed: FaultError" in said
    assert "outside of every tensor" in said


def test_an_assertion_on_the_device_is_an_error(simulated):
    said = simulated(
        """
import os
os.environ["TRITON_DEBUG"] = "1"
"""
        + ADD.replace("    tl.store", "    tl.device_assert(at < 128, 'too far')\n    tl.store")
        + """
add[(1,)](x, y, out, 1000, BLOCK=128)
assert torch.equal(out[:128], (x + y)[:128])
print("fine", flush=True)
add[(8,)](x, y, out, 1000, BLOCK=128)
""",
        status=1,
        cold=True,  # Triton reads the variable when it is imported
    )
    assert "fine" in said
    assert "too far" in said


@pytest.mark.long
def test_a_kernel_of_inductors_may_change_what_all_its_warps_read(simulated):
    simulated("""
import torch
x = torch.randn(4, 16)
y = x.cuda()
torch.compile(lambda x: x.copy_(x.softmax(-1)))(y)
torch.testing.assert_close(y.cpu(), x.softmax(-1))
""")


@pytest.mark.parametrize(("used", "status"), [("1.0", 0), ("tl.load(x)", 1)])
def test_all_warps_may_read_what_one_changes_if_it_is_of_no_use_to_the_others(
    simulated, used, status
):
    text = f"""
import torch, triton, triton.language as tl

@triton.jit
def double(x, y):
    at = tl.arange(0, 16)
    tl.store(y + tl.arange(0, 512), {used})
    tl.store(x + at, tl.load(x + at) * 2)

x, y = torch.ones(16, device="cuda"), torch.empty(512, device="cuda")
double[(1,)](x, y)
assert (x == 2).all() and (y == 1).all()
"""
    said = simulated(text, status=status)
    assert ("race: writes what another warp reads or writes" in said) == status
