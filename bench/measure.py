"""Measures one case: checks every implementation and times those whose results are right.

Ours, PyTorch's and every peer are checked with the same rule (`kernels.parity`), and an
implementation with wrong results gets no time. A peer beyond the rule is still timed if its
relative L2 error is at most LENIENT, because leaving it out would flatter us; the row says by how
much it is off.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.cases import Case, Inputs, cases
from bench.peers import MissingError
from bench.timing import Timed, Timer, limit, quantiles
from fastgpt.device.device import DTYPES
from fastgpt.kernels.parity import complaints, errors, outputs_and_gradients

LENIENT = 0.02
"""Largest relative L2 error of a peer that is timed; FlashAttention in bf16 has about 0.005."""
Record = tuple[str, dict[str, Any]]
"""Kind of a record (`op`, `missing`, `refused`), and its fields."""


@dataclass(frozen=True, slots=True)
class Passed:
    """An implementation with correct results, which may be timed."""

    call: Callable[..., Any]
    inexact: str = ""


class Checker:
    """Checks whether the results of a case's implementations are correct.

    It computes the truth and PyTorch's own error once. The reference runs in fp64, or in fp32 on
    CUDA where the inputs are narrower.
    """

    def __init__(self, case: Case, on: str) -> None:
        self.case, self.on, self.dtype = case, on, DTYPES[case.dtype]
        self.spec = spec = case.spec
        self.inputs = {name: x.detach() for name, x in case.inputs(on).items()}
        if spec.random is not None:
            return
        ref = spec.call(spec.ref, case.shape, "meta")
        outputs = ref(*(x.to("meta") for x in self.inputs.values()))
        self.shapes = [y.shape for y in _as_tuple(outputs)]
        part = {name: spec.probe(name, x) for name, x in self.inputs.items()}
        wide = on == "cpu" or self.dtype == torch.float32
        eager, ref = (spec.call(f, spec.probed(case.shape), on) for f in (spec.eager, spec.ref))
        self.eager = self._results(eager, part, self.dtype, spec.probe)
        self.truth = self._results(ref, part, torch.float64 if wide else torch.float32, spec.probe)

    def _results(
        self,
        call: Callable[..., Any],
        inputs: Inputs,
        dtype: torch.dtype,
        probe: Callable[[str, Tensor], Tensor],
    ) -> dict[str, Tensor]:
        """Runs an implementation and returns its outputs and gradients.

        If the inputs are only a part of the whole, they get that part of the upstream gradients.
        """

        def draw(i: int, y: Tensor) -> Tensor:
            generator = torch.Generator(self.on).manual_seed(i + 1)
            drawn = torch.randn(self.shapes[i], generator=generator, device=self.on)
            return probe(f"output {i}", drawn.to(self.dtype))

        if not self.spec.differentiable:
            cast = (x.to(dtype) if x.is_floating_point() else x for x in inputs.values())
            return {f"output {i}": y for i, y in enumerate(_as_tuple(call(*cast)))}
        return outputs_and_gradients(call, inputs, dtype, draw)

    def complaints(self, call: Callable[..., Any]) -> tuple[list[str], float]:
        """Returns the errors of an implementation's results, and the largest relative L2 error."""
        copies = {name: x.clone() for name, x in self.inputs.items()}
        if self.spec.random is not None:
            wrong = self.spec.random(copies, call(*copies.values()))
            return wrong, float(bool(wrong))
        got = self._results(call, copies, self.dtype, lambda name, x: x)
        probe = self.spec.probe
        got = {name: probe(name.removeprefix("gradient of "), x) for name, x in got.items()}
        if shapes := [n for n, x in self.truth.items() if n not in got or got[n].shape != x.shape]:
            return [f"{name}: wrong shape, or missing" for name in shapes], float("inf")
        worst = max(errors(got[name], true)[1] for name, true in self.truth.items())
        terms = self.spec.terms(self.spec.probed(self.case.shape))
        return complaints(got, self.eager, self.truth, self.dtype, terms), worst

    def check(self, name: str, call: Callable[..., Any]) -> Passed | str:
        """Returns the implementation if it may be timed, else why it may not."""
        try:
            wrong, worst = self.complaints(call)
        except Exception as error:  # the others still run
            return in_one_line(error)
        if not wrong:
            return Passed(call)
        if name != "ours" and worst <= LENIENT:
            return Passed(call, f"{wrong[0]}; relative L2 error {worst:.1e}")
        return f"wrong: {wrong[0]}"


