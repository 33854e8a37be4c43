"""Benchmarks a training step beside those of other trainers: `python -m bench.step [recipe]`.

All trainers have the same number of tokens and the same precision; on a CPU fastgpt and nanoGPT are
timed in fp32 as well. Each has a process of its own, which builds it and takes a first step. Then
they take turns, A B B A; llm.c runs after them.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from bench import parts, records, report, trainers
from bench.measure import Timer, in_one_line, machine_rates, peaks_of, quantiles, resident_peak
from bench.records import Record, is_ours, record
from bench.trainers import TRAINERS, Benchmark
from fastgpt import flags
from fastgpt.config.recipes import RECIPES
from fastgpt.device import cpu, device
from fastgpt.errors import UserError, run_command, unknown_name
from fastgpt.model.flops import MFU_CONVENTION, flops_per_token

BATCHES = (64, 16, 4)  # sequences in a step on CUDA, most important first; else the recipe's
WARM_STEPS, TIMED_STEPS = 2, 3  # in each turn
ANSWER_S = 600  # that a process may take to build and compile, or for a turn
USUAL = {
    "cuda": ("fastgpt", "fastgpt triton", "eager", "compiled", "nanogpt"),
    "cpu": ("fastgpt", "fastgpt fp32", "eager", "nanogpt", "nanogpt fp32"),
}
Found = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBench:
    """Times training steps of fastgpt and other trainers, in turn."""

    recipe: Annotated[str, tyro.conf.Positional] = "auto"
    """Recipe of the network and settings; `auto`: gpt2-124m on CUDA, else shakespeare-char."""
    batch: tuple[int, ...] = ()
    """Sequences in a step; by default 64, 16 and 4 on CUDA, the recipe's on a CPU."""
    context: int | None = None
    """Tokens in a sequence; by default the recipe's."""
    implementations: tuple[str, ...] = ()
    """Names of the trainers; by default fastgpt, eager and nanogpt (if --nanogpt is given).

    On CUDA `fastgpt triton` and compiled are added, on a CPU `fastgpt fp32`.
    """
    nanogpt: Path | None = None
    """Path of a nanoGPT checkout, whose model.py is imported."""
    nanochat: Path | None = None
    """Path of a nanochat checkout, whose nanochat/gpt.py is imported."""
    llmc: Path | None = None
    """Path of llm.c's train_gpt2cu (on a CPU train_gpt2), or of a checkout that has it."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Use torch.compile for fastgpt's model."""
    rounds: int = 5
    """Number of timed rounds, after one that is not timed; each trainer runs in each."""
    parallel_start: bool = False
    """Build and compile all trainers of a batch size at once, which slows their first steps."""
    explain: bool = False
    """Print the parts of fastgpt's step, those that cost the most over their limit first."""
    trace: bool = False
    """Keep a Chrome trace of each of fastgpt's steps in the folder of the record."""
    tiny: bool = False
    """Use a network of 1 layer of 16, for rehearsals."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to measure; `auto` takes CUDA if torch sees it, else the CPU."""
    out: Path | None = None
    """Folder of the record; by default bench/results/local."""


def names_of(bench: StepBench, on: str) -> tuple[str, ...]:
    """Returns the trainers asked for, or all that make sense on the device; checks the options."""
    given = {"rounds": (bench.rounds,), "batch": bench.batch, "context": (bench.context,)}
    for name, numbers in given.items():
        if wrong := [number for number in numbers if number is not None and number < 1]:
            raise UserError(f"--{name} is {wrong[0]}: expected 1 or more")
    for name in bench.implementations:
        if name not in TRAINERS:
            raise unknown_name("implementation", name, TRAINERS)
    for peer, path in (("nanogpt", bench.nanogpt), ("nanochat", bench.nanochat)):
        if path is not None or any(name.startswith(peer) for name in bench.implementations):
            trainers.imported(peer, path)
    usual = [name for name in USUAL[on] if bench.nanogpt or not name.startswith("nanogpt")]
    return tuple(dict.fromkeys(bench.implementations or usual))


def first_step(step: trainers.Step, on: str) -> None:
    """Takes a step; retries while other trainers that start fill the GPU's memory."""
    for left in (4, 3, 2, 1, 0):
        try:
            step()
            device.synchronize(on)
            break
        except torch.OutOfMemoryError:
            if not left:
                raise
        torch.cuda.empty_cache()
        time.sleep(3)


