"""Timing of calls: the same method for every benchmark.

On CUDA a call lies between two events, behind a write that is larger than the L2 cache and a pause
as long as the host needs to queue the call, so that the time is the GPU's work and not the host's
speed. On a CPU it is `perf_counter`, over as many calls as make a millisecond, caches warm. The
host's own time, from call to return, is kept as well.

Rivals take turns, A B B A, so that a drift of the machine's speed affects all of them alike.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastgpt.device.device import DTYPES, measured_peak
from fastgpt.errors import UserError

ROOT = Path(__file__).parents[1]
FLUSH_BYTES = 256 * 2**20
"""Size of the write before each call: five times the L2 cache of an H200, twice that of a B200."""
LEAST_SECONDS = 1e-3
"""Shortest sample on a CPU: shorter calls are timed several at a time."""
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}
"""Size of the buffer whose copy is timed: far beyond any cache."""
PAUSE_HZ = 2.0e9
"""GPU clock assumed for the pause in which the host queues work; a slower one pauses longer."""


def nothing() -> Any:
    return None


@dataclass(frozen=True, slots=True)
class Timed:
    """A call to be timed: `call(prepare())`, of which only the call counts."""

    call: Callable[[Any], Any]
    prepare: Callable[[], Any] = nothing


@dataclass(slots=True)
class Samples:
    """Seconds of each sample: until the device is done, and until the call returned."""

    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


def quantiles(samples: list[float]) -> dict[str, float]:
    """Returns the quantiles p20, p50 and p80 of at least two samples, and their number."""
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return {"p20": deciles[1], "p50": deciles[4], "p80": deciles[7], "samples": len(samples)}


class Timer:
    """Times calls on one device, `cpu` or `cuda`."""

    def __init__(self, on: str) -> None:
        self.on = on
        self.flush = torch.empty(FLUSH_BYTES if on == "cuda" else 0, dtype=torch.int8, device=on)

    @property
    def settings(self) -> dict[str, Any]:
        """The method of timing, for the record."""
        if self.on == "cuda":
            return {"clock": "CUDA events", "cache": f"flushed with {FLUSH_BYTES >> 20} MiB"}
        return {"clock": "perf_counter", "cache": "warm"}

    def sample(self, timed: Timed, calls: int = 1, pause: float = 0.0) -> tuple[float, float]:
        """Returns (seconds on the device, seconds of the host) of one call, the mean of `calls`."""
        if self.on == "cuda":
            return self._sample_cuda(timed, pause)
        states = [timed.prepare() for _ in range(calls)]
        call, start = timed.call, time.perf_counter()
        for state in states:
            call(state)
        seconds = (time.perf_counter() - start) / calls
        return seconds, seconds

    def _sample_cuda(self, timed: Timed, pause: float) -> tuple[float, float]:
        state = timed.prepare()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.flush.zero_()
        torch.cuda._sleep(int(pause * PAUSE_HZ))
        begin.record()
        start = time.perf_counter()
        timed.call(state)
        host = time.perf_counter() - start
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3, host

    def interleave(
        self, rivals: Mapping[str, Timed], *, seconds: float, rounds: int | None = None
    ) -> dict[str, Samples]:
        """Times several implementations in turn, in alternating order; returns the samples of each.

        Args:
            rivals: calls by name; the first call of each is not counted.
            seconds: time in all, for at least 3 and at most 100 rounds.
            rounds: exact number of rounds instead.
        """
        plans = {name: self._plan(timed) for name, timed in rivals.items()}
        samples = {name: Samples() for name in rivals}
        end, turn = time.perf_counter() + seconds, 0
        while turn < (rounds or 3) or (rounds is None and turn < 100 and time.perf_counter() < end):
            for name in list(rivals)[:: -1 if turn % 2 else 1]:
                on_device, on_host = self.sample(rivals[name], *plans[name])
                samples[name].device.append(on_device)
                samples[name].host.append(on_host)
            turn += 1
        return samples

    def _plan(self, timed: Timed) -> tuple[int, float]:
        """Returns (calls per sample, seconds of pause before each), measured with two calls."""
        self.sample(timed)
        on_device, on_host = self.sample(timed)
        if self.on == "cuda":
            return 1, min(1.5 * on_host, 0.01)
        return max(1, min(64, round(LEAST_SECONDS / max(on_device, 1e-9)))), 0.0


def machine_rates(timer: Timer, dtypes: tuple[str, ...], seconds: float = 1.0) -> dict[str, float]:
    """Measures FLOP/s of the best square matrix product, as `matmul <dtype>`, and bytes/s of a
    copy.

    They are the limits for every row of the same run. A copy of n bytes reads and writes: it counts
    2 n, as the bytes of every op's row do.
    """
    on = timer.on
    rates = {f"matmul {name}": measured_peak(on, DTYPES[name], seconds) for name in dtypes}
    source = torch.randint(-128, 127, (COPY_BYTES[on],), dtype=torch.int8, device=on)
    target = torch.empty_like(source)
    copy = Timed(lambda _: target.copy_(source))
    samples = timer.interleave({"copy": copy}, seconds=seconds)["copy"].device
    return {**rates, "copy": 2 * COPY_BYTES[on] / quantiles(samples)["p20"]}


def peaks_of(rates: dict[str, float], dtype: str) -> dict[str, float]:
    """Returns the machine's limits for one dtype: FLOP/s as `matmul`, bytes/s as `copy`."""
    return {"matmul": rates[f"matmul {dtype}"], "copy": rates["copy"]}


def limit(flops: float, size: float, peaks: dict[str, float]) -> tuple[float, str]:
    """Returns the least seconds that this work can take, and `matmul` or `copy`, which limits it.

    Args:
        flops: FLOPs of matrix products.
        size: bytes moved.
        peaks: FLOP/s as `matmul` and bytes/s as `copy`, measured.
    """
    times = {"matmul": flops / peaks["matmul"], "copy": size / peaks["copy"]}
    bound = max(times, key=lambda name: times[name])
    return times[bound], bound


def time_process(what: str, *arguments: str, cwd: Path = ROOT) -> tuple[float, str]:
    """Runs Python as a process of its own; returns its seconds and its output.

    Args:
        what: name of the process in an error.

    Raises:
        UserError: the process failed; the message has the last line that it printed.
    """
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
        raise UserError(f"{what} failed: {said[0]}")
    return seconds, done.stdout


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Context in which `count` processes of this machine keep a core busy each."""
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield
