"""Bytes and memory of the account of many GPUs, compared with counts of runs on gloo.

Run as a module, `ARGV`, it trains with two to four forked ranks and prints what rank 0 counted.
"""

import importlib
import json
import multiprocessing
import os
import socket
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.scaling.__main__ import PAGE, PLANS, page
from bench.scaling.collectives import Collective, Plan, Work, exchange, of_muon, units
from bench.scaling.memory import gathered_bytes, state_bytes
from bench.scaling.time import NETWORKS, exposed_seconds, seconds
from fastgpt import cli
from fastgpt.distributed import StopSignal
from fastgpt.engine import Engine
from fastgpt.muon import MOST_ON_CPU
from fastgpt.sharding import is_sharded, part
from tests.processes import python

OPS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}
CASES = {
    "ddp": (2, 2, ""),
    "fsdp": (2, 2, "--parallel.kind fsdp"),
    "uneven": (3, 1, "--train.batch-tokens 96 --parallel.kind fsdp --parallel.no-reshard"
               " --train.precision bf16 --parallel.dtype bf16 --train.ddp-dtype bf16"),
    "groups": (4, 1, "--parallel.kind hsdp --parallel.shards 2"),
    "context": (2, 4, "--parallel.cp 2"),
    "context, shared": (4, 1, "--parallel.kind fsdp --parallel.cp 2"),
    "tensor": (2, 4, "--parallel.kind fsdp --parallel.tp 2"),
    "tensor, shared": (4, 1, "--parallel.kind fsdp --parallel.tp 2 --parallel.no-reshard"
                             " --train.precision bf16 --parallel.dtype bf16"),
    "tensor, context": (4, 4, "--parallel.kind fsdp --parallel.tp 2 --parallel.cp 2"),
    "muon": (2, 1, "--optim.kind muon"),
    "muon, shared": (3, 1, "--train.batch-tokens 96 --parallel.kind fsdp --optim.kind muon"),
}  # fmt: skip
"""Ranks, micro-steps and flags."""
MICRO = "--train.micro-batch=2"
"""Flag for several micro-steps."""


