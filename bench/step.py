"""Benchmarks a training step beside those of other trainers: `python -m bench.step [recipe]`.

Every implementation does what its trainer does between two log lines: batch, forward, backward,
clipping, optimizer. All have the same number of tokens and the same precision; on a CPU fastgpt and
nanoGPT are timed in fp32 as well, and llm.c in fp32 alone. Each runs in a process of its own. They
take turns in an order that alternates.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from bench import implementations, parts, records
from bench.goals import is_ours
from bench.implementations import TINY, Benchmark
from bench.timing import Timer, busy_processes, machine_rates, peaks_of
from bench.trainers import LLMC_ON_CPU, nanogpt_module, run_llmc, run_llmc_on_cpu
from fastgpt import flags
from fastgpt.config.config import Config, DataConfig
from fastgpt.config.recipes import RECIPES
from fastgpt.data.preparation import open_corpus
from fastgpt.device import device
from fastgpt.errors import UserError, run_command, unknown_name
from fastgpt.model.flops import MFU_CONVENTION, flops_per_token

BATCHES = (64, 16, 4)
"""Batch sizes in sequences on CUDA, most important first; on a CPU it is the recipe's."""
LLMC_STEPS = 20
GPT2_VOCABULARY = 50_257
VOCABULARY = 65
"""Size of tiny shakespeare's vocabulary, for recipes that take theirs from the text."""


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
    """Dropout of all implementations; by default the recipe's."""
    implementations: tuple[str, ...] = ()
    """Names of the implementations; by default fastgpt, eager and nanogpt (if --nanogpt is given).

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
    """Number of timed rounds, after one that is not timed; each implementation runs in each."""
    starts: Literal[1, 2] = 1
    """Number of starts of each implementation; the second finds torch.compile's caches filled."""
    parallel_start: bool = False
    """Build and compile all implementations of a batch size at once.

    Their first steps then run at the same time, which the record notes.
    """
    budget: float = float("inf")
    """Seconds after which no further batch size is started; the record lists skipped ones."""
    explain: bool = False
    """Print the three parts of fastgpt's step that cost the most over their limit."""
    trace: bool = False
    """Keep a Chrome trace of each of fastgpt's steps in the folder of the record."""
    busy: int = 0
    """Number of other processes that keep a core busy meanwhile."""
    tiny: bool = False
    """Use a network of 1 layer of 16, for rehearsals."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to measure; `auto` takes CUDA if torch sees it, else the CPU."""
    out: Path | None = None
    """Folder of the record; by default bench/results/local/<device>."""


def base_config(bench: StepBench, on: str, text: Path) -> Config:
    """Returns the recipe's settings, on random text of its vocabulary."""
    name = bench.recipe
    if name == "auto":
        name = "gpt2-124m" if on == "cuda" else "shakespeare-char"
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    config = RECIPES[name][1]
    vocab = (not bench.tiny and config.model.vocab_size) or VOCABULARY
    model = replace(config.model, vocab_size=vocab, **(TINY if bench.tiny else {}))
    if bench.dropout is not None:
        model = replace(model, dropout=bench.dropout)
    if bench.context is not None:
        model = replace(model, context=bench.context)
    if not text.exists():
        implementations.write_text(text, vocab, 2_000_000 if vocab > 1000 else 200_000)
    data = DataConfig(source=str(text), tokenizer="chars")
    train = replace(config.train, compile=bench.compile, device=on, batch_tokens=2**20)
    return replace(config, model=model, data=data, train=train)


def with_batch(benchmark: Benchmark, batch: int) -> Benchmark:
    tokens = batch * benchmark.config.model.context
    train = replace(benchmark.config.train, batch_tokens=tokens, micro_batch=batch)
    return replace(benchmark, config=replace(benchmark.config, train=train))


def names_of(bench: StepBench, on: str) -> tuple[str, ...]:
    """Returns the implementations asked for, or all that make sense on the device, by name."""
    if unknown := [
        name for name in bench.implementations if name not in implementations.IMPLEMENTATIONS
    ]:
        raise unknown_name("implementation", unknown[0], implementations.IMPLEMENTATIONS)
    for peer, path in (("nanogpt", bench.nanogpt), ("nanochat", bench.nanochat)):
        if named := [name for name in bench.implementations if name.startswith(peer) and not path]:
            raise UserError(f"implementation {named[0]} needs --{peer} PATH, a checkout")
    if bench.implementations:
        return bench.implementations
    names = ["fastgpt"]
    names += ["fastgpt triton", "eager", "compiled"] if on == "cuda" else ["fastgpt fp32", "eager"]
    if bench.nanogpt is not None:
        names += ["nanogpt"] if on == "cuda" else ["nanogpt", "nanogpt fp32"]
    return tuple(names)


