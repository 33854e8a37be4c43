"""Accounts for a training step of GPT-2 on GPUs that need not be there.

    python -m bench.account [--publish]
    python -m bench.account --beside bench/results/local/h100

Prints what each part of fastgpt's step needs and how long it should take on each GPU, and the same
of nanoGPT's and llm.c's steps beside speeds that were published. With --beside, prints and records
the predicted parts beside those that `bench.step` measured.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import records
from bench.account.steps import TRAINERS
from bench.account.time import ASSUMED, GPUS, RECIPE, Account, Gpu, account, recipe
from bench.goals import is_ours
from bench.report import DOCS
from fastgpt.errors import UserError, run_command
from fastgpt.kernels.runtime import INTERPRETING

PAGE = DOCS / "performance.md"
PUBLISHED = {
    ("llm.c", "A100"): (218e3, "8 GPUs, scripts/run_gpt2_124M.sh"),
    ("llm.c", "H100"): (468e3, "8 GPUs, modded-nanogpt's first record"),
    ("nanoGPT", "RTX 4090"): (106e3, "karpathy/nanoGPT#225"),
    ("nanoGPT", "H100"): (380e3, "karpathy/nanoGPT#464"),
}
"""(Trainer, GPU) -> (tokens per second and GPU, source)."""
EXPECTED = "440,000 to 490,000"
"""Tokens per second of fastgpt on one H100 that published rates of each part add up to: 441,000 at
B = 16, 475,000 at 32, 490,000 at 64. Causal attention with D = 64 and T = 1,024 runs at 250 to 270
TFLOP/s forward (FlashAttention-2 229, Triton 291, cuDNN 288) and 180 to 200 backward, products with
K = 768 under sustained power at 600 to 650; logits are read again from memory, not from the L2."""


def markdown(head: str, rows: list[tuple[str, ...]]) -> str:
    columns = head.split("|")
    lines = [columns, ["-", *["-:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def part_rows(x: Account) -> list[tuple[str, ...]]:
    rows = [
        (part.name, f"{part.count}", f"{part.count * part.flops / 1e12:.2f}",
         f"{part.count * part.bytes / 1e9:.2f}", f"{part.count * part.launches}",
         f"{1e3 * least:.2f}", f"{1e3 * seconds:.2f}")
        for part, least, seconds in sorted(x.lines, key=lambda line: -line[2])
    ]  # fmt: skip
    total = [sum(float(row[i]) for row in rows) for i in (2, 3)]
    launches = sum(int(row[4]) for row in rows)
    sums = (f"{total[0]:.2f}", f"{total[1]:.2f}", f"{launches}", f"{1e3 * x.floor:.2f}")
    return [*rows, ("all", "", *sums, f"{1e3 * x.seconds:.2f}")]


def warning(too_fast: Sequence[float]) -> str:
    """Returns what the errors of the other trainers' predictions on an H100 mean for ours."""
    if not too_fast:
        return ""
    lowest, highest = min(too_fast), max(too_fast)
    peer = PUBLISHED["llm.c", "H100"][0]
    return f"""
**Too fast on an H100.** The same account predicts speeds of nanoGPT and llm.c there that are
{lowest:.0%} to {highest:.0%} above those that were published: expect the same of ours.
A close reading, with published rates for each part, gives {EXPECTED} tokens/s of fastgpt
on one H100, where the fastest of those trainers has {peer:,.0f} per GPU. That is an estimate, too.
"""