def in_one_line(error: Exception) -> str:
    """Formats an error as its type and first line; the message of an assertion is often empty."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


# --- passes ---------------------------------------------------------------------------------------


def timed_pass(case: Case, call: Callable[..., Any], which: str, inputs: Inputs) -> Timed:
    """Prepares the timed call of a pass: `fwd` (saving for the backward), `bwd` or `both`."""
    upstream: list[Tensor] = []

    def fresh() -> Inputs:
        over = case.spec.overwritten  # a leaf must not be overwritten, its copy may
        return {name: x.clone() if name == over else x for name, x in inputs.items()}

    def forward(arguments: Inputs) -> tuple[Tensor, ...]:
        outputs = _as_tuple(call(*arguments.values()))
        if not upstream:
            # 1 for a loss, as in training, where some implementations then skip a pass
            upstream.extend(torch.randn_like(y) if y.dim() else torch.ones_like(y) for y in outputs)
        return outputs

    def ran() -> tuple[Inputs, tuple[Tensor, ...]]:
        arguments = fresh()
        return arguments, forward(arguments)

    def backward(state: tuple[Inputs, tuple[Tensor, ...]]) -> Any:
        arguments, outputs = state  # of this call: several may be prepared before the first runs
        leaves = [x for x in arguments.values() if x.requires_grad]
        return torch.autograd.grad(outputs, leaves, upstream)

    if which == "fwd":
        return Timed(forward, fresh)
    if which == "bwd":
        return Timed(backward, ran)
    return Timed(lambda arguments: backward((arguments, forward(arguments))), fresh)


def peak_bytes(timed: Timed) -> int:
    """Returns the peak of CUDA memory during a call, beyond the memory in use before it."""
    state = timed.prepare()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    timed.call(state)
    return torch.cuda.max_memory_allocated() - before


def resident_peak() -> int:
    """Returns this process's peak resident size in bytes; getrusage's includes the parent's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if "VmHWM" in line))


def memory_on_cpu(case: str, name: str) -> dict[str, int]:
    """Measures the memory of two steps in a process of their own; only on Linux, else empty.

    `peak_bytes` is the whole process, Python and PyTorch included; `before_bytes` is the part that
    was there before the first step, inputs included.
    """
    if not Path("/proc/self/status").exists():
        return {}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_memory_here, (case, name))


def _memory_here(name: str, implementation: str) -> dict[str, int]:
    (case,) = cases("cpu", names={name}, full=True)
    call = case.implementations[implementation]("cpu")
    timed = timed_pass(case, call, "both", case.inputs("cpu"))
    before = resident_peak()
    for _ in range(2):
        timed.call(timed.prepare())
    return {"peak_bytes": resident_peak(), "before_bytes": before}


# --- a case ---------------------------------------------------------------------------------------


def records_of(
    case: Case,
    timer: Timer,
    peaks: dict[str, float],
    *,
    seconds: float,
    rounds: int | None = None,
) -> Iterator[Record]:
    """Measures a case and yields rows of kind `op`, `missing` and `refused`.

    Args:
        peaks: `matmul` and `copy` rates, see `bench.timing`.
        seconds: time for each pass, all implementations together.
        rounds: number of rounds instead.
    """
    torch.compiler.reset()  # all cases compile the same code; together they pass a limit
    about = {"case": case.name, "op": case.spec.name, "shape": case.shape, "dtype": case.dtype}
    checker, passed = Checker(case, timer.on), {}
    for name, maker in case.implementations.items():
        try:
            call = maker(timer.on)
        except MissingError as reason:
            yield "missing", {**about, "implementation": name, "reason": str(reason)}
            continue
        except Exception as error:  # a broken installation may raise anything
            yield "refused", {**about, "implementation": name, "reason": in_one_line(error)}
            continue
        result = checker.check(name, call)
        if isinstance(result, Passed):
            passed[name] = result
        else:
            yield "refused", {**about, "implementation": name, "reason": result}
    del checker
    inputs = case.inputs(timer.on)
    memory = _memory(case, timer.on, passed)
    for which in case.passes:
        rivals = {n: timed_pass(case, ok.call, which, inputs) for n, ok in passed.items()}
        samples = timer.interleave(rivals, seconds=seconds, rounds=rounds)
        for name, timing in samples.items():
            row = figures(case, which, quantiles(timing.device), peaks)
            if timer.on == "cuda":
                row["peak_bytes"] = peak_bytes(rivals[name])
            elif which == "both":
                row |= memory.get(name, {})
            host = quantiles(timing.host)
            inexact = {"inexact": passed[name].inexact} if passed[name].inexact else {}
            yield (
                "op",
                {**about, "pass": which, "implementation": name, **row, "host_s": host, **inexact},
            )


def _memory(case: Case, on: str, passed: dict[str, Passed]) -> dict[str, dict[str, int]]:
    if on == "cuda" or case.label not in case.spec.sizes.get(f"{on}-full", {}):
        return {}
    return {name: memory_on_cpu(case.name, name) for name in passed}


def figures(
    case: Case, which: str, seconds: dict[str, float], peaks: dict[str, float]
) -> dict[str, Any]:
    """Computes an implementation's FLOP/s and bytes/s, and its share of the machine's limit."""
    flops, size = case.work()[which]
    least, bound = limit(flops, size, peaks)
    p50 = seconds["p50"]
    return {
        "device_s": seconds,
        "flops": flops,
        "bytes": size,
        "tflops": flops / p50 / 1e12,
        "gb_per_s": size / p50 / 1e9,
        "bound": bound,
        "limit_s": least,
        "share": least / p50,
        "roof": peaks,
    }