def answers(name: str, benchmark: Benchmark, rounds: int) -> Iterator[Found]:
    """Trains; yields nothing after the first step and each turn, and at the end all figures."""
    on, seconds = benchmark.on, list[float]()
    if on == "cpu" and not name.startswith("nanogpt"):
        cpu.keep_freed_memory()
    torch.manual_seed(0)
    start = time.perf_counter()
    step, facts = TRAINERS[name](benchmark)
    first_step(step, on)
    facts["first_step_s"] = time.perf_counter() - start
    yield {}
    for turn in range(rounds + 1):
        for number in range(WARM_STEPS + TIMED_STEPS):
            start = time.perf_counter()
            step()
            device.synchronize(on)
            if turn > 0 and number >= WARM_STEPS:
                seconds.append(time.perf_counter() - start)
        yield {}
    resident = resident_peak() if Path("/proc/self/status").exists() else None
    peak = torch.cuda.max_memory_allocated() if on == "cuda" else resident
    facts |= {"figure": quantiles(seconds), "peak_bytes": peak}
    file = f"{records.slug(name)}-{benchmark.config.global_batch}.trace.json.gz"
    traces = benchmark.traces if name.startswith("fastgpt") else None
    try:
        facts |= parts.profile(step, on, traces / file if traces else None)
    except Exception as error:  # the times stand without it
        facts["no_parts"] = in_one_line(error)
    yield facts


def serve(pipe: Connection, caches: Path, *args: Any) -> None:
    """Sends each answer, or why there is none, and waits for a request; its caches begin empty."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(caches / "triton")
    try:
        for answer in answers(*args):
            torch.cuda.empty_cache()  # for the others; weights and moments stay
            pipe.send(answer)
            pipe.recv()
    except EOFError:  # no more is asked
        pass
    except UserError as error:
        pipe.send({"why": str(error)})
    except Exception as error:
        traceback.print_exc()
        pipe.send({"why": in_one_line(error)})


def process(*args: Any) -> Generator[Found, None, None]:
    """Runs `serve` in a process; yields nothing when it has started, then its answers."""
    spawn = multiprocessing.get_context("spawn")
    pipe, its_end = spawn.Pipe()
    running = spawn.Process(target=serve, args=(its_end, *args), daemon=True)
    running.start()
    its_end.close()  # then recv raises when the process ends
    try:
        yield {}
        while pipe.poll(ANSWER_S):
            yield (answer := pipe.recv())
            if "why" in answer:
                return
            pipe.send("go on")
        yield {"why": f"no answer in {ANSWER_S} s"}
    except (EOFError, OSError):
        yield {"why": "its process ended early, perhaps for lack of memory"}
    finally:
        pipe.close()
        running.join(5)
        running.terminate()
        running.join()


def in_turns(
    names: tuple[str, ...], benchmark: Benchmark, bench: StepBench, caches: Path
) -> Iterator[tuple[str, Found]]:
    """Yields (name, figures) of each trainer, or (name, {"why": why it has none})."""
    running: dict[str, Generator[Found, None, None]] = {}
    found: dict[str, Found] = {}
    try:
        for name in names:
            folder = caches / records.slug(name) / str(benchmark.config.global_batch)
            running[name] = process(folder, name, benchmark, bench.rounds)
            for _ in range(1 if bench.parallel_start else 2):
                found[name] = next(running[name])
        for turn in range(bench.rounds + 1 + bench.parallel_start):
            for name in names[:: -1 if turn % 2 else 1]:
                found[name] = next(running[name], found[name])
        for name in names:
            yield name, next(running[name], found[name])
    finally:
        for it in running.values():
            it.close()
    if bench.llmc is not None:
        try:
            yield "llm.c", trainers.run_llmc(bench.llmc, benchmark)
        except (OSError, UserError) as error:
            yield "llm.c", {"why": str(error)}


def measured(bench: StepBench, on: str, names: tuple[str, ...], folder: Path) -> Iterator[Record]:
    """Yields a record of each batch size and trainer, as soon as it is known."""
    config = trainers.base_config(
        bench.recipe, on, folder / "text.txt", context=bench.context, compile=bench.compile,
        tiny=bench.tiny,
    )  # fmt: skip
    precision = device.pick_precision(config.train.precision, on)
    base = Benchmark(
        config=config, on=on, precision=precision, nanogpt=bench.nanogpt, nanochat=bench.nanochat,
        traces=(bench.out or records.RESULTS / records.LOCAL) if bench.trace else None,
    )  # fmt: skip
    formats = {precision, *["fp32"] * (on == "cpu" or any(x.endswith(" fp32") for x in names))}
    formats |= {"bf16"} if bench.llmc and on == "cuda" else set()
    rates = machine_rates(Timer(on), tuple(formats), 0.2 if bench.tiny else 1.0)
    torch.cuda.empty_cache()  # 3 GB for the trainers
    usual = 8 if bench.tiny else RECIPES[config.recipe][1].global_batch
    for batch in bench.batch or (BATCHES if on == "cuda" else (usual,)):
        benchmark = trainers.with_batch(base, batch)
        case = f"step/{config.recipe}/B={batch}" + (f"/T={bench.context}" if bench.context else "")
        for name, found in in_turns(names, benchmark, bench, folder / "caches"):
            about = {"precision": precision, "shape": {"B": batch, "T": config.model.context}}
            more = {} if "why" in found else derived(benchmark, found, rates)
            yield record(case, name, **about | found | more, state=records.state(on))


def derived(benchmark: Benchmark, found: Found, rates: dict[str, float]) -> Found:
    """Returns what follows from a trainer's figures: its speed and the machine's limits."""
    model, tokens, precision = benchmark.config.model, benchmark.tokens, found["precision"]
    peaks, speed = peaks_of(rates, precision), tokens / found["figure"]["p50"]
    mfu = speed * flops_per_token(model) / peaks["matmul"]
    more = {"tok_per_s": speed, "mfu": mfu, "mfu_convention": MFU_CONVENTION, "peaks": peaks}
    more["limits"] = parts.limits(model, tokens, 4 if precision == "fp32" else 2, peaks)
    return more


def said(row: Record, ours: Record | None) -> str:
    """Describes a figure and its ratio to fastgpt's, or why there is none."""
    if row["figure"] is None:
        return row["why"]
    memory = f", {row['peak_bytes'] / 1e9:.2f} GB" if row["peak_bytes"] else ""
    ratio = f", {report.times_ours(row, ours):.2f}x fastgpt's time" if ours else ""
    times = f"{report.quantiles_of(row, 1e3)} ms (p20 p50 p80)"
    return f"{row['tok_per_s']:,.0f} tok/s, {times}, MFU {row['mfu']:.1%}{memory}{ratio}"


def explain(row: Record) -> None:
    """Prints each part of a step with its limit, the furthest over it first."""
    spent, limits = row.get("parts", {}), row["limits"]
    order = sorted(spent, key=lambda part: limits[part] - spent[part])
    report.show("part|ms|limit ms", ((x, f"{spent[x]:.2f}", f"{limits[x]:.2f}") for x in order))
    print(row.get("no_parts", ""))


def run(bench: StepBench) -> list[Record]:
    """Measures, records and prints; returns the records."""
    on = device.pick_device(bench.device, "--device", ("cuda", "cpu"))
    names = names_of(bench, on)
    settings = {"rounds": bench.rounds, "parallel_start": bench.parallel_start}
    writer = records.Writer(on, bench.out, rough=bench.tiny, **settings)
    rows = list[Record]()
    with tempfile.TemporaryDirectory() as folder:
        for row in measured(bench, on, names, Path(folder)):
            writer.write(row)
            rows.append(row)
            same = (x for x in rows if x["case"] == row["case"] and x["figure"])
            ours = next(filter(is_ours, same), None)
            print(f"{row['case']} {row['implementation']}: {said(row, ours)}", flush=True)
            if bench.explain and is_ours(row) and row["figure"]:
                explain(row)
    wanted = {name for name in names if name.startswith("fastgpt")} or {*names}
    if not any(row["figure"] and row["implementation"] in wanted for row in rows):
        raise UserError(f"{' and '.join(wanted)} took no step; the reasons are above")
    print(f"recorded in {writer.path}")
    return rows


def main(argv: list[str]) -> None:
    run(flags.command(StepBench, argv, prog="python -m bench.step"))


if __name__ == "__main__":
    run_command(main)
