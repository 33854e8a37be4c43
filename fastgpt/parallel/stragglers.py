"""Pace of the ranks: which one is slower than the others, or waits longer for its data."""

import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor

INTERVALS, FACTOR = 5, 1.2
"""A rank is reported after so many log intervals in which it took so many times the median."""


class Stopwatch:
    """Context manager that adds up the device's time in its body; only `read` waits for the device.

    Of a step's parts the forward is timed: in the backward a rank also waits for slower ones.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.spans: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self.began = self._now()

    def __exit__(self, *_: object) -> None:
        self.spans.append((self.began, self._now()))

    def _now(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(self.device).Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> float:
        """Returns the seconds since the last call, after the device has been waited for."""
        on_host, spans, self.spans = self.device == "cpu", self.spans, []
        return sum(b - a if on_host else a.elapsed_time(b) / 1e3 for a, b in spans)


class Pace:
    """Compares the ranks at each log record."""

    def __init__(self) -> None:
        self.slow: Counter[int] = Counter()
        """Number of successive log intervals in which a rank was slow."""

    def compare(self, times: Tensor) -> tuple[dict[str, Any], list[str]]:
        """Returns figures for the log record, and a warning for each rank that is slow for long.

        The `times` (ranks, 2) are each rank's seconds per step, in forwards and waiting for data.
        """
        own = times.sum(1)
        median = own.quantile(0.5)
        late = (own > FACTOR * median).nonzero().flatten().tolist()
        self.slow = Counter({rank: self.slow[rank] + 1 for rank in late})
        spread = times.quantile(torch.tensor([0.0, 0.5, 1.0]), dim=0).T.tolist()
        forwards, waits = ([round(x, 6) for x in xs] for xs in spread)
        record = {"forward_s": forwards, "data_wait_s": waits, "slowest_rank": int(own.argmax())}
        return record, [
            f"rank {rank} has been slower than the other ranks for {INTERVALS} log intervals: a"
            f" step's forward takes it {times[rank, 0]:.3g} s and waiting for data"
            f" {times[rank, 1]:.3g} s, together {own[rank] / median:.1f} times the median"
            for rank in late
            if self.slow[rank] == INTERVALS
        ]
