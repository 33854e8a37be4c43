"""llm.c's binary as a peer: run on the same tokens, its own figures read from what it prints."""

import re
import subprocess
from pathlib import Path
from typing import Any

from bench.timing import quantiles
from fastgpt.errors import UserError

STEP = re.compile(
    r"step\s+(?P<step>\d+)/\d+ .*?\|\s*(?P<ms>[\d.]+) ms .*?\|\s*(?P<tok_per_s>\d+) tok/s"
)
"""As its train_gpt2.cu prints a step (commit f1e2ace)."""
PATIENCE_S = 600
MEMORY = re.compile(r"allocat(?:ed|ing) (\d+) MiB")


def steps_in(output: str) -> list[float]:
    """Seconds of each step it printed, but for the first, which warms up."""
    return [float(m["ms"]) / 1e3 for m in STEP.finditer(output) if int(m["step"]) > 1]


def measure(
    binary: Path, shards: Path, *, layers: int, batch: int, context: int, steps: int
) -> dict[str, Any]:
    """Its seconds a step and the MiB it says it allocates, in bf16.

    Args:
        binary: `train_gpt2cu`, or a checkout that has it.
        shards: a folder with `train_*.bin` and `val_*.bin` in its format.
        layers: of a GPT-2 of that depth, with random weights.
        batch: sequences a step.
        context: tokens of each.
        steps: to take.

    Raises:
        UserError: it is not there, fails, takes too long, or prints no steps.
    """
    binary = binary / "train_gpt2cu" if binary.is_dir() else binary
    if not binary.exists():
        raise UserError(f"--llmc {binary}: expected llm.c's train_gpt2cu, found nothing")
    command = [
        str(binary.absolute()), "-i", str(shards / "train_*.bin"), "-j", str(shards / "val_*.bin"),
        "-e", f"d{layers}", "-b", str(batch), "-t", str(context), "-d", str(batch * context),
        "-x", str(steps), "-v", "1000000", "-m", "1", "-s", "0", "-r", "0",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except OSError as error:
        raise UserError(f"--llmc {binary} does not run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"--llmc {binary}: not done in {PATIENCE_S} s") from error
    seconds = steps_in(done.stdout)
    if done.returncode or len(seconds) < 2:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
        raise UserError(f"--llmc {binary}: exit status {done.returncode}, it said: {said[0]}")
    mib = sum(int(found) for found in MEMORY.findall(done.stdout))
    return {"seconds": quantiles(seconds), "peak_bytes": mib * 2**20 or None}
