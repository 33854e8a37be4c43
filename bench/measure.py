"""Measures calls: one timer for every benchmark, and the check of an op before it is timed.

On CUDA a call lies between two events, behind a write that is larger than the L2 cache and a pause
as long as the host needs to queue the call, so that the time is the GPU's work and not the host's
speed. On a CPU it is `perf_counter`, over as many calls as make a millisecond, caches warm. Rivals
take turns, A B B A, so that a drift of the machine's speed affects all of them alike.

An op's implementations are checked with the rule of the tests (`kernels.parity`). One with wrong
results gets no time. A peer beyond the rule is still timed if its relative L2 error is at most
LENIENT, because leaving it out would flatter us.
"""

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import records
from bench.ops import Call, Case, Inputs
from bench.records import Record, record
from fastgpt.device.device import DTYPES, measured_peak
from fastgpt.errors import UserError
from fastgpt.kernels.parity import complaints, errors, outputs_and_gradients

ROOT = Path(__file__).parents[1]
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}  # of the buffer that is copied, beyond any cache
LENIENT = 0.02
"""Largest relative L2 error of a peer that is timed; FlashAttention in bf16 has about 0.005."""


class Timed(NamedTuple):
    """A call to be timed: `call(prepare())`, of which only the call counts."""

    call: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None


def quantiles(samples: list[float]) -> dict[str, float]:
    """Returns the quantiles p20, p50 and p80 of samples, and their number."""
    deciles = statistics.quantiles(samples * (1 + (len(samples) == 1)), n=10, method="inclusive")
    return {"p20": deciles[1], "p50": deciles[4], "p80": deciles[7], "samples": len(samples)}


class Timer:
    """Times calls on one device, `cpu` or `cuda`."""

    def __init__(self, on: str) -> None:
        self.on = on
        # for the write before each call: five times the L2 cache of an H200, twice that of a B200
        self.flush = torch.empty(2**28 if on == "cuda" else 0, dtype=torch.int8, device=on)

    def sample(self, timed: Timed, calls: int = 1, pause: float = 0.0) -> float:
        """Returns the seconds of one call on the device, on a CPU the mean of `calls`."""
        states, call = [timed.prepare() for _ in range(calls)], timed.call
        if self.on == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            self.flush.zero_()
            torch.cuda._sleep(int(pause * 2e9))  # at 2 GHz; a slower GPU pauses longer
            begin.record()
            call(states[0])
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3
        start = time.perf_counter()
        for state in states:
            call(state)
        return (time.perf_counter() - start) / calls

    def interleave(
        self, rivals: Mapping[str, Timed], *, seconds: float, rounds: int | None = None
    ) -> dict[str, list[float]]:
        """Times several implementations in turn, in alternating order; returns seconds of each.

        Args:
            rivals: calls by name; the first call of each is not counted.
            seconds: time in all, for at least 3 and at most 100 rounds.
            rounds: exact number of rounds instead.
        """
        plans = {name: self._plan(timed) for name, timed in rivals.items()}
        samples: dict[str, list[float]] = {name: [] for name in rivals}
        end, turn = time.perf_counter() + seconds, 0
        while turn < (rounds or 3) or (rounds is None and turn < 100 and time.perf_counter() < end):
            for name in list(rivals)[:: -1 if turn % 2 else 1]:
                samples[name].append(self.sample(rivals[name], *plans[name]))
            turn += 1
        return samples

    def _plan(self, timed: Timed) -> tuple[int, float]:
        """Returns (calls per sample, seconds of pause before each), measured with two calls."""
        self.sample(timed)
        state, start = timed.prepare(), time.perf_counter()
        timed.call(state)
        seconds = time.perf_counter() - start
        if self.on == "cuda":
            return 1, min(1.5 * seconds, 0.01)
        return max(1, min(64, round(1e-3 / max(seconds, 1e-9)))), 0.0


