"""What a run measures and where it is written: metrics.jsonl, TensorBoard events, loss.png."""

import json
from pathlib import Path
from typing import Any

from fastgpt.config import ModelConfig
from fastgpt.errors import writing
from fastgpt.storage import write_atomically

MFU_CONVENTION = "6N + causal attention over the measured matmul peak"


def flops_per_token(config: ModelConfig) -> float:
    """FLOPs of forward and backward for one token: 6 N + 12 L H D * (mean keys a query sees).

    N counts the weights of matrix products alone, the padded output head included: embeddings,
    positions, norms and biases are not multiplied. A causal query sees (T + 1) / 2 keys on average,
    fewer with a window.
    """
    C, D, F, T = config.dim, config.head_dim, config.ffn_width, config.context
    H, K = config.num_heads, config.kv_heads
    up = 2 * F if config.activation == "swiglu" else F
    qkv, rest = C * (H + 2 * K) * D, H * D * C + C * up + F * C
    match config.architecture:
        case "bigram":
            return 0.0  # one row is looked up
        case "heads":
            rest = 0
        case "feedforward":
            rest = C * C
    N = config.num_layers * (qkv + rest) + config.padded_vocab * C
    window = min(config.window or T, T)
    keys = (window * T - window * (window - 1) / 2) / T
    return 6 * N + 12 * config.num_layers * H * D * keys


class MetricsLog:
    """Appends records to metrics.jsonl and TensorBoard events, and draws them at the end.

    Args:
        run_dir: of the run.
        from_step: records of later steps are dropped: a resumed run writes them again.
    """

    def __init__(self, run_dir: Path, from_step: int) -> None:
        from torch.utils.tensorboard import (
            SummaryWriter,
        )  # slow to import: only the main rank needs it

        self.path = run_dir / "metrics.jsonl"
        self.records = [r for r in read_records(self.path) if r["step"] <= from_step]
        kept = "".join(json.dumps(record) + "\n" for record in self.records)
        with writing(self.path):
            write_atomically(self.path, kept.encode())
            self.file = self.path.open("a", buffering=1)
            purge = from_step + 1 if from_step else None
            self.board = SummaryWriter(str(run_dir), purge_step=purge)

    def write(self, record: dict[str, Any]) -> None:
        """One line of JSON, flushed, and each number but the step as a TensorBoard scalar (those of
        a list as `name/0`, `name/1`, ...)."""
        self.records.append(record)
        with writing(self.path):
            self.file.write(json.dumps(record) + "\n")
            for name, value in record.items():
                if isinstance(value, list):
                    for number, part in enumerate(value):
                        self.board.add_scalar(f"{name}/{number}", part, record["step"])
                elif name != "step" and value is not None:
                    self.board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flushes everything and draws loss.png."""
        with writing(self.path.with_name("loss.png")):
            self.file.close()
            self.board.close()
            plot_losses(self.records, self.path.with_name("loss.png"))


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line that a crash cut short is left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def plot_losses(records: list[dict[str, Any]], path: Path) -> None:
    """Draws training and validation loss over steps as a PNG."""
    from matplotlib.figure import Figure  # without pyplot: no display is looked for

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for key, label in (("train_loss", "training"), ("val_loss", "validation")):
        points = [(r["step"], r[key]) for r in records if key in r]
        if points:
            axes.plot(
                *zip(*points, strict=True), label=label, marker="o" if key == "val_loss" else None
            )
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=120)
