"""Training gives the same losses as on the CPU, and asks no more of the device than is said."""

import json
import time
from pathlib import Path
from shlex import split

import pytest

SMALL = (
    "baby --model.num-layers 2 --model.dim 64 --model.num-heads 4 --model.context 64 "
    "--train.batch-tokens 256 --train.micro-batch 2 --steps 3 --train.sample-tokens 0 "
    "--data.eval-tokens 256 --data.final-eval-tokens 256 --train.precision fp32"
)
TORCH = "--ops.attention sdpa --ops.loss torch --ops.kernels torch"
OURS = "--ops.attention triton --ops.loss chunked --ops.kernels triton"
EAGER, COMPILED = "--train.compile off", "--train.compile on"
long = pytest.mark.long


@pytest.fixture
def train(simulated, tmp_path: Path):
    """Runs train.py and returns its losses: first validation, steps 1 and 3, last validation."""

    def run(*args: str, device: str = "cuda", flags: str = "", ranks: int = 1) -> list[float]:
        run.folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        flags += f" --gpus {ranks}" if ranks > 1 else ""
        all_ = ["train.py", SMALL, "--train.device", device, "--run-dir", str(run.folder), *args]
        among = ranks if ranks > 1 else 0
        run.said = simulated(*split(" ".join(all_)), flags=flags, ranks=among)
        return run.losses()

    def losses() -> list[float]:
        lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
        return [x for line in lines for x in (line.get("train_loss"), line.get("val_loss")) if x]

    run.losses = losses
    return run


CPU: list[float] = []


@pytest.fixture
def cpu(train):
    """The losses of this machine's CPU, of PyTorch's ops: run once, before the first test of it."""
    if not CPU:
        CPU.extend(train(EAGER, TORCH, device="cpu", flags="--gpus 0"))
        assert len(CPU) == 4, CPU
    return CPU


def test_eager(train, cpu):
    found = train(EAGER, TORCH)
    assert found[:2] == pytest.approx(cpu[:2], abs=1e-5)
    # in an fp32 run Muon's products are in bf16, but in fp32 on a CPU
    assert found == pytest.approx(cpu, abs=1e-4)


def test_eager_with_adamw(train):
    flags = [EAGER, TORCH, "--optim.kind adamw"]
    assert train(*flags) == pytest.approx(train(*flags, device="cpu", flags="--gpus 0"), abs=2e-5)


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        pytest.param(f"{EAGER} {OURS}", 1, marks=long),
        pytest.param(f"{COMPILED} {TORCH} --steps 2", 1, marks=long),
        pytest.param(f"{COMPILED} {TORCH} --steps 2 --parallel.kind fsdp", 2, marks=long),
        (f"{EAGER} {TORCH} --parallel.kind ddp", 2),
        pytest.param(f"{EAGER} {TORCH} --parallel.kind fsdp", 2, marks=long),
        pytest.param(f"{EAGER} {TORCH} --parallel.kind fsdp --parallel.tp 2", 2, marks=long),
        pytest.param(f"{EAGER} {TORCH} --parallel.kind ddp --parallel.cp 2", 2, marks=long),
        pytest.param(f"{EAGER} {TORCH} --parallel.kind hsdp --parallel.shards 2 "
                     "--train.micro-batch 1", 4, marks=long),
    ],
    ids=["ours", "compiled", "compiled ranks", "ddp", "fsdp", "tp", "cp", "hsdp"],
)  # fmt: skip
def test_losses_are_the_cpus(train, cpu, flags, ranks):
    found = train(flags, ranks=ranks)
    known = 2 if "--steps 2" in flags else 4
    assert found[:known] == pytest.approx(cpu[:known], abs=1e-4)


@long
def test_cuda_graphs(train, cpu):
    """Two micro-steps add their gradients, and evaluations come between."""
    found = train("--train.compile graphs", TORCH, "--eval-every 1")
    assert [*found[:2], found[-1]] == pytest.approx([*cpu[:2], cpu[-1]], abs=1e-4)


@long
def test_compiled_dropout_is_recomputed(train, cpu):
    """Inductor packs its masks byte by byte, and checks the shapes of attention's random state."""
    flags = "--train.precision bf16 --model.dropout 0.1 --train.recompute full"
    found = train("--train.compile graphs", TORCH, flags)
    assert found[0] == pytest.approx(cpu[0], abs=2e-3)  # no dropout there
    assert found[1] == pytest.approx(cpu[1], abs=0.1)
    assert found[1] != pytest.approx(cpu[1], abs=2e-3)


def test_all_that_a_run_may_do(train):
    """In bf16 with Muon and recomputation: evaluations, samples by our decode kernel, saves."""
    flags = (
        "--train.precision bf16 --optim.kind muon --train.recompute full --eval-every 1"
        " --save-every 1 --train.sample-tokens 8"
    )
    found = train(EAGER, TORCH, flags, "--ops.kernels triton")
    assert train.said.count("--- sample ---") >= 3
    assert len(list((train.folder / "checkpoints").glob("step_*/model.safetensors"))) >= 2
    assert found == pytest.approx(train(EAGER, TORCH, flags, device="cpu"), abs=2e-3)


