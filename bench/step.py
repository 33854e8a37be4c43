"""Benchmarks a training step beside those of other trainers: `python -m bench.step [recipe]`.

All trainers have the same number of tokens and the same precision; on a CPU fastgpt and nanoGPT are
timed in fp32 as well, and llm.c in fp32 alone. Each has a process of its own, which builds it and
takes a first step. Then they take turns, A B B A.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from bench import parts, records, report, trainers
from bench.count import recorded
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
PATIENCE = 5  # attempts at the first step if other trainers leave too little GPU memory
ANSWER_S = 600  # that a process may take to build and compile, or for a turn
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
    dropout: float | None = None
    """Dropout of all trainers; by default the recipe's."""
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
    """Print the three parts of fastgpt's step that cost the most over their limit."""
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
    for flag, numbers in (("rounds", (bench.rounds,)), ("batch", bench.batch)):
        if wrong := [number for number in numbers if number < 1]:
            raise UserError(f"--{flag} is {wrong[0]}: expected 1 or more")
    for name in bench.implementations:
        if name not in TRAINERS:
            raise unknown_name("implementation", name, TRAINERS)
    for peer, file in (("nanogpt", "model.py"), ("nanochat", "nanochat/gpt.py")):
        path = getattr(bench, peer)
        if path is None and any(name.startswith(peer) for name in bench.implementations):
            raise UserError(f"implementation {peer} needs --{peer} PATH, a checkout")
        if path is not None and not (path / file).exists():
            raise UserError(f"--{peer} {path}: expected a checkout, found no {file}")
    usual = ["fastgpt", "fastgpt triton", "eager", "compiled", "nanogpt"]
    if on == "cpu":
        usual = ["fastgpt", "fastgpt fp32", "eager", "nanogpt", "nanogpt fp32"]
    usual = [name for name in usual if bench.nanogpt or not name.startswith("nanogpt")]
    return tuple(dict.fromkeys(bench.implementations or usual))


def first_step(step: trainers.Step, on: str) -> None:
    """Takes a step; retries while other trainers that start fill the GPU's memory."""
    for left in reversed(range(PATIENCE)):
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
    on, seconds, host = benchmark.on, list[float](), list[float]()
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
            returned = time.perf_counter()
            device.synchronize(on)
            if turn > 0 and number >= WARM_STEPS:
                seconds.append(time.perf_counter() - start)
                host.append(returned - start)
        yield {}
    facts |= {"figure": quantiles(seconds), "host": quantiles(host), "peak_bytes": None}
    if on == "cuda":
        facts["peak_bytes"] = torch.cuda.max_memory_allocated()
    elif Path("/proc/self/status").exists():
        facts["peak_bytes"] = resident_peak()
    trace = None
    if benchmark.traces is not None and name.startswith("fastgpt"):
        file = f"{records.slug(name)}-{benchmark.config.global_batch}.trace.json.gz"
        trace = benchmark.traces / file
    try:
        facts |= parts.profile(step, on, trace)
    except Exception as error:  # the times stand without it
        facts["no_parts"] = in_one_line(error)
    yield facts


def serve(pipe: Connection, caches: Path, *args: Any) -> None:
    """Sends an answer for each request, or why there is none; ends when the pipe does."""
    # empty folders make a cold start
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(caches / "triton")
    found = answers(*args)
    try:
        while pipe.recv():
            answer = next(found)
            torch.cuda.empty_cache()  # for the others; weights and moments stay
            pipe.send(answer)
    except EOFError:
        pass
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
        pipe.send({"why": str(error) if isinstance(error, UserError) else in_one_line(error)})


def process(*args: Any) -> Generator[Found, None, None]:
    """Runs `serve` in a process; yields nothing when it has started, then its answers."""
    spawn = multiprocessing.get_context("spawn")
    pipe, its_end = spawn.Pipe()
    running = spawn.Process(target=serve, args=(its_end, *args), daemon=True)
    running.start()
    its_end.close()  # then recv raises when the process ends
    try:
        pipe.send("begin")
        yield {}
        while pipe.poll(ANSWER_S):
            answer = pipe.recv()
            yield answer
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
    names: tuple[str, ...], benchmark: Benchmark, caches: Path, rounds: int, parallel_start: bool
) -> Iterator[tuple[str, Found]]:
    """Yields (name, figures) of each trainer, or (name, {"why": why it has none})."""
    running: dict[str, Generator[Found, None, None]] = {}
    found: dict[str, Found] = {}
    try:
        for name in names:
            folder = caches / records.slug(name) / str(benchmark.config.global_batch)
            running[name] = process(folder, name, benchmark, rounds)
            for _ in range(1 if parallel_start else 2):
                found[name] = next(running[name])
        for turn in range(rounds + 1 + parallel_start):
            for name in names[:: -1 if turn % 2 else 1]:
                found[name] = next(running[name], found[name])
        for name in names:
            yield name, next(running[name], found[name])
    finally:
        for it in running.values():
            it.close()


def without_turns(bench: StepBench, benchmark: Benchmark) -> Iterator[tuple[str, Found]]:
    """Yields the same of llm.c, which is no process of ours, and of what was not given."""
    if bench.nanogpt is None:
        yield "nanogpt", {"why": "not given: --nanogpt PATH"}
    try:
        if bench.llmc is None:
            raise UserError("not given: --llmc PATH")
        yield "llm.c", trainers.run_llmc(bench.llmc, benchmark)
    except (OSError, UserError) as error:
        yield "llm.c", {"why": str(error)}