def page(gpus: Sequence[Gpu]) -> str:
    """Returns the page, in Markdown."""
    model, tokens = recipe(RECIPE)
    accounts = {(x, gpu.name): account(x, gpu, model, tokens) for x in TRAINERS for gpu in gpus}
    summary, errors, too_fast = [], [], []
    for (name, gpu), x in accounts.items():
        known = PUBLISHED.get((name, gpu))
        if known:
            too_fast += [x.rate / known[0] - 1] * (gpu == "H100")
            errors.append((f"{name}, {gpu}", f"{x.rate:,.0f}", f"{known[0]:,.0f}",
                           f"{x.rate / known[0] - 1:+.0%}", known[1]))  # fmt: skip
        summary.append((f"{name}, {gpu}", f"{1e3 * x.floor:.1f}", f"{1e3 * x.seconds:.1f}",
                        f"{x.rate:,.0f}", f"{x.floor / x.seconds:.0%}"))  # fmt: skip
    assumed = [(name, f"{value:g}", text) for name, (value, text) in ASSUMED.items()]
    for gpu in gpus:
        rates = f"{gpu.flops / 1e12:,.0f} TFLOP/s, {gpu.device.bandwidth:,.0f} GB/s"
        assumed.append((f"{gpu.name}, sm_{gpu.arch}", rates, "Data sheet, dense bf16."))
    parts = [
        f"### {gpu.name}\n\n"
        + markdown("Part|Times|TFLOP|GB|Launches|Floor, ms|Predicted, ms",
                   part_rows(accounts["fastgpt", gpu.name]))
        for gpu in gpus
    ]  # fmt: skip
    return f"""# Where a training step's time goes

Written by `python -m bench.account --publish`. **Predicted, not measured**: no GPU has run this.
{warning(too_fast)}
One micro-batch of `{RECIPE}`, {tokens:,} tokens in sequences of {model.context}, forward, backward
and one update, on one GPU. A part's floor is its FLOPs at the tensor cores' peak or its bytes at
the memory's bandwidth, whichever takes longer. The prediction takes the shares of these rates that
are assumed below; attention's time, and that of our other kernels where they are not bound by
memory, follows from their machine code.

## Summary

{markdown("Trainer and GPU|Floor, ms|Predicted, ms|Tokens/s|Floor of predicted", summary)}

The same account of other trainers, beside speeds that were published. Where it is too fast for
them, expect the same of ours: clocks fall under load, and eight GPUs wait for each other.

{markdown("Trainer and GPU|Predicted tokens/s|Published|Error|Source", errors)}

## Assumptions

{markdown("What|Value|Meaning", assumed)}

## fastgpt's step by part

{chr(10).join(f"{x}{chr(10)}" for x in parts)}"""


def names_of(gpus: Iterable[Gpu]) -> list[str]:
    return [gpu.name for gpu in gpus]


def beside(rows: list[dict[str, Any]], gpus: Iterable[Gpu]) -> list[dict[str, Any]]:
    """Returns a row for each part of fastgpt's measured steps, with its prediction and error.

    Args:
        rows: records of `bench.step`, of which those of RECIPE with parts and a known GPU count.
    """
    found = []
    for row in rows:
        gpu = next((gpu for gpu in gpus if gpu.name in row["device"]), None)
        if gpu is None or "parts" not in row or not is_ours(row) or row["recipe"] != RECIPE:
            continue
        tokens = row["shape"]["B"] * row["shape"]["T"]
        said = account("fastgpt", gpu, recipe(RECIPE)[0], tokens).by_group()
        about = {name: row[name] for name in ("case", "implementation")}
        measured = {part: row["parts"].get(part, 0.0) for part in said} | {
            "step": 1e3 * row["seconds"]["p50"]
        }
        for part, ms in {**said, "step": sum(said.values())}.items():
            error = ms / measured[part] - 1 if measured[part] else None
            figures = {"predicted_ms": ms, "measured_ms": measured[part], "error": error}
            found.append({**about, "part": part, **figures})
    return found


def show_beside(folder: Path) -> None:
    """Prints predicted beside measured for the steps recorded in a folder, and records it.

    Raises:
        UserError: there is no step of fastgpt with its parts.
    """
    steps = [row for row in records.read(folder) if row["kind"] == "step" and is_ours(row)]
    if not any("parts" in row for row in steps):
        raise UserError(f"{folder} has no step of fastgpt that bench.step measured part by part")
    rows = beside(steps, GPUS)
    if not rows:
        what, where = (f"{steps[0][key]}" for key in ("recipe", "device"))
        there = f"there is one of {RECIPE} on {', '.join(names_of(GPUS))}"
        print(f"no account of {what} on {where}: {there}")
        return
    writer = records.Writer("cuda", folder)
    for row in rows:
        writer.write("account", row)
    records.show("case|contender|part|predicted ms|measured ms|error", [
        (row["case"], row["implementation"], row["part"], f"{row['predicted_ms']:.2f}",
         f"{row['measured_ms']:.2f}", "-" if row["error"] is None else f"{row['error']:+.0%}")
        for row in rows
    ])  # fmt: skip


def main(argv: list[str]) -> None:
    kind = argparse.RawDescriptionHelpFormatter
    name = "python -m bench.account"
    parser = argparse.ArgumentParser(prog=name, description=__doc__, formatter_class=kind)
    parser.add_argument("--publish", action="store_true", help=f"write docs/{PAGE.name}")
    text = "print predicted beside measured for the steps recorded there"
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help=text)
    names = names_of(GPUS)
    parser.add_argument("--gpus", nargs="+", choices=names, default=names, help="only these GPUs")
    args = parser.parse_args(argv)
    gpus = [gpu for gpu in GPUS if gpu.name in args.gpus]
    if INTERPRETING:
        raise UserError("unset TRITON_INTERPRET, because the interpreter compiles nothing")
    if args.beside:
        show_beside(args.beside)
    elif args.publish:
        PAGE.write_text(page(gpus), encoding="utf-8")
        print(PAGE)
    else:
        print(page(gpus))


if __name__ == "__main__":
    run_command(main)