@long
def test_the_trial_of_auto(train, cpu, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("FASTGPT_CACHE", str(tmp_path_factory.mktemp("cache")))  # no results yet
    found = train(COMPILED, "--steps 2")
    assert "checking and timing our kernels on this device, once" in train.said
    assert "did not pass" not in train.said
    assert found[:2] == pytest.approx(cpu[:2], abs=1e-4)


DIES = """
import os, sys
sys.path.insert(0, os.getcwd())
import train
from fastgpt.train import trainer

def dying(run):
    if run.step == 2 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    return seed(run)

seed, trainer.seed_dropout = trainer.seed_dropout, dying
train.main()
"""


def test_a_rank_that_dies_ends_the_others_which_wait_for_it(simulated, tmp_path):
    (tmp_path / "dies.py").write_text(DIES)
    job = f"torch.distributed.run --nproc_per_node=2 {tmp_path}/dies.py {SMALL} {EAGER} {TORCH}"
    flags = f"--train.device cuda --steps 100 --run-dir {tmp_path}/run"
    began = time.monotonic()
    said = simulated(*split(f"{job} {flags}"), flags="--gpus 2 -m", status=1)
    assert "exitcode  : -9" in said
    assert "error: " in said
    assert time.monotonic() - began < 120  # NCCL itself would wait for ten minutes


@long
def test_16_bits_stay_near(train, cpu):
    found = train(EAGER, TORCH, "--train.precision fp16")
    assert found == pytest.approx(cpu, abs=3e-3)
    assert found != pytest.approx(cpu, abs=2e-5)  # the products are in 16 bits


@long
def test_a_run_is_resumed_and_sampled_from(train, simulated):
    whole = train(EAGER, TORCH, "--steps 4")
    train(EAGER, TORCH, "--steps 2")
    simulated("train.py", "--resume", str(train.folder), "--steps", "4")
    assert train.losses()[-1] == pytest.approx(whole[-1], abs=1e-6)
    said = simulated("fastgpt.sample", str(train.folder), "--tokens", "5", flags="-m")
    assert said


def test_too_little_memory_halves_the_micro_batch(train):
    few = "--train.micro-batch 512 --train.batch-tokens 32768 --steps 1"
    train(EAGER, TORCH, few, flags="--memory 128MiB")
    assert "--train.micro-batch is 512, for which the GPU's memory is too small" in train.said


COUNTS = """
import sys, torch, simgpu
from fastgpt.parallel.signals import StopSignal
from fastgpt.train.build import build
from fastgpt.train.trainer import train
from fastgpt.cli import configure
from fastgpt.train.plan import resolve
from simgpu.launches import launched
run = build(resolve(configure(sys.argv[1:])))
run.stop = StopSignal(print)
steps = []
for _ in range(6):
    before, stats, kernels = simgpu.counts(), torch.cuda.memory_stats(), launched.total()
    train(run, run.step + 1)
    got, now = simgpu.counts() - before, torch.cuda.memory_stats()
    kept = "allocated_bytes.all.current", "num_sync_all_streams"  # empty_cache adds to the latter
    more = {name: now[name] - stats[name] for name in kept if now[name] != stats[name]}
    names = ["operator", "copy to the device", "copy to the host", "copy on the device", "wait",
             "wait in a copy", "cudaMalloc"]
    steps.append([*(got[name] for name in names), launched.total() - kernels])
run.loader.close()
torch.cuda.synchronize()  # which finds pinned memory that changed before it was copied
assert steps[4] == steps[5], steps
assert not more, f"the last step leaves {more}"
print("COUNTS", *steps[5])
"""


WAITS = """
import sys, simgpu
from fastgpt.train.build import build
from fastgpt.cli import configure
from fastgpt.train.plan import resolve
run = build(resolve(configure(sys.argv[1:])))
run.evaluate("val")
before = simgpu.waits()
run.evaluate("val")
print("WAITS", sum((simgpu.waits() - before).values()))
run.loader.close()
"""


@long
def test_an_evaluation_waits_once_whatever_it_reads(simulated):
    for tokens in ("256", "1024"):  # two batches, and eight
        given = f"{SMALL} --train.device cuda {EAGER} {TORCH} --data.eval-tokens {tokens}"
        assert "WAITS 1\n" in simulated(WAITS, *given.split())


@pytest.mark.parametrize(
    ("ops", "counts"),
    [
        (f"{EAGER} {TORCH}", [295, 4, 0, 6, 0, 0, 0, 0]),
        pytest.param(f"{EAGER} {OURS}", [245, 4, 0, 6, 0, 0, 0, 56], marks=long),
        pytest.param(f"{COMPILED} {TORCH}", [203, 4, 0, 0, 0, 0, 0, 58], marks=long),
    ],
    ids=["torch", "ours", "compiled"],
)
def test_what_a_step_asks_of_the_device(simulated, ops, counts):
    """Operators, copies to, from and on the device, waits, of these in copies, and allocations by
    cudaMalloc, launches of Triton's kernels: nothing waits in a step, and nothing is allocated."""
    said = simulated(COUNTS, *split(f"{SMALL} --steps 9 --train.device cuda {ops}"))
    (line,) = [line for line in said.splitlines() if line.startswith("COUNTS")]
    assert [*map(int, line.split()[1:])] == counts


@pytest.mark.slow
def test_the_headline_command(simulated, tmp_path):
    """Eight ranks of gpt2-124m with its own settings, compiled and with the trial of auto; only its
    width, layers, batch and steps are smaller."""
    small = (
        "torch.distributed.run --nproc_per_node=8 train.py"
        " gpt2-124m --model.num-layers 1 --model.dim 64 --model.num-heads 4 --model.context 64"
        " --train.batch-tokens 1024 --train.micro-batch 1 --steps 2 --data.source builtin"
        " --data.eval-tokens 1024 --data.final-eval-tokens 1024 --train.sample-tokens 4"
    )
    said = simulated(*split(f"{small} --run-dir {tmp_path}/run"), flags="--gpus 8 -m")
    assert "to train longer: " in said
