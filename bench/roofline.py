"""The machine's own limits, measured in the run whose rows are held against them."""

import torch

from bench.timing import Timed, Timer, quantiles
from fastgpt.device import DTYPES, measured_peak

COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
"""Of the buffer that is copied: far beyond any cache."""


def measure(timer: Timer, dtypes: tuple[str, ...], seconds: float = 1.0) -> dict[str, float]:
    """FLOP/s of the best square matrix product, as `matmul <dtype>`, and bytes/s of a copy.

    A copy of n bytes reads and writes: it counts 2 n. The same convention holds for every op's row.
    """
    on = timer.on
    rates = {f"matmul {name}": measured_peak(on, DTYPES[name], seconds) for name in dtypes}
    source = torch.randint(-128, 127, (COPY_BYTES[on],), dtype=torch.int8, device=on)
    target = torch.empty_like(source)
    copy = Timed(lambda _: target.copy_(source))
    samples = timer.turns({"copy": copy}, seconds=seconds)["copy"].device
    return {**rates, "copy": 2 * COPY_BYTES[on] / quantiles(samples)["p20"]}


def roof(rates: dict[str, float], dtype: str) -> dict[str, float]:
    """`matmul` and `copy` for rows of one dtype."""
    return {"matmul": rates[f"matmul {dtype}"], "copy": rates["copy"]}