def machine_rates(timer: Timer, dtypes: tuple[str, ...], seconds: float = 1.0) -> dict[str, float]:
    """Measures FLOP/s of square matrix products, as `matmul <dtype>`, and bytes/s, as `copy`.

    They are the limits for every row of the same run. A copy of n bytes reads and writes 2 n.
    """
    on = timer.on
    rates = {f"matmul {name}": measured_peak(on, DTYPES[name], seconds) for name in dtypes}
    source = torch.randint(-128, 127, (COPY_BYTES[on],), dtype=torch.int8, device=on)
    target = torch.empty_like(source)
    copy = Timed(lambda _: target.copy_(source))
    samples = timer.interleave({"copy": copy}, seconds=seconds)["copy"]
    return {**rates, "copy": 2 * COPY_BYTES[on] / quantiles(samples)["p20"]}


def peaks_of(rates: dict[str, float], dtype: str) -> dict[str, float]:
    """Returns the machine's limits for one dtype: FLOP/s as `matmul`, bytes/s as `copy`."""
    return {"matmul": rates[f"matmul {dtype}"], "copy": rates["copy"]}


def limit(flops: float, size: float, peaks: dict[str, float]) -> tuple[float, str]:
    """Returns the least seconds for FLOPs of matrix products and bytes moved, and what limits them.

    The limit is `matmul` or `copy`, the name of its measured peak.
    """
    times = {"matmul": flops / peaks["matmul"], "copy": size / peaks["copy"]}
    bound = max(times, key=lambda name: times[name])
    return times[bound], bound


def time_process(what: str, *arguments: str, cwd: Path = ROOT) -> tuple[float, str]:
    """Runs Python as a process of its own; returns its seconds and its output.

    Raises:
        UserError: `what` failed; the message has the last line that it printed.
    """
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
        raise UserError(f"{what} failed: {said[0]}")
    return seconds, done.stdout


def resident_peak() -> int:
    """Returns this process's peak resident size in bytes; getrusage's includes the parent's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if "VmHWM" in line))


def in_one_line(error: Exception) -> str:
    """Returns the first line of an error, with its type if it is not a `UserError`."""
    line = str(error).strip().partition("\n")[0][:200]
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


class Checker:
    """Checks whether the results of a case's implementations are correct.

    It computes the truth and PyTorch's own error once; of attention, as the weights of all take too
    much memory, for the last head of the last sequence, which is independent of all others. The
    reference runs in fp64, or in fp32 on CUDA where the inputs are narrower.
    """

    def __init__(self, case: Case, on: str) -> None:
        self.on, self.dtype, self.spec = on, DTYPES[case.dtype], case.spec
        self.inputs = {name: x.detach() for name, x in case.inputs(on).items()}
        if self.spec.random is not None:
            return
        shape, self.heads = case.shape, 0
        if self.spec.name in ("attention", "attention_packed"):
            shape, self.heads = {**shape, "B": 1, "H": 1, "K": 1}, shape["H"]
        whole = self.spec.call(self.spec.ref, case.shape, "meta")
        outputs = as_tuple(whole(*(x.to("meta") for x in self.inputs.values())))
        self.shapes, self.terms = [y.shape for y in outputs], self.spec.terms(shape)
        part = {name: self._part(x) for name, x in self.inputs.items()}
        wide = torch.float64 if on == "cpu" or self.dtype == torch.float32 else torch.float32
        eager, ref = (self.spec.call(f, shape, on) for f in (self.spec.eager, self.spec.ref))
        self.eager = self._results(eager, part, self.dtype)
        self.truth = self._results(ref, part, wide)

    def _part(self, x: Tensor) -> Tensor:
        """Returns the last head of x, or where x is q, k and v in one, of each of them."""
        return x[-1:, :, self.heads - 1 :: self.heads] if self.heads else x

    def _results(self, call: Call, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
        """Runs an implementation; with a part of the inputs, on that part of the upstream."""

        def draw(i: int, y: Tensor) -> Tensor:
            generator = torch.Generator(self.on).manual_seed(i + 1)
            drawn = torch.randn(self.shapes[i], generator=generator, device=self.on)
            drawn = drawn.to(self.dtype)
            return drawn if y.shape == drawn.shape else self._part(drawn)

        return outputs_and_gradients(
            call, inputs, dtype, draw if self.spec.differentiable else None
        )

    def complaints(self, call: Call) -> tuple[list[str], float]:
        """Returns the errors of an implementation's results, and the largest relative L2 error."""
        copies = {name: x.clone() for name, x in self.inputs.items()}
        if self.spec.random is not None:
            wrong = self.spec.random(copies, call(*copies.values()))
            return wrong, float(bool(wrong))
        found = self._results(call, copies, self.dtype).items()
        got = {name: self._part(x) for name, x in found}
        for name, true in self.truth.items():
            if name not in got or got[name].shape != true.shape:
                return [f"{name}: wrong shape, or missing"], math.inf
        worst = max(errors(got[name], true)[1] for name, true in self.truth.items())
        return complaints(got, self.eager, self.truth, self.dtype, self.terms), worst

    def check(self, name: str, call: Call) -> dict[str, Any]:
        """Returns how exact an implementation is.

        Raises:
            UserError: its results are so wrong that it may not be timed.
        """
        wrong, worst = self.complaints(call)
        if wrong and (name == "ours" or not worst <= LENIENT):  # it may be NaN
            raise UserError(f"wrong: {wrong[0]}")
        return {"error": worst, "inexact": bool(wrong)}