def measured(
    bench: StepBench, on: str, names: tuple[str, ...], folder: Path, traces: Path | None
) -> Iterator[Record]:
    """Yields a record of each batch size and trainer, as soon as it is known."""
    config = trainers.base_config(
        bench.recipe, on, folder / "text.txt", context=bench.context, dropout=bench.dropout,
        compile=bench.compile, tiny=bench.tiny,
    )  # fmt: skip
    precision = device.pick_precision(config.train.precision, on)
    checkouts = {"nanogpt": bench.nanogpt, "nanochat": bench.nanochat}
    base = Benchmark(config=config, on=on, precision=precision, traces=traces, **checkouts)
    formats = dict.fromkeys((precision, "fp32") if on == "cpu" else (precision,))
    rates = machine_rates(Timer(on), tuple(formats), 0.2 if bench.tiny else 1.0)
    torch.cuda.empty_cache()  # 3 GB for the trainers
    usual = 8 if bench.tiny else RECIPES[config.recipe][1].global_batch
    for batch in bench.batch or (BATCHES if on == "cuda" else (usual,)):
        benchmark, before = trainers.with_batch(base, batch), records.state(on)
        case = f"step/{config.recipe}/B={batch}" + (f"/T={bench.context}" if bench.context else "")
        turns = in_turns(names, benchmark, folder / "caches", bench.rounds, bench.parallel_start)
        for name, found in chain(turns, without_turns(bench, benchmark)):
            more = {} if "why" in found else derived(name, benchmark, found, rates)
            about = {
                "recipe": config.recipe, "precision": precision, "dropout": config.model.dropout,
                "shape": {"B": batch, "T": config.model.context}, **found, **more,
            }  # fmt: skip
            yield record(case, name, **about, before=before, after=records.state(on))


def derived(name: str, benchmark: Benchmark, found: Found, rates: dict[str, float]) -> Found:
    """Returns what follows from a trainer's figures: its speed and the machine's limits."""
    model, tokens, precision = benchmark.config.model, benchmark.tokens, found["precision"]
    peaks, speed = peaks_of(rates, precision), tokens / found["figure"]["p50"]
    mfu = speed * flops_per_token(model) / peaks["matmul"]
    more = {"tok_per_s": speed, "mfu": mfu, "mfu_convention": MFU_CONVENTION, "peaks": peaks}
    if "parts" in found:
        size, muon = 4 if precision == "fp32" else 2, found["optimizer"] == "muon"
        more["limits"] = parts.limits(model, tokens, size, peaks, muon=muon)
    if benchmark.on == "cuda" and precision == "bf16":
        more["counted"] = recorded(name, benchmark.config)
    return more


def show(rows: list[Record]) -> None:
    """Prints a table of the rows, which have a figure."""
    lines = []
    for row in rows:
        ours = next((r for r in rows if r["case"] == row["case"] and is_ours(r)), None)
        memory = f"{row['peak_bytes'] / 1e9:.2f}" if row["peak_bytes"] else "-"
        ratio = f"{row['figure']['p50'] / ours['figure']['p50']:.2f}x" if ours else "-"
        cells = (row["case"], row["implementation"], f"{row['tok_per_s']:,.0f}")
        lines.append((*cells, report.quantiles_of(row, 1e3), f"{row['mfu']:.1%}", memory, ratio))
    report.show("step|trainer|tok/s|ms p20 p50 p80|MFU|GB|time / fastgpt's", lines)


def explain(row: Record) -> None:
    """Prints which parts of a step cost the most over their limit, and what was foretold of all."""
    found = "parts" in row
    lines = parts.explain(row["parts"], row["limits"]) if found else [row["no_parts"]]
    if found and row.get("counted"):
        lines += parts.beside_counts(row["parts"], row["counted"], row["peaks"])
    print("\n  ".join((f"{row['case']} {row['implementation']}:", *lines)))


def run(bench: StepBench) -> list[Record]:
    """Measures, records and prints; returns the records."""
    on = device.pick_device(bench.device, "--device", ("cuda", "cpu"))
    names = names_of(bench, on)
    settings = {"rounds": bench.rounds, "parallel_start": bench.parallel_start, "tiny": bench.tiny}
    writer, rows = records.Writer(on, bench.out, **settings), list[Record]()
    traces = writer.path.parent if bench.trace else None
    with tempfile.TemporaryDirectory() as folder:
        for row in measured(bench, on, names, Path(folder), traces):
            writer.write(row)
            rows.append(row)
            said = f"{row['tok_per_s']:,.0f} tok/s" if row["figure"] else row["why"]
            print(f"{row['case']} {row['implementation']}: {said}", flush=True)
    timed = [row for row in rows if row["figure"]]
    show(timed)
    for row in filter(is_ours, timed if bench.explain else ()):
        explain(row)
    if not timed:
        raise UserError("no trainer took a step; the reasons are above")
    if not any(map(is_ours, timed)) and any(name.startswith("fastgpt") for name in names):
        raise UserError("fastgpt took no step; the reasons are above")
    return rows


def main(argv: list[str]) -> None:
    bench = flags.command(StepBench, argv, prog="python -m bench.step")
    run(bench)
    print(f"recorded in {bench.out or records.RESULTS / records.LOCAL}")


if __name__ == "__main__":
    run_command(main)
