"""Helpers of the kernels' CUDA tests."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fastgpt.kernels.spec import Problem
from tests.conftest import SIMULATED
from tests.parity import launches

MOST = {"B": 2, "T": 256, "H": 4, "M": 32, "V": 2048}
"""The largest sizes of a problem on a simulated GPU."""
Step = Callable[[], Sequence[Tensor]]
"""Function that computes an op's outputs and gradients, from the same tensors in every call."""


def need(gib: int) -> None:
    """Skips the test if the GPU has less than `gib` GiB of free memory."""
    torch.cuda.empty_cache()  # what earlier tests of this process left is free
    if torch.cuda.mem_get_info()[0] < gib << 30:
        pytest.skip(f"needs {gib} GiB of free device memory")


def fitting(problem: Problem) -> Problem:
    """Returns a problem as it is; for a simulated GPU smaller, as awkward as before.

    A size that is too large becomes half of the most, and the remainder that it leaves by that.
    """

    def less(size: int, most: int) -> int:
        return size if size <= most else most // 2 + size % (most // 2)

    if not SIMULATED:
        return problem
    most = {**MOST, **({"M": 512} if "V" in problem else {})}
    small = {**problem, **{k: less(problem[k], most[k]) for k in most.keys() & problem}}
    if "K" in problem:
        small["K"] = min(problem["K"], 2)
        small["H"] = small["K"] * (problem["H"] // problem["K"])
    if "valid_vocab" in problem:
        small["valid_vocab"] = small["V"] - (problem["V"] - problem["valid_vocab"])
    if "lengths" in problem:
        small["lengths"] = tuple(min(less(n, 256), small["T"]) for n in problem["lengths"][:2])
        small["B"] = len(small["lengths"])
    return small


def assert_nothing_waits(step: Callable[[], object], *kernels: str) -> None:
    """Asserts that the host never waits for the device, while each of `kernels` is launched."""
    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        with launches(*kernels):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(step: Step) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
    """Captures one call in a graph; also returns the tensors that each replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