def timed_pass(case: Case, call: Call, which: str, inputs: Inputs) -> Timed:
    """Prepares the timed call of a pass: `fwd` (saving for the backward), `bwd` or `both`."""
    upstream: list[Tensor] = []

    def fresh() -> Inputs:
        over = case.shape.get("inplace_grad")  # a leaf must not be overwritten, its copy may
        return {k: x.clone() if over and x.requires_grad else x for k, x in inputs.items()}

    def forward(arguments: Inputs) -> tuple[Inputs, tuple[Tensor, ...]]:
        outputs = as_tuple(call(*arguments.values()))
        if not upstream:
            # 1 for a loss, as in training, where some implementations then skip a pass
            upstream.extend(torch.randn_like(y) if y.dim() else torch.ones_like(y) for y in outputs)
        return arguments, outputs

    def backward(state: tuple[Inputs, tuple[Tensor, ...]]) -> Any:
        arguments, outputs = state  # of this call: several may be prepared before the first runs
        leaves = [x for x in arguments.values() if x.requires_grad]
        return torch.autograd.grad(outputs, leaves, upstream)

    return {
        "fwd": Timed(forward, fresh),
        "bwd": Timed(backward, lambda: forward(fresh())),
        "both": Timed(lambda arguments: backward(forward(arguments)), fresh),
    }[which]


def peak_bytes(timed: Timed) -> int:
    """Returns the peak of CUDA memory during a call, beyond the memory in use before it."""
    state = timed.prepare()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    timed.call(state)
    return torch.cuda.max_memory_allocated() - before


def op_records(
    case: Case, timer: Timer, rates: dict[str, float], *, seconds: float, rounds: int | None = None
) -> Iterator[list[Record]]:
    """Measures a case; yields the records of implementations without a time, then of each pass.

    A pass takes `seconds`, all implementations together, or `rounds`. `rates` are `machine_rates`.
    """
    torch.compiler.reset()  # all cases compile the same code; together they pass a limit
    checker, absent = Checker(case, timer.on), list[Record]()
    passed: dict[str, tuple[Call, dict[str, Any]]] = {}
    for name, maker in case.implementations().items():
        try:
            call = maker(timer.on)
            passed[name] = call, checker.check(name, call)
        except Exception as error:  # a broken installation may raise anything, the others still run
            absent.append(record(case.name, name, why=in_one_line(error), shape=case.shape))
    yield absent
    del checker
    inputs = case.inputs(timer.on)
    for which, (flops, size) in case.work().items():
        rivals = {n: timed_pass(case, call, which, inputs) for n, (call, _) in passed.items()}
        samples = timer.interleave(rivals, seconds=seconds, rounds=rounds)
        rows, state = list[Record](), records.state(timer.on)
        least, bound = limit(flops, size, peaks_of(rates, case.dtype))
        for name, figure in ((name, quantiles(taken)) for name, taken in samples.items()):
            more = passed[name][1] | {
                "tflops": flops / figure["p50"] / 1e12, "gb_per_s": size / figure["p50"] / 1e9,
                "bound": bound, "share": least / figure["p50"], "state": state,
            }  # fmt: skip
            if timer.on == "cuda":
                more["peak_bytes"] = peak_bytes(rivals[name])
            rows.append(record(f"{case.name}/{which}", name, figure, shape=case.shape, **more))
        yield rows