def check(bench: StepBench, on: str) -> None:
    """Raises `UserError` for options that cannot be measured, before anything runs."""
    if bench.busy < 0:
        raise UserError(f"--busy is {bench.busy}: expected 0 or more")
    for name, given in (("rounds", bench.rounds), ("context", bench.context)):
        if given is not None and given < 1:
            raise UserError(f"--{name} is {given}: expected 1 or more")
    if wrong := [n for n in bench.batch if n < 1]:
        raise UserError(f"--batch {wrong[0]}: expected 1 or more")
    if bench.nanogpt is not None:
        nanogpt_module(bench.nanogpt)


# --- all of it ------------------------------------------------------------------------------------


def time_implementations(
    bench: StepBench, on: str, folder: Path, traces: Path | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields rows of kind `step` and `missing`, each as soon as it is known."""
    check(bench, on)
    names = names_of(bench, on)
    config = base_config(bench, on, folder / "text.txt")
    precision = device.pick_precision(config.train.precision, on)
    benchmark = Benchmark(config=config, on=on, precision=precision, nanogpt=bench.nanogpt)
    benchmark = replace(benchmark, nanochat=bench.nanochat, traces=traces)
    both = (precision, "fp32") if on == "cpu" and precision != "fp32" else (precision,)
    rates = machine_rates(Timer(on), both, 0.2 if bench.tiny else 1.0)
    if on == "cuda":
        torch.cuda.empty_cache()  # 3 GB for the implementations
    end = time.perf_counter() + bench.budget
    usual = (8 if bench.tiny else RECIPES[config.recipe][1].global_batch,)
    for batch in bench.batch or (BATCHES if on == "cuda" else usual):
        length = "" if bench.context is None else f"/T={bench.context}"
        busy = f"/busy={bench.busy}" if bench.busy else ""
        about = {
            "recipe": config.recipe,
            "precision": precision,
            "tiny": bench.tiny,
            "case": f"step/{config.recipe}/B={batch}{length}{busy}",
            "shape": {"B": batch, "T": config.model.context},
            "dropout": config.model.dropout,
        }
        if time.perf_counter() > end:
            reason = f"over the budget of {bench.budget:.0f} s"
            yield "missing", {**about, "implementation": "all", "reason": reason}
            continue
        now = with_batch(benchmark, batch)
        with busy_processes(bench.busy):
            yield from _implementations(bench, names, now, rates, about, folder / "caches")
        for name, flag in (("nanogpt", bench.nanogpt), ("llm.c", bench.llmc)):
            if flag is None:
                reason = f"not given: --{name.replace('.', '')} PATH"
                yield "missing", {**about, "implementation": name, "reason": reason}
        if bench.llmc is not None:
            yield _llmc(bench, now, rates, about)


def _implementations(
    bench: StepBench, names: tuple[str, ...], benchmark: Benchmark, rates: dict[str, float],
    about: dict[str, Any], caches: Path,
) -> Iterator[tuple[str, dict[str, Any]]]:  # fmt: skip
    """Yields the measurements of one batch size, each as soon as it is known."""
    from bench.count import recorded  # imports this module

    before = records.state(benchmark.on)
    how = {"alternating": True, "first_step_alone": not bench.parallel_start}
    found = implementations.run_interleaved(
        names, benchmark, caches, rounds=bench.rounds, starts=bench.starts,
        parallel_start=bench.parallel_start,
    )  # fmt: skip
    for name, figures in found:
        row = {**about, "implementation": name, **figures}
        if "reason" in figures:
            yield "missing", row
            continue
        if benchmark.on == "cuda" and figures["precision"] == "bf16":
            row["counted"] = recorded(name, benchmark.config)
        state = {"before": before, "after": records.state(benchmark.on)}
        yield "step", {**row, **how, **_rates(benchmark, figures, rates), **state}


def _rates(benchmark: Benchmark, found: dict[str, Any], rates: dict[str, float]) -> dict[str, Any]:
    """Returns the speed of a row, and its share of the machine's limits for its precision."""
    precision = found["precision"]
    peaks = peaks_of(rates, precision)
    tok_per_s = benchmark.tokens / found["seconds"]["p50"]
    flops = flops_per_token(benchmark.config.model)
    speed: dict[str, Any] = {
        "tok_per_s": tok_per_s, "mfu": tok_per_s * flops / peaks["matmul"],
        "mfu_convention": MFU_CONVENTION, "roof": peaks,
    }  # fmt: skip
    if "parts" in found:
        size = 4 if precision == "fp32" else 2
        speed["limits"] = parts.limits(
            benchmark.config.model, benchmark.tokens, size, peaks,
            muon=found.get("optimizer") == "muon",
        )  # fmt: skip
    return speed


def _llmc(
    bench: StepBench, benchmark: Benchmark, rates: dict[str, float], about: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    config, row = benchmark.config, {**about, "implementation": "llm.c"}
    assert bench.llmc is not None
    try:
        implementations.expect_gpt2(config.model)
        if config.model.vocab_size != GPT2_VOCABULARY:
            raise UserError(f"needs GPT-2's vocabulary, got {config.model.vocab_size} tokens")
        sizes = {"batch": config.global_batch, "context": config.model.context}
        if benchmark.on == "cpu":
            if sizes != LLMC_ON_CPU:
                raise UserError(f"has {LLMC_ON_CPU} built in, got {sizes}")
            found = run_llmc_on_cpu(bench.llmc, config.model, LLMC_STEPS)
        else:
            corpus = open_corpus(config.data.source, tokenizer="chars", val_fraction=0.1)
            layers = config.model.num_layers
            found = run_llmc(
                bench.llmc, Path(corpus.path), layers=layers, steps=LLMC_STEPS, **sizes
            )
    except UserError as error:
        return "missing", {**row, "reason": str(error)}
    precision = "fp32" if benchmark.on == "cpu" else "bf16"
    found |= {"optimizer": "adamw", "alternating": False, "precision": precision}
    return "step", {**row, **found, **_rates(benchmark, found, rates)}


def print_rows(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        ours = next((r for r in rows if r["case"] == row["case"] and is_ours(r)), None)
        ms = " ".join(f"{row['seconds'][p] * 1e3:.1f}" for p in ("p20", "p50", "p80"))
        memory = f"{row['peak_bytes'] / 1e9:.2f}" if row.get("peak_bytes") else "-"
        ratio = f"{row['seconds']['p50'] / ours['seconds']['p50']:.2f}x" if ours else "-"
        cells = (row["case"], row["implementation"], f"{row['tok_per_s']:,.0f}", ms)
        lines.append((*cells, f"{row['mfu']:.1%}", memory, ratio))
    records.show("step|implementation|tok/s|ms p20 p50 p80|MFU|GB|time / fastgpt's", lines)


def run(bench: StepBench) -> Path:
    """Measures, records and prints; returns the path of the record."""
    on = device.pick_device(bench.device, "--device", ("cuda", "cpu"))
    settings = {"rounds": bench.rounds, "parallel_start": bench.parallel_start}
    writer = records.Writer(on, bench.out, **settings)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        traces = writer.path.parent if bench.trace else None
        for kind, row in time_implementations(bench, on, Path(name), traces):
            writer.write(kind, row)
            said = f"{row['case']} {row['implementation']}"
            if kind == "missing":
                print(f"{said}: not measured: {row['reason']}", flush=True)
            else:
                print(f"{said}: {row['tok_per_s']:,.0f} tok/s", flush=True)
                rows.append(row)
    print_rows(rows)
    if bench.explain:
        for row in rows:
            if is_ours(row):
                found = "parts" in row
                lines = parts.explain(row["parts"], row["limits"]) if found else [row["no_parts"]]
                if found and row.get("counted"):
                    lines += parts.beside_counts(row["parts"], row["counted"], row["roof"])
                print(f"{row['case']} {row['implementation']}:")
                print("\n".join(f"  {line}" for line in lines))
    if not rows:
        raise UserError("no implementation took a step; the reasons are above")
    asked = names_of(bench, on)
    if not any(map(is_ours, rows)) and any(name.startswith("fastgpt") for name in asked):
        raise UserError("fastgpt took no step; the reasons are above")
    return writer.path


def main(argv: list[str]) -> None:
    print(run(flags.parse(StepBench, argv, prog="python -m bench.step")))


if __name__ == "__main__":
    run_command(main)
