"""bench.count: the formula holds, and our compiled step does no more than is written down here."""

import json

import pytest

COUNT = """
import json, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from bench import count
from bench.trainers import Benchmark, base_config, with_batch

folder, compiled, *sizes = sys.argv[1:]
text = Path(folder, "text")
drawn = np.random.default_rng(0).integers(260, size=4740)
text.write_text("".join(chr(0x4E00 + i) for i in [*range(260), *drawn]))
config = base_config("gpt2-124m", "cuda", text, compile=compiled)
config = replace(config, model=replace(config.model, vocab_size=260, dim=64, num_heads=4))
whole = with_batch(Benchmark(config=config, on="cuda", precision="bf16"), 16)
count.chunks_at = lambda *_: 3  # as for GPT-2's vocabulary
for size in sizes:
    found = count.count("fastgpt triton", whole, *map(int, size.split("x")))
    print("RESULT", json.dumps(dict(zip(("parts", "waits", "allocations"), found))))
"""


@pytest.fixture
def counted(simulated, tmp_path):
    """Counts steps of a narrow GPT-2 with our kernels, each of LAYERSxBATCH."""

    def run(compiled: str, *sizes: str):
        said = simulated(COUNT, str(tmp_path), compiled, *sizes, flags="--memory 4GiB")
        return [json.loads(x.split(" ", 1)[1]) for x in said.splitlines() if x[:6] == "RESULT"]

    return run


MOVED = ("read", "written")


def sums(found):
    return {key: sum(row[key] for row in found["parts"].values()) for key in ("launches", *MOVED)}


WHOLE = """
import json, sys
from dataclasses import replace
from bench import count
from fastgpt.config.recipes import RECIPES
config = RECIPES["gpt2-124m"][1]
model = replace(config.model, num_layers=3, context=64)
config = replace(config, model=model, train=replace(config.train, batch_tokens=12 * 64))
print(json.dumps(count.predicted({tuple(at): x for at, x in json.loads(sys.argv[1])}, config)))
"""


@pytest.mark.long
def test_a_whole_step_follows_from_four_small_ones(counted, simulated):
    sizes = [(layers, batch) for layers in (1, 2) for batch in (4, 8)]
    *found, larger = counted("off", "1x4", "1x8", "2x4", "2x8", "3x12")
    corners = [(at, x["parts"]) for at, x in zip(sizes, found, strict=True)]
    whole = {"parts": json.loads(simulated(WHOLE, json.dumps(corners)))}
    assert sums(whole) == pytest.approx(sums(larger), rel=1e-3)


def test_our_step_by_torch_compile(counted):
    """Fewer are welcome; more need a reason."""
    (found,) = counted("on", "2x4")
    launches = {part: row["launches"] for part, row in found["parts"].items() if row["launches"]}
    assert launches == {  # so small a head that other casts count as the head's
        "data": 2, "attention": 6, "head and loss": 28, "norms": 11, "activation": 4,
        "projections": 28, "other": 1, "clipping": 7, "optimizer": 9,
    }  # fmt: skip
    assert sum(sums(found)[key] for key in MOVED) == 15_120_515
    assert (found["waits"], found["allocations"]) == (0, 0)


RANKS = """
import os, sys, threading
sys.path.insert(0, os.getcwd())
import simgpu
from fastgpt.parallel import parallelize
from fastgpt.train.build import build
from fastgpt.train.trainer import train
from fastgpt.cli import configure
from fastgpt.train.plan import resolve

parallelize.BUCKET_MB = 1  # about a block, as are 25 MiB of gpt2-124m
run = build(resolve(configure(sys.argv[1:])))
for _ in range(2):
    train(run, run.step + 1)
with simgpu.trace() as works:
    train(run, run.step + 1)
backward = [x for x in works if x.thread != threading.get_native_id()]
moved = [0 if x.name.startswith("nccl") else x.read + x.written for x in backward]
sent = next(i for i, x in enumerate(backward) if x.name in ("ncclAllReduce", "ncclReduceScatter"))
print("SENT", sum(moved[:sent]) / sum(moved), backward[sent].name)
run.loader.close()
"""
FLAGS = (
    "baby --model.num-layers 12 --model.dim 128 --model.num-heads 2 --model.context 64"
    " --train.micro-batch 1 --steps 9 --train.device cuda --train.precision bf16"
    " --train.compile on --ops.attention triton --ops.loss chunked --ops.kernels triton"
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "kind"),
    [(2, "ddp"), (2, "fsdp"), pytest.param(4, "ddp", marks=pytest.mark.slow)],
)
def test_ranks_exchange_gradients_while_the_backward_goes_on(simulated, tmp_path, ranks, kind):
    (tmp_path / "ranks.py").write_text(RANKS)
    given = [*FLAGS.split(), "--train.batch-tokens", str(64 * ranks), "--parallel.kind", kind]
    given += ["--run-dir", str(tmp_path / "run")]
    job = str(tmp_path / "ranks.py")
    said = simulated(job, *given, flags=f"--gpus {ranks}", ranks=ranks)
    shares = [float(line.split()[1]) for line in said.splitlines() if line.startswith("SENT")]
    assert len(shares) == ranks
    assert max(shares) < 1 / 3, said