class Intercepted(TorchDispatchMode):
    """Counts collective operations by name and bytes, DDP's own too: on a CPU all pass here."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            out = func(*args, **(kwargs or {}))
            tensors = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
            name = func._opname
            if name not in ("wait_tensor", "_wrap_tensor_autograd"):  # they send nothing
                self.found[OPS.get(name, name), max(x.nbytes for x in tensors)] += 1
            return out
        return func(*args, **(kwargs or {}))


def counted(argv: list[str]) -> dict:
    """Counts the third step of a run: DDP has arranged its buckets by then."""
    engine, stop = Engine(cli.parse(argv), print), StopSignal(print)
    for _ in range(2):
        engine.train_step(stop)
    with Intercepted() as intercepted:
        engine.train_step(stop)
    tensors = [*engine.model.parameters(), *(x.grad for x in engine.model.parameters())]
    tensors += [x for state in engine.optimizers.all[0].state.values() for x in state.values()]
    state = sum(part(x).nbytes for x in tensors if x.dim())
    loss = engine.loss(*engine.loader.next())
    gathered = sum(part(x).nbytes for x in engine.model.parameters() if not is_shared_out(x))
    loss.backward()
    engine.loader.close()
    calls = [[*call, times] for call, times in intercepted.found.items()]
    return {"calls": calls, "state": state, "gathered": gathered}


def is_shared_out(x: torch.Tensor) -> bool:
    return is_sharded(x) and "shard" in (x.device_mesh.mesh_dim_names or ())


def rank(number: int, ranks: int, port: int, runs: dict[str, list[str]]) -> None:
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(x) for name, x in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, argv in runs.items():
        found = counted(argv)
        if number == 0:
            print(json.dumps({name: found}), flush=True)


def main(argv: list[str]) -> None:
    for module in ("distributed.fsdp", "distributed.tensor", "_dynamo"):
        importlib.import_module(f"torch.{module}")
    flags = {
        name: (ranks, [*argv, *own.split(), *([MICRO] * (steps > 1))])
        for name, (ranks, steps, own) in CASES.items()
    }
    for ranks in (2, 3, 4):
        runs = {name: given for name, (size, given) in flags.items() if size == ranks}
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        context = multiprocessing.get_context("fork")  # after all imports, which take seconds
        every = [context.Process(target=rank, args=(n, ranks, port, runs)) for n in range(ranks)]
        for process in every:
            process.start()
        for process in every:
            process.join()
        assert not any(process.exitcode for process in every)


def test_formulas_give_the_calls_and_bytes_of_runs(tiny):
    argv = tiny("--model.num-layers 2 --optim.kind adamw --eval-every 0")
    done = python("-m", "tests.bench.test_scaling", *argv, TRITON_INTERPRET=None)
    assert done.returncode == 0, done.stderr
    runs = {
        name: run for line in done.stdout.splitlines() for name, run in json.loads(line).items()
    }
    assert runs.keys() == CASES.keys()
    for name, found in runs.items():
        ranks, micro_steps, flags = CASES[name]
        config = cli.parse([*argv, *flags.split()])
        plan = Plan(config.parallel, config.train.ddp_dtype)
        model, parallel = replace(config.model, vocab_size=256), config.parallel
        parts = units(model, parallel.tp)
        sequences = config.global_batch * parallel.cp * parallel.tp // (ranks * micro_steps)
        every = exchange(parts, plan, ranks, Work(model, sequences, micro_steps, parallel.dtype))
        calls = [x for _, x in every]
        if config.optim.kind == "muon":
            calls += of_muon(parts, plan, ranks, MOST_ON_CPU)
        else:
            assert state_bytes(parts, plan, ranks) == found["state"], name
        expected: Counter[tuple[str, int]] = Counter()
        for x in calls:
            expected[x.op, x.bytes] += x.times
        assert expected == {(op, size): times for op, size, times in found["calls"]}, name
        assert plan.parallel.kind == "ddp" or gathered_bytes(parts, plan) == found["gathered"], name


NVLINK, _, ETHERNET = NETWORKS


@pytest.mark.parametrize(
    ("collective", "net", "latency", "sent_s"),
    [
        # seven eighths of a gigabyte by NVLink
        (Collective("all_gather", 10**9, 8), NVLINK, 7 * 3.4e-6, 0.875 / 450),
        # 16 GPUs send by eight ports at once, which are slower than NVLink
        (Collective("all_gather", 10**9, 16), NVLINK, 14e-6 + 14 * 3.4e-6, 15 / 16 / 400),
        # one port; a tree of four machines is shorter than two rounds of the ring
        (
            Collective("all_reduce", 10**9, 32),
            ETHERNET,
            2 * (7 * 4e-6 + 2 * 14e-6),
            2 * 31 / 32 / 12.5,
        ),
        # the eight groups of hsdp share the port
        (Collective("all_reduce", 10**9, 2, 8), ETHERNET, 2 * 14e-6, 1 / (12.5 / 8)),
    ],
)
def test_time_of_a_collective_by_hand(collective, net, latency, sent_s):
    assert seconds(collective, net) == pytest.approx(8.4e-6 + latency + sent_s / 0.8)


def test_exposed_is_what_computation_cannot_hide():
    """A network without latency on which the root takes 1 s, a gather 2 s, a reduction 4 s, and the
    keys and values of all layers 3 s."""
    net = replace(NVLINK, inside=2 / 0.8, hop_s=-8.4e-6)
    found = [("root", Collective("all_gather", 4, 2)), ("block", Collective("all_gather", 8, 2)),
             ("block", Collective("reduce_scatter", 16, 2)),
             ("context", Collective("all_gather", 4, 2, times=3))]  # fmt: skip
    cases = {
        ("fsdp", 1.5): 4 + 2 + 2 * 0.5 + 2 + 2 * 3 + 4,
        ("fsdp", 9): 4 + 2 + 2 + 4,  # all but the first and the last of each pass
        ("fsdp, no-reshard", 1.5): 4 + 2 + 2 * 0.5 + 2 * 1 + 4,
        ("ddp", 9): 4 + 2 + 4,
    }
    for (kind, block_s), expected in cases.items():
        assert exposed_seconds(found, PLANS[kind], 3, block_s, net) == pytest.approx(expected)


def test_the_page_is_what_the_formulas_give():
    assert page() == PAGE.read_text(encoding="utf-8"), "run python -m bench.scaling --publish"


if __name__ == "__main__":
    main(sys.argv[1:])
