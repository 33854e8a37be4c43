"""Profiles of our kernels count what their sizes make known."""

from tests.processes import printed_by

SCRIPT = """
import torch
from fastgpt.kernels.proof.profile import profile
from fastgpt.kernels.specs import SPECS

for name, problem in (
    ("attention", {"B": 1, "T": 128, "H": 2, "D": 64, "causal": False}),
    ("rotary", {"B": 2, "T": 64, "H": 3, "D": 64}),
    ("decode_attention", {"B": 2, "T": 700, "H": 3, "D": 64}),
):
    for (kernel, _), c in profile(SPECS[name], problem, torch.bfloat16, 90).items():
        print(kernel, c.thread_blocks, c.total("multiply_adds"), c.total("touched"))
"""


def test_products_bytes_and_thread_blocks_are_counted():
    lines = [line.split() for line in printed_by(SCRIPT).splitlines()]
    found = [(name, *map(int, counts)) for name, *counts in lines]
    pairs = 2 * 128 * 128 * 64  # of each head, with its dimension
    products = {name: n / pairs for name, _, n, _ in found if name.startswith("_attention")}
    assert products == {
        "_attention_fwd_kernel": 2, "_attention_bwd_dq_kernel": 3, "_attention_bwd_dkv_kernel": 4
    }  # fmt: skip
    rotated = [touched for name, _, _, touched in found if name == "_rotary_kernel"]
    q_and_k, angles = 2 * (2 * 64 * 3 * 64) * 2, 2 * (64 * 32) * 4  # bytes
    assert rotated == [2 * q_and_k + angles] * 2
    splits, combined = (entry for entry in found if entry[0].startswith("_decode"))
    assert splits[1] > combined[1] == 2 * 3  # splits of each head and sequence
    keys_and_values = 2 * (2 * 700 * 3 * 64) * 2
    assert keys_and_values < splits[3] < 1.1 * keys_and_values
